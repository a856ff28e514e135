"""Episodes in the user process: one asyncio task each, many concurrently.

An episode's requests to the model go through the worker to the generation manager, and the completions return the same
way. Both sides therefore know which of them has to send the next message: while no request of an episode is pending,
this process has to send one within the time limit of the user's code.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Iterator, Sequence

import msgspec

from kintsugi.errors import UserError
from kintsugi.rollout.environments.protocol import Episode, EpisodeFailed, EpisodeHangs, Player
from kintsugi.rollout.trajectory import int32
from kintsugi.rollout.user_code.channel import (
    FromUserCode,
    FromWorker,
    GenerationAnswered,
    GenerationWanted,
    UserCodeFailed,
    UserCodeReady,
    WorkBegun,
    attempt_send,
    receive,
)
from kintsugi.runtime.waits import wait
from kintsugi.types import Completion


class EpisodeRunner:
    """Running episodes and their pending requests."""

    def __init__(self, connection: socket.socket, player: Player, *, timeout_s: float) -> None:
        self._connection = connection
        self._player = player
        self._timeout_s = timeout_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending: dict[int, asyncio.Future[GenerationAnswered]] = {}
        self._numbers = itertools.count()
        self._pid = os.getpid()
        self._gone: asyncio.Future[None]
        """Done when the worker has closed the connection, or with an error of this process itself."""

    def run(self) -> None:
        """Run episodes until the worker closes the connection."""
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._gone = loop.create_future()
        loop.add_reader(self._connection, self._take)
        self.send(UserCodeReady())
        try:
            await self._gone
        finally:
            loop.remove_reader(self._connection)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._player.close()

    def _take(self) -> None:
        content = receive(self._connection)
        if content is None:
            self._end(None)
            return
        match msgspec.msgpack.decode(content, type=FromWorker):
            case Episode() as episode:
                task = asyncio.get_running_loop().create_task(
                    self._play(episode), name=f"episode {episode.id}"
                )
                self._tasks.add(task)
                task.add_done_callback(self._ended)
            case GenerationAnswered() as answer:
                pending = self._pending.get(answer.id)
                if pending is not None and not pending.done():
                    pending.set_result(answer)
            case other:
                raise AssertionError(f"a process that plays episodes was sent {type(other).__name__}")

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # A bug of ours: errors of the user's code are sent as `UserCodeFailed`.
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._gone.done():
            return
        if error is None:
            self._gone.set_result(None)
        else:
            self._gone.set_exception(error)

    async def _play(self, episode: Episode) -> None:
        relay = _Relay(self, episode, numbers=self._numbers)
        try:
            outcome: FromUserCode = await self._player.play(episode, relay)
        except EpisodeFailed as error:
            hangs = isinstance(error, EpisodeHangs)
            outcome = UserCodeFailed(episode.id, str(error), EpisodeFailed.__name__, hangs=hangs)
        except UserError as error:
            outcome = UserCodeFailed(episode.id, str(error), type(error).__name__)
        relay.is_over = True
        self.send(outcome)

    async def request(self, wanted: GenerationWanted) -> Completion:
        """Send a request to the model and wait for the completion. After the end of the episode it never comes."""
        answered: asyncio.Future[GenerationAnswered] = asyncio.get_running_loop().create_future()
        self._pending[wanted.id] = answered
        try:
            self.send(wanted)
            answer = await answered
        finally:
            del self._pending[wanted.id]
        if answer.completion is None:
            raise EpisodeFailed(answer.reason)
        return answer.completion

    def send(self, body: FromUserCode) -> None:
        """Send a message. The worker reads continuously: if the socket stays full, it is about to kill this process."""
        if os.getpid() != self._pid:
            os._exit(0)  # A copy that the user's code forked and that returned: only the original sends.
        wait(
            lambda remaining_s: attempt_send(self._connection, body, remaining_s=remaining_s) or None,
            whom="rollout worker",
            what="room for an answer",
            timeout_s=self._timeout_s,
        )


class _Relay:
    """The model's interface for one episode."""

    def __init__(self, runner: EpisodeRunner, episode: Episode, *, numbers: Iterator[int]) -> None:
        self._runner = runner
        self._episode = episode.id
        self._numbers = numbers
        self._is_counted = True
        """Whether the worker's time limit already runs: from the submission of the episode, or from an answer."""
        self.is_over = False

    async def complete(
        self,
        prompt: Sequence[int],
        *,
        turn: int,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        temperature: float | None = None,
    ) -> Completion:
        if self.is_over:
            raise EpisodeFailed("the episode has ended")
        number, tokens = next(self._numbers), int32(prompt)
        wanted = GenerationWanted(
            number, self._episode, turn, tokens, max_new_tokens, tuple(stop), temperature
        )
        completion = await self._runner.request(wanted)
        self._is_counted = True
        return completion

    def working(self) -> None:
        if not self._is_counted:
            self._runner.send(WorkBegun(self._episode))
        self._is_counted = False
