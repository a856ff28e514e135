"""What carries out the engine's decisions on a device: its memory, its rows, its steps.

An engine decides (who runs, in which pages); a runner computes. There is one for the CPU and one for CUDA, and one
without a model for tests. Keys and values live in pages of `page_size` tokens; page `num_pages` is scratch: what has
nowhere to go is written there. Behind what a sequence has written to its last page lies whatever the page's last owner
left, perhaps not even finite: it must not be read, not even through a mask. A runner has one row of state per slot, and
one more, which is never used by a request.

A prompt's tokens but the last are fed by `prefill`, in chunks that begin at multiples of `chunk_size`; everything
after is fed by `decode`, one token per step, and only there anything is sampled. In deterministic mode both always
have the same shape, whatever they hold: a token's bits then depend on the tokens before it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kintsugi.generation.backend import Pause
from kintsugi.generation.requests import Request

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
    """Chunks of one call of `prefill`."""
    vocab_size: int


@dataclass(frozen=True, eq=False)
class Chunk:
    """Prompt tokens at positions `start`, `start + 1`, …, whose keys and values are to be written."""

    tokens: NDArray[np.int32]
    """At least one and at most `chunk_size`."""
    start: int
    """A multiple of `chunk_size`. Where earlier positions of the chunk are in shared pages already, they are computed
    again, to the same bits."""
    pages: Sequence[int]
    """Of the sequence, from position 0 up to the chunk's last token."""
    num_known: int = 0
    """So many of its first tokens have their keys and values already, in pages that others may be reading: these are
    not written."""


@dataclass(frozen=True, eq=False)
class Row:
    """A request that begins to decode in a slot."""

    slot: int
    request: Request
    start: int
    """Position of the first token to be fed; everything before it is in the pages."""
    tokens: NDArray[np.int32]
    """All that are known, prompt first. Those after `start` are fed in their turn; then sampling begins."""
    end_token_ids: tuple[int, ...]
    """End and stop tokens together."""


@dataclass(frozen=True, eq=False)
class Decoded:
    """What some steps gave, one column per slot that was asked for, in that order.

    A column's entry of step s is the token that was sampled after feeding; where the next token was already known
    (a replay), or the row had ended before, it means nothing.
    """

    tokens: NDArray[np.int32]
    """[steps, slots]"""
    logprobs: NDArray[np.float32]
    """[steps, slots]; not finite where the logits overflowed."""
    top_tokens: NDArray[np.int32]
    """[steps, slots, k] with k the most that any row asked for, possibly 0."""
    top_logprobs: NDArray[np.float32]


class Pending(Protocol):
    def result(self) -> Decoded:
        """Wait for the device."""
        ...


@dataclass(frozen=True, eq=False)
class Done:
    """Of a runner that computes at once: nothing to wait for."""

    decoded: Decoded

    def result(self) -> Decoded:
        return self.decoded


class Runner(Protocol):
    """Not thread-safe. Calls take effect in their order; only `Pending.result` waits for the device."""

    @property
    def shape(self) -> RunnerShape: ...

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """Write keys and values. Chunks of one sequence may stand together, in order."""
        ...

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(from, to), for every layer."""
        ...

    def start(self, rows: Sequence[Row]) -> None: ...

    def set_pages(self, tables: Mapping[int, Sequence[int]]) -> None:
        """The pages of these slots, from position 0 on; to be called before a step needs them."""
        ...

    def stop(self, slots: Sequence[int]) -> None:
        """Their rows take part in nothing until they are started again; what they write goes to scratch."""
        ...

    def decode(self, slots: Sequence[int], *, num_steps: int) -> Pending:
        """Feed `num_steps` tokens to each of these slots. A row that samples an end token, or reaches its
        `max_length`, feeds nothing further by itself; the engine sees the same in the tokens and stops it."""
        ...

    def stage(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """As `Backend.stage`: from any thread."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> Pause | None:
        """Copy weights to where the old ones are, after all steps begun before and before all later ones."""
        ...
