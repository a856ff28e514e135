"""Fetching by stream: from the rank that published, or from a meta-server to which ranks are still uploading.

Pieces are asked for a few at a time and from all ranks' shares at once, and verified as they arrive. A meta-server
answers when it has any of what was asked for; so download and upload overlap, and a rank whose upload is slow holds up
nothing but its own share. It is named while that happens, and when patience ends, its pieces are fetched from itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import xxhash

from kintsugi.errors import IntegrityError, RefusedError, WorldError
from kintsugi.messages import FetchWeights, WeightsFetched
from kintsugi.runtime import SYSTEM_CLOCK, Clock, wait
from kintsugi.transport import Blob, Reply
from kintsugi.types import StreamSource, WeightManifest
from kintsugi.weights.manifest import CACHED_BYTES, check_digest, check_whole

STREAM_BYTES = 16 << 20
"""Asked for at once, so that a lost reply costs little and both sides hold little beside the weights."""
IN_FLIGHT = 2
"""Requests per share: one is on its way while another is taken in."""
FETCH_TIMEOUT_S = 60.0
"""Of one request."""
PATIENCE_S = 5.0
"""For a piece to be uploaded, before the rank itself is asked for it."""
SLOW_S = 1.0
"""Who makes others wait so long for a piece is named."""
POLL_S = 1e-3
"""Between two looks at what has come."""


class Answer(Protocol):
    """To a request that is under way (`worker.Future`)."""

    @property
    def done(self) -> bool: ...

    def result(self) -> Reply: ...


@dataclass(frozen=True, slots=True)
class Answered:
    """Of who answers at once."""

    reply: Reply

    @property
    def done(self) -> bool:
        return True

    def result(self) -> Reply:
        return self.reply


Ask = Callable[[str, FetchWeights, float], Answer]
"""Sends a request to a process: (whom, what, deadline in seconds)."""
Say = Callable[[str], None]


@dataclass(slots=True)
class _Share:
    """What one rank gives, and how fast."""

    owner: str
    source: str
    """Whom it is asked of: the meta-server, or the rank itself."""
    waiting: deque[tuple[int, ...]] = field(default_factory=deque)
    num_sent: int = 0
    num_bytes: int = 0
    is_named: bool = False


@dataclass(frozen=True, slots=True)
class _Sent:
    share: _Share
    source: str
    indices: tuple[int, ...]
    answer: Answer
    since: float


class Pull:
    """One version on its way here."""

    def __init__(
        self,
        manifest: WeightManifest,
        source: StreamSource,
        *,
        into: memoryview,
        ask: Ask,
        say: Say = lambda message: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._manifest = manifest
        self._source = source
        self._into = into
        self._ask = ask
        self._say = say
        self._clock = clock
        self._since = clock.monotonic()
        self._shares = self._cut()
        self._sent: deque[_Sent] = deque()

    def run(self) -> None:
        """Until every piece is here and verified; WorldError, of the first that could not be had."""
        while self._send():
            sent = self._next_answered()
            try:
                self._take(sent)
            except WorldError as error:
                if sent.source == sent.share.owner:
                    raise
                self._go_around(sent, error)
        check_whole(self._manifest, source=self._name(self._source.process))

    def _cut(self) -> list[_Share]:
        owners = self._source.owners or (self._source.process,)
        shares = [_Share(owner, self._source.process) for owner in owners]
        for share_index, share in enumerate(shares):
            share.waiting.extend(self._requests(share_index if self._source.owners else None))
        return shares

    def _requests(self, owner: int | None) -> Iterator[tuple[int, ...]]:
        """Pieces of about `STREAM_BYTES` together; never none, which would mean all."""
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
        """Keep every share busy; whether anything is under way."""
        for share in self._shares:
            while share.waiting and share.num_sent < IN_FLIGHT:
                self._request(share, share.waiting.popleft())
        return bool(self._sent)

    def _request(self, share: _Share, indices: tuple[int, ...]) -> None:
        timeout_s = FETCH_TIMEOUT_S if share.source == share.owner else PATIENCE_S
        answer = self._ask(share.source, FetchWeights(self._manifest.version, indices), timeout_s)
        share.num_sent += 1
        self._sent.append(_Sent(share, share.source, indices, answer, self._clock.monotonic()))

    def _next_answered(self) -> _Sent:
        """The first that is answered: who is slow must not keep what others gave from being taken in, nor them from
        being asked for more."""
        idle = threading.Event()

        def attempt(remaining_s: float) -> _Sent | None:
            for sent in self._sent:
                self._name_if_slow(sent)
                if sent.answer.done:
                    return sent
            idle.wait(min(POLL_S, remaining_s))
            return None

        owners = sorted({sent.share.owner for sent in self._sent})
        what = f"pieces of version {self._manifest.version} from {self._source.process}"
        # Every request ends by itself, and none lives longer than this.
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
            found = frames.copy_to(self._into[piece.offset : piece.offset + piece.size])
            check_digest(self._manifest, piece, found=found, source=self._name(process))
        return expected

    def _name_if_slow(self, sent: _Sent) -> None:
        waited_s = self._clock.monotonic() - sent.since
        share = sent.share
        if waited_s < SLOW_S or share.is_named:
            return
        share.is_named = True
        self._say(f"{self._rate_of(share)}; it was asked {waited_s:.1f} s ago")

    def _rate_of(self, share: _Share) -> str:
        elapsed_s = max(1e-3, self._clock.monotonic() - self._since)
        others = [other.num_bytes for other in self._shares if other is not share]
        fastest = f", the fastest other at {max(others) / elapsed_s / 1e6:.1f} MB/s" if others else ""
        link = "" if share.owner == self._source.process else f" through {self._source.process}"
        return (
            f"version {self._manifest.version} is slow to come from {share.owner}{link}: "
            f"{share.num_bytes / 1e6:.1f} MB in {elapsed_s:.1f} s{fastest}"
        )

    def _go_around(self, sent: _Sent, error: WorldError) -> None:
        """Ask the rank itself, from now on for all of its share: its way to the meta-server is what is slow."""
        share = sent.share
        if share.source != share.owner:
            self._say(f"{self._rate_of(share)}; it is asked itself now, because {error}")
        share.is_named, share.source = True, share.owner
        share.waiting.appendleft(sent.indices)

    def _name(self, process: str) -> str:
        return f"stream of {process}"


class _Frames:
    """Bulk frames as one run of bytes, however they were cut."""

    def __init__(self, blobs: Sequence[Blob]) -> None:
        self._left = deque(memoryview(blob).cast("B") for blob in blobs)

    def copy_to(self, target: memoryview) -> str:
        """The next bytes; gives their xxh3-64."""
        digest = xxhash.xxh3_64()
        copied = np.frombuffer(target, np.uint8)
        start = 0
        while start < len(copied):
            frame = self._left[0]
            count = min(len(frame), len(copied) - start, CACHED_BYTES)
            part = copied[start : start + count]
            part[...] = np.frombuffer(frame[:count], np.uint8)
            digest.update(part.data)
            start += count
            if count == len(frame):
                self._left.popleft()
            else:
                self._left[0] = frame[count:]
        return digest.hexdigest()
