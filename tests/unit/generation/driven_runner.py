"""A CPU runner driven by hand: every request has pages of its own, in whatever order the test likes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kintsugi.generation.cpu.runner import CpuRunner
from kintsugi.generation.engine.requests import GenerationRequest, Tokens
from kintsugi.generation.engine.rng import stream_key
from kintsugi.generation.engine.runner import DecodedTokens, DecodeRow, PrefillChunk, Runner
from kintsugi.model.attention import PackedLayout
from kintsugi.model.transformer import Transformer
from kintsugi.types import SamplingParams


def runner_of(
    model: Transformer,
    *,
    num_slots: int = 4,
    max_length: int = 48,
    num_pages: int | None = None,
    deterministic: bool = True,
) -> CpuRunner:
    """With the weights of a model that need not be packed."""
    packed = Transformer(model.config, packed=True, dtype=model.dtype)
    pages = num_slots * -(-max_length // 16) if num_pages is None else num_pages
    runner = CpuRunner(
        packed, num_slots=num_slots, max_length=max_length, num_pages=pages, deterministic=deterministic
    )
    runner.load({name: parameter.detach() for name, parameter in model.named_parameters()})
    return runner


def request_of(
    prompt: Sequence[int], *, produced: Sequence[int] = (), number: int = 0, **sampling: object
) -> GenerationRequest:
    request = GenerationRequest(
        (number, 0),
        prompt=np.asarray(prompt, np.int32),
        rng_key=stream_key(str(number), seed=0, sample=0, turn=0),
        sampling=SamplingParams(**{"max_new_tokens": 8, **sampling}),  # type: ignore[arg-type]
    )
    if not produced:
        return request
    blank = Tokens.none()
    return replace(request, produced=blank._replace(ids=np.asarray(produced, np.int32)))


R = TypeVar("R", bound=Runner)


@dataclass
class Driven(Generic[R]):
    runner: R

    def prefill(
        self, tokens: NDArray[np.int32], *, pages: Sequence[int], num_known: int = 0, start: int = 0
    ) -> None:
        """From `start` on; one chunk per call."""
        shape = self.runner.shape
        for first in range(start, len(tokens), shape.chunk_size):
            part = tokens[first : first + shape.chunk_size]
            num_pages = -(-(first + len(part)) // shape.page_size)
            known = min(max(num_known - first, 0), len(part))
            self.runner.prefill([PrefillChunk(part, first, pages[:num_pages], known)])

    def start(
        self,
        slot: int,
        request: GenerationRequest,
        *,
        pages: Sequence[int] | None = None,
        end_token_ids: tuple[int, ...] = (),
    ) -> None:
        """The prompt but its last token by prefill, everything after by decode steps."""
        shape = self.runner.shape
        per_slot = -(-shape.max_length // shape.page_size)
        pages = range(slot * per_slot, (slot + 1) * per_slot) if pages is None else pages
        start = len(request.prompt) - 1
        self.prefill(request.prompt[:start], pages=pages)
        self.start_prefilled(slot, request, pages=pages, end_token_ids=end_token_ids)

    def start_prefilled(
        self,
        slot: int,
        request: GenerationRequest,
        *,
        pages: Sequence[int],
        end_token_ids: tuple[int, ...] = (),
    ) -> None:
        known = request.prompt
        if request.produced is not None:
            known = np.concatenate([known, request.produced.ids])
        self.runner.start([DecodeRow(slot, request, len(request.prompt) - 1, known, end_token_ids)])
        self.runner.set_pages({slot: list(pages)})

    def decode(self, slots: Sequence[int], num_steps: int) -> DecodedTokens:
        return self.runner.decode(slots, num_steps=num_steps).result()


def logprobs_by_the_trainer(
    model: Transformer, sequence: Sequence[int], *, padded_length: int | None = None
) -> NDArray[np.float32]:
    """Of every token but the first."""
    tokens = torch.tensor(sequence)
    layout = PackedLayout.from_lengths([len(sequence)], padded_length=padded_length)
    with torch.no_grad():
        hidden = model.forward_packed(tokens, layout.positions, layout)
        logprobs, _ = model.token_logprobs(hidden[:-1], tokens[1:])
    return logprobs.numpy()
