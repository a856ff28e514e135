"""What an engine is asked for and what it gives back. No torch: back ends that compute elsewhere use it too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kintsugi.errors import UserError
from kintsugi.types import Finish, Sampling

RequestId = tuple[int, int]
"""(what the caller numbers its requests by, sample); unique among the requests that an engine holds."""


class Tokens(NamedTuple):
    """Sampled tokens of one request: ids (int32), log-probabilities (float32), weight versions (int32), and the most
    likely tokens at each place with their log-probabilities, [tokens, `Sampling.top_logprobs`]."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    @classmethod
    def none(cls, *, num_top: int = 0) -> Tokens:
        """No tokens yet."""
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
        """Those from `start` on, up to `end`."""
        part = slice(start, end)
        return Tokens(
            self.ids[part],
            self.logprobs[part],
            self.versions[part],
            self.top_ids[part],
            self.top_logprobs[part],
        )


@dataclass(frozen=True, eq=False)
class Request:
    """One sample to be made: `Request((17, 3), prompt=ids, noise_key=…, sampling=Sampling(max_new_tokens=5))`."""

    id: RequestId
    prompt: NDArray[np.int32]
    noise_key: int
    """Of `noise.stream_key`."""
    sampling: Sampling
    """`seed` and `num_samples` have done their work: they are in `noise_key` and `id`."""
    produced: Tokens | None = None
    """Tokens of an interrupted attempt; they are replayed, not sampled again, and count towards `max_new_tokens`."""

    @property
    def num_produced(self) -> int:
        return 0 if self.produced is None else len(self.produced.ids)

    @property
    def num_forced(self) -> int:
        """Tokens that are known before the first one is sampled."""
        return len(self.prompt) + self.num_produced

    @property
    def max_length(self) -> int:
        return len(self.prompt) + self.sampling.max_new_tokens


@dataclass(frozen=True, eq=False)
class Output:
    """What became of a request. `finish` is None when it was interrupted."""

    request: Request
    tokens: Tokens
    """All of them, `request.produced` first."""
    finish: Finish | None
    refusal: UserError | None = None
    """What was wrong with it, where that is known only after it was accepted."""

    @property
    def finite(self) -> bool:
        """False when the model's logits overflowed; the tokens then mean nothing."""
        return bool(np.isfinite(self.tokens.logprobs).all())

    def resume(self) -> Request:
        """The request that continues an interrupted one from its last token."""
        assert self.finish is None, f"request {self.request.id} ended by {self.finish} and cannot be resumed"
        return replace(self.request, produced=self.tokens)
