"""Requests and results of a back end. Imports no torch: back ends that compute in another server use it too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kintsugi.errors import UserError
from kintsugi.types import FinishReason, SamplingParams

RequestId = tuple[int, int]
"""(number of the caller, sample); unique among the requests that an engine holds."""


class Tokens(NamedTuple):
    """Sampled tokens of one request: ids (int32), log-probabilities (float32), weight versions (int32), and the most
    likely tokens at each position with their log-probabilities, [tokens, `SamplingParams.top_logprobs`]."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    @classmethod
    def none(cls, *, num_top: int = 0) -> Tokens:
        """No tokens."""
        return cls(
            np.empty(0, np.int32),
            np.empty(0, np.float32),
            np.empty(0, np.int32),
            np.empty((0, num_top), np.int32),
            np.empty((0, num_top), np.float32),
        )

    @classmethod
    def joined(cls, parts: Sequence[Tokens]) -> Tokens:
        return cls(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.versions for part in parts]),
            np.concatenate([part.top_ids for part in parts]),
            np.concatenate([part.top_logprobs for part in parts]),
        )

    def between(self, start: int, end: int | None = None) -> Tokens:
        """Tokens from `start` on, up to `end`."""
        part = slice(start, end)
        return Tokens(
            self.ids[part],
            self.logprobs[part],
            self.versions[part],
            self.top_ids[part],
            self.top_logprobs[part],
        )


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """One sample to generate: `GenerationRequest((17, 3), prompt=ids, rng_key=…,
    sampling=SamplingParams(max_new_tokens=5))`."""

    id: RequestId
    prompt: NDArray[np.int32]
    rng_key: int
    """Key of the random numbers (`rng.stream_key`)."""
    sampling: SamplingParams
    """`seed` and `num_samples` are unused here: they are part of `rng_key` and `id`."""
    produced: Tokens | None = None
    """Tokens of an interrupted attempt. They are replayed, not sampled again, and count towards `max_new_tokens`."""

    @property
    def num_produced(self) -> int:
        return 0 if self.produced is None else len(self.produced.ids)

    @property
    def num_forced(self) -> int:
        """Number of tokens that are known before the first one is sampled."""
        return len(self.prompt) + self.num_produced

    @property
    def max_length(self) -> int:
        return len(self.prompt) + self.sampling.max_new_tokens


@dataclass(frozen=True, eq=False)
class GenerationOutput:
    """Result of a request. `finish` is None if it was interrupted."""

    request: GenerationRequest
    tokens: Tokens
    """All tokens, `request.produced` first."""
    finish: FinishReason | None
    user_error: UserError | None = None
    """Error of the request that was found only after it was accepted."""

    @property
    def finite(self) -> bool:
        """False if the model's logits overflowed; the tokens are then meaningless."""
        return bool(np.isfinite(self.tokens.logprobs).all())

    def resume(self) -> GenerationRequest:
        """Request that continues an interrupted one after its last token."""
        assert self.finish is None, f"request {self.request.id} ended by {self.finish} and cannot be resumed"
        return replace(self.request, produced=self.tokens)
