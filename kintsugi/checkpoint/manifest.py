"""`manifest.json`: every file of a checkpoint with size and digest, and every tensor with its slice of the model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import xxhash

from kintsugi.errors import DataDamaged, StorageError
from kintsugi.model.tensor_file import DTYPES, TensorPlace, stored_dtype
from kintsugi.types import Piece, PieceKind

MANIFEST_FILE = "manifest.json"


class StoredFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file: its size, its xxh3-64 digest, and the tensors in it."""

    size: int
    digest: str
    pieces: tuple[Piece, ...] = ()


class Contents(msgspec.Struct, frozen=True):
    """Contents of a checkpoint."""

    step: int
    stage: str
    files: dict[str, StoredFile]


class _Manifest(msgspec.Struct, frozen=True):
    digest: str
    """xxh3-64 of the bytes of `contents` in the file."""
    contents: msgspec.Raw


def encode_manifest(contents: Contents) -> bytes:
    """Encode a manifest; equal contents give equal bytes."""
    raw = msgspec.json.encode(contents, order="deterministic")
    return msgspec.json.encode(_Manifest(xxhash.xxh3_64_hexdigest(raw), msgspec.Raw(raw)))


def decode_manifest(data: bytes, *, path: Path) -> tuple[Contents, str]:
    """Return the contents and their digest; StorageError if the manifest is damaged."""
    try:
        manifest = msgspec.json.decode(data, type=_Manifest)
        found = xxhash.xxh3_64_hexdigest(bytes(manifest.contents))
        if found != manifest.digest:
            raise StorageError(
                f"{path} is damaged on disk: expected xxh3 {manifest.digest}, got {found}",
                detail=DataDamaged(path=str(path)),
            )
        return msgspec.json.decode(manifest.contents, type=Contents), manifest.digest
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        damage = DataDamaged(path=str(path))
        raise StorageError(f"{path} is damaged on disk: {error}", detail=damage) from error


def describe_tensor(place: TensorPlace, *, digest: str) -> Piece:
    """Entry of a tensor in the manifest.

    Every tensor is complete today; the format has fields (slice, mesh) for tensors sharded over ranks.
    """
    return Piece(
        name=place.name,
        dtype=DTYPES.get(place.dtype, place.dtype),
        shape=place.shape,
        slice=tuple((0, extent) for extent in place.shape),
        mesh={"dp": 0, "tp": 0, "pp": 0},
        kind=PieceKind.FULL,
        offset=place.offset,
        size=place.size,
        digest=digest,
    )


def stored_places(file: StoredFile, *, path: Path) -> list[TensorPlace]:
    """Places of the tensors of a file, by offset; StorageError for a tensor that this program never writes."""
    try:
        places = [
            TensorPlace(piece.name, stored_dtype(piece.dtype), piece.shape, piece.offset, piece.size)
            for piece in file.pieces
        ]
    except KeyError as error:
        raise StorageError(
            f"{path}: expected a dtype of {', '.join(DTYPES.values())}, got {error}"
        ) from error
    return sorted(places, key=lambda place: place.offset)
