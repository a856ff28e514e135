"""Plays environments: what the model writes is an action, what that leads to is fed to it, and so on until it is done.

Methods that are `async def` are awaited; ordinary ones run in threads, so that one that waits for something does not
hold the others. Each has `rollout.turn_timeout_s`. Everything that the user's code may do wrong is an `EpisodeFailed`
that says what it was, and in which call.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import msgspec

from kintsugi.config import Config
from kintsugi.data.columns import COMPLETION
from kintsugi.data.tokens import prompt_tokens
from kintsugi.errors import UserError
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.rollout.environment import (
    DemonstratingEnvironment,
    Environment,
    Episode,
    EpisodeFailed,
    EpisodeHangs,
    EpisodeRecord,
    Observation,
    Player,
    Policy,
    Step,
    Turn,
)
from kintsugi.rollout.episode import demonstrated_completion
from kintsugi.rollout.failures import described
from kintsugi.rollout.finding import EnvironmentMaker, find_environment
from kintsugi.rollout.scoring import finite_number
from kintsugi.rollout.turns import observation_tokens
from kintsugi.types import Completion, Finish

_MOST_THREADS = 32
"""Ordinary methods that run at once; the next waits, and its time does not count yet."""


def open_player(config: Config, tokenizer: Tokenizer) -> Player:
    """Who plays what `rollout.environment` names; ConfigError says why it can not be."""
    assert config.rollout.environment is not None
    found = find_environment(config.rollout)
    if isinstance(found, EnvironmentMaker):
        return EnvironmentPlayer(found, config=config, tokenizer=tokenizer)
    # Agent programs bring an HTTP server with them, which environments have no use for.
    from kintsugi.rollout.agents import AgentPlayer

    return AgentPlayer(found, config=config, tokenizer=tokenizer)


class EnvironmentPlayer:
    """Plays the episodes of one kind of environment."""

    def __init__(self, maker: EnvironmentMaker, *, config: Config, tokenizer: Tokenizer) -> None:
        self.maker, self.config, self.tokenizer = maker, config, tokenizer
        self._timeout_s = config.rollout.turn_timeout_s
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="environment")
        self._free = asyncio.Semaphore(_MOST_THREADS)

    async def play(self, episode: Episode, policy: Policy) -> EpisodeRecord:
        if episode.demonstrate and not self.maker.demonstrates:
            return row_record(episode, self.tokenizer)
        play = _Play(self, episode)
        try:
            await play.begin()
            while play.finish is None:
                await play.take_turn(policy)
        except BaseException:
            await play.abandon()
            raise
        await play.close()
        return play.record()

    async def close(self) -> None:
        """Whatever still runs in a thread is left to the end of the process."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def call(self, what: str, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """What a method of the user's says; EpisodeFailed names the method and what it did instead."""
        since = time.monotonic()
        try:
            if not inspect.iscoroutinefunction(function):
                return await self._call_in_thread(what, partial(function, *given, **named))
            async with asyncio.timeout(self._timeout_s):
                return await function(*given, **named)
        except (EpisodeFailed, UserError):
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # The process ends.
                raise
            if isinstance(error, TimeoutError) and time.monotonic() - since >= self._timeout_s:
                raise EpisodeFailed(self._too_long(what)) from error
            raise _raised(what, error) from error

    async def _call_in_thread(self, what: str, function: Callable[[], Any]) -> Any:
        async with self._free:
            running = asyncio.get_running_loop().run_in_executor(self._threads, _attempted, function)
            try:
                async with asyncio.timeout(self._timeout_s):
                    value, error = await asyncio.shield(running)
            except TimeoutError:
                raise EpisodeHangs(self._too_long(what)) from None
        if isinstance(error, UserError):
            raise error
        if error is not None:
            raise _raised(what, error) from error
        if inspect.isawaitable(value):
            if inspect.iscoroutine(value):
                value.close()
            raise EpisodeFailed(f"`{what}` of the environment gave something to await; make it `async def`")
        return value

    def _too_long(self, what: str) -> str:
        return f"`{what}` of the environment took longer than `rollout.turn_timeout_s`={self._timeout_s:g} s"


def _raised(what: str, error: BaseException) -> EpisodeFailed:
    return EpisodeFailed(f"`{what}` of the environment raised {described(error)}")


def _attempted(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Not everything that may be raised in a thread can be raised in a loop: a coroutine takes StopIteration for its
    own end."""
    try:
        return function(), None
    except BaseException as error:  # noqa: BLE001 - the user's function may raise anything
        return None, error


class _Play:
    """One episode so far."""

    def __init__(self, player: EnvironmentPlayer, episode: Episode) -> None:
        self._player, self._episode = player, episode
        self._tokenizer, self._rollout = player.tokenizer, player.config.rollout
        self._chat = bool(episode.row.messages) or player.config.data.chat_template
        self._environment: Environment | None = None
        self._context: list[int] = []
        self._fed: list[int] = []
        self._stop: tuple[str, ...] = ()
        self._turns: list[Turn] = []
        self._rewards: list[float] = []
        self._sums: dict[str, float] = {}
        self._success: bool | None = None
        self._prompt = episode.row.prompt
        self._text = ""
        self._seconds = 0.0
        self.finish: Finish | None = None

    async def begin(self) -> None:
        self._environment = await self._call("__init__", self._player.maker.make)
        shown = await self._call("reset", self._environment.reset, self._episode.row, seed=self._episode.seed)
        first = checked_observation(shown)
        self._stop = first.stop
        if first.text is None:
            fed = array("i", self._episode.prompt).tolist()
        else:
            row = msgspec.structs.replace(self._episode.row, prompt=first.text, messages=())
            self._prompt = first.text
            with _in_tokens("reset"):
                fed = prompt_tokens(row, self._tokenizer, data=self._player.config.data)
        self._feed(fed)
        if not fed or self._room < 1:
            raise EpisodeFailed(
                f"`reset` of the environment: expected a prompt of 1 to {self._max_length - 1} tokens "
                f"(`generation.max_length`={self._max_length}), got {len(fed)}"
            )

    async def take_turn(self, policy: Policy) -> None:
        """Ask the model, then the environment."""
        completion = await (self._demonstrated() if self._episode.demonstrate else self._asked(policy))
        sampled = array("i", completion.tokens).tolist()
        self._turns.append(Turn(array("i", self._fed).tobytes(), completion))
        self._context += sampled
        self._fed = []
        ended = completion.finish is Finish.EOS
        action = self._tokenizer.text_of_completion(sampled, ended=ended)
        self._text += action
        assert self._environment is not None
        step = checked_step(await self._call("step", self._environment.step, action))
        self._rewards.append(step.reward)
        self._note(step.info)
        if step.done:
            assert completion.finish is not None
            self.finish = completion.finish
            return
        with _in_tokens("step"):
            observed = observation_tokens(
                step.observation,
                self._tokenizer,
                chat=self._chat,
                ended_by=sampled[-1] if ended else None,
            )
        self._feed(observed)
        if self._room < 1 or len(self._turns) == self._rollout.max_turns:
            self.finish = Finish.LENGTH
        else:
            self._text += f"⟨{step.observation}⟩"

    async def _asked(self, policy: Policy) -> Completion:
        return await policy.complete(
            self._context,
            turn=len(self._turns),
            max_new_tokens=min(self._episode.sampling.max_new_tokens, self._room),
            stop=self._stop,
        )

    async def _demonstrated(self) -> Completion:
        environment = cast(DemonstratingEnvironment, self._environment)
        action = await self._call("demonstrate", environment.demonstrate)
        if not isinstance(action, str) or not action:
            raise EpisodeFailed(f"`demonstrate` of the environment: expected text, got {action!r:.200}")
        with _in_tokens("demonstrate"):
            ids = self._tokenizer.encode(action)
        stopped = action.endswith(self._stop) if self._stop else False
        end = [] if stopped else [self._tokenizer.eos_token_id]
        return demonstrated_completion([*ids, *end], finish=Finish.STOP if stopped else Finish.EOS)

    def record(self) -> EpisodeRecord:
        assert self.finish is not None
        success = sum(self._rewards) >= 1.0 if self._success is None else self._success
        return EpisodeRecord(
            self._episode.id,
            tuple(self._turns),
            tuple(self._rewards),
            self.finish,
            success,
            components=self._sums | {"turns": float(len(self._turns))},
            prompt=self._prompt,
            text=self._text,
            seconds=self._seconds,
        )

    async def close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            await self._call("close", environment.close)

    async def abandon(self) -> None:
        """It has failed already; what `close` says to that changes nothing."""
        try:
            await self.close()
        except (EpisodeFailed, UserError):
            return

    async def _call(self, what: str, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        since = time.monotonic()
        try:
            return await self._player.call(what, function, *given, **named)
        finally:
            self._seconds += time.monotonic() - since

    def _feed(self, ids: list[int]) -> None:
        self._fed += ids
        self._context += ids

    def _note(self, info: Mapping[str, Any]) -> None:
        for name, value in info.items():
            if name == "success":
                self._success = bool(self._success) or bool(value)
            elif (number := finite_number(value)) is not None:
                self._sums[name] = self._sums.get(name, 0.0) + number

    @property
    def _max_length(self) -> int:
        return self._player.config.generation.max_length

    @property
    def _room(self) -> int:
        return self._max_length - len(self._context)


@contextmanager
def _in_tokens(what: str) -> Iterator[None]:
    """Text that the model has no tokens for is the mistake of the environment that said it."""
    try:
        yield
    except UserError as error:
        raise EpisodeFailed(f"`{what}` of the environment: {error}") from error


def checked_observation(value: Any) -> Observation:
    """What `reset` may return."""
    if value is None:
        return Observation()
    if isinstance(value, str):
        return Observation(text=value)
    try:
        return msgspec.convert(
            value, Observation, strict=True, from_attributes=isinstance(value, Observation)
        )
    except msgspec.ValidationError as error:
        raise EpisodeFailed(
            f"`reset` of the environment: expected text, an `Observation` or None, got {value!r:.200}: {error}"
        ) from error


def checked_step(value: Any) -> Step:
    """What `step` may return; a reward of NaN is none.

    >>> checked_step(("408", 0, False, {}))
    Step(observation='408', reward=0.0, done=False, info={})
    """
    if isinstance(value, Step):
        value = msgspec.structs.astuple(value)
    if not isinstance(value, tuple) or len(value) != 4:
        raise EpisodeFailed(
            "`step` of the environment: expected a `Step` or a tuple (observation, reward, done, info), "
            f"got {value!r:.200}"
        )
    observation, reward, done, info = value
    number = finite_number(reward)
    for holds, expected, got in (
        (isinstance(observation, str), "text as its observation", observation),
        (number is not None, "a finite number as its reward", reward),
        (done in (True, False), "True or False as `done`", done),
        (isinstance(info, Mapping), "a dict as its `info`", info),
    ):
        if not holds:
            raise EpisodeFailed(f"`step` of the environment: expected {expected}, got {got!r:.200}")
    assert number is not None
    return Step(observation, number, bool(done), dict(info))


def row_record(episode: Episode, tokenizer: Tokenizer) -> EpisodeRecord:
    """A demonstration where nobody shows how it is done: one turn, which the row's completion says."""
    text = episode.row.columns[COMPLETION]
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
    turn = Turn(episode.prompt, demonstrated_completion(ids, finish=Finish.EOS))
    return EpisodeRecord(episode.id, (turn,), (0.0,), Finish.EOS, False, prompt=episode.row.prompt, text=text)
