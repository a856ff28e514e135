"""Interface of a runner, which carries out the engine's decisions on one device.

The engine schedules; a runner computes. There are runners for the CPU and for CUDA, and one without a model for tests.
The KV cache consists of pages of `page_size` tokens; page `num_pages` is scratch for values that are never read. The
memory of a page after the last token of a sequence holds leftovers of its previous owner, possibly non-finite: it must
not be read, not even through a mask. A runner has one row of state per slot, and one more that no request uses.

`prefill` feeds all tokens of a prompt but the last, in chunks that begin at multiples of `chunk_size`. `decode` feeds
everything after that, one token per step, and only `decode` samples. In deterministic mode both always run with the
same shape, whatever they hold: the bits of a token then depend only on the tokens before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kintsugi.generation.backend import Pause
from kintsugi.generation.engine.requests import GenerationRequest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RunnerShape:
    num_slots: int
    max_length: int
    """Longest prompt + completion of a slot."""
    page_size: int
    num_pages: int
    """Without the scratch page."""
    chunk_size: int
    """Tokens of one sequence that are prefilled together; a multiple of `page_size`."""
    max_chunks: int
    """Largest number of chunks per call of `prefill`."""
    vocab_size: int


@dataclass(frozen=True, eq=False)
class PrefillChunk:
    """Prompt tokens at positions `start`, `start + 1`, … to write into the KV cache."""

    tokens: NDArray[np.int32]
    """At least one and at most `chunk_size`."""
    start: int
    """A multiple of `chunk_size`. Earlier positions of the chunk that are already in shared pages are computed again,
    to the same bits."""
    pages: Sequence[int]
    """Pages of the sequence, from position 0 up to the chunk's last token."""
    num_known: int = 0
    """Number of leading tokens that are already in the KV cache, in pages that other requests may be reading: these are
    not written."""


@dataclass(frozen=True, eq=False)
class DecodeRow:
    """A request that starts to decode in a slot."""

    slot: int
    request: GenerationRequest
    start: int
    """Position of the first token to feed; all positions before it are in the KV cache."""
    tokens: NDArray[np.int32]
    """All known tokens, prompt first. Those after `start` are fed one by one; then sampling begins."""
    end_token_ids: tuple[int, ...]
    """End tokens of the model and stop tokens of the request."""


@dataclass(frozen=True, eq=False)
class DecodedTokens:
    """Result of some decode steps, one column per slot, in the order of the call.

    The entry of step s is the token that was sampled after feeding. It is meaningless where the next token was already
    known (a replay), or where the sequence had ended before.
    """

    tokens: NDArray[np.int32]
    """[steps, slots]"""
    logprobs: NDArray[np.float32]
    """[steps, slots]; not finite where the logits overflowed."""
    top_tokens: NDArray[np.int32]
    """[steps, slots, k], where k is the largest number that a request in these slots wants, possibly 0."""
    top_logprobs: NDArray[np.float32]


class PendingStep(Protocol):
    def result(self) -> DecodedTokens:
        """Wait for the device and return the result."""
        ...


@dataclass(frozen=True, eq=False)
class RunnerDone:
    """Result of a runner that computes synchronously."""

    decoded: DecodedTokens

    def result(self) -> DecodedTokens:
        return self.decoded


class Runner(Protocol):
    """Not thread-safe. Calls take effect in their order; only `PendingStep.result` waits for the device."""

    @property
    def shape(self) -> RunnerShape: ...

    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Write prompt tokens into the KV cache. A call may contain several chunks of one sequence, in order."""
        ...

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (source, target) in every layer."""
        ...

    def start(self, rows: Sequence[DecodeRow]) -> None: ...

    def set_pages(self, tables: Mapping[int, Sequence[int]]) -> None:
        """Set the page tables of these slots, from position 0 on, before a step needs them."""
        ...

    def stop(self, slots: Sequence[int]) -> None:
        """Exclude these slots from decoding until they are started again; what they write goes to the scratch page."""
        ...

    def decode(self, slots: Sequence[int], *, num_steps: int) -> PendingStep:
        """Feed `num_steps` tokens to each of these slots. A slot that samples an end token, or reaches its
        `max_length`, stops feeding; the engine sees the same in the tokens and stops it."""
        ...

    def stage(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Prepare weights for `load`, as `Backend.stage`; callable from any thread."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> Pause | None:
        """Copy weights over the old ones, after all steps that were issued before and before all later ones."""
        ...
