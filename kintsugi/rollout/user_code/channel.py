"""Messages between a rollout worker and its user process, and their transport over a socket pair.

| from the worker    | to the worker                                                                            |
|--------------------|------------------------------------------------------------------------------------------|
| OpenUserCode       | UserCodeReady, or UserCodeRefused                                                        |
| RewardCase         | WorkBegun, then GroupScored or UserCodeFailed                                            |
| Episode            | GenerationWanted for each completion, WorkBegun in between, then EpisodeRecord or        |
|                    | UserCodeFailed                                                                           |
| GenerationAnswered | (the answer to a GenerationWanted)                                                       |
"""

from __future__ import annotations

import array
import os
import select
import socket
from typing import Any

import msgspec

from kintsugi.config.schema import Config
from kintsugi.rollout.environments.protocol import Episode, EpisodeRecord
from kintsugi.types import Completion

_INLINE_BYTES = 16384
"""A message up to this size is sent as a datagram; a larger one as the descriptor of a memory file."""
_INLINE, _DESCRIPTOR = b"i", b"d"


class OpenUserCode(msgspec.Struct, frozen=True, tag="Opening"):
    """Configuration of the run; the first message."""

    config: Config


class RewardCase(msgspec.Struct, frozen=True, tag="Case"):
    """One group to be scored."""

    id: int
    prompt: str
    completions: tuple[str, ...]
    columns: dict[str, Any]


class GenerationAnswered(msgspec.Struct, frozen=True, tag="Answered"):
    """Completion for a `GenerationWanted`, or the reason why there is none."""

    id: int
    """Id of the `GenerationWanted`."""
    completion: Completion | None
    reason: str = ""


class UserCodeReady(msgspec.Struct, frozen=True, tag="Ready"):
    """The user's code is imported."""


class UserCodeRefused(msgspec.Struct, frozen=True, tag="Refused"):
    """The user's code cannot be imported or does not fit: the user's mistake."""

    message: str


class WorkBegun(msgspec.Struct, frozen=True, tag="Begun"):
    """User code starts to run, for a case or the next call of an episode: its time limit counts from here."""

    id: int


class GroupScored(msgspec.Struct, frozen=True, tag="Judged"):
    """Reward components of each completion; a completion with a reason could not be scored and has none."""

    id: int
    components: list[dict[str, float]]
    reasons: dict[int, str]
    seconds: dict[str, float]
    """Duration of each reward function."""


class GenerationWanted(msgspec.Struct, frozen=True, tag="Wanted"):
    """An episode requests a completion from the model."""

    id: int
    """Id of this request."""
    episode: int
    turn: int
    prompt: bytes
    """Tokens as int32."""
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float | None = None


class UserCodeFailed(msgspec.Struct, frozen=True, tag="Failed"):
    """A whole group could not be scored, or an episode not be run."""

    id: int
    message: str
    kind: str = "RewardFailed"
    """Type of the error. A `UserError` (a mistake in configuration or data) is not retried."""
    hangs: bool = False
    """Whether abandoned user code still runs, so that the process has to be replaced."""


FromWorker = OpenUserCode | RewardCase | Episode | GenerationAnswered
FromUserCode = (
    UserCodeReady
    | UserCodeRefused
    | WorkBegun
    | GroupScored
    | GenerationWanted
    | EpisodeRecord
    | UserCodeFailed
)
Ended = GroupScored | EpisodeRecord | UserCodeFailed
"""Last message of a case or an episode."""


def attempt_send(
    connection: socket.socket, body: FromWorker | FromUserCode, *, remaining_s: float = 0.0
) -> bool:
    """Send a message of any size without blocking; a large one is passed as the descriptor of a memory file. Return
    False if the socket has no room. TypeError if MessagePack cannot encode the message (an image, for example).
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
    """Return the next message; None if the other side has closed. BlockingIOError if there is none yet.

    If the other side closed with unread messages, the kernel reports a reset once, before its last messages.
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
    """Receive a datagram and its descriptors. `socket.recv_fds` would block: it ignores its flags."""
    descriptors = array.array("i")
    content, ancillary, _, _ = connection.recvmsg(
        len(_INLINE) + _INLINE_BYTES, socket.CMSG_LEN(descriptors.itemsize), socket.MSG_DONTWAIT
    )
    for _, _, rights in ancillary:
        descriptors.frombytes(rights)
    return content, descriptors
