"""Fetching by stream: from the rank that published, or from a meta-server to which ranks are still uploading.

Pieces are requested a few at a time, from all ranks' shares in parallel, and verified as they arrive. A meta-server
replies as soon as it has any of the requested pieces; so download and upload overlap, and a slow upload delays only its
own share. The slow rank is reported meanwhile, and after `PATIENCE_S` its pieces are fetched from the rank itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kintsugi.errors import IntegrityError, RefusedError, WorldError, damage_of
from kintsugi.process.shell import ReplyHandle
from kintsugi.protocol.weights import FetchWeights, WeightsFetched
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.digests import PIECE_SLICE_BYTES, PieceDigest
from kintsugi.runtime.waits import wait
from kintsugi.telemetry.events import Alert, AlertEvent, BytesDamaged, NoteEvent
from kintsugi.transport import Blob, Reply
from kintsugi.types import Piece, StreamSource, WeightManifest
from kintsugi.weights.manifest import check_digest, check_whole

STREAM_BYTES = 16 << 20
"""Bytes per request: few, so that a lost reply costs little and both sides need little memory besides the weights."""
IN_FLIGHT = 2
"""Requests in flight per share: one is on its way while another is processed."""
FETCH_TIMEOUT_S = 60.0
"""Deadline of one request."""
PATIENCE_S = 5.0
"""Longest wait for a piece to be uploaded, before it is requested from the rank itself."""
SLOW_S = 1.0
"""A rank that delays a piece for this long is reported."""
POLL_S = 1e-3
"""Interval of polling for replies."""


@dataclass(frozen=True, slots=True)
class StreamAnswered:
    """A reply that is available immediately."""

    reply: Reply

    @property
    def done(self) -> bool:
        return True

    def result(self) -> Reply:
        return self.reply


SendRequest = Callable[[str, FetchWeights, float], ReplyHandle]
"""Sends a request to a process: (process, request, deadline in seconds)."""
EventSink = Callable[[AlertEvent | NoteEvent], object]


@dataclass(slots=True)
class _Share:
    """Share of one rank, and its throughput."""

    owner: str
    source: str
    """Process that is requested: the meta-server, or the rank itself."""
    waiting: deque[tuple[int, ...]] = field(default_factory=deque)
    num_sent: int = 0
    num_bytes: int = 0
    is_reported: bool = False


@dataclass(frozen=True, slots=True)
class _Sent:
    share: _Share
    source: str
    indices: tuple[int, ...]
    answer: ReplyHandle
    since: float


class Pull:
    """Fetch of one version."""

    def __init__(
        self,
        manifest: WeightManifest,
        source: StreamSource,
        *,
        into: Callable[[Piece], memoryview],
        send_request: SendRequest,
        emit: EventSink = lambda event: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`into` returns the memory of a piece, of exactly its size."""
        self._manifest = manifest
        self._source = source
        self._into = into
        self._send_request = send_request
        self._emit = emit
        self._clock = clock
        self._since = clock.monotonic()
        self._shares = self._cut()
        self._sent: deque[_Sent] = deque()

    def run(self) -> None:
        """Run until every piece has arrived and is verified; WorldError of the first piece that can not be fetched."""
        while self._send():
            sent = self._next_answered()
            try:
                self._take(sent)
            except WorldError as error:
                if sent.source == sent.share.owner:
                    raise
                self._fetch_from_owner(sent, error)
        check_whole(self._manifest, source=self._name(self._source.process))

    def _cut(self) -> list[_Share]:
        owners = self._source.owners or (self._source.process,)
        shares = [_Share(owner, self._source.process) for owner in owners]
        for share_index, share in enumerate(shares):
            share.waiting.extend(self._requests(share_index if self._source.owners else None))
        return shares

    def _requests(self, owner: int | None) -> Iterator[tuple[int, ...]]:
        """Pieces of about `STREAM_BYTES` together; never an empty request, which would mean all."""
        indices: list[int] = []
        size = 0
        for index, piece in enumerate(self._manifest.pieces):
            if owner is not None and piece.mesh.get("dp", 0) != owner:
                continue
            if indices and size + piece.size > STREAM_BYTES:
                yield tuple(indices)
                indices, size = [], 0
            indices.append(index)
            size += piece.size
        if indices:
            yield tuple(indices)

    def _send(self) -> bool:
        """Keep every share busy; return whether a request is in flight."""
        for share in self._shares:
            while share.waiting and share.num_sent < IN_FLIGHT:
                self._request(share, share.waiting.popleft())
        return bool(self._sent)

    def _request(self, share: _Share, indices: tuple[int, ...]) -> None:
        timeout_s = FETCH_TIMEOUT_S if share.source == share.owner else PATIENCE_S
        answer = self._send_request(share.source, FetchWeights(self._manifest.version, indices), timeout_s)
        share.num_sent += 1
        self._sent.append(_Sent(share, share.source, indices, answer, self._clock.monotonic()))

    def _next_answered(self) -> _Sent:
        """First request with a reply: a slow rank must not delay the processing of other replies, nor further requests
        to others."""
        idle = threading.Event()

        def attempt(remaining_s: float) -> _Sent | None:
            for sent in self._sent:
                self._report_if_slow(sent)
                if sent.answer.done:
                    return sent
            idle.wait(min(POLL_S, remaining_s))
            return None

        owners = sorted({sent.share.owner for sent in self._sent})
        what = f"pieces of version {self._manifest.version} from {self._source.process}"
        # Every request has its own deadline, and none is longer than this.
        sent = wait(attempt, whom=", ".join(owners), what=what, timeout_s=FETCH_TIMEOUT_S + PATIENCE_S)
        self._sent.remove(sent)
        return sent

    def _take(self, sent: _Sent) -> None:
        sent.share.num_sent -= 1
        reply = sent.answer.result()
        got = reply.expect(WeightsFetched)
        if got.version != self._manifest.version:
            where = self._name(sent.source)
            raise RefusedError(f"{where}: expected version {self._manifest.version}, got {got.version}")
        came = got.pieces or sent.indices
        if not set(came) <= set(sent.indices):
            raise IntegrityError(f"{self._name(sent.source)}: expected pieces of {sent.indices}, got {came}")
        sent.share.num_bytes += self._fill(came, reply.blobs, process=sent.source)
        rest = tuple(index for index in sent.indices if index not in came)
        if rest:
            sent.share.waiting.appendleft(rest)

    def _fill(self, indices: Sequence[int], blobs: Sequence[Blob], *, process: str) -> int:
        pieces = [self._manifest.pieces[index] for index in indices]
        expected, got = sum(piece.size for piece in pieces), sum(len(blob) for blob in blobs)
        if expected != got:
            names = ", ".join(piece.name for piece in pieces)
            raise IntegrityError(f"{self._name(process)}: expected {expected} bytes of {names}, got {got}")
        frames = _Frames(blobs)
        for piece in pieces:
            found = frames.copy_to(self._into(piece))
            check_digest(self._manifest, piece, found=found, source=self._name(process), origin=process)
        return expected

    def _report_if_slow(self, sent: _Sent) -> None:
        waited_s = self._clock.monotonic() - sent.since
        share = sent.share
        if waited_s < SLOW_S or share.is_reported:
            return
        share.is_reported = True
        self._emit(Alert(f"{self._rate_of(share)}; it was asked {waited_s:.1f} s ago"))

    def _rate_of(self, share: _Share) -> str:
        elapsed_s = max(1e-3, self._clock.monotonic() - self._since)
        others = [other.num_bytes for other in self._shares if other is not share]
        fastest = f", the fastest other at {max(others) / elapsed_s / 1e6:.1f} MB/s" if others else ""
        link = "" if share.owner == self._source.process else f" through {self._source.process}"
        return (
            f"version {self._manifest.version} is slow to come from {share.owner}{link}: "
            f"{share.num_bytes / 1e6:.1f} MB in {elapsed_s:.1f} s{fastest}"
        )

    def _fetch_from_owner(self, sent: _Sent, error: WorldError) -> None:
        """Request the rest of a share from the rank itself: its connection to the meta-server is slow."""
        share = sent.share
        if share.source != share.owner:
            self._emit(Alert(f"{self._rate_of(share)}; it is asked itself now, because {error}"))
            if (damage := damage_of(error)) is not None:
                self._emit(BytesDamaged(str(error), origin=damage.origin))
        share.is_reported, share.source = True, share.owner
        share.waiting.appendleft(sent.indices)

    def _name(self, process: str) -> str:
        return f"stream of {process}"


class _Frames:
    """Bulk frames as one sequence of bytes, independent of how they were cut."""

    def __init__(self, blobs: Sequence[Blob]) -> None:
        self._left = deque(memoryview(blob).cast("B") for blob in blobs)

    def copy_to(self, target: memoryview) -> str:
        """Copy the next bytes and return their digest as a piece."""
        digest = PieceDigest()
        copied = np.frombuffer(target, np.uint8)
        start = 0
        while start < len(copied):
            frame = self._left[0]
            count = min(len(frame), len(copied) - start, PIECE_SLICE_BYTES)
            part = copied[start : start + count]
            part[...] = np.frombuffer(frame[:count], np.uint8)
            digest.update(part.data)
            start += count
            if count == len(frame):
                self._left.popleft()
            else:
                self._left[0] = frame[count:]
        return digest.hexdigest()
