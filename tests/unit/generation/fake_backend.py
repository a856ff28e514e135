"""A back end without a model: what it says is a hash of the noise, so that whoever goes on says the same."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from kintsugi.errors import DataError, UserError
from kintsugi.generation.backend import Running
from kintsugi.generation.engine.requests import GenerationOutput, GenerationRequest, RequestId, Tokens
from kintsugi.types import FinishReason

if TYPE_CHECKING:
    from torch import Tensor

END = 0
VOCABULARY = 11


def next_token(request: GenerationRequest, index: int, *, salt: int = 0) -> int:
    return zlib.crc32(f"{request.rng_key}/{index}/{salt}".encode()) % VOCABULARY


def sampled(token: int, *, version: int, num_top: int) -> Tokens:
    top = np.arange(num_top, dtype=np.int32).reshape(1, num_top)
    return Tokens(
        np.array([token], np.int32),
        np.array([-token / 16], np.float32),
        np.array([version], np.int32),
        top,
        -top.astype(np.float32),
    )


class FakeBackend:
    """One token per step for the first `slots` requests. With a `salt` of its own it is not deterministic: another one
    would have said something else."""

    def __init__(self, *, slots: int = 4, salt: int = 0, max_length: int = 64) -> None:
        self._slots = slots
        self._salt = salt
        self._max_length = max_length
        self._held: dict[RequestId, tuple[GenerationRequest, Tokens]] = {}
        self.version = -1
        self.num_steps = 0
        self.num_sampled = 0
        self.loaded: list[tuple[int, Running]] = []
        self.overflows = False
        self._refusals: dict[RequestId, UserError] = {}

    @property
    def num_requests(self) -> int:
        return len(self._held)

    @property
    def idle(self) -> bool:
        return not self._held

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        requests = list(requests)
        for request in requests:
            if len(request.prompt) == 0 or request.max_length > self._max_length:
                raise DataError("the prompt does not fit")
        for request in requests:
            begun = request.produced or Tokens.none(num_top=request.sampling.top_logprobs)
            self._held[request.id] = (request, begun)

    def refuse(self, request_id: RequestId, refusal: UserError) -> None:
        """Find out in the next step what is wrong with it."""
        self._refusals[request_id] = refusal

    def step(self) -> list[GenerationOutput]:
        self.num_steps += 1
        ended = [
            GenerationOutput(*self._held.pop(request_id), None, refusal)
            for request_id, refusal in self._refusals.items()
        ]
        self._refusals.clear()
        for request, tokens in list(self._held.values())[: self._slots]:
            self.num_sampled += 1
            token = next_token(request, len(tokens.ids), salt=self._salt)
            more = sampled(token, version=self.version, num_top=request.sampling.top_logprobs)
            if self.overflows:
                more.logprobs.fill(np.nan)
            tokens = Tokens.joined([tokens, more])
            self._held[request.id] = (request, tokens)
            finish = None
            if token == END and not request.sampling.ignore_end:
                finish = FinishReason.EOS
            elif len(tokens.ids) == request.sampling.max_new_tokens:
                finish = FinishReason.LENGTH
            if finish is not None:
                del self._held[request.id]
                ended.append(GenerationOutput(request, tokens, finish))
        return ended

    def interrupt(self, request_id: RequestId) -> GenerationOutput | None:
        held = self._held.pop(request_id, None)
        return None if held is None else GenerationOutput(*held, None)

    def produced(self, request_id: RequestId) -> Tokens | None:
        held = self._held.get(request_id)
        return None if held is None else held[1]

    def stage(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors

    def load(self, version: int, tensors: Mapping[str, Tensor], *, running: Running = "keep") -> None:
        self.version = version
        self.loaded.append((version, running))

    def stats(self) -> dict[str, float]:
        return {"running": float(len(self._held)), "decoded_tokens": float(self.num_sampled)}
