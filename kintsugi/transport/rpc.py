"""One exchange between two processes: the delivered message, its reply, and the pending request of the sender.

`Endpoint` transfers these; nothing here touches a socket.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from kintsugi.errors import KintsugiError, RefusedError
from kintsugi.protocol.messages import Body
from kintsugi.protocol.wire import Envelope, MessageKind
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.spans import SPANS
from kintsugi.types import Peer

BodyType = TypeVar("BodyType", bound=Body)

FIRST_RESEND_S = 0.25
LONGEST_RESEND_S = 2.0
LATE_S = 0.5
"""A timer that fires this much later than it was due shows that its own process did not run meanwhile: answers that
have arrived were not read, and lost messages were not sent again."""
LAST_ANSWER_S = 1.0
"""Time for an answer that a process has after such a pause, if its deadline has passed in it."""
SLOW_S = 1.0
"""A request that takes longer is recorded as a span."""
SAVED_REPLIES = 512
REPLIES_PER_PEER = 4
"""Replies saved for each peer beyond `SAVED_REPLIES`: in a large run too a repeated request finds its reply."""
SAVED_BYTES = 2 << 20
BYTES_PER_PEER = 8 << 10
SLOWEST_BYTES_PER_S = 50e6
"""A large reply counts as under way for as long as it would take at this rate."""


class Delivery(msgspec.Struct, eq=False):
    """An inbound request or one-way message, with its sender."""

    envelope: Envelope
    body: Body
    peer: Peer
    route: bytes
    """Connection on which it arrived last; a repeated request may arrive on another one."""
    running: dict[int, Delivery] = {}
    """The sender's requests that are not answered yet; this one is among them until it is."""

    @property
    def wants_reply(self) -> bool:
        return self.envelope.kind is MessageKind.REQUEST


class Reply(msgspec.Struct, frozen=True, eq=False):
    """Reply of a peer."""

    body: Body

    def expect(self, kind: type[BodyType]) -> BodyType:
        """Return the body as the type with which this request is answered; RefusedError for another one."""
        if not isinstance(self.body, kind):
            raise RefusedError(f"expected {kind.__name__} as answer, got {type(self.body).__name__}")
        return self.body


def subject(body: Body) -> dict[str, object]:
    """Identifiers of a request's subject, by which it is traced through the processes."""
    ticket, manifest = getattr(body, "ticket", None), getattr(body, "manifest", None)
    return {
        "ticket": getattr(ticket, "id", ticket),
        "step": getattr(body, "step", None),
        "version": getattr(body, "version", getattr(manifest, "version", None)),
    }


class RequestTimer(msgspec.Struct, eq=False):
    """When a request is sent again, and when it expires. Pure: the real endpoint and the simulated one use it.

    The deadline is a limit for the peer, so a pause of the own process does not count: after one the request is sent
    once more, and expires later by as much.
    """

    due: float
    """When it is sent again, or expires."""
    deadline: float
    interval_s: float = FIRST_RESEND_S
    is_extended: bool = False
    """Whether it was given `LAST_ANSWER_S`; once, so that the process's own pauses can not keep it open for ever."""

    @classmethod
    def begin(cls, now: float, *, deadline_s: float) -> RequestTimer:
        return cls(now + min(FIRST_RESEND_S, deadline_s), now + deadline_s)

    def fire(self, now: float) -> bool:
        """Return whether the request is to be sent again now, and set the next time; False if it has expired."""
        if now - self.due > LATE_S:
            left_s = self.deadline - self.due
            if left_s < LAST_ANSWER_S and not self.is_extended:
                left_s, self.is_extended = LAST_ANSWER_S, True
            self.deadline = now + left_s
        if now >= self.deadline:
            return False
        self.interval_s = min(2 * self.interval_s, LONGEST_RESEND_S)
        self.due = min(now + self.interval_s, self.deadline)
        return True


class EndpointTurn(Protocol):
    """The part of an endpoint that a pending reply uses: one round of its loop."""

    def turn(self, timeout_s: float) -> None: ...


class PendingReply(msgspec.Struct, eq=False):
    """A pending request. `done` once it was answered, failed or expired; `result()` then returns or raises."""

    endpoint: EndpointTurn
    process: str
    body: Body
    cause_id: str | None
    on_done: Callable[[PendingReply], None] | None
    since: float
    timer: RequestTimer
    sequence: int = 0
    done: bool = False
    reply: Reply | None = None
    error: KintsugiError | None = None

    @property
    def what(self) -> str:
        """Name of the request, as `runtime.wait` declares it."""
        return type(self.body).__name__

    def result(self) -> Reply:
        """Return the reply, or raise the error that it ended with; only once `done`."""
        if self.error is not None:
            raise self.error
        assert self.reply is not None, f"{self.what} to {self.process} is still under way"
        return self.reply

    def settle(self, reply: Reply | None, error: KintsugiError | None) -> None:
        """End the request, once, with a reply or an error."""
        assert not self.done, f"{self.what} to {self.process} ended twice"
        self.reply, self.error, self.done = reply, error, True
        if SYSTEM_CLOCK.monotonic() - self.since > SLOW_S:
            ended = None if error is None else type(error).__name__
            about = {"to": self.process, "what": self.what, "error": ended, **subject(self.body)}
            SPANS.add("slow_request", about, since=self.since)
        if self.on_done is not None:
            self.on_done(self)

    def attempt(self, remaining_s: float) -> PendingReply | None:
        """Run the endpoint's loop for at most this long; an attempt of `runtime.wait`, which ends as well when the
        deadline has been extended."""
        deadline = self.timer.deadline
        if not self.done:
            self.endpoint.turn(remaining_s)
        return self if self.done or self.timer.deadline > deadline else None


class SavedReply(msgspec.Struct, frozen=True, eq=False):
    """A reply as it was sent; without the frame when it was too large to keep.

    It is kept encoded, because the objects take several times the memory. Its term is the one at which it was sent; a
    receiver ignores older terms than its own.
    """

    frame: bytes | None
    size: int
    until: float = 0.0
    """For a reply that was not kept: when its first copy must have arrived or be lost."""


class SavedReplies:
    """Replies by (sender, incarnation, sequence), bounded in number and in bytes; the oldest is dropped first.

    A large reply is only noted: repetitions of its request are ignored while the first copy may still
    be under way, and are carried out again after that (a repeated fetch is harmless).
    """

    def __init__(self, *, num_peers: int = 0) -> None:
        self._most_replies = SAVED_REPLIES + REPLIES_PER_PEER * num_peers
        self._most_bytes = SAVED_BYTES + BYTES_PER_PEER * num_peers
        self._replies: OrderedDict[tuple[str, str, int], SavedReply] = OrderedDict()
        self._bytes = 0

    def get(self, envelope: Envelope) -> SavedReply | None:
        return self._replies.get((envelope.sender, envelope.incarnation, envelope.sequence))

    def drop(self, envelope: Envelope) -> None:
        saved = self._replies.pop((envelope.sender, envelope.incarnation, envelope.sequence))
        self._bytes -= saved.size

    def put(self, envelope: Envelope, frame: bytes, *, now: float) -> None:
        """Save a reply."""
        size = len(frame)
        if size > SAVED_BYTES:
            saved = SavedReply(None, 0, now + 1.0 + size / SLOWEST_BYTES_PER_S)
        else:
            saved = SavedReply(frame, size)
        self._replies[envelope.sender, envelope.incarnation, envelope.sequence] = saved
        self._bytes += saved.size
        while self._bytes > self._most_bytes or len(self._replies) > self._most_replies:
            _, oldest = self._replies.popitem(last=False)
            self._bytes -= oldest.size
