"""Recording of the master's inputs, so that a run can be replayed through the same decisions.

`<run>/inputs` is a sequence of length-prefixed msgpack records (now, event). It serves users and tests and is no state:
only the journal determines the state of a run.

A file of `PART_SIZE` is put aside as `inputs.N`, N the offset of its first byte in the sequence, and the oldest of
them are removed. Offsets count from the beginning of the run, so that a reader continues where it was.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kintsugi.control.protocol import Event, Replied
from kintsugi.errors import StorageError
from kintsugi.protocol.rollout import EpisodesDone
from kintsugi.runtime.disk import append_whole

_LENGTH = struct.Struct("<I")
PART_SIZE = 16 << 20
"""Size of a file: a new master looks through the last one, for the end of its last complete record."""
MOST_SIZE = 256 << 20
"""Size of all files; about two million inputs."""


class MasterInput(msgspec.Struct, frozen=True, array_like=True):
    now: float
    event: Event
    wall: float = 0.0
    """Wall-clock time for users: facts have no times of their own, and get those of the inputs that they follow
    from."""
    after: int = 0
    """Last record of the journal when the input came; the decision on it is the next one, if it leads to any facts."""


class InputTime(msgspec.Struct, frozen=True, array_like=True):
    """A record with its event left undecoded."""

    now: float
    event: msgspec.Raw
    wall: float = 0.0
    after: int = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(MasterInput)
_moment_decoder = msgspec.msgpack.Decoder(InputTime)


class InputRecorder:
    """Appends inputs, unbuffered: like the facts that follow from them, they survive a killed master."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._size = _end_of_whole_records(path)
        os.truncate(path, self._size)
        self._gap = ""
        """Reason why an input is missing. Later inputs would not lead to the same facts, so they are not recorded."""

    def write(self, event: Event, now: float, *, wall: float = 0.0, after: int = 0) -> None:
        """Append an input. Texts are left out: no decision depends on them, and `samples.jsonl` has them. StorageError
        for a full disk."""
        if isinstance(event, Replied) and isinstance(event.body, EpisodesDone):
            event = Replied(event.token, event.sender, msgspec.structs.replace(event.body, texts={}))
        record = _encoder.encode(MasterInput(now, event, wall, after))
        if self._gap:
            raise StorageError(self._gap)
        try:
            if self._size >= PART_SIZE:
                self._put_aside()
            append_whole(self._file, _LENGTH.pack(len(record)) + record)
            self._size += _LENGTH.size + len(record)
        except OSError as error:
            self._gap = f"{self._file.name}: {error.strerror or error}"
            raise StorageError(self._gap) from error

    def _put_aside(self) -> None:
        """Continue in a new file, and remove the oldest ones that exceed `MOST_SIZE`."""
        *kept, (start, _) = _parts(self._path)
        os.rename(self._path, _part_name(self._path, start))
        self._file.close()
        self._file, self._size = self._path.open("ab", buffering=0), 0
        total = PART_SIZE
        for _, part in reversed([*kept, (start, _part_name(self._path, start))]):
            total += part.stat().st_size
            if total > MOST_SIZE:
                part.unlink()

    def close(self) -> None:
        self._file.close()


def _part_name(path: Path, start: int) -> Path:
    return path.with_name(f"{path.name}.{start}")


def _parts(path: Path) -> list[tuple[int, Path]]:
    """Return (offset of its first byte, file) of all files, the one that is written last."""
    suffixes = [other.name.removeprefix(path.name + ".") for other in path.parent.glob(path.name + ".*")]
    kept = [(start, _part_name(path, start)) for start in sorted(int(s) for s in suffixes if s.isdecimal())]
    end = kept[-1][0] + kept[-1][1].stat().st_size if kept else 0
    return [*kept, (end, path)]


def _end_of_whole_records(path: Path) -> int:
    """Return the end of the last complete record of a file; anything behind it was left by a killed master."""
    size, end = path.stat().st_size, 0
    with path.open("rb") as file:
        while end + _LENGTH.size <= size:
            after = end + _LENGTH.size + _LENGTH.unpack(file.read(_LENGTH.size))[0]
            if after > size:
                break
            end = file.seek(after)
    return end


def read_inputs(path: Path) -> Iterator[MasterInput]:
    """Yield all complete records that are kept; a torn tail is left out."""
    for _, part in _parts(path):
        end = _end_of_whole_records(part)
        with part.open("rb") as file:
            while file.tell() < end:
                (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
                yield _decoder.decode(file.read(length))


def are_complete(path: Path) -> bool:
    """Return whether all inputs since the beginning of the run are kept."""
    return _parts(path)[0][0] == 0


def read_moments(path: Path, *, offset: int = 0, most: int = 10_000) -> tuple[list[InputTime], int]:
    """Return the times of inputs from an offset on, and the next offset. What is not kept is skipped. A master may be
    writing meanwhile."""
    moments: list[InputTime] = []
    parts = _parts(path)
    if offset > parts[-1][0] + path.stat().st_size:
        offset = 0  # Another run has taken the folder.
    for start, part in parts:
        try:
            file = part.open("rb")
        except FileNotFoundError:
            continue  # It has just been removed.
        with file:
            size = os.fstat(file.fileno()).st_size
            if offset >= start + size and part != path:
                continue
            offset = max(offset, start)
            file.seek(offset - start)
            while len(moments) < most and offset - start + _LENGTH.size <= size:
                (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
                if offset - start + _LENGTH.size + length > size:
                    break
                moments.append(_moment_decoder.decode(file.read(length)))
                offset += _LENGTH.size + length
    return moments, offset
