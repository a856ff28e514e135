"""What a rollout worker and the process beside it, in which the user's code runs, say to each other, and how.

| from the worker | to it                                                                                   |
|-----------------|-----------------------------------------------------------------------------------------|
| Opening         | Ready, or Refused                                                                       |
| Case            | Begun, then Judged or Failed                                                            |
| Episode         | Wanted as often as it asks the model, Begun in between, then EpisodeRecord or Failed    |
| Answered        | (the answer to a Wanted)                                                                |
"""

from __future__ import annotations

import array
import os
import select
import socket
from typing import Any

import msgspec

from kintsugi.config import Config
from kintsugi.rollout.environment import Episode, EpisodeRecord
from kintsugi.types import Completion

_INLINE_BYTES = 16384
"""A message up to this size is its own datagram; of a larger one only a descriptor is sent."""
_INLINE, _DESCRIPTOR = b"i", b"d"


class Opening(msgspec.Struct, frozen=True, tag=True):
    """What the process is for; the first thing it is told."""

    config: Config


class Case(msgspec.Struct, frozen=True, tag=True):
    """One group to be judged."""

    id: int
    prompt: str
    completions: tuple[str, ...]
    columns: dict[str, Any]


class Answered(msgspec.Struct, frozen=True, tag=True):
    """What the model says to a `Wanted`, or the reason why it says nothing."""

    id: int
    """Of the `Wanted`."""
    completion: Completion | None
    reason: str = ""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The user's code is imported."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """It can not be: the user's mistake."""

    message: str


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The functions of a case run now, or the next call of an episode: its time counts from here."""

    id: int


class Judged(msgspec.Struct, frozen=True, tag=True):
    """Components of each completion; those with a reason could not be judged, and have none."""

    id: int
    components: list[dict[str, float]]
    reasons: dict[int, str]
    seconds: dict[str, float]
    """What each function took."""


class Wanted(msgspec.Struct, frozen=True, tag=True):
    """An episode asks the model to go on."""

    id: int
    """Of this request."""
    episode: int
    turn: int
    prompt: bytes
    """int32."""
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A group could not be judged at all, or an episode not be played."""

    id: int
    message: str
    kind: str = "RewardFailed"
    """Of the error: a `UserError` (the configuration, the data) is mended by no repetition."""
    hangs: bool = False
    """Some code still runs that nobody waits for any more: the process is of no use."""


FromWorker = Opening | Case | Episode | Answered
FromUserCode = Ready | Refused | Begun | Judged | Wanted | EpisodeRecord | Failed
Ended = Judged | EpisodeRecord | Failed
"""How a case or an episode ends."""


def attempt_send(
    connection: socket.socket, body: FromWorker | FromUserCode, *, remaining_s: float = 0.0
) -> bool:
    """Hand over a message of any size at once, a large one in memory that is passed by descriptor; False if there is
    no room.

    What MessagePack can not say (an image, say) is a TypeError.
    """
    poller = select.poll()
    poller.register(connection, select.POLLOUT)
    if not poller.poll(remaining_s * 1000):
        return False
    content = msgspec.msgpack.encode(body)
    try:
        if len(content) <= _INLINE_BYTES:
            connection.send(_INLINE + content, socket.MSG_DONTWAIT)
        else:
            _send_descriptor(connection, content)
    except BlockingIOError:
        return False
    return True


def _send_descriptor(connection: socket.socket, content: bytes) -> None:
    descriptor = os.memfd_create("message", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        rights = array.array("i", [descriptor])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        connection.sendmsg([_DESCRIPTOR], ancillary, socket.MSG_DONTWAIT)
    finally:
        os.close(descriptor)


def receive(connection: socket.socket) -> bytes | None:
    """The next message; None when the other side is gone. BlockingIOError where there is none yet.

    One that went without reading all is told first, and once, before what it had said last.
    """
    try:
        content, descriptors = _received(connection)
    except ConnectionResetError:
        content, descriptors = _received(connection)
    if not content:
        return None
    if content[:1] == _INLINE:
        return content[1:]
    with os.fdopen(descriptors[0], "rb") as file:
        file.seek(0)
        return file.read()


def _received(connection: socket.socket) -> tuple[bytes, array.array[int]]:
    """A datagram and its descriptors. `socket.recv_fds` would wait: it does not pass its flags on."""
    descriptors = array.array("i")
    content, ancillary, _, _ = connection.recvmsg(
        len(_INLINE) + _INLINE_BYTES, socket.CMSG_LEN(descriptors.itemsize), socket.MSG_DONTWAIT
    )
    for _, _, rights in ancillary:
        descriptors.frombytes(rights)
    return content, descriptors
