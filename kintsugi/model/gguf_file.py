"""A GGUF file: its metadata, and where each tensor lies. No torch; tensors are not read here.

    "GGUF" version num_tensors num_entries | entries: key type value | tensors: name dims type offset | padding | data

Every length in the file is checked against its size, so that a cut or damaged file is named as such.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type → format of `struct`."""
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4


class GgufTensor(msgspec.Struct, frozen=True):
    """Place of a tensor: `GgufTensor("output.weight", (151936, 1536), kind=14, start=5951488, size=191439360)`."""

    name: str
    shape: tuple[int, ...]
    """Slowest dimension first, as in torch."""
    kind: int
    """GGML type of its blocks."""
    start: int
    """Position in the file."""
    size: int
    """Bytes."""


class GgufFile(msgspec.Struct, frozen=True):
    """Contents of a GGUF file except the tensors' values."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


BlockSize = Callable[[int], tuple[int, int] | None]
"""GGML type → elements and bytes of a block; None for a type that can not be read."""


def read_gguf(path: Path, *, block_size: BlockSize) -> GgufFile:
    """Read the metadata and the table of tensors; ModelError if the file is damaged or cut."""
    try:
        size = path.stat().st_size
        if size < len(_MAGIC):
            raise ModelError(f"{path} is not a GGUF file: it has {size} bytes")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Parser(content, path=path, size=size).read(block_size)
    except OSError as error:
        raise ModelError(f"{path} can not be read: {error.strerror}") from error


class _Parser:
    """Reads one value after the other from a mapped file."""

    def __init__(self, content: mmap.mmap, *, path: Path, size: int) -> None:
        self._content, self._path, self._size = content, path, size
        self._position = 0

    def read(self, block_size: BlockSize) -> GgufFile:
        if self._content[:4] != _MAGIC:
            raise ModelError(
                f"{self._path} is not a GGUF file: expected it to begin with {_MAGIC!r}, "
                f"got {self._content[:4]!r}"
            )
        self._position = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ModelError(
                f"{self._path}: expected GGUF version {' or '.join(map(str, _VERSIONS))}, got {version}"
            )
        num_tensors, num_entries = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"), key)
        table = [self._table_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._damaged(f"its alignment is {alignment!r}")
        start = math.ceil(self._position / alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in table:
            if (block := block_size(kind)) is None:
                raise ModelError(f"{self._path}: {name} has the unknown GGML type {kind}")
            size = self._tensor_size(name, shape, block=block)
            if start + offset + size > self._size:
                raise ModelError(
                    f"{self._path} is cut: {name} ends at byte {start + offset + size}, "
                    f"the file has {self._size}"
                )
            tensors[name] = GgufTensor(name, shape, kind, start + offset, size)
        return GgufFile(self._path, metadata, tensors)

    def _tensor_size(self, name: str, shape: tuple[int, ...], *, block: tuple[int, int]) -> int:
        elements, block_bytes = block
        if shape[-1] % elements:
            raise self._damaged(f"the rows of {name} have {shape[-1]} elements, no multiple of {elements}")
        return math.prod(shape) // elements * block_bytes

    def _table_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._scalar("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._damaged(f"{name} has {num_dimensions} dimensions")
        dimensions = [self._scalar("Q") for _ in range(num_dimensions)]
        if any(size <= 0 for size in dimensions):
            raise self._damaged(f"{name} has the dimensions {dimensions}")
        return name, tuple(reversed(dimensions)), self._scalar("I"), self._scalar("Q")

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._damaged(f"the value of {key!r} has the unknown type {kind}")
        element, count = self._scalar("I"), self._scalar("Q")
        if element in _SCALARS:
            form = f"<{count}{_SCALARS[element]}"
            return list(struct.unpack(form, self._bytes(count * struct.calcsize(f"<{_SCALARS[element]}"))))
        if count > self._size:
            raise self._damaged(f"{key!r} has {count} elements, more than the file has bytes")
        return [self._value(element, key) for _ in range(count)]

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack(f"<{form}", self._bytes(struct.calcsize(f"<{form}")))
        return value

    def _string(self) -> str:
        data = self._bytes(self._scalar("Q"))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"a text before byte {self._position} is not UTF-8") from error

    def _bytes(self, size: int) -> bytes:
        end = self._position + size
        if end > self._size:
            raise ModelError(
                f"{self._path} is cut or damaged: a value at byte {self._position} needs {size} bytes, "
                f"the file has {self._size}"
            )
        data = self._content[self._position : end]
        self._position = end
        return data

    def _damaged(self, why: str) -> ModelError:
        return ModelError(f"{self._path} is damaged: {why}")
