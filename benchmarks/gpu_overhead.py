"""What snapshots cost on an accelerator: training steps of a 0.6 B model with and without copy and digest of its state.

    python benchmarks/gpu_overhead.py [--json FILE] [--pairs 12]

One rank, the shape of Qwen3-0.6B with random weights, bfloat16 with float32 masters and moments (a state of 7.2 GB), a
batch of 32 × 8 samples of 64 + 256 tokens. Nothing but training is counted: in a run, generation comes on top, behind
which a copy could hide. Blocks of steps are on, off, off, on, …; a pair is two neighbouring ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from benchmarks.overhead import stop_snapshots, upper_bound
from kintsugi.config.schema import ActorSection, AlgorithmSection, resolved
from kintsugi.config.stages import Stage
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.protocol.training import RunCall
from kintsugi.training.group import Groups
from kintsugi.training.model_calls import ModelCalls
from kintsugi.training.packing import BatchSample
from kintsugi.training.process_group import join_group
from kintsugi.training.snapshots import CopyCounters, digest_of
from kintsugi.training.state import TrainingState

PAIRS = 12
STEPS_PER_BLOCK = 3
WARM_BLOCKS = 4
"""Not counted; whole rounds of four keep the order of on and off."""
QWEN3_600M = ModelConfig(
    family="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_positions=40960,
    rope_theta=1e6,
    tie_embeddings=True,
    qk_norm=True,
)
NUM_SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 32 * 8, 64, 256
MICRO_BATCH_TOKENS = 16384


def is_on(step: int) -> bool:
    return ((step - 1) // STEPS_PER_BLOCK) % 4 in (0, 3)


def new_samples(config: ModelConfig, *, count: int) -> list[BatchSample]:
    random = np.random.default_rng(0)
    places = np.arange(PROMPT_TOKENS, PROMPT_TOKENS + NEW_TOKENS)
    guess = np.full(NEW_TOKENS, -np.log(config.vocab_size), dtype=np.float32)
    return [
        BatchSample(
            f"grpo:0:{index // 8}:0/{index % 8}",
            random.integers(0, config.vocab_size, PROMPT_TOKENS + NEW_TOKENS).astype(np.int32),
            places,
            guess,
            np.full(NEW_TOKENS, -1, dtype=np.int32),
            {"advantage": float(random.normal())},
        )
        for index in range(count)
    ]


class Trainer:
    """One rank without its process."""

    def __init__(self, config: ModelConfig, *, device: torch.device, num_samples: int = NUM_SAMPLES) -> None:
        model = Transformer(config, device=device)
        initialize(model, 0)
        actor = ActorSection(learning_rate=1e-6, micro_batch_tokens=MICRO_BATCH_TOKENS, dtype="bfloat16")
        algorithm = resolved(AlgorithmSection(name="grpo", steps=10**6))
        self.state = TrainingState(model, compute_dtype=torch.bfloat16)
        self.state.start_stage(Stage("grpo", 1, algorithm, actor, seed=0), step=0)
        self._calls = ModelCalls(self.state, deterministic=False)
        self._samples = new_samples(config, count=num_samples)
        self._group = join_group(
            group_id=1,
            ranks=["model-0"],
            me="model-0",
            store_address="",
            keys=(b"", b""),
            device=device,
            timeout_s=1.0,
        )

    def step(self, number: int) -> dict[str, float]:
        """Train and commit a step; seconds per part."""
        tokens = float(len(self._samples) * NEW_TOKENS)
        call = RunCall(
            call="actor_train",
            interface="policy_train",
            step=number,
            shards=(),
            num_shards=1,
            totals={"tokens": tokens, "sequences": float(len(self._samples)), "constant": tokens},
            generation=1,
            arguments={"temperature": 1.0},
            stage="grpo",
        )
        result = self._calls.run(call, {0: self._samples}, groups=Groups.of(self._group))
        self.state.commit(number)
        return result.timing


def blocks_of_steps(trainer: Trainer, *, num_blocks: int) -> list[float]:
    """Wall seconds per step of each block."""
    seconds = []
    for block in range(num_blocks):
        start = time.perf_counter()
        for index in range(STEPS_PER_BLOCK):
            trainer.step(1 + block * STEPS_PER_BLOCK + index)
        _synchronize()
        seconds.append((time.perf_counter() - start) / STEPS_PER_BLOCK)
    return seconds


def parts(trainer: Trainer) -> dict[str, float]:
    """What a snapshot is made of, each by itself; medians of seconds."""
    copies, counters = trainer.state._copies, CopyCounters(1, "grpo")  # A step with protection.
    live = copies._live
    host = live.cpu()

    def prepare() -> None:
        copies.prepare(counters)

    def copy_whole() -> None:
        prepare()
        copies.settle()

    return {
        "digest where the state is": _seconds(lambda: digest_of(counters, live)),
        "digest in host memory": _seconds(lambda: digest_of(counters, host), repeats=3),
        "until the rank can answer (copy begun, digest known)": _seconds(prepare, before=copies.settle),
        "until the copy is whole": _seconds(copy_whole),
    }


def _seconds(
    work: Callable[[], object], *, repeats: int = 7, before: Callable[[], object] = lambda: None
) -> float:
    taken = []
    for _ in range(repeats):
        before()
        _synchronize()
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return round(statistics.median(taken), 4)


def _synchronize() -> None:
    """Training only: a copy that is under way is not waited for."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def row(seconds: Sequence[float]) -> dict[str, Any]:
    """The pairs as one figure."""
    on, off = [], []
    for pair in range(0, len(seconds), 2):
        first, second = seconds[pair : pair + 2]
        first_is_on = is_on(1 + (WARM_BLOCKS + pair) * STEPS_PER_BLOCK)
        on.append(first if first_is_on else second)
        off.append(second if first_is_on else first)
    ratios = [with_it / without for with_it, without in zip(on, off, strict=True)]
    return {
        "pairs": len(ratios),
        "steps_per_block": STEPS_PER_BLOCK,
        "on_s": round(statistics.median(on), 4),
        "off_s": round(statistics.median(off), 4),
        "ratio": round(statistics.fmean(ratios), 4),
        "upper_bound_95": round(upper_bound(ratios), 4),
    }


def report(trainer: Trainer, *, pairs: int) -> dict[str, Any]:
    seconds = blocks_of_steps(trainer, num_blocks=WARM_BLOCKS + 2 * pairs)[WARM_BLOCKS:]
    return {
        "state_bytes": trainer.state._copies._live.nbytes,
        "step": row(seconds),
        "parts_s": parts(trainer),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stop_snapshots(is_on)
    found = report(Trainer(QWEN3_600M, device=torch.device("cuda")), pairs=arguments.pairs)
    found = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **found,
    }
    print(json.dumps(found, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
