"""Weights of other hosts in the memory of this one: fetched once, for all processes of the host.

An agent holds the latest two versions, each in shared memory of its host. The memory is filled in one of three ways:

    meta-server   ranks upload the pieces of their shares, which this agent fetches from them
    same host     a rank published the whole version in this host's memory: it is offered as it is, without a copy
    chain         the agent fetches the version from the agent before it, the meta-server, or the ranks

The successor of a meta-server has nothing of what ranks announced before it was there, and they do not repeat it: it
fetches from the ranks what it is asked for.

The agent of a chain that holds an earlier version fetches the difference where that is faster (`weight_deltas`).

While a version arrives, its slices are offered to the next host of the chain; the processes of this host get it when it
is whole and verified. Decisions are taken in the agent's loop; background threads only fetch.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kintsugi.bulk.endpoint import BulkEndpoint
from kintsugi.bulk.exports import FileExport
from kintsugi.bulk.pull import EventSink, Pull, Share
from kintsugi.cluster.weight_deltas import DeltaFetch, Difference, HeldVersion, make_difference
from kintsugi.errors import KintsugiError, RefusedError, WorldError, damage_of
from kintsugi.process.loop_calls import LoopCalls
from kintsugi.protocol.bulk import BulkOffer
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.messages import Body
from kintsugi.protocol.weights import DeltaHeld, HoldDelta, HoldWeights, UploadWeights, WeightsHeld
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.counters import COUNTERS
from kintsugi.telemetry.events import BytesDamaged, Note
from kintsugi.transport import Delivery
from kintsugi.types import Piece, Role, StreamSource, WeightManifest, role_of
from kintsugi.weights.delta_choice import DeltaChoice
from kintsugi.weights.transports.shared_memory import (
    VERSIONS_KEPT,
    WeightSegments,
    WritableSegments,
    reopened,
    segment_name,
    segment_owner,
    unlock,
)
from kintsugi.weights.transports.stream import locate, shares_of

MAX_WAITING = 1024
"""Maximum of requests that wait for one version."""


class Replies(Protocol):
    """The part of an endpoint that answers requests."""

    def reply(self, delivery: Delivery, body: Body) -> None: ...

    def fail(self, delivery: Delivery, error: BaseException) -> object: ...


@dataclass(eq=False)
class _Version:
    """A version in the memory of this host."""

    number: int
    segment: str
    descriptor: int
    """Open file of the memory; locked for writing until the version is whole."""
    export: FileExport
    buffer: memoryview
    offer: BulkOffer
    is_own: bool
    """Whether the memory is this agent's; else a rank's."""
    pieces: dict[int, Piece] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    unannounced: frozenset[int] = frozenset()
    """Pieces that this agent fetches from the ranks, as their announcements may have gone to its predecessor."""
    expected: int | None = None
    """Number of pieces, once a manifest has told it."""
    waiting: list[Delivery] = field(default_factory=list)

    failure: Exception | None = None
    """Error of an upload: the version will not be whole here."""
    num_pulls: int = 0
    """Threads that may still write to the memory, or read it for a difference."""
    difference: Difference | None = None
    delta_offer: BulkOffer | None = None
    delta_waiting: list[Delivery] = field(default_factory=list)
    is_delta_awaited: bool = False
    """Whether a difference is on its way here, or being made."""
    delta_refusal: str = ""
    """Reason why no difference is made of this version."""

    def fits(self, pieces: Mapping[int, Piece]) -> bool:
        """Whether these are pieces of this version, and not of one that a rollback has undone."""
        return all(self.pieces.get(index, piece).digest == piece.digest for index, piece in pieces.items())

    def has(self, pieces: Mapping[int, Piece]) -> bool:
        return all(index in self.pieces and index not in self.missing for index in pieces)

    @property
    def held(self) -> HeldVersion:
        return HeldVersion(self.number, dict(self.pieces), self.buffer, self.export.reading)

    @property
    def is_whole(self) -> bool:
        return self.expected is not None and len(self.pieces) == self.expected and not self.missing


class WeightHolder:
    """Answers `UploadWeights`, `HoldWeights` and `HoldDelta`; never blocks the loop for a transfer."""

    def __init__(
        self,
        replies: Replies,
        bulk: BulkEndpoint,
        calls: LoopCalls,
        *,
        process: str,
        segments: WeightSegments,
        emit: EventSink = lambda event: None,
        choice: DeltaChoice | None = None,
    ) -> None:
        """`segments` is the shared memory of this host. `emit` records slow sources, from any thread."""
        self._replies = replies
        self._bulk = bulk
        self._calls = calls
        self._process = process
        self._segments = segments
        self._writable = WritableSegments(segments)
        self._emit = emit
        self._choice = choice or DeltaChoice()
        self._versions: dict[int, _Version] = {}
        self._published: dict[str, int] = {}
        """Latest version that each rank has published."""
        self._is_successor = False
        """Whether ranks may have announced pieces to an earlier agent of this host."""

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that are held, or arriving."""
        return tuple(self._versions)

    def succeed(self) -> None:
        """Fetch from the ranks what they announced to an earlier agent of this host."""
        self._is_successor = True

    def handle(self, delivery: Delivery) -> None:
        body = delivery.body
        try:
            if isinstance(body, UploadWeights):
                self._take_upload(delivery, body)
            elif isinstance(body, HoldDelta):
                self._take_hold_delta(delivery, body)
            else:
                assert isinstance(body, HoldWeights)
                self._hold(delivery, body)
        except (KintsugiError, OSError) as error:
            self._replies.fail(delivery, error)

    def close(self) -> None:
        for number in tuple(self._versions):
            self._drop(number, "the agent ends")

    # Uploads, at the meta-server.

    def _take_upload(self, delivery: Delivery, upload: UploadWeights) -> None:
        owner = delivery.envelope.sender
        if role_of(owner) is not Role.MODEL:
            raise RefusedError(f"expected weights of a rank, got version {upload.version} from {owner}")
        _check_places(upload, owner=owner)
        self._forget_undone(owner, upload.version)
        if upload.segment:
            if segment_owner(upload.segment) != owner:
                raise RefusedError(f"segment {upload.segment} is not of {owner}")
            self._adopt(upload)
            self._replies.reply(delivery, Ok())
            return
        if upload.offer is None or upload.offer.process != owner:
            raise RefusedError(f"{owner} offered no pieces of version {upload.version}")
        version = self._version_for(upload.version, upload.pieces, size=upload.size)
        if version.has(upload.pieces) or upload.pieces.keys() <= version.unannounced:
            self._replies.reply(delivery, Ok())
            return
        self._announce(version, upload.pieces)
        version.missing |= upload.pieces.keys()
        share = Share(owner, (owner,), tuple(sorted(upload.pieces)))
        offer = upload.offer
        self._begin_pull(
            version,
            upload.pieces,
            [share],
            locate=lambda process: offer,
            done=partial(self._uploaded, delivery),
        )

    def _uploaded(self, delivery: Delivery, version: _Version, error: Exception | None) -> None:
        upload = delivery.body
        assert isinstance(upload, UploadWeights)
        if error is not None:
            self._replies.fail(delivery, error)
            self._fail_waiting(version, error)
            return
        version.missing -= upload.pieces.keys()
        self._replies.reply(delivery, Ok())
        self._finish_if_whole(version)

    def _adopt(self, upload: UploadWeights) -> None:
        """Offer a version where a rank of this host has published it. Processes that asked for it before keep their
        offer, which moves there."""
        version = self._versions.get(upload.version)
        is_arriving = version is not None and version.unannounced & version.missing
        if version is not None and (not version.fits(upload.pieces) or not version.is_own or is_arriving):
            self._drop_refused(upload.version, "it was published again")
            version = None
        if version is None:
            self._make_room(upload.version)
        held = self._segments.open(upload.segment)
        try:
            descriptor = reopened(held)
        finally:
            os.close(held)
        try:
            buffer = memoryview(mmap.mmap(descriptor, upload.size, prot=mmap.PROT_READ))
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise RefusedError(f"segment {upload.segment} of {upload.size} bytes: {error}") from error
        reading = partial(_read_lock, descriptor, upload.segment)
        if version is None:
            export = FileExport(
                _places(upload.pieces), buffer, descriptor=descriptor, reading=reading, is_whole=True
            )
            version = self._offer(upload.version, upload.segment, descriptor, export, buffer, is_own=False)
        else:
            version.export.move(buffer, descriptor=descriptor, reading=reading)
            unlock(version.descriptor)
            version.segment, version.descriptor, version.buffer = upload.segment, descriptor, buffer
            version.is_own = False
        version.pieces, version.expected = dict(upload.pieces), len(upload.pieces)
        version.missing.clear()
        self._answer_waiting(version)

    # Requests of servers and of other agents.

    def _hold(self, delivery: Delivery, request: HoldWeights) -> None:
        version = self._held_or_begun(request.manifest, request.source)
        if request.is_awaited and not version.is_whole:
            if version.failure is not None:
                raise version.failure
            if len(version.waiting) >= MAX_WAITING:
                raise RefusedError(f"{MAX_WAITING} requests wait for version {version.number} already")
            version.waiting.append(delivery)
        else:
            self._replies.reply(delivery, WeightsHeld(version.number, version.segment, version.offer))

    def _held_or_begun(self, manifest: WeightManifest, source: StreamSource) -> _Version:
        pieces = dict(enumerate(manifest.pieces))
        version = self._version_for(manifest.version, pieces, size=manifest.size)
        if version.expected is None:
            version.expected = len(pieces)
            absent = pieces.keys() - version.pieces.keys()
            version.missing |= absent
            self._announce(version, pieces)
            if source.process == self._process and self._is_successor:
                version.unannounced = frozenset(absent)
            shares = shares_of(manifest, source, own=self._process)
            if source.process == self._process:
                shares = [share.only(version.unannounced) for share in shares]
            if shares := [share for share in shares if share.indices]:
                self._pull_from_others(version, manifest, source, shares)
            self._finish_if_whole(version)
        return version

    def _pull_from_others(
        self, version: _Version, manifest: WeightManifest, source: StreamSource, shares: Sequence[Share]
    ) -> None:
        process = shares[0].sources[0]
        base = self._base_for(version)
        attempt: DeltaFetch | None = None
        if (
            base is not None
            and role_of(process) is Role.AGENT
            and self._choice.is_worth_asking(manifest.size)
        ):
            attempt = self._begin_delta(version, manifest, source, base)

        pieces = {index: manifest.pieces[index] for share in shares for index in share.indices}
        size = sum(piece.size for piece in pieces.values())

        def fetch(pull: Pull) -> None:
            if attempt is not None and self._attempt_delta(version, attempt, process):
                return
            since = SYSTEM_CLOCK.monotonic()
            pull.run()
            self._choice.note_whole(size, SYSTEM_CLOCK.monotonic() - since)

        self._begin_pull(
            version,
            pieces,
            shares,
            locate=lambda process: locate(process, manifest, source, call=self._calls.call),
            done=partial(self._pulled, pieces.keys()),
            fetch=fetch,
        )

    # Differences.

    def _base_for(self, version: _Version) -> _Version | None:
        """The latest whole version with the same tensors."""
        found = [
            other
            for other in self._versions.values()
            if other is not version and other.is_whole and other.held.has_pieces_of(version.pieces)
        ]
        return max(found, key=lambda other: other.number, default=None)

    def _begin_delta(
        self, version: _Version, manifest: WeightManifest, source: StreamSource, base: _Version
    ) -> DeltaFetch:
        version.is_delta_awaited = True
        base.num_pulls += 1

        def release() -> None:
            base.num_pulls -= 1

        return DeltaFetch(
            manifest,
            source,
            base.held,
            client=self._bulk.client,
            choice=self._choice,
            call=self._calls.call,
            emit=self._emit,
            check=lambda: _check_held(version, self._versions),
            release=lambda: self._calls.run(release),
        )

    def _attempt_delta(self, version: _Version, attempt: DeltaFetch, process: str) -> bool:
        """In a background thread: fetch a difference and apply it; False if the version has to come whole."""
        try:
            difference = attempt.fetch(process)
            self._calls.run(lambda: self._offer_difference(version, difference))
            attempt.apply(
                difference,
                into=lambda index: _place(version.buffer, version.pieces[index]),
                arrived=version.export.arrived,
                origin=process,
            )
        except (WorldError, OSError) as error:
            self._choice.note_refused()
            self._emit(Note(f"version {version.number} comes whole: {error}"))
            if isinstance(error, WorldError) and (damage := damage_of(error)) is not None:
                self._emit(BytesDamaged(str(error), origin=damage.origin))
            reason = f"version {version.number} comes whole to {self._process}"
            self._calls.run(lambda: self._refuse_difference(version, reason))
            return False
        finally:
            attempt.release()
        COUNTERS.add("weights.deltas")
        COUNTERS.add("weights.delta_bytes", difference.size)
        return True

    def _take_hold_delta(self, delivery: Delivery, request: HoldDelta) -> None:
        version = self._held_or_begun(request.manifest, request.source)
        if len(version.delta_waiting) >= MAX_WAITING:
            raise RefusedError(
                f"{MAX_WAITING} requests wait for a difference to version {version.number} already"
            )
        version.delta_waiting.append(delivery)
        self._answer_deltas(version)

    def _answer_deltas(self, version: _Version) -> None:
        """Answer requests for a difference, as far as it is known what becomes of it."""
        waiting, version.delta_waiting = version.delta_waiting, []
        for delivery in waiting:
            assert isinstance(delivery.body, HoldDelta)
            try:
                held = self._difference_for(version, delivery.body)
            except KintsugiError as error:
                self._replies.fail(delivery, error)
                continue
            if held is None:
                version.delta_waiting.append(delivery)
            else:
                self._replies.reply(delivery, held)

    def _difference_for(self, version: _Version, request: HoldDelta) -> DeltaHeld | None:
        """None if it is not ready; RefusedError if there will be none."""
        if version.difference is not None and version.difference.leads_from(request):
            assert version.delta_offer is not None
            return version.difference.held(version.number, version.delta_offer)
        if version.delta_refusal:
            raise RefusedError(version.delta_refusal)
        base = self._versions.get(request.base_version)
        if base is None or not base.is_whole or base.held.digest != request.base_digest:
            raise RefusedError(
                f"{self._process} does not hold version {request.base_version} as it was named"
            )
        is_from_ranks = request.source.process == self._process
        if not (version.is_whole or version.is_delta_awaited or is_from_ranks):
            raise RefusedError(f"version {version.number} comes whole to {self._process}")
        if version.is_whole and not version.is_delta_awaited:
            self._make_difference(version, base)
        return None

    def _make_difference(self, version: _Version, base: _Version) -> None:
        version.is_delta_awaited = True
        version.num_pulls += 1
        base.num_pulls += 1
        new, old = version.held, base.held

        def work() -> None:
            try:
                difference = make_difference(new, old)
            except Exception as error:  # noqa: BLE001 - the thread's outermost boundary: the loop answers with it.
                reason = str(error)
                self._calls.run(lambda: self._refuse_difference(version, reason))
            else:
                self._calls.run(lambda: self._offer_difference(version, difference))
            self._calls.run(ended)

        def ended() -> None:
            version.num_pulls -= 1
            base.num_pulls -= 1

        threading.Thread(target=work, name="weights-difference", daemon=True).start()

    def _offer_difference(self, version: _Version, difference: Difference) -> None:
        version.is_delta_awaited = False
        if self._versions.get(version.number) is version:
            self._withdraw_difference(version)
            name = f"weights-{version.number}-from-{difference.base_version}-{os.urandom(4).hex()}"
            version.difference = difference
            version.delta_offer = self._bulk.server.offer(name, difference.export())
        self._answer_deltas(version)

    def _refuse_difference(self, version: _Version, reason: str) -> None:
        version.is_delta_awaited = False
        version.delta_refusal = reason
        self._answer_deltas(version)

    def _withdraw_difference(self, version: _Version) -> None:
        if version.delta_offer is not None:
            self._bulk.server.withdraw(version.delta_offer.export)
        version.difference = version.delta_offer = None

    def _pulled(self, indices: Collection[int], version: _Version, error: Exception | None) -> None:
        if error is None:
            version.missing.difference_update(indices)
            self._finish_if_whole(version)
            return
        self._fail_waiting(version, error)
        if self._versions.get(version.number) is version:
            self._drop(version.number, f"it could not be fetched: {error}")

    # The memory.

    def _version_for(self, number: int, pieces: Mapping[int, Piece], *, size: int) -> _Version:
        """Memory for a version. A version that was rolled back and trained again replaces the one that was there."""
        version = self._versions.get(number)
        waiting: list[Delivery] = []
        if version is not None:
            if all(
                version.pieces.get(index, piece).digest == piece.digest for index, piece in pieces.items()
            ):
                return version
            waiting = self._drop(number, f"version {number} was published again")
        for delivery in waiting:
            self._replies.fail(delivery, RefusedError(f"version {number} was published again"))
        self._make_room(number)
        segment = segment_name(self._process, number)
        buffer, descriptor = self._writable.begin(segment, size=max(1, size))
        export = FileExport({}, buffer, descriptor=descriptor)
        return self._offer(number, segment, descriptor, export, buffer, is_own=True)

    def _offer(
        self,
        number: int,
        segment: str,
        descriptor: int,
        export: FileExport,
        buffer: memoryview,
        *,
        is_own: bool,
    ) -> _Version:
        offer = self._bulk.server.offer(f"weights-{number}-{os.urandom(4).hex()}", export)
        version = _Version(number, segment, descriptor, export, buffer, offer, is_own)
        self._versions[number] = version
        return version

    def _announce(self, version: _Version, pieces: Mapping[int, Piece]) -> None:
        version.pieces |= pieces
        version.export.add(_places(pieces))

    def _make_room(self, number: int) -> None:
        """Drop versions that a rollback has undone, and those older than the latest two."""
        newest = max(self._versions, default=number)
        if number <= newest - VERSIONS_KEPT:
            raise RefusedError(f"version {number} comes too late: version {newest} is here")
        for old in [held for held in self._versions if held <= number - VERSIONS_KEPT]:
            self._drop_refused(old, f"version {number} has replaced it")

    def _forget_undone(self, rank: str, number: int) -> None:
        """Drop later versions if this rank had published one: a rollback has undone them."""
        if number < self._published.get(rank, number):
            for undone in [held for held in self._versions if held > number]:
                self._drop_refused(undone, f"a rollback to version {number} has undone it")
        self._published[rank] = number

    def _drop_refused(self, number: int, reason: str) -> None:
        """Withdraw a version, and refuse the requests that wait for it."""
        for delivery in self._drop(number, reason):
            self._replies.fail(delivery, RefusedError(f"version {number} is not held any more: {reason}"))

    def _drop(self, number: int, reason: str) -> list[Delivery]:
        """Withdraw a version; return the requests that wait for it."""
        version = self._versions.pop(number)
        version.export.end(f"version {number} is not offered any more: {reason}")
        self._bulk.server.withdraw(version.offer.export)
        self._withdraw_difference(version)
        for delivery in version.delta_waiting:
            self._replies.fail(delivery, RefusedError(f"version {number} is not held any more: {reason}"))
        version.delta_waiting = []
        unlock(version.descriptor)
        # A thread may still use this memory: the next version gets other memory. A rank's is locked by its readers.
        if version.num_pulls and version.is_own:
            self._writable.remove(version.segment)
        waiting, version.waiting = version.waiting, []
        return waiting

    def _finish_if_whole(self, version: _Version) -> None:
        if not version.is_whole or not version.is_own:
            return
        version.export.complete()
        fcntl.flock(version.descriptor, fcntl.LOCK_UN)  # From now on processes of this host may read it.
        self._answer_waiting(version)

    def _answer_waiting(self, version: _Version) -> None:
        waiting, version.waiting = version.waiting, []
        for delivery in waiting:
            self._replies.reply(delivery, WeightsHeld(version.number, version.segment, version.offer))
        self._answer_deltas(version)

    def _fail_waiting(self, version: _Version, error: Exception) -> None:
        """Answer those that wait for a version that will not be whole here: they fetch for themselves."""
        version.failure = error
        self._refuse_difference(version, str(error))
        waiting, version.waiting = version.waiting, []
        for delivery in waiting:
            self._replies.fail(delivery, error)

    def _begin_pull(
        self,
        version: _Version,
        pieces: Mapping[int, Piece],
        shares: Sequence[Share],
        *,
        locate: Callable[[str], BulkOffer],
        done: Callable[[_Version, Exception | None], object],
        fetch: Callable[[Pull], object] = Pull.run,
    ) -> None:
        """Fetch in a background thread; `done` is called in the loop."""
        version.num_pulls += 1
        pull = Pull(
            pieces,
            shares,
            into=lambda index: _place(version.buffer, pieces[index]),
            locate=locate,
            client=self._bulk.client,
            what=f"version {version.number}",
            emit=self._emit,
            check=lambda: _check_held(version, self._versions),
            arrived=version.export.arrived,
        )

        def work() -> None:
            error: Exception | None = None
            try:
                fetch(pull)
            except Exception as failure:  # noqa: BLE001 - the thread's outermost boundary: the loop answers with it.
                error = failure
            self._calls.run(lambda: ended(error))

        def ended(error: Exception | None) -> None:
            version.num_pulls -= 1
            if error is None and self._versions.get(version.number) is not version:
                error = RefusedError(f"version {version.number} was dropped while it was fetched")
            done(version, error)

        threading.Thread(target=work, name="weights-fetch", daemon=True).start()


def _check_places(upload: UploadWeights, *, owner: str) -> None:
    for piece in upload.pieces.values():
        if piece.offset < 0 or piece.size < 0 or piece.offset + piece.size > upload.size:
            raise RefusedError(
                f"{piece.name} of version {upload.version} from {owner}: {piece.size} bytes at {piece.offset} do not "
                f"fit into {upload.size}"
            )


def _places(pieces: Mapping[int, Piece]) -> dict[int, tuple[int, int]]:
    return {index: (piece.offset, piece.size) for index, piece in pieces.items()}


def _place(buffer: memoryview, piece: Piece) -> memoryview:
    return buffer[piece.offset : piece.offset + piece.size]


def _check_held(version: _Version, held: Mapping[int, _Version]) -> None:
    if held.get(version.number) is not version:
        raise RefusedError(f"version {version.number} is not wanted any more")


@contextmanager
def _read_lock(descriptor: int, segment: str) -> Iterator[None]:
    """Keep the rank that published from writing to its memory. Each reader has an open file, and a lock, of its own."""
    own = reopened(descriptor)
    try:
        fcntl.flock(own, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(own)
        raise RefusedError(f"segment {segment} is being written") from error
    try:
        yield
    finally:
        unlock(own)
