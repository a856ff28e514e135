"""Recording of the master's inputs, so that a run can be replayed through the same decisions.

`<run>/inputs` is a sequence of length-prefixed msgpack records (now, event). It serves users and tests and is no state:
only the journal determines the state of a run.
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
        self._file = path.open("ab", buffering=0)
        os.truncate(path, _end_of_whole_records(path))
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
            append_whole(self._file, _LENGTH.pack(len(record)) + record)
        except OSError as error:
            self._gap = f"{self._file.name}: {error.strerror or error}"
            raise StorageError(self._gap) from error

    def close(self) -> None:
        self._file.close()


def _end_of_whole_records(path: Path) -> int:
    """Return the end of the last complete record; anything behind it was left by a killed master."""
    size, end = path.stat().st_size, 0
    with path.open("rb") as file:
        while end + _LENGTH.size <= size:
            after = end + _LENGTH.size + _LENGTH.unpack(file.read(_LENGTH.size))[0]
            if after > size:
                break
            end = file.seek(after)
    return end


def read_inputs(path: Path) -> Iterator[MasterInput]:
    """Yield all complete records; a torn tail is left out."""
    end = _end_of_whole_records(path)
    with path.open("rb") as file:
        while file.tell() < end:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            yield _decoder.decode(file.read(length))


def read_moments(path: Path, *, offset: int = 0, most: int = 10_000) -> tuple[list[InputTime], int]:
    """Return the times of inputs from a byte offset on, and the next offset. A master may be writing meanwhile."""
    moments: list[InputTime] = []
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(offset)
        while len(moments) < most and offset + _LENGTH.size <= size:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if offset + _LENGTH.size + length > size:
                break
            moments.append(_moment_decoder.decode(file.read(length)))
            offset += _LENGTH.size + length
    return moments, offset
