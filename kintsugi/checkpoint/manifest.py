"""`manifest.json`: every file of a checkpoint with size and digest, every tensor with its place in the whole model."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from kintsugi.errors import StorageError
from kintsugi.types import Piece, PieceKind

MANIFEST_FILE = "manifest.json"

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Names that safetensors files use → ours (torch's)."""


class StoredFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file: its size, its xxh3-64, and the tensors in it."""

    size: int
    digest: str
    pieces: tuple[Piece, ...] = ()


class Contents(msgspec.Struct, frozen=True):
    """What a checkpoint consists of."""

    step: int
    stage: str
    files: dict[str, StoredFile]


class _Manifest(msgspec.Struct, frozen=True):
    digest: str
    """xxh3-64 of `contents` as it stands in the file."""
    contents: msgspec.Raw


def encode_manifest(contents: Contents) -> bytes:
    """The same bytes for the same contents."""
    raw = msgspec.json.encode(contents, order="deterministic")
    return msgspec.json.encode(_Manifest(xxhash.xxh3_64_hexdigest(raw), msgspec.Raw(raw)))


def decode_manifest(data: bytes, *, path: Path) -> tuple[Contents, str]:
    """The contents and their digest; StorageError if it is not what was written."""
    try:
        manifest = msgspec.json.decode(data, type=_Manifest)
        found = xxhash.xxh3_64_hexdigest(bytes(manifest.contents))
        if found != manifest.digest:
            raise StorageError(f"{path} is damaged on disk: expected xxh3 {manifest.digest}, got {found}")
        return msgspec.json.decode(manifest.contents, type=Contents), manifest.digest
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} is damaged on disk: {error}") from error


def tensor_pieces(data: bytes) -> tuple[Piece, ...]:
    """The tensors of a safetensors file: a length, a JSON header with types, shapes and offsets, then the bytes.

    Every tensor is whole today; slice and mesh are there for those that will be spread over ranks.
    """
    (length,) = struct.unpack_from("<Q", data)
    start = 8 + length
    header: dict[str, dict[str, Any]] = msgspec.json.decode(data[8:start])
    view = memoryview(data)
    pieces = []
    for name, about in sorted(header.items()):
        if name == "__metadata__":
            continue
        first, last = about["data_offsets"]
        shape = tuple(about["shape"])
        piece = Piece(
            name=name,
            dtype=_DTYPES.get(about["dtype"], about["dtype"]),
            shape=shape,
            slice=tuple((0, extent) for extent in shape),
            mesh={"dp": 0, "tp": 0, "pp": 0},
            kind=PieceKind.FULL,
            offset=start + first,
            size=last - first,
            digest=xxhash.xxh3_64_hexdigest(view[start + first : start + last]),
        )
        pieces.append(piece)
    return tuple(pieces)
