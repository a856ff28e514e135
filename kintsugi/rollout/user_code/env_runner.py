"""Episodes in environments: the model's text is an action, the observation is appended to its context, until done.

`async def` methods are awaited; synchronous ones run in threads, so that a blocking one does not delay other episodes.
Each call has the time limit `rollout.turn_timeout_s`. Every mistake of the user's code is an `EpisodeFailed` that names
the call and the mistake.
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
from typing import Any, TypeVar, cast

import msgspec

from kintsugi.config.schema import Config
from kintsugi.data.columns import COMPLETION
from kintsugi.data.tokenized import prompt_tokens
from kintsugi.errors import UserError
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.rollout.environments.protocol import (
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
from kintsugi.rollout.environments.registry import EnvironmentMaker, find_environment
from kintsugi.rollout.rewards.spec import finite_number
from kintsugi.rollout.trajectory import demonstrated_completion
from kintsugi.rollout.user_code.failures import TRACEBACKS, described
from kintsugi.rollout.user_code.observation_tokens import observation_tokens
from kintsugi.types import Completion, FinishReason

_Checked = TypeVar("_Checked")
_MOST_THREADS = 32
"""Synchronous methods that run concurrently; the time of one that waits for a thread does not count yet."""
_LONGEST_TOKEN = 256
"""Upper bound of a token's length in characters; in all vocabularies we know it is half of that."""


def open_player(config: Config, tokenizer: Tokenizer) -> Player:
    """Open the runner for `rollout.environment`; ConfigError if it cannot be used."""
    assert config.rollout.environment is not None
    found = find_environment(config.rollout)
    if isinstance(found, EnvironmentMaker):
        return EnvironmentRunner(found, config=config, tokenizer=tokenizer)
    # Imported here: agent programs need an HTTP server, environments do not.
    from kintsugi.rollout.user_code.agent_runner import AgentRunner

    return AgentRunner(found, config=config, tokenizer=tokenizer)


class EnvironmentRunner:
    """Runs the episodes of one class of environments."""

    def __init__(self, maker: EnvironmentMaker, *, config: Config, tokenizer: Tokenizer) -> None:
        self.maker = maker
        self.config = config
        self.tokenizer = tokenizer
        self._timeout_s = config.rollout.turn_timeout_s
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="environment")
        self._free = asyncio.Semaphore(_MOST_THREADS)

    async def play(self, episode: Episode, policy: Policy) -> EpisodeRecord:
        if episode.demonstrate and not self.maker.demonstrates:
            return row_record(episode, self.tokenizer)
        play = _Play(self, episode, policy)
        try:
            await play.begin()
            while play.finish is None:
                await play.take_turn()
        except BaseException:
            await play.abandon()
            raise
        await play.close()
        return play.record()

    async def close(self) -> None:
        """Stop the thread pool without waiting; threads that still run end with the process."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def call(
        self, what: str, function: Callable[[], Any], *, check: Callable[[Any], _Checked]
    ) -> _Checked:
        """Call a method of the user's environment and check its result. The check runs here too, because inspecting
        the user's objects runs their code. EpisodeFailed names the method and its mistake."""
        since = time.monotonic()
        try:
            if not inspect.iscoroutinefunction(function):
                return check(await self._call_in_thread(what, function))
            async with asyncio.timeout(self._timeout_s):
                return check(await function())
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
    TRACEBACKS.write(error)
    return EpisodeFailed(f"`{what}` of the environment raised {described(error)}")


def _attempted(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return a function's value or its exception. Not every exception can be raised in a coroutine: StopIteration
    would end it."""
    try:
        return function(), None
    except BaseException as error:  # noqa: BLE001 - the user's function may raise anything
        return None, error


class _Play:
    """State of one running episode."""

    def __init__(self, player: EnvironmentRunner, episode: Episode, policy: Policy) -> None:
        self._player = player
        self._episode = episode
        self._policy = policy
        self._tokenizer = player.tokenizer
        self._rollout = player.config.rollout
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
        self.finish: FinishReason | None = None

    async def begin(self) -> None:
        environment: Environment = await self._call("__init__", self._player.maker.make, check=_unchecked)
        self._environment = environment
        reset = partial(environment.reset, self._episode.row, seed=self._episode.seed)
        first = await self._call("reset", reset, check=checked_observation)
        self._stop = first.stop
        if first.text is None:
            fed = array("i", self._episode.prompt).tolist()
        else:
            row = msgspec.structs.replace(self._episode.row, prompt=self._bounded(first.text), messages=())
            self._prompt = first.text
            with _in_tokens("reset"):
                fed = prompt_tokens(row, self._tokenizer, data=self._player.config.data)
        self._feed(fed)
        if not fed or self._room < 1:
            raise EpisodeFailed(
                f"`reset` of the environment: expected a prompt of 1 to {self._max_length - 1} tokens "
                f"(`generation.max_length`={self._max_length}), got {len(fed)}"
            )

    async def take_turn(self) -> None:
        """Get an action from the model, then a step from the environment."""
        completion = await (self._demonstrated() if self._episode.demonstrate else self._sampled())
        sampled = array("i", completion.tokens).tolist()
        self._turns.append(Turn(array("i", self._fed).tobytes(), completion))
        self._context += sampled
        self._fed = []
        ended = completion.finish is FinishReason.EOS
        action = self._tokenizer.text_of_completion(sampled, ended=ended)
        self._text += action
        assert self._environment is not None
        step = await self._call("step", partial(self._environment.step, action), check=checked_step)
        self._rewards.append(step.reward)
        self._note(step.info)
        if step.done:
            assert completion.finish is not None
            self.finish = completion.finish
            return
        with _in_tokens("step"):
            observed = observation_tokens(
                self._bounded(step.observation),
                self._tokenizer,
                chat=self._chat,
                ended_by=sampled[-1] if ended else None,
            )
        self._feed(observed)
        if self._room < 1 or len(self._turns) == self._rollout.max_turns:
            self.finish = FinishReason.LENGTH
        else:
            self._text += f"⟨{step.observation}⟩"

    async def _sampled(self) -> Completion:
        return await self._policy.complete(
            self._context,
            turn=len(self._turns),
            max_new_tokens=min(self._episode.sampling.max_new_tokens, self._room),
            stop=self._stop,
        )

    async def _demonstrated(self) -> Completion:
        environment = cast(DemonstratingEnvironment, self._environment)
        action = await self._call("demonstrate", environment.demonstrate, check=checked_action)
        with _in_tokens("demonstrate"):
            ids = self._tokenizer.encode(action)
        stopped = action.endswith(self._stop) if self._stop else False
        end = [] if stopped else [self._tokenizer.eos_token_id]
        return demonstrated_completion(
            [*ids, *end], finish=FinishReason.STOP if stopped else FinishReason.EOS
        )

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
            await self._call("close", environment.close, check=_unchecked)

    async def abandon(self) -> None:
        """Close the environment of a failed episode; an error of `close` is ignored."""
        try:
            await self.close()
        except (EpisodeFailed, UserError):
            return

    async def _call(
        self, what: str, function: Callable[[], Any], *, check: Callable[[Any], _Checked]
    ) -> _Checked:
        since = time.monotonic()
        self._policy.working()
        try:
            return await self._player.call(what, function, check=check)
        finally:
            self._seconds += time.monotonic() - since

    def _feed(self, ids: list[int]) -> None:
        self._fed += ids
        self._context += ids

    def _bounded(self, text: str) -> str:
        """Cut a text to a length that is certainly too long for the context; encoding a huge text would take memory and
        time from other episodes."""
        return text[: (self._max_length + 1) * _LONGEST_TOKEN]

    def _note(self, info: Mapping[str, float]) -> None:
        for name, number in info.items():
            if name == "success":
                self._success = bool(self._success) or bool(number)
            else:
                self._sums[name] = self._sums.get(name, 0.0) + number

    @property
    def _max_length(self) -> int:
        return self._player.config.generation.max_length

    @property
    def _room(self) -> int:
        return self._max_length - len(self._context)


@contextmanager
def _in_tokens(what: str) -> Iterator[None]:
    """Turn text that cannot be encoded into a mistake of the environment that returned it."""
    try:
        yield
    except UserError as error:
        raise EpisodeFailed(f"`{what}` of the environment: {error}") from error


def checked_observation(value: Any) -> Observation:
    """Check the result of `reset`."""
    shown = Observation(text=value) if value is None or isinstance(value, str) else value
    text: Any = getattr(shown, "text", None)
    stop: Any = getattr(shown, "stop", None)
    if (
        not isinstance(shown, Observation)
        or not (text is None or _is_text(text))
        or not isinstance(stop, list | tuple)
        or not all(_is_text(each) and each for each in stop)
    ):
        raise EpisodeFailed(
            f"`reset` of the environment: expected text, an `Observation` or None, got {value!r:.200}"
        )
    return Observation(text=text, stop=tuple(stop))


def checked_step(value: Any) -> Step:
    """Check the result of `step`; a reward of NaN is refused. Only the numbers of its `info` are kept.

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
        (_is_text(observation), "text as its observation", observation),
        (number is not None, "a finite number as its reward", reward),
        (done in (True, False), "True or False as `done`", done),
        (isinstance(info, Mapping) and all(map(_is_text, info)), "a dict with names as its `info`", info),
    ):
        if not holds:
            raise EpisodeFailed(f"`step` of the environment: expected {expected}, got {got!r:.200}")
    assert number is not None
    numbers = {
        name: value
        for name, each in info.items()
        if (value := float(bool(each)) if name == "success" else finite_number(each)) is not None
    }
    return Step(observation, number, bool(done), numbers)


def checked_action(value: Any) -> str:
    """Check the result of `demonstrate`."""
    if not _is_text(value) or not value:
        raise EpisodeFailed(f"`demonstrate` of the environment: expected text, got {value!r:.200}")
    return str(value)


def _unchecked(value: Any) -> Any:
    return value


def _is_text(value: Any) -> bool:
    """Whether a value is text that can be encoded; half a surrogate pair cannot."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def row_record(episode: Episode, tokenizer: Tokenizer) -> EpisodeRecord:
    """Demonstration for an environment without `demonstrate`: one turn with the row's completion."""
    text = episode.row.columns[COMPLETION]
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
    turn = Turn(episode.prompt, demonstrated_completion(ids, finish=FinishReason.EOS))
    return EpisodeRecord(
        episode.id, (turn,), (0.0,), FinishReason.EOS, False, prompt=episode.row.prompt, text=text
    )
