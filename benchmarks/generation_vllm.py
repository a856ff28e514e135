"""vLLM as a side of `generation.py`; on a CPU with one thread, as every side there.

On an accelerator it may be a folder of unpacked wheels (`--vllm-path`), which only this process has on its path.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
    "0"  # The engine in this process: no pickling between, the best case.
)
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault(
    "VLLM_USE_FLASHINFER_SAMPLER", "0"
)  # It would compile kernels with tools that hosts lack.

import vllm

from benchmarks.generation_rounds import Order, Round, answer_rounds


class Vllm:
    def __init__(self, order: Order) -> None:
        self.version = f"vllm {vllm.__version__}"
        self._logprobs = 0 if order.logprobs else None  # 0: of the sampled token only.
        further = {"gpu_memory_utilization": order.memory_share} if order.memory_share else {}
        self._engine = vllm.LLM(
            model=order.folder,
            dtype=order.dtype,
            skip_tokenizer_init=True,
            max_model_len=order.max_length,
            max_num_seqs=order.max_batch,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **further,
        )

    def play(self, work: Round) -> list[list[int]]:
        how = [
            vllm.SamplingParams(
                temperature=work.temperature,
                max_tokens=count,
                ignore_eos=True,
                detokenize=False,
                logprobs=self._logprobs,
            )
            for count in work.new_tokens
        ]
        outputs = self._engine.generate(
            [{"prompt_token_ids": prompt} for prompt in work.prompts], how, use_tqdm=False
        )
        assert self._logprobs is None or all(output.outputs[0].logprobs for output in outputs)
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    answer_rounds(Vllm)
