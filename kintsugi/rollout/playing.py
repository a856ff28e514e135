"""Plays episodes in the process beside a rollout worker, many at once: one task each, on one loop.

What an episode asks of the model goes to the worker, and from there to the generation manager; the answer comes back
the same way. So both sides know whose turn it is: while nothing of an episode is asked of the worker, this process owes
it something, and must not be silent for longer than the user's code may take.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Iterator, Sequence

import msgspec

from kintsugi.errors import UserError
from kintsugi.rollout.channel import (
    Answered,
    Begun,
    Failed,
    FromUserCode,
    FromWorker,
    Ready,
    Wanted,
    attempt_send,
    receive,
)
from kintsugi.rollout.environment import Episode, EpisodeFailed, EpisodeHangs, Player
from kintsugi.rollout.episode import int32
from kintsugi.runtime import wait
from kintsugi.types import Completion


class Playing:
    """The episodes that are being played, and what they wait for."""

    def __init__(self, connection: socket.socket, player: Player, *, timeout_s: float) -> None:
        self._connection, self._player, self._timeout_s = connection, player, timeout_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: dict[int, asyncio.Future[Answered]] = {}
        self._numbers = itertools.count()
        self._pid = os.getpid()
        self._gone: asyncio.Future[None]
        """Ends when the worker is gone, or with what is wrong with this process itself."""

    def run(self) -> None:
        """Until the worker is gone."""
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._gone = loop.create_future()
        loop.add_reader(self._connection, self._take)
        self.say(Ready())
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
            case Answered() as answer:
                asked = self._asked.get(answer.id)
                if asked is not None and not asked.done():
                    asked.set_result(answer)
            case other:
                raise AssertionError(f"a process that plays episodes was sent {type(other).__name__}")

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # Ours: what the user's code does is said in a `Failed`.
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
            outcome = Failed(episode.id, str(error), EpisodeFailed.__name__, hangs=hangs)
        except UserError as error:
            outcome = Failed(episode.id, str(error), type(error).__name__)
        relay.is_over = True
        self.say(outcome)

    async def ask(self, wanted: Wanted) -> Completion:
        """Once its episode has ended, what was asked and not waited for is never answered."""
        answered: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._asked[wanted.id] = answered
        try:
            self.say(wanted)
            answer = await answered
        finally:
            del self._asked[wanted.id]
        if answer.completion is None:
            raise EpisodeFailed(answer.reason)
        return answer.completion

    def say(self, body: FromUserCode) -> None:
        """The worker reads all the time: where there is no room for a word, it is about to kill this process."""
        if os.getpid() != self._pid:
            os._exit(0)  # A copy that the user's code forked and let return: one of them speaks.
        wait(
            lambda remaining_s: attempt_send(self._connection, body, remaining_s=remaining_s) or None,
            whom="rollout worker",
            what="room for an answer",
            timeout_s=self._timeout_s,
        )


class _Relay:
    """The model, as one episode meets it."""

    def __init__(self, playing: Playing, episode: Episode, *, numbers: Iterator[int]) -> None:
        self._playing, self._episode, self._numbers = playing, episode.id, numbers
        self._is_counted = True
        """The worker counts from when it gave the episode, or an answer."""
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
        wanted = Wanted(number, self._episode, turn, tokens, max_new_tokens, tuple(stop), temperature)
        completion = await self._playing.ask(wanted)
        self._is_counted = True
        return completion

    def working(self) -> None:
        if not self._is_counted:
            self._playing.say(Begun(self._episode))
        self._is_counted = False
