"""One side of `generation.py`: a process that prepares itself once and then plays a round each time it is asked.

Every side speaks the same protocol, so that only one computes at a time and rounds of all of them can alternate. One
line of JSON each: first an `Order`, answered by `{"version": …}` when the side is ready; then `Round`s, each
answered by `{"seconds": …, "cpu_seconds": …, "tokens": …}`. The standard
library alone: peers have environments of their own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol


@dataclass(frozen=True)
class Order:
    """What to prepare."""

    folder: str
    """A Hugging Face folder; a GGUF file with the same weights, `model.gguf`, is in it where one is needed."""
    dtype: str
    device: str
    max_batch: int
    max_length: int
    deterministic: bool = False
    logprobs: bool = False
    """Peers compute the log-probability of every sampled token too, as ours always does."""
    memory_share: float = 0.0
    """Share of the accelerator's memory for a peer that takes all it can get; 0: its default."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Round:
    """What to generate: a sequence for each prompt, end tokens or not."""

    prompts: list[list[int]]
    new_tokens: list[int]
    """By prompt. Sides that take whole batches want prompts of one length, and the same number for all."""
    temperature: float
    seed: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Side(Protocol):
    version: str

    def play(self, work: Round) -> list[list[int]]:
        """The sampled tokens of every prompt."""
        ...


def answer_rounds(prepare: Callable[[Order], Side]) -> None:
    """Until the standard input ends. What libraries print goes to the standard error instead."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    side = prepare(Order(**json.loads(sys.stdin.readline())))
    print(json.dumps({"version": side.version}), file=answers, flush=True)
    for line in sys.stdin:
        work = Round(**json.loads(line))
        start, start_cpu = time.perf_counter(), time.process_time()
        tokens = side.play(work)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
        answer = {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": tokens}
        print(json.dumps(answer), file=answers, flush=True)
