"""Our embedded engine as a side of `generation.py`, and what its parts on an accelerator ask of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

import kintsugi
from benchmarks.generation_rounds import Order, Round, answer_rounds
from kintsugi.generation.engine.engine import Engine
from kintsugi.generation.engine.factory import build_engine
from kintsugi.generation.engine.requests import GenerationOutput, GenerationRequest
from kintsugi.generation.engine.rng import stream_key
from kintsugi.model import huggingface
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.tokenizer import character_tokenizer
from kintsugi.types import SamplingParams


def new_engine(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    *,
    slots: int,
    max_length: int,
    dtype: str,
    device: str,
    deterministic: bool = False,
    kv_cache_gib: float | None = None,
) -> Engine:
    engine = build_engine(
        config,
        character_tokenizer("ab"),
        slots=slots,
        max_length=max_length,
        dtype=getattr(torch, dtype),
        device=torch.device(device),
        deterministic=deterministic,
        kv_cache_gib=kv_cache_gib,
    )
    engine.load(1, weights)
    return engine


def new_requests(
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int | Sequence[int],
    first: int,
    temperature: float = 1.0,
    num_samples: int = 1,
    seed: int = 0,
    top_logprobs: int = 0,
) -> list[GenerationRequest]:
    """`num_samples` for each prompt, side by side; end tokens mean nothing. Numbered from `first` on."""
    budgets = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else new_tokens
    return [
        GenerationRequest(
            (first + number, sample),
            prompt=np.asarray(prompt, np.int32),
            rng_key=stream_key(f"{first + number}", seed=seed, sample=sample, turn=0),
            sampling=SamplingParams(
                temperature=temperature, max_new_tokens=budget, ignore_end=True, top_logprobs=top_logprobs
            ),
        )
        for number, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True))
        for sample in range(num_samples)
    ]


def outputs_of(engine: Engine, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
    """In the requests' order."""
    engine.submit(requests)
    found = {output.request.id: output for output in finished(engine, while_true=lambda: not engine.idle)}
    return [found[request.id] for request in requests]


def finished(engine: Engine, *, while_true: Callable[[], bool]) -> Iterator[GenerationOutput]:
    while while_true():
        yield from engine.step()


class Ours:
    def __init__(self, order: Order) -> None:
        if order.device == "cpu":
            torch.set_num_threads(1)
        self.version = f"kintsugi {kintsugi.__version__}"
        model = huggingface.load(Path(order.folder), dtype=getattr(torch, order.dtype), device=order.device)
        self._numbers = count(step=order.max_batch)
        self._engine = new_engine(
            model.config,
            {name: parameter.detach() for name, parameter in model.named_parameters()},
            slots=order.max_batch,
            max_length=order.max_length,
            dtype=order.dtype,
            device=order.device,
            deterministic=order.deterministic,
        )

    def play(self, work: Round) -> list[list[int]]:
        requests = new_requests(
            work.prompts,
            new_tokens=work.new_tokens,
            first=next(self._numbers),
            temperature=work.temperature,
            seed=work.seed,
        )
        return [output.tokens.ids.tolist() for output in outputs_of(self._engine, requests)]


if __name__ == "__main__":
    answer_rounds(Ours)
