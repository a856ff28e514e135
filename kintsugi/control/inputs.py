"""The master's inputs as they came, so that a run can be replayed through the same decisions.

`<run>/inputs` is a sequence of length-prefixed msgpack records (now, event). It is a record for people and tests, not
state: the journal alone decides where a run stands.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kintsugi.control.protocol import Event, Replied
from kintsugi.disk import append_whole
from kintsugi.errors import StorageError
from kintsugi.messages import EpisodesDone

_LENGTH = struct.Struct("<I")


class Input(msgspec.Struct, frozen=True, array_like=True):
    now: float
    event: Event
    wall: float = 0.0
    """For people: facts have no times of their own, and get those of the inputs that they follow from."""
    after: int = 0
    """The journal's last record when it came; what is decided on it is the next one, if it leads to any facts."""


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """The same without looking at the event."""

    now: float
    event: msgspec.Raw
    wall: float = 0.0
    after: int = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Input)
_moment_decoder = msgspec.msgpack.Decoder(Moment)


class InputRecorder:
    """Appends inputs. Unbuffered: like the facts that follow from them, they survive a master that is killed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        os.truncate(path, _end_of_whole_records(path))
        self._gap = ""
        """Why an input is missing: what came after it would not lead to the same facts, so it is not recorded."""

    def write(self, event: Event, now: float, *, wall: float = 0.0, after: int = 0) -> None:
        """Texts are left out: no decision looks at them, and `samples.jsonl` has them. StorageError for a full disk."""
        if isinstance(event, Replied) and isinstance(event.body, EpisodesDone):
            event = Replied(event.token, event.sender, msgspec.structs.replace(event.body, texts={}))
        record = _encoder.encode(Input(now, event, wall, after))
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
    """Where the last whole record ends; what a killed master left behind it is cut off."""
    size, end = path.stat().st_size, 0
    with path.open("rb") as file:
        while end + _LENGTH.size <= size:
            after = end + _LENGTH.size + _LENGTH.unpack(file.read(_LENGTH.size))[0]
            if after > size:
                break
            end = file.seek(after)
    return end


def read_inputs(path: Path) -> Iterator[Input]:
    """All complete records; a torn tail is left out."""
    end = _end_of_whole_records(path)
    with path.open("rb") as file:
        while file.tell() < end:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            yield _decoder.decode(file.read(length))


def read_moments(path: Path, *, offset: int = 0, most: int = 10_000) -> tuple[list[Moment], int]:
    """When inputs came, from a byte offset on, and the offset to go on from. A master may be writing meanwhile."""
    moments: list[Moment] = []
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
