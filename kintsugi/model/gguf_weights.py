"""Weights of a GGUF file as safetensors files in bfloat16.

    read a piece → dequantise and round it → write it to its place     by each of a few threads
    bring what was written to the disk                                 by one thread, meanwhile

No tensor is held as a whole: a thread keeps the memory of one piece. The time is about that of reading and writing the
bytes. No torch: importing it takes as long as the computation.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from kintsugi.errors import ModelError
from kintsugi.model import folder_files, gguf_blocks
from kintsugi.model.folder import INDEX_FILE, WEIGHTS_FILE
from kintsugi.model.gguf_blocks import Bits, Scratch
from kintsugi.model.gguf_file import GgufTensor

PIECE_ELEMENTS = 1 << 19
"""Elements that a thread dequantises at once: enough for an operation to take much longer than the interpreter."""
MOST_THREADS = 8
"""More would wait for the interpreter, and for the file, which one thread at a time writes to."""
FLUSH_BYTES = 256 << 20
"""Bytes after which the disk begins to write; the system would keep them for long on a host with much memory."""
MAX_SHARD_BYTES = folder_files.DEFAULT_MAX_SHARD_BYTES
BF16_BYTES = 2

Progress = Callable[[int, int], None]
"""Called with the bytes that are written and the bytes of all weights; from several threads, one at a time."""


class TensorPlace(NamedTuple):
    """A tensor of the GGUF file, and where its values go."""

    tensor: GgufTensor
    descriptor: int
    position: int
    num_heads: int = 0
    """Heads whose rows are reordered; 0: rows stay as they are."""


class _Piece(NamedTuple):
    """Rows of a tensor."""

    place: TensorPlace
    rows: range

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the GGUF file."""
        return self.place.tensor.size // math.prod(self.place.tensor.shape[:-1])

    @property
    def columns(self) -> int:
        return self.place.tensor.shape[-1]

    @property
    def elements(self) -> int:
        return len(self.rows) * self.columns


def num_bytes(wanted: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes of all parameters in bfloat16."""
    return BF16_BYTES * sum(math.prod(shape) for shape in wanted.values())


def create_weight_files(
    wanted: Mapping[str, tuple[int, ...]], *, folder: Path, stack: ExitStack
) -> dict[str, tuple[int, int]]:
    """Create the safetensors files with their headers; returns descriptor and position of each tensor."""
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name, shape in wanted.items():
        size = BF16_BYTES * math.prod(shape)
        if shards[-1] and shard_bytes + size > MAX_SHARD_BYTES:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += size
    file_names = (
        [WEIGHTS_FILE]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    places: dict[str, tuple[int, int]] = {}
    for file_name, names in zip(file_names, shards, strict=True):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name in names:
            end = position + BF16_BYTES * math.prod(wanted[name])
            header[name] = {"dtype": "BF16", "shape": wanted[name], "data_offsets": (position, end)}
            position = end
        encoded = msgspec.json.encode(header)
        encoded += b" " * (-len(encoded) % 8)
        descriptor = os.open(folder / file_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        stack.callback(os.close, descriptor)
        os.write(descriptor, len(encoded).to_bytes(8, "little") + encoded)
        start = 8 + len(encoded)
        _reserve(descriptor, size=start + position)
        places |= {name: (descriptor, start + header[name]["data_offsets"][0]) for name in names}
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(file_names, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": num_bytes(wanted)}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return places


def _reserve(descriptor: int, *, size: int) -> None:
    """Reserve space where the file system can; elsewhere `os.posix_fallocate` would write to every block."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = errno.EINTR
    while number == errno.EINTR:  # By a signal, as when the terminal's size changes.
        if libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0:
            return
        number = ctypes.get_errno()
    if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
        raise OSError(number, os.strerror(number))
    os.ftruncate(descriptor, size)


class WeightWriter:
    """Dequantises tensors in pieces and writes them to their places, by a few threads."""

    def __init__(self, source: Path, *, progress: Progress, total: int) -> None:
        self._path, self._progress, self._total, self._done = source, progress, total, 0
        self._lock = threading.Lock()
        self._of_thread = threading.local()
        self._descriptors: set[int] = set()
        self._unflushed = 0
        self._flushes: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._source = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="import-flush")
        return self

    def __exit__(self, *error: object) -> None:
        self._flusher.shutdown(cancel_futures=True)
        os.close(self._source)

    def write(self, tensors: Sequence[TensorPlace]) -> None:
        """Write all tensors; they may be on their way to the disk when this returns."""
        self._descriptors |= {each.descriptor for each in tensors}
        pieces = [piece for each in tensors for piece in _pieces(each)]
        self._most_elements = max((piece.elements for piece in pieces), default=0)
        self._most_bytes = max((piece.row_bytes * len(piece.rows) for piece in pieces), default=0)
        num_threads = min(len(os.sched_getaffinity(0)), MOST_THREADS)
        with ThreadPoolExecutor(num_threads, thread_name_prefix="import") as pool:
            try:
                for _ in pool.map(self._write_piece, pieces):
                    pass
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def sync(self) -> None:
        """Wait until everything that was written is on the disk."""
        self._flushes += [self._flusher.submit(os.fsync, each) for each in self._descriptors]
        for flush in self._flushes:
            flush.result()

    def _write_piece(self, piece: _Piece) -> None:
        raw, scratch = self._memory()
        raw = raw[: piece.row_bytes * len(piece.rows)]
        tensor, descriptor, position, num_heads = piece.place
        _read(self._source, raw, position=tensor.start + piece.row_bytes * piece.rows.start)
        bits = self._bfloat16(raw, piece, scratch)
        if bits is None:
            raise ModelError(f"{self._path} is damaged: {tensor.name} has values that are not finite numbers")
        if num_heads:
            bits = _in_halves(bits, head_rows=tensor.shape[0] // num_heads, columns=piece.columns)
        _write(descriptor, bits, position=position + BF16_BYTES * piece.columns * piece.rows.start)
        with self._lock:
            self._done += bits.nbytes
            self._unflushed += bits.nbytes
            if self._unflushed >= FLUSH_BYTES:
                self._unflushed = 0
                self._flushes.append(self._flusher.submit(os.fdatasync, descriptor))
            self._progress(self._done, self._total)

    def _memory(self) -> tuple[NDArray[np.uint8], Scratch]:
        """Memory that this thread uses for every piece."""
        if not hasattr(self._of_thread, "raw"):
            self._of_thread.raw = np.empty(self._most_bytes, np.uint8)
            self._of_thread.scratch = Scratch(self._most_elements)
        return self._of_thread.raw, self._of_thread.scratch

    def _bfloat16(self, raw: NDArray[np.uint8], piece: _Piece, scratch: Scratch) -> Bits | None:
        """Values of whole rows, by the library `gguf` where a kind is rare."""
        tensor = piece.place.tensor
        if tensor.kind in gguf_blocks.NUMBERS:
            return gguf_blocks.bfloat16_of(raw, gguf_blocks.NUMBERS[tensor.kind], scratch=scratch)
        import gguf

        kind = gguf.GGMLQuantizationType(tensor.kind)
        try:
            values = gguf.dequantize(raw.reshape(len(piece.rows), -1), kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self._path}: {tensor.name} has the GGML type {kind.name}, which can not be read"
            ) from error
        return gguf_blocks.rounded(values.astype(np.float32).reshape(-1), scratch=scratch)


def _pieces(place: TensorPlace) -> Iterator[_Piece]:
    """Pieces of a tensor; the rows of a head stay together where they are reordered."""
    columns, num_rows = place.tensor.shape[-1], math.prod(place.tensor.shape[:-1])
    together = num_rows // place.num_heads if place.num_heads else 1
    at_once = max(1, PIECE_ELEMENTS // (together * columns)) * together
    for start in range(0, num_rows, at_once):
        yield _Piece(place, range(start, min(num_rows, start + at_once)))


def _in_halves(bits: Bits, *, head_rows: int, columns: int) -> Bits:
    """Undo llama.cpp's order of the rows of a head, which puts the two rows of a rotary pair side by side."""
    by_pair = bits.reshape(-1, head_rows // 2, 2, columns)
    return np.ascontiguousarray(by_pair.swapaxes(1, 2)).reshape(-1)


def _read(descriptor: int, target: NDArray[np.uint8], *, position: int) -> None:
    rest = target.data
    while rest:
        count = os.preadv(descriptor, [rest], position)
        if count == 0:
            raise ModelError("the GGUF file became shorter while it was read")
        rest, position = rest[count:], position + count


def _write(descriptor: int, bits: Bits, *, position: int) -> None:
    rest = bits.data.cast("B")
    while rest:
        written = os.pwrite(descriptor, rest, position)
        rest, position = rest[written:], position + written
