"""Differences between versions that agents hold: made once by the first host of a chain, passed on by every other.

asks     HoldDelta, with number and digest of the version that its host holds
source   has that very version and the new one: compares them, in a background thread, and offers the difference
then     the difference is fetched, offered to the next host, and applied to a copy; every piece must have the
         digest of the new version. What goes wrong on the way is no failure: the version is fetched whole
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kintsugi.bulk.client import BulkClient
from kintsugi.bulk.exports import ViewExport, slices
from kintsugi.bulk.pull import EventSink, Pull, Share, num_connections
from kintsugi.errors import DataDamaged, IntegrityError, RefusedError
from kintsugi.protocol.bulk import BulkOffer, BulkRange
from kintsugi.protocol.weights import DeltaHeld, DeltaPiece, HoldDelta
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.digests import piece_digest
from kintsugi.types import Piece, StreamSource, WeightManifest
from kintsugi.weights import delta
from kintsugi.weights.delta_choice import MAX_SHARE, DeltaChoice
from kintsugi.weights.manifest import digest_of
from kintsugi.weights.transports.stream import AGENT_TIMEOUT_S, Call

SLOWEST_RATE = 2.5e8
"""Bytes of a version per second at which a source compares at least."""


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """A whole version in the memory of this host."""

    number: int
    pieces: Mapping[int, Piece]
    buffer: memoryview
    reading: Callable[[], AbstractContextManager[object]]

    @property
    def digest(self) -> str:
        return digest_of(self.pieces[index] for index in sorted(self.pieces))

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces.values())

    def bytes_of(self, index: int) -> memoryview:
        piece = self.pieces[index]
        return self.buffer[piece.offset : piece.offset + piece.size]

    def has_pieces_of(self, pieces: Mapping[int, Piece]) -> bool:
        """Whether the other version's pieces are of the same tensors."""
        return self.pieces.keys() == pieces.keys() and all(
            (own.name, own.dtype, own.shape, own.size)
            == (pieces[index].name, pieces[index].dtype, pieces[index].shape, pieces[index].size)
            for index, own in self.pieces.items()
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """Pieces of a difference, by their index in the version."""

    base_version: int
    base_digest: str
    contents: Mapping[int, memoryview]
    described: Mapping[int, DeltaPiece]
    made_s: float

    @property
    def size(self) -> int:
        return sum(content.nbytes for content in self.contents.values())

    def leads_from(self, request: HoldDelta) -> bool:
        return (self.base_version, self.base_digest) == (request.base_version, request.base_digest)

    def export(self) -> ViewExport:
        return ViewExport(
            {index: content.nbytes for index, content in self.contents.items()},
            lambda index: self.contents[index],
        )

    def held(self, version: int, offer: BulkOffer) -> DeltaHeld:
        return DeltaHeld(version, offer, dict(self.described), self.made_s)


def make_difference(new: HeldVersion, base: HeldVersion) -> Difference:
    """Compare two versions; RefusedError if too much has changed."""
    since = SYSTEM_CLOCK.monotonic()

    def encode(index: int) -> memoryview:
        width = _item_bytes(new.pieces[index])
        return memoryview(delta.encode(new.bytes_of(index), base.bytes_of(index), item_bytes=width))

    with new.reading(), base.reading(), ThreadPoolExecutor(num_connections(), "difference") as pool:
        changed = sum(
            piece.size
            * delta.changed_share(new.bytes_of(index), base.bytes_of(index), item_bytes=_item_bytes(piece))
            for index, piece in new.pieces.items()
        )
        if changed > MAX_SHARE * new.size:
            raise RefusedError(
                f"{changed / new.size:.0%} of version {new.number} differs from version {base.number}"
            )
        contents = dict(zip(new.pieces, pool.map(encode, new.pieces), strict=True))
    described = {
        index: DeltaPiece(content.nbytes, piece_digest(content)) for index, content in contents.items()
    }
    made_s = SYSTEM_CLOCK.monotonic() - since
    return Difference(base.number, base.digest, contents, described, made_s)


class DeltaFetch:
    """One attempt to bring a version here by its difference to `base`; its methods run in a background thread."""

    def __init__(
        self,
        manifest: WeightManifest,
        source: StreamSource,
        base: HeldVersion,
        *,
        client: BulkClient,
        choice: DeltaChoice,
        call: Call,
        emit: EventSink,
        check: Callable[[], object],
        release: Callable[[], object],
    ) -> None:
        """`check` raises once the version is not wanted any more; `release` is to be called when the base is not read
        any more."""
        self._manifest = manifest
        self._source = source
        self._base = base
        self._client = client
        self._choice = choice
        self._call = call
        self._emit = emit
        self._check = check
        self.release = release

    def fetch(self, process: str) -> Difference:
        """Fetch the difference from an agent; a WorldError if it has none, or if the whole is faster."""
        base, size = self._base, self._manifest.size
        held = self._call(
            process,
            HoldDelta(self._manifest, self._source, base.number, base.digest),
            AGENT_TIMEOUT_S + size / SLOWEST_RATE,
        ).expect(DeltaHeld)
        num_bytes = sum(piece.size for piece in held.pieces.values())
        if held.pieces.keys() != base.pieces.keys() or not 0 <= num_bytes <= size:
            raise IntegrityError(
                f"{process}: expected the difference of {len(base.pieces)} pieces, at most {size} bytes, got "
                f"{len(held.pieces)} of {num_bytes} bytes",
                detail=DataDamaged(process),
            )
        if not self._choice.pays(size, num_bytes):
            raise RefusedError(f"a difference of {num_bytes} bytes does not pay here")
        contents = _places(held.pieces, num_bytes)
        Pull(
            {index: _as_piece(self._manifest.pieces[index], piece) for index, piece in held.pieces.items()},
            [Share(process, (process,), tuple(held.pieces))],
            into=lambda index: contents[index],
            locate=lambda source: held.offer,
            client=self._client,
            what=f"the difference to version {self._manifest.version}",
            emit=self._emit,
            check=self._check,
        ).run()
        return Difference(base.number, base.digest, contents, held.pieces, held.made_s)

    def apply(
        self,
        difference: Difference,
        *,
        into: Callable[[int], memoryview],
        arrived: Callable[[BulkRange], object],
        origin: str,
    ) -> None:
        """Fill the places of all pieces; IntegrityError unless each has the digest of the version. `arrived` is called
        for the slices of every piece that has."""
        since = SYSTEM_CLOCK.monotonic()

        def apply(index: int) -> None:
            self._check()
            piece = self._manifest.pieces[index]
            found = delta.apply(
                difference.contents[index],
                self._base.bytes_of(index),
                into(index),
                item_bytes=_item_bytes(piece),
                origin=origin,
            )
            if found != piece.digest:
                raise IntegrityError(
                    f"{piece.name} of version {self._manifest.version}, by a difference from {origin}: expected xxh3 "
                    f"{piece.digest}, got {found}",
                    detail=DataDamaged(origin),
                )
            for part in slices(index, piece.size):
                arrived(part)

        with self._base.reading(), ThreadPoolExecutor(num_connections(), "difference") as pool:
            for _ in pool.map(apply, difference.contents):
                pass
        self._choice.note_difference(
            self._manifest.size,
            difference.size,
            made_s=difference.made_s,
            applied_s=SYSTEM_CLOCK.monotonic() - since,
        )


def _places(pieces: Mapping[int, DeltaPiece], num_bytes: int) -> dict[int, memoryview]:
    buffer = memoryview(mmap.mmap(-1, max(1, num_bytes)))
    places: dict[int, memoryview] = {}
    start = 0
    for index, piece in pieces.items():
        places[index] = buffer[start : start + piece.size]
        start += piece.size
    return places


def _as_piece(whole: Piece, piece: DeltaPiece) -> Piece:
    return Piece(
        whole.name,
        "uint8",
        (piece.size,),
        ((0, piece.size),),
        {},
        whole.kind.DELTA,
        0,
        piece.size,
        piece.digest,
    )


def _item_bytes(piece: Piece) -> int:
    """Size of an element; pieces of other widths than a machine word are compared byte by byte."""
    count = 1
    for start, stop in piece.slice:
        count *= stop - start
    width = piece.size // count if count else 1
    return width if width in (1, 2, 4, 8) and piece.size % width == 0 else 1
