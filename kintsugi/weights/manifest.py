"""A version of the weights as bytes: where each tensor lies, how it is recognised, and how it is read back.

Both sides check: who publishes digests the bytes that lie ready to be fetched, who fetches digests the bytes that it
got. Torch is imported only where tensors are turned into bytes or back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import xxhash

from kintsugi.errors import IntegrityError
from kintsugi.types import Piece, PieceKind, WeightManifest

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 64
"""Of every piece, so that a view of any dtype, and a vectorised copy, can start there."""

CACHED_BYTES = 256 << 10
"""Copied at once and digested right after, while the processor's cache still has it. Neither of the two holds up the
process's other threads."""


def layout_size(named: Mapping[str, Tensor]) -> int:
    """Bytes that a buffer needs to hold these tensors."""
    return max((offset + size for _, offset, size in layout(named)), default=0)


def build_manifest(
    named: Mapping[str, Tensor],
    *,
    version: int,
    step: int,
    mesh: Mapping[str, int],
    into: memoryview | None = None,
) -> WeightManifest:
    """Describe these tensors, in the order of their names. With `into` they are copied there, and what lies there is
    what is digested."""
    pieces = describe_pieces(named, layout(named), mesh=mesh, into=into)
    return manifest_of(pieces, version=version, step=step)


def describe_pieces(
    named: Mapping[str, Tensor],
    places: Iterable[tuple[str, int, int]],
    *,
    mesh: Mapping[str, int],
    into: memoryview | None = None,
) -> list[Piece]:
    """Those of `named` that lie at these places, as `layout` gives them: name, offset and size."""
    places = list(places)
    tensors = [named[name] for name, _, _ in places]
    targets = [None if into is None else into[offset : offset + size] for _, offset, size in places]
    return [
        Piece(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            slice=tuple((0, extent) for extent in tensor.shape),
            mesh=dict(mesh),
            kind=PieceKind.FULL,
            offset=offset,
            size=size,
            digest=digest,
        )
        for (name, offset, size), tensor, digest in zip(
            places, tensors, _copies_digested(tensors, targets), strict=True
        )
    ]


def _copies_digested(tensors: Sequence[Tensor], targets: Sequence[memoryview | None]) -> list[str]:
    if tensors and tensors[0].is_cuda:
        from kintsugi.weights.device import digests_of_device

        return digests_of_device(tensors, into=targets)
    return [
        xxhash.xxh3_64_hexdigest(tensor_bytes(tensor))
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
    """Of a version: xxh3-64 over its pieces' names and digests, so that no byte is digested twice."""
    whole = xxhash.xxh3_64()
    for piece in pieces:
        whole.update(f"{piece.name}:{piece.digest}\n".encode())
    return whole.hexdigest()


def copy_and_digest(source: memoryview, target: memoryview) -> str:
    """Copy the bytes and give the xxh3-64 of the copy."""
    assert source.nbytes == target.nbytes, f"{source.nbytes} bytes do not fill {target.nbytes}"
    # Only here: the master knows manifests too, and starts without it.
    import numpy as np

    copied, original = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    digest = xxhash.xxh3_64()
    for start in range(0, len(copied), CACHED_BYTES):
        part = copied[start : start + CACHED_BYTES]
        part[...] = original[start : start + CACHED_BYTES]
        digest.update(part.data)
    return digest.hexdigest()


def verify(manifest: WeightManifest, buffer: memoryview, *, source: str) -> None:
    """Raise IntegrityError, with the piece and the source, unless the buffer holds exactly what was published."""
    if buffer.nbytes < manifest.size:
        raise IntegrityError(
            f"version {manifest.version} from {source}: expected {manifest.size} bytes, got {buffer.nbytes}"
        )
    for piece in manifest.pieces:
        data = buffer[piece.offset : piece.offset + piece.size]
        check_digest(manifest, piece, found=xxhash.xxh3_64_hexdigest(data), source=source)
    check_whole(manifest, source=source)


def check_digest(manifest: WeightManifest, piece: Piece, *, found: str, source: str) -> None:
    """Raise IntegrityError, with the piece and the source, unless this is the digest of what was published."""
    if found != piece.digest:
        raise IntegrityError(
            f"{piece.name} of version {manifest.version} from {source}: expected xxh3 {piece.digest}, got {found}"
        )


def check_whole(manifest: WeightManifest, *, source: str) -> None:
    """That the pieces are those of the version, when each by itself is right."""
    found = digest_of(manifest.pieces)
    if found != manifest.digest:
        raise IntegrityError(
            f"version {manifest.version} from {source}: every piece is right, but not the whole: "
            f"expected xxh3 {manifest.digest}, got {found}"
        )


def tensor_views(manifest: WeightManifest, buffer: memoryview) -> dict[str, Tensor]:
    """The tensors as views into the (writable) buffer; copying them in place is up to the engine."""
    import torch

    views = {}
    for piece in manifest.pieces:
        assert piece.kind is PieceKind.FULL, f"{piece.name} is a {piece.kind.value} piece"
        dtype = getattr(torch, piece.dtype)
        if piece.size == 0:
            views[piece.name] = torch.empty(piece.shape, dtype=dtype)
            continue
        flat = torch.frombuffer(buffer, dtype=dtype, count=piece.size // dtype.itemsize, offset=piece.offset)
        views[piece.name] = flat.view(piece.shape)
    return views


def weights_sha256(named: Mapping[str, Tensor]) -> str:
    """What a run's summary calls its weights: SHA-256 over names, in order, and raw bytes."""
    digest = hashlib.sha256()
    for name in sorted(named):
        digest.update(name.encode())
        digest.update(tensor_bytes(named[name]))
    return digest.hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The raw bytes, in row order; a view where the tensor is contiguous and in host memory."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def aligned(size: int) -> int:
    """What a piece takes, with what is left free behind it.

    >>> aligned(64), aligned(65)
    (64, 128)
    """
    return -(-size // ALIGNMENT) * ALIGNMENT


def layout(named: Mapping[str, Tensor]) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) in the order of names."""
    offset = 0
    for name in sorted(named):
        size = named[name].numel() * named[name].element_size()
        yield name, offset, size
        offset += aligned(size)
