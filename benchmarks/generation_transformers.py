"""`transformers.generate` as a side of `generation.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from benchmarks.generation_rounds import Order, Round, answer_rounds


class Transformers:
    """The whole batch at once, which all have the same length: no padding, the best case for it."""

    def __init__(self, order: Order) -> None:
        if order.device == "cpu":
            torch.set_num_threads(1)
        self.version = f"transformers {transformers.__version__}"
        self._device = torch.device(order.device)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            order.folder, dtype=getattr(torch, order.dtype), attn_implementation="sdpa"
        )
        self._model.to(self._device).eval()

    @torch.inference_mode()
    def play(self, work: Round) -> list[list[int]]:
        torch.manual_seed(work.seed)
        prompts = torch.tensor(work.prompts, device=self._device)
        # Its own defaults would leave all but fifty tokens out.
        how = (
            {"do_sample": True, "temperature": work.temperature, "top_k": 0, "top_p": 1.0}
            if work.temperature
            else {"do_sample": False}
        )
        tokens = self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=max(work.new_tokens),
            min_new_tokens=None,
            eos_token_id=None,
            pad_token_id=0,
            **how,
        )
        sampled: list[list[int]] = tokens[:, prompts.shape[1] :].tolist()
        return sampled


if __name__ == "__main__":
    answer_rounds(Transformers)
