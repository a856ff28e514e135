"""The loop in which episodes are played, with a player of the test's own and the worker's end of the socket."""

import asyncio
import socket
from collections.abc import Iterator
from threading import Thread

import msgspec
import pytest

from kintsugi.rollout.environments.protocol import Episode, EpisodeFailed, EpisodeRecord, Policy
from kintsugi.rollout.user_code.channel import FromUserCode, UserCodeReady, WorkBegun, attempt_send, receive
from kintsugi.rollout.user_code.episode_runner import EpisodeRunner
from kintsugi.types import FinishReason, Row, SamplingParams


class Restless:
    """Asks the model when its episode has ended; before that, begins three things one after the other."""

    def __init__(self) -> None:
        self.refusal = ""
        self._asking: asyncio.Task[None] | None = None

    async def play(self, episode: Episode, policy: Policy) -> EpisodeRecord:
        for _ in range(3):
            policy.working()
        self._asking = asyncio.get_running_loop().create_task(self._ask(policy))
        return EpisodeRecord(episode.id, (), (), FinishReason.EOS, False)

    async def _ask(self, policy: Policy) -> None:
        try:
            await policy.complete([3], turn=0, max_new_tokens=1)
        except EpisodeFailed as error:
            self.refusal = str(error)

    async def close(self) -> None:
        assert self._asking is not None
        await self._asking


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def test_nothing_is_asked_for_an_episode_that_has_ended(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = connection
    player = Restless()
    playing = Thread(target=EpisodeRunner(theirs, player, timeout_s=5.0).run)
    playing.start()
    attempt_send(ours, Episode(4, "grpo:0:0:0", 0, Row("1+1="), b"", 7, SamplingParams()))
    assert [type(said(ours)) for _ in range(4)] == [UserCodeReady, WorkBegun, WorkBegun, EpisodeRecord]
    ours.shutdown(socket.SHUT_WR)
    playing.join(5.0)
    assert player.refusal == "the episode has ended"
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        receive(ours)


def said(connection: socket.socket) -> FromUserCode:
    connection.settimeout(5.0)
    connection.recv(1, socket.MSG_PEEK)
    content = receive(connection)
    assert content is not None
    message: FromUserCode = msgspec.msgpack.decode(content, type=FromUserCode)
    return message
