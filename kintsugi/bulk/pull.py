"""Fetch of one version or state: from all shares in parallel, verified piece by piece.

A share has one or more sources, in order of preference: the next host of a chain, the meta-server, the rank itself. A
source that fails, sends a damaged piece, or takes longer than `PATIENCE_S` for one request is gone around: what is
missing comes from the next. A slow source is reported before that, with its rate beside the fastest other one.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kintsugi.bulk.channel import Channel
from kintsugi.bulk.client import BulkClient
from kintsugi.bulk.exports import SLICE_BYTES, slices
from kintsugi.errors import DataDamaged, DeadlineExceeded, IntegrityError, WorldError, damage_of
from kintsugi.protocol.bulk import BulkOffer, BulkRange
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.digests import piece_digest
from kintsugi.runtime.waits import join, wait
from kintsugi.telemetry.events import Alert, AlertEvent, BytesDamaged, NoteEvent
from kintsugi.types import Piece

REQUEST_BYTES = 8 * SLICE_BYTES
"""Approximate size of one request: a source that is gone around costs little."""
PATIENCE_S = 5.0
"""Longest time for one request to a source that is not the last."""
SLOW_S = 1.0
"""A request that takes longer is reported."""
POLL_S = 0.02
STOP_TIMEOUT_S = 30.0
MAX_CONNECTIONS = 4
PULL_TIMEOUT_S = 3600.0
"""Bound of a whole fetch; each request has its own, much shorter one."""

EventSink = Callable[[AlertEvent | NoteEvent], object]
Locate = Callable[[str], BulkOffer]
"""Asks a process, over the control channel, for its offer of this version; blocks the thread that calls it."""


@dataclass(frozen=True, slots=True)
class Share:
    """Pieces that come from the same sources: `Share("model-1", ("agent-0", "model-1"), (0, 1, 2))`."""

    owner: str
    sources: tuple[str, ...]
    indices: tuple[int, ...]

    def only(self, chosen: Container[int]) -> Share:
        """Return the same without the pieces that are not chosen."""
        return Share(self.owner, self.sources, tuple(index for index in self.indices if index in chosen))


@dataclass(eq=False)
class _Progress:
    """State of one share; the lock of the pull protects it."""

    share: Share
    waiting: deque[tuple[BulkRange, ...]]
    source: int = 0
    num_bytes: int = 0
    is_reported: bool = False

    @property
    def process(self) -> str:
        return self.share.sources[self.source]

    @property
    def has_another(self) -> bool:
        return self.source + 1 < len(self.share.sources)


@dataclass(eq=False)
class _Request:
    """A request in flight."""

    progress: _Progress
    process: str
    since: float
    channel: Channel | None = None
    is_given_up: bool = False


@dataclass(eq=False)
class _Outcome:
    """Shared by the threads of one pull."""

    error: BaseException | None = None
    requests: list[_Request] = field(default_factory=list)
    missing: dict[int, int] = field(default_factory=dict)
    """Index → slices that have not arrived."""


class Pull:
    """One fetch; `run` blocks until it has ended."""

    def __init__(
        self,
        pieces: Mapping[int, Piece],
        shares: Sequence[Share],
        *,
        into: Callable[[int], memoryview],
        locate: Locate,
        client: BulkClient,
        what: str,
        emit: EventSink = lambda event: None,
        check: Callable[[], object] = lambda: None,
        arrived: Callable[[BulkRange], object] = lambda part: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`pieces` by their indices in the offers; `what` names them: "version 3". `into` returns the place of a piece,
        of exactly its size. `check` is called by the waiting thread, and raises to give up. `arrived` is called for
        every slice, before its piece is verified."""
        self._pieces = pieces
        self._into = into
        self._locate = locate
        self._client = client
        self._what = what
        self._emit = emit
        self._check = check
        self._arrived = arrived
        self._clock = clock
        self._since = clock.monotonic()
        self._lock = threading.Lock()
        self._offers: dict[str, BulkOffer] = {}
        self._outcome = _Outcome()
        self._shares = [self._begin(share) for share in shares]
        self._changed = threading.Event()
        """Set when a thread has ended."""
        self._num_running = 0

    def run(self) -> None:
        """Return when every piece has arrived and is verified; raise the first error that no other source repairs."""
        threads = [
            threading.Thread(target=self._work, args=(progress,), name="bulk-fetch", daemon=True)
            for progress in self._shares
            for _ in range(min(num_connections(), max(1, len(progress.waiting))))
        ]
        self._num_running = len(threads)
        try:
            for thread in threads:
                thread.start()
            self._await()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            for thread in threads:
                if thread.ident is not None:  # The host may have had no thread left for it.
                    join(thread, whom=self._what, what="its connections", timeout_s=STOP_TIMEOUT_S)
        if self._outcome.error is not None:
            raise self._outcome.error

    def _begin(self, share: Share) -> _Progress:
        pieces = [(index, self._pieces[index]) for index in share.indices]
        for index, piece in pieces:
            self._outcome.missing[index] = len(slices(index, piece.size))
        return _Progress(share, deque(_requests(pieces)))

    def _await(self) -> None:
        def attempt(remaining_s: float) -> bool | None:
            self._changed.clear()
            self._check()
            self._watch()
            if not self._num_running:
                return True
            self._changed.wait(min(POLL_S, remaining_s))
            return None

        sources = sorted({source for each in self._shares for source in each.share.sources})
        wait(attempt, whom=", ".join(sources), what=f"pieces of {self._what}", timeout_s=PULL_TIMEOUT_S)

    # The threads.

    def _work(self, progress: _Progress) -> None:
        """Fetch the requests of one share; the outermost boundary of its thread."""
        try:
            while (parts := self._next(progress)) is not None:
                self._fetch(progress, parts)
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it.
            self._fail(error)
        finally:
            with self._lock:
                self._num_running -= 1
            self._changed.set()

    def _next(self, progress: _Progress) -> tuple[BulkRange, ...] | None:
        with self._lock:
            is_over = self._outcome.error is not None or not progress.waiting
            return None if is_over else progress.waiting.popleft()

    def _fetch(self, progress: _Progress, parts: tuple[BulkRange, ...]) -> None:
        request = _Request(progress, progress.process, self._clock.monotonic())
        with self._lock:
            self._outcome.requests.append(request)
        try:
            offer = self._offers.get(request.process) or self._locate(request.process)
            self._offers[request.process] = offer
            self._client.fetch(
                offer,
                parts,
                self._places(parts),
                watch=lambda channel: self._watch_connection(request, channel),
                arrived=self._arrived,
            )
            self._take(parts, process=request.process)
        except WorldError as error:
            self._go_around(request, parts, error)
        finally:
            with self._lock:
                self._outcome.requests.remove(request)

    def _watch_connection(self, request: _Request, channel: Channel | None) -> None:
        """Take note of the connection of a request; it is ended at once if the pull has failed meanwhile."""
        with self._lock:
            request.channel = channel
            if self._outcome.error is not None:
                _interrupt(request)

    def _places(self, parts: Iterable[BulkRange]) -> list[memoryview]:
        return [self._into(part.index)[part.offset : part.offset + part.size] for part in parts]

    def _take(self, parts: tuple[BulkRange, ...], *, process: str) -> None:
        """Count slices, and verify the pieces that are whole now."""
        whole: list[int] = []
        with self._lock:
            for part in parts:
                self._outcome.missing[part.index] -= 1
                if not self._outcome.missing[part.index]:
                    whole.append(part.index)
        for index in whole:
            piece = self._pieces[index]
            found = piece_digest(self._into(index))
            if found != piece.digest:
                raise IntegrityError(
                    f"{piece.name} of {self._what} from {process}: expected xxh3 {piece.digest}, got {found}",
                    detail=DataDamaged(process),
                )

    def _go_around(self, request: _Request, parts: tuple[BulkRange, ...], error: WorldError) -> None:
        """Ask the next source for what this one did not give; the error is final if there is none."""
        progress = request.progress
        if request.is_given_up:
            error = DeadlineExceeded(whom=request.process, what=self._what, waited_s=PATIENCE_S)
        with self._lock:
            if self._outcome.error is not None:
                return  # The pull has ended this request; that says nothing about its source.
            is_first = progress.process == request.process
            if is_first and not progress.has_another:
                raise error
            progress.source += is_first
            progress.is_reported = True
            again = self._again(parts)
            progress.waiting.extendleft(reversed(again))
        if is_first:
            self._emit(
                Alert(f"{self._rate_of(progress, request.process)}; {progress.process} is asked now: {error}")
            )
        if (damage := damage_of(error)) is not None:
            self._emit(BytesDamaged(str(error), origin=damage.origin))

    def _again(self, parts: tuple[BulkRange, ...]) -> list[tuple[BulkRange, ...]]:
        """Requests for what a failed request left: its parts if they did not arrive, or pieces that are wrong."""
        wrong = [index for index in {part.index for part in parts} if not self._outcome.missing[index]]
        if not wrong:
            return [parts]
        for index in wrong:
            self._outcome.missing[index] = len(slices(index, self._pieces[index].size))
        return list(_requests((index, self._pieces[index]) for index in wrong))

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._outcome.error = self._outcome.error or error
            for request in self._outcome.requests:
                _interrupt(request)

    # Slow sources.

    def _watch(self) -> None:
        """Report requests that take long; give up those for which there is another source."""
        now = self._clock.monotonic()
        with self._lock:
            requests = list(self._outcome.requests)
        for request in requests:
            waited_s, progress = now - request.since, request.progress
            if waited_s >= SLOW_S and not progress.is_reported:
                progress.is_reported = True
                self._emit(
                    Alert(f"{self._rate_of(progress, request.process)}; it was asked {waited_s:.1f} s ago")
                )
            if waited_s >= PATIENCE_S and progress.has_another:
                with self._lock:
                    request.is_given_up |= _interrupt(request)

    def _rate_of(self, progress: _Progress, process: str) -> str:
        elapsed_s = max(1e-3, self._clock.monotonic() - self._since)
        others = [self._bytes_of(other) for other in self._shares if other is not progress]
        fastest = f", the fastest other at {max(others) / elapsed_s / 1e6:.1f} MB/s" if others else ""
        link = "" if progress.share.owner == process else f" through {process}"
        return (
            f"{self._what} is slow to come from {progress.share.owner}{link}: "
            f"{self._bytes_of(progress) / 1e6:.1f} MB in {elapsed_s:.1f} s{fastest}"
        )

    def _bytes_of(self, progress: _Progress) -> int:
        left = sum(part.size for parts in progress.waiting for part in parts)
        return sum(self._pieces[index].size for index in progress.share.indices) - left


def _interrupt(request: _Request) -> bool:
    """End the connection of a request; False if it has none. Under the lock: afterwards another request may have it."""
    if request.channel is None:
        return False
    request.channel.interrupt()
    return True


def _requests(pieces: Iterable[tuple[int, Piece]]) -> Iterator[tuple[BulkRange, ...]]:
    """Cut pieces into requests of about `REQUEST_BYTES`."""
    parts: list[BulkRange] = []
    size = 0
    for index, piece in pieces:
        for part in slices(index, piece.size):
            if parts and size + part.size > REQUEST_BYTES:
                yield tuple(parts)
                parts, size = [], 0
            parts.append(part)
            size += part.size
    if parts:
        yield tuple(parts)


def num_connections() -> int:
    """Connections per share: at least two, so that one is verified while the other receives; more on large hosts."""
    return max(2, min(MAX_CONNECTIONS, (os.cpu_count() or 1) // 4))
