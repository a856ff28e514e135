"""A version of the weights as bytes: the location of each tensor, its digest, and how it is read back.

Both sides check: the publisher digests the bytes that are ready to be fetched, the fetcher digests the bytes that it
got. Torch is imported only where tensors are converted to bytes or back.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import xxhash

from kintsugi.errors import DataDamaged, IntegrityError
from kintsugi.model.arrays import Array, dtype_name, is_on_accelerator, is_tensor, view_of
from kintsugi.model.tensor_slices import SliceName, extent
from kintsugi.runtime.digests import PIECE_SLICE_BYTES, piece_digest, piece_digest_of
from kintsugi.types import Piece, PieceKind, WeightManifest

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 64
"""Alignment of every piece, so that a view of any dtype, and a vectorised copy, can start there."""


MOST_COPIED_BYTES = 1 << 30
"""Size of the tensors that are read before they are copied; one more may begin below it."""


def layout_size(named: Mapping[str, Array]) -> int:
    """Size of a buffer that holds these tensors."""
    return max((offset + size for _, offset, size in layout(named)), default=0)


def build_manifest(
    named: Mapping[str, Array],
    *,
    version: int,
    step: int,
    mesh: Mapping[str, int],
    into: memoryview | None = None,
) -> WeightManifest:
    """Describe these tensors, in the order of their names. With `into` they are copied there, and the copy is
    digested."""
    pieces = describe_pieces(named, layout(named), mesh=mesh, into=into)
    return manifest_of(pieces, version=version, step=step)


def describe_pieces(
    named: Mapping[str, Array],
    places: Iterable[tuple[str, int, int]],
    *,
    mesh: Mapping[str, int],
    into: memoryview | None = None,
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> list[Piece]:
    """Describe the tensors of `named` at these locations (name, offset and size), as `layout` returns them. Of slices
    (`model/tensor_slices.py`) `shapes` has those of the whole tensors."""
    found: list[Piece] = []
    for together in copied_together(places):
        found += _described(named, together, mesh=mesh, into=into, shapes=shapes)
    return found


def copied_together(places: Iterable[tuple[str, int, int]]) -> Iterator[list[tuple[str, int, int]]]:
    """Tensors that are copied at once: reading them may take memory (`GatheredWeights`)."""
    together: list[tuple[str, int, int]] = []
    for place in places:
        if sum(size for _, _, size in together) >= MOST_COPIED_BYTES:
            yield together
            together = []
        together.append(place)
    if together:
        yield together


def _described(
    named: Mapping[str, Array],
    places: Sequence[tuple[str, int, int]],
    *,
    mesh: Mapping[str, int],
    into: memoryview | None,
    shapes: Mapping[str, tuple[int, ...]],
) -> list[Piece]:
    tensors = [named[name] for name, _, _ in places]
    targets = [None if into is None else into[offset : offset + size] for _, offset, size in places]
    slices = [SliceName.parse(name) for name, _, _ in places]
    whole = [
        shapes[each.name] if each.count > 1 else tuple(tensor.shape)
        for each, tensor in zip(slices, tensors, strict=True)
    ]
    return [
        Piece(
            name=where.name,
            dtype=dtype_name(tensor),
            shape=shape,
            slice=extent(where, shape),
            mesh=dict(mesh),
            kind=PieceKind.FULL,
            offset=offset,
            size=size,
            digest=digest,
        )
        for (_, offset, size), where, shape, tensor, digest in zip(
            places, slices, whole, tensors, _copies_digested(tensors, targets), strict=True
        )
    ]


def _copies_digested(tensors: Sequence[Array], targets: Sequence[memoryview | None]) -> list[str]:
    if tensors and is_on_accelerator(tensors[0]):
        from kintsugi.weights.device_digests import piece_digests
        from kintsugi.weights.transports.device import copies_digested

        # Either all of them are copied or none.
        filled = [target for target in targets if target is not None]
        on_device = cast("Sequence[Tensor]", tensors)
        return copies_digested(on_device, filled) if filled else piece_digests(on_device)
    return [
        piece_digest(tensor_bytes(tensor))
        if target is None
        else copy_and_digest(tensor_bytes(tensor), target)
        for tensor, target in zip(tensors, targets, strict=True)
    ]


def manifest_of(pieces: Iterable[Piece], *, version: int, step: int) -> WeightManifest:
    """The version that consists of these pieces."""
    pieces = tuple(pieces)
    end = max((piece.offset + piece.size for piece in pieces), default=0)
    return WeightManifest(version=version, step=step, pieces=pieces, size=end, digest=digest_of(pieces))


def digest_of(pieces: Iterable[Piece]) -> str:
    """Digest of a version: xxh3-64 over its pieces' names, slices and digests, so that no byte is digested twice."""
    whole = xxhash.xxh3_64()
    for piece in pieces:
        part = "" if is_whole(piece) else str(piece.slice)
        whole.update(f"{piece.name}{part}:{piece.digest}\n".encode())
    return whole.hexdigest()


def copy_and_digest(source: memoryview, target: memoryview) -> str:
    """Copy the bytes and return the digest of the copy: slice by slice, while each is in the CPU cache. Neither holds
    the interpreter's lock."""
    assert source.nbytes == target.nbytes, f"{source.nbytes} bytes do not fill {target.nbytes}"
    # Imported here: the master uses manifests too, and starts without numpy.
    import numpy as np

    copied, original = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    digests = []
    for start in range(0, len(copied), PIECE_SLICE_BYTES):
        part = copied[start : start + PIECE_SLICE_BYTES]
        part[...] = original[start : start + PIECE_SLICE_BYTES]
        digests.append(xxhash.xxh3_64_intdigest(part.data))
    return piece_digest_of(digests)


def verify(manifest: WeightManifest, buffer: memoryview, *, source: str, origin: str = "") -> None:
    """Raise IntegrityError, with the piece and the source, unless the buffer holds exactly what was published.

    `origin` is the process that published it.
    """
    if buffer.nbytes < manifest.size:
        raise IntegrityError(
            f"version {manifest.version} from {source}: expected {manifest.size} bytes, got {buffer.nbytes}"
        )
    for piece in manifest.pieces:
        data = buffer[piece.offset : piece.offset + piece.size]
        check_digest(manifest, piece, found=piece_digest(data), source=source, origin=origin)
    check_whole(manifest, source=source, origin=origin)


def check_digest(
    manifest: WeightManifest, piece: Piece, *, found: str, source: str, origin: str = ""
) -> None:
    """Raise IntegrityError, with the piece and the source, unless this is the digest of what was published."""
    if found != piece.digest:
        raise IntegrityError(
            f"{piece.name} of version {manifest.version} from {source}: expected xxh3 {piece.digest}, got {found}",
            detail=DataDamaged(origin),
        )


def check_whole(manifest: WeightManifest, *, source: str, origin: str = "") -> None:
    """Raise IntegrityError unless the pieces, each of which is correct, are those of the version."""
    found = digest_of(manifest.pieces)
    if found != manifest.digest:
        raise IntegrityError(
            f"version {manifest.version} from {source}: every piece is right, but not the whole: "
            f"expected xxh3 {manifest.digest}, got {found}",
            detail=DataDamaged(origin),
        )


def tensor_views(manifest: WeightManifest, buffer: memoryview) -> dict[str, Tensor]:
    """The tensors as views into the (writable) buffer, or as copies where they were published in slices; the engine
    copies them."""
    import torch

    views: dict[str, Tensor] = {}
    for piece in manifest.pieces:
        assert piece.kind is PieceKind.FULL, f"{piece.name} is a {piece.kind.value} piece"
        dtype = getattr(torch, piece.dtype)
        if piece.size == 0:
            views[piece.name] = torch.empty(piece.shape, dtype=dtype)
            continue
        flat = torch.frombuffer(buffer, dtype=dtype, count=piece.size // dtype.itemsize, offset=piece.offset)
        if is_whole(piece):
            views[piece.name] = flat.view(piece.shape)
            continue
        target = views.setdefault(piece.name, torch.empty(piece.shape, dtype=dtype))
        own = target[tuple(slice(*each) for each in piece.slice)]
        own.copy_(flat.view(own.shape))
    return views


def is_whole(piece: Piece) -> bool:
    """Whether it is a whole tensor."""
    return all(stop - start == size for (start, stop), size in zip(piece.slice, piece.shape, strict=True))


def num_elements(piece: Piece) -> int:
    return math.prod(stop - start for start, stop in piece.slice)


def weights_sha256(named: Mapping[str, Array]) -> str:
    """Identity of the weights in a run's summary: SHA-256 over names, in order, and raw bytes."""
    digest = hashlib.sha256()
    for name in sorted(named):
        digest.update(name.encode())
        digest.update(tensor_bytes(named[name]))
    return digest.hexdigest()


def tensor_bytes(array: Array) -> memoryview:
    """Raw bytes, in row order; a view if the array is contiguous and in host memory."""
    if is_tensor(array):
        tensor: Any = array
        return view_of(tensor.detach().cpu().contiguous())
    return view_of(array.reshape(-1))


def aligned(size: int) -> int:
    """Size of a piece with its padding.

    >>> aligned(64), aligned(65)
    (64, 128)
    """
    return -(-size // ALIGNMENT) * ALIGNMENT


def layout(named: Mapping[str, Array]) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) in the order of names, and of slices."""
    return _in_order({name: array.nbytes for name, array in named.items()})


def layout_of(shapes: Mapping[str, tuple[int, ...]], *, itemsize: int) -> Iterator[tuple[str, int, int]]:
    """Layout of weights that may be elsewhere, all of one type."""
    return _in_order({name: itemsize * math.prod(shape) for name, shape in shapes.items()})


def _order(name: str) -> tuple[str, int]:
    where = SliceName.parse(name)
    return where.name, where.index


def _in_order(sizes: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    offset = 0
    for name in sorted(sizes, key=_order):
        yield name, offset, sizes[name]
        offset += aligned(sizes[name])
