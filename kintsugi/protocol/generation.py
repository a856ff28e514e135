"""Generation of text: the rollout workers request it from the manager, the manager from a server."""

from __future__ import annotations

from kintsugi.protocol.body import MessageBody
from kintsugi.types import (
    Completion,
    Fragment,
    SamplingParams,
)


class Generate(MessageBody, frozen=True):
    """Continue a prompt `sampling.num_samples` times. Idempotent: the random numbers are keyed by these fields."""

    ticket: str
    turn: int
    prompt: bytes
    """int32 token ids."""
    sampling: SamplingParams
    version: int
    samples: tuple[int, ...] = ()
    """Indices of the requested samples; empty means all of `range(num_samples)`."""
    timeout_s: float = 120.0
    """How long the sender waits; a later reply has no use."""
    produced: tuple[Completion, ...] = ()
    """Tokens of requested samples that other servers have produced; replayed, not sampled again."""
    stream: bool = False
    """Whether every token is sent by `Produced` as soon as it is sampled, instead of at intervals."""
    number: int = 0
    """Number that the sender chose, repeated in `Produced` and `Cancel`."""

    @property
    def wanted(self) -> tuple[int, ...]:
        return self.samples or tuple(range(self.sampling.num_samples))


class Generated(MessageBody, frozen=True):
    ticket: str
    turn: int
    completions: tuple[Completion, ...]
    server: str


class Produced(MessageBody, frozen=True):
    """Tokens that a server has produced since its last report, so that another server can continue if it dies."""

    fragments: dict[int, tuple[Fragment, ...]]
    """`Generate.number` → fragments."""


class Cancel(MessageBody, frozen=True):
    """Stop this `Generate`: its reply is not needed any more, and its KV cache blocks are."""

    number: int


class Interrupt(MessageBody, frozen=True):
    """Answer every running `Generate` with what it has produced: completions without a `finish`, to be resumed."""


class Retire(MessageBody, frozen=True):
    """A server is to be stopped: move its requests to other servers. Answered when it has none left."""

    process: str
    incarnation: str
