"""A version of the weights as bytes: where each tensor lies, how it is recognised, and how it is read back.

Both sides check: who publishes digests the bytes that lie ready to be fetched, who fetches digests the bytes that it
got. Torch is imported only where tensors are turned into bytes or back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import xxhash

from kintsugi.errors import IntegrityError
from kintsugi.types import Piece, PieceKind, WeightManifest

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 64
"""Of every piece, so that a view of any dtype, and a vectorised copy, can start there."""


def layout_size(named: Mapping[str, Tensor]) -> int:
    """Bytes that a buffer needs to hold these tensors."""
    return max((offset + size for _, offset, size in _layout(named)), default=0)


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
    pieces = []
    whole = xxhash.xxh3_64()
    end = 0
    for name, offset, size in _layout(named):
        tensor = named[name]
        data = tensor_bytes(tensor)
        if into is not None:
            into[offset : offset + size] = data
            data = into[offset : offset + size]
        whole.update(data)
        piece = Piece(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            slice=tuple((0, extent) for extent in tensor.shape),
            mesh=dict(mesh),
            kind=PieceKind.FULL,
            offset=offset,
            size=size,
            digest=xxhash.xxh3_64_hexdigest(data),
        )
        pieces.append(piece)
        end = offset + size
    return WeightManifest(
        version=version, step=step, pieces=tuple(pieces), size=end, digest=whole.hexdigest()
    )


def verify(manifest: WeightManifest, buffer: memoryview, *, source: str) -> None:
    """Raise IntegrityError, with the piece and the source, unless the buffer holds exactly what was published."""
    if buffer.nbytes < manifest.size:
        raise IntegrityError(
            f"version {manifest.version} from {source}: expected {manifest.size} bytes, got {buffer.nbytes}"
        )
    whole = xxhash.xxh3_64()
    for piece in manifest.pieces:
        data = buffer[piece.offset : piece.offset + piece.size]
        whole.update(data)
        found = xxhash.xxh3_64_hexdigest(data)
        if found != piece.digest:
            raise IntegrityError(
                f"{piece.name} of version {manifest.version} from {source}: "
                f"expected xxh3 {piece.digest}, got {found}"
            )
    if whole.hexdigest() != manifest.digest:
        raise IntegrityError(
            f"version {manifest.version} from {source}: every piece is right, but not the whole: "
            f"expected xxh3 {manifest.digest}, got {whole.hexdigest()}"
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


def _layout(named: Mapping[str, Tensor]) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) in the order of names."""
    offset = 0
    for name in sorted(named):
        size = named[name].numel() * named[name].element_size()
        yield name, offset, size
        offset += -(-size // ALIGNMENT) * ALIGNMENT
