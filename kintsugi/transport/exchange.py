"""One exchange between two processes: what is delivered, what is answered, and the request that is under way.

`Endpoint` moves these; nothing here touches a socket.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import msgspec
import xxhash

from kintsugi.errors import IntegrityError, KintsugiError, RefusedError
from kintsugi.messages import Body
from kintsugi.runtime import SPANS, SYSTEM_CLOCK
from kintsugi.types import Peer
from kintsugi.wire import Envelope, MessageKind

Blob = bytes | memoryview
BodyType = TypeVar("BodyType", bound=Body)

SLOW_S = 1.0
"""A request that takes longer is worth a span."""
CHUNK_BYTES = 16 << 20
SAVED_REPLIES = 512
SAVED_BYTES = 2 << 20
SLOWEST_BULK_BYTES_PER_S = 50e6
"""A bulk transfer is taken to be still on its way for as long as it would need at this rate."""


def bulk_digest(blobs: Iterable[Blob]) -> str:
    """xxh3-64 over all frames in order; how they were cut does not matter."""
    digest = xxhash.xxh3_64()
    for blob in blobs:
        digest.update(blob)
    return digest.hexdigest()


def verify_bulk(blobs: Iterable[Blob], *, expected: str, what: str) -> None:
    """Raise IntegrityError unless the frames are the bytes that were announced."""
    found = bulk_digest(blobs)
    if found != expected:
        raise IntegrityError(f"{what}: expected xxh3 {expected}, got {found}")


def chunks(data: Blob) -> list[memoryview]:
    """Cut bulk data into frames of bounded size, without copying."""
    view = memoryview(data).cast("B")
    return [view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES)]


def bulk_size(blobs: Sequence[Blob]) -> int:
    """Bytes in all."""
    return sum(memoryview(blob).nbytes for blob in blobs)


class Delivery(msgspec.Struct, eq=False):
    """An inbound request or one-way message, and who sent it."""

    envelope: Envelope
    body: Body
    blobs: tuple[memoryview, ...]
    peer: Peer
    route: bytes
    """The connection it came on last; a repeated request may come on another one."""
    running: dict[int, Delivery] = {}
    """The sender's requests that are not answered yet; this one is among them until it is."""

    @property
    def wants_reply(self) -> bool:
        return self.envelope.kind is MessageKind.REQUEST


class Reply(msgspec.Struct, frozen=True, eq=False):
    """What a peer answered."""

    body: Body
    blobs: tuple[memoryview, ...] = ()

    def expect(self, kind: type[BodyType]) -> BodyType:
        """The body as the type that this request is answered with."""
        if not isinstance(self.body, kind):
            raise RefusedError(f"expected {kind.__name__} as answer, got {type(self.body).__name__}")
        return self.body


def subject(body: Body) -> dict[str, object]:
    """What a request is about, by which its way through the processes can be followed."""
    ticket, manifest = getattr(body, "ticket", None), getattr(body, "manifest", None)
    return {
        "ticket": getattr(ticket, "id", ticket),
        "step": getattr(body, "step", None),
        "version": getattr(body, "version", getattr(manifest, "version", None)),
    }


class Turning(Protocol):
    """What a pending reply needs of its endpoint: to do one round of work."""

    def turn(self, timeout_s: float) -> None: ...


class PendingReply(msgspec.Struct, eq=False):
    """A request under way. `done` once it was answered, failed or ran out of time; then `result()` tells."""

    endpoint: Turning
    process: str
    body: Body
    blobs: Sequence[Blob]
    cause_id: str | None
    on_done: Callable[[PendingReply], None] | None
    since: float
    deadline: float
    interval_s: float
    """How long until it is sent again."""
    sequence: int = 0
    done: bool = False
    reply: Reply | None = None
    error: KintsugiError | None = None

    @property
    def what(self) -> str:
        """What is waited for, as `runtime.wait` declares it."""
        return type(self.body).__name__

    def result(self) -> Reply:
        """The reply, or the error that it ended with; only once `done`."""
        if self.error is not None:
            raise self.error
        assert self.reply is not None, f"{self.what} to {self.process} is still under way"
        return self.reply

    def settle(self, reply: Reply | None, error: KintsugiError | None) -> None:
        """End it, once; a later answer finds it done."""
        assert not self.done, f"{self.what} to {self.process} ended twice"
        self.reply, self.error, self.done = reply, error, True
        self.blobs = ()
        if SYSTEM_CLOCK.monotonic() - self.since > SLOW_S:
            ended = None if error is None else type(error).__name__
            about = {"to": self.process, "what": self.what, "error": ended, **subject(self.body)}
            SPANS.add("slow_request", about, since=self.since)
        if self.on_done is not None:
            self.on_done(self)

    def attempt(self, remaining_s: float) -> PendingReply | None:
        """For `runtime.wait`: let the endpoint work for at most so long."""
        if not self.done:
            self.endpoint.turn(remaining_s)
        return self if self.done else None


class SavedReply(msgspec.Struct, frozen=True, eq=False):
    """An answer that was given, as it was sent; without the frame when it was too large to keep.

    Encoded, because the objects that it says take several times the memory. The epoch that it says is that of then:
    who gets it again believes in newer ones only.
    """

    frame: bytes | None
    blobs: Sequence[Blob]
    size: int
    until: float = 0.0
    """For one that was not kept: when its first copy must have arrived or be lost."""


class SavedReplies:
    """Replies by (sender, incarnation, sequence), the oldest leaving first; bounded in number and in bytes.

    A bulk reply that would not fit is not kept, only remembered: repetitions of its request are ignored while the
    first copy must still be on its way, and are carried out again after that (fetching again is harmless).
    """

    def __init__(self) -> None:
        self._replies: OrderedDict[tuple[str, str, int], SavedReply] = OrderedDict()
        self._bytes = 0

    def get(self, envelope: Envelope) -> SavedReply | None:
        return self._replies.get((envelope.sender, envelope.incarnation, envelope.sequence))

    def drop(self, envelope: Envelope) -> None:
        saved = self._replies.pop((envelope.sender, envelope.incarnation, envelope.sequence))
        self._bytes -= saved.size

    def put(self, envelope: Envelope, frame: bytes, *, blobs: Sequence[Blob] = (), now: float) -> None:
        """Remember an answer."""
        size = len(frame) + bulk_size(blobs)
        if size > SAVED_BYTES:
            saved = SavedReply(None, (), 0, now + 1.0 + size / SLOWEST_BULK_BYTES_PER_S)
        else:
            saved = SavedReply(frame, blobs, size)
        self._replies[envelope.sender, envelope.incarnation, envelope.sequence] = saved
        self._bytes += saved.size
        while self._bytes > SAVED_BYTES or len(self._replies) > SAVED_REPLIES:
            _, oldest = self._replies.popitem(last=False)
            self._bytes -= oldest.size
