"""Files of tensors in the safetensors format, written and read in pieces: no file is ever a whole in memory.

    | length of the header, 8 bytes | header: JSON, padded with spaces | tensors in the order of their offsets |

The bytes are those that `safetensors.torch.save` returns. That function builds the file as one object while it holds
the interpreter's lock, which for gigabytes silences every other thread of the process.

Tensors are torch's, or numpy arrays in a process of another framework (`Array`). torch is imported only where its
tensors are read.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kintsugi.model.arrays import Array, is_tensor, view_of

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 16 << 20
"""Size of a piece: some milliseconds of work, after which other threads and a cancellation have their turn."""
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
}
"""Names of dtypes in the format → those of torch, in the format's order."""
_NAMES = {name: stored for stored, name in DTYPES.items()}
_ORDER = list(DTYPES)
_LENGTH = struct.Struct("<Q")
MOST_HEADER_BYTES = 100_000_000
"""Limit of the format."""


@dataclass(frozen=True)
class TensorPlace:
    """Place of a tensor in a file: `TensorPlace("w", "F32", (2, 3), 128, 24)`."""

    name: str
    dtype: str
    """Name of the dtype in the format; `DTYPES` has that of torch."""
    shape: tuple[int, ...]
    offset: int
    """From the beginning of the file."""
    size: int


class TensorFile:
    """Contents of a file that does not exist yet: its header is complete, its tensors are read when they are written.

    The tensors must not change until `pieces` is exhausted.
    """

    def __init__(
        self,
        tensors: Mapping[str, Array],
        *,
        dtype: Any = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """With `dtype` the tensors are converted, piece by piece."""
        self._tensors = tensors
        self._dtype = dtype
        stored = {name: stored_dtype(dtype or tensor.dtype) for name, tensor in tensors.items()}
        names = sorted(tensors, key=lambda name: (-_ORDER.index(stored[name]), name))
        header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
        end = 0
        for name in names:
            itemsize = (dtype or tensors[name].dtype).itemsize
            start, end = end, end + math.prod(tensors[name].shape) * itemsize
            header[name] = {
                "dtype": stored[name],
                "shape": list(tensors[name].shape),
                "data_offsets": [start, end],
            }
        encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        encoded += b" " * (-len(encoded) % 8)
        self.head = _LENGTH.pack(len(encoded)) + encoded
        self.places = tuple(places_of(self.head))
        self.size = len(self.head) + end

    def pieces(self) -> Iterator[tuple[TensorPlace | None, memoryview]]:
        """All bytes of the file in order, each piece with the tensor that it belongs to, None for the header. A piece
        is valid until the next one is taken."""
        yield None, memoryview(self.head)
        for place in self.places:
            for piece in self._pieces_of(self._tensors[place.name]):
                yield place, piece

    def _pieces_of(self, tensor: Array) -> Iterator[memoryview]:
        flat = tensor.reshape(-1)
        dtype = self._dtype or tensor.dtype
        step = PIECE_BYTES // max(tensor.dtype.itemsize, dtype.itemsize)
        for start in range(0, len(flat), step):
            part = flat[start : start + step]
            if is_tensor(tensor):
                yield view_of(part.detach().to(device="cpu", dtype=dtype))
            else:
                yield view_of(part.astype(dtype, copy=False))


FileContent = bytes | TensorFile
"""Contents of a file: as they are, or produced in pieces."""


def content_pieces(content: FileContent) -> Iterator[memoryview]:
    """All bytes of a file in order."""
    if isinstance(content, bytes):
        yield memoryview(content)
        return
    for _, piece in content.pieces():
        yield piece


def head_size(start: bytes) -> int:
    """Size of length and header together, from the first 8 bytes of a file; ValueError if it can not be one."""
    if len(start) < _LENGTH.size:
        raise ValueError(f"expected at least {_LENGTH.size} bytes, got {len(start)}")
    (length,) = _LENGTH.unpack_from(start)
    if not 2 <= length <= MOST_HEADER_BYTES:
        raise ValueError(f"expected a header of 2 to {MOST_HEADER_BYTES} bytes, got {length}")
    return _LENGTH.size + int(length)


def places_of(head: bytes) -> list[TensorPlace]:
    """Places of the tensors of a file, by offset, from its length and header; ValueError if they make no sense."""
    start = head_size(head)
    header: dict[str, dict[str, Any]] = json.loads(head[_LENGTH.size : start])
    places = []
    for name, about in header.items():
        if name == "__metadata__":
            continue
        first, last = about["data_offsets"]
        places.append(TensorPlace(name, about["dtype"], tuple(about["shape"]), start + first, last - first))
    places.sort(key=lambda place: place.offset)
    for place, following in pairwise(places):
        if place.offset + place.size > following.offset:
            raise ValueError(f"{place.name} and {following.name} overlap")
    return places


def torch_dtype(place: TensorPlace) -> torch.dtype:
    """The tensor's dtype; ValueError for one that this program never writes."""
    import torch

    name = DTYPES.get(place.dtype)
    if name is None:
        raise ValueError(f"{place.name}: expected a dtype of {', '.join(DTYPES)}, got {place.dtype}")
    dtype: torch.dtype = getattr(torch, name)
    if place.size != math.prod(place.shape) * dtype.itemsize:
        raise ValueError(f"{place.name}: {place.size} bytes are no {place.dtype} of shape {place.shape}")
    return dtype


def stored_dtype(dtype: object) -> str:
    """Name of a dtype in the format: `stored_dtype("float32") == "F32"`."""
    return _NAMES[str(dtype).removeprefix("torch.")]
