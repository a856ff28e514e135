"""Episodes of agent programs: functions that use the model over HTTP with an OpenAI client.

    async def solve(row, *, base_url, api_key, model) -> float:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        …
        return 1.0 if right else 0.0

`async def` functions run in the event loop, many concurrently; synchronous ones in a thread each. A program may work
for `rollout.turn_timeout_s` without waiting for the model, and may send `rollout.max_turns` requests. Every mistake of
the program is an `EpisodeFailed` that describes it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from threading import Thread
from typing import Any

from kintsugi.config.schema import Config
from kintsugi.data.columns import COMPLETION
from kintsugi.errors import DataError, UserError
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.openai_api.requests import ApiLimits
from kintsugi.rollout.environments.protocol import (
    Episode,
    EpisodeFailed,
    EpisodeHangs,
    EpisodeRecord,
    Policy,
    Turn,
)
from kintsugi.rollout.rewards.spec import checked
from kintsugi.rollout.trajectory import demonstrated_completion
from kintsugi.rollout.user_code.failures import TRACEBACKS, described
from kintsugi.rollout.user_code.openai_endpoint import HOST, AgentSession, EndpointLimits, OpenAIEndpoint
from kintsugi.rollout.user_code.token_capture import CapturedReply, TokenCapture
from kintsugi.types import Completion, FinishReason, Row

REPLIES = "replies"
"""Column with the model's replies in a demonstration, one per request; by default the row's completion is the only one.
"""

Agent = Callable[..., Any]


class AgentRunner:
    """Runs the episodes of one agent program."""

    def __init__(self, agent: Agent, *, config: Config, tokenizer: Tokenizer) -> None:
        self._agent = agent
        self._tokenizer = tokenizer
        self._name = getattr(agent, "__name__", type(agent).__name__)
        self._rollout = config.rollout
        self._limits = ApiLimits(
            config.name, vocab_size=tokenizer.vocab_size, max_length=config.generation.max_length
        )
        self._endpoint = OpenAIEndpoint(tokenizer)
        self._starting: asyncio.Task[None] | None = None

    async def play(self, episode: Episode, policy: Policy) -> EpisodeRecord:
        """Run an episode; in a demonstration the policy returns the replies of the row."""
        if episode.demonstrate:
            policy = _Demonstrator(episode.row, self._tokenizer)
        await self._started()
        timeout = _WorkTimeout(self._rollout.turn_timeout_s)
        bounds = EndpointLimits(
            self._limits,
            max_new_tokens=episode.sampling.max_new_tokens,
            max_requests=self._rollout.max_turns,
        )
        capture = TokenCapture(self._tokenizer)
        session = AgentSession(
            episode.id, capture, policy, bounds, timeout, asyncio.get_running_loop().create_future()
        )
        value = await self._returned(episode, session, timeout)
        reward = 0.0 if episode.demonstrate else self._reward(value)
        return self._record(episode, session, reward, seconds=timeout.spent_s)

    async def close(self) -> None:
        await self._endpoint.close()

    async def _started(self) -> None:
        """Start the endpoint with the first episode; later ones wait until it listens."""
        if self._starting is None:
            _reach_directly(HOST)
            self._starting = asyncio.get_running_loop().create_task(self._endpoint.start(), name="endpoint")
        await asyncio.shield(self._starting)

    async def _returned(self, episode: Episode, session: AgentSession, work_timeout: _WorkTimeout) -> Any:
        """Run the program and return its value, or raise when one of its requests failed or its time is over. After a
        failed request a thread gets the same time again to end; a thread that does not is reported as hanging."""
        base_url = self._endpoint.open(session)
        call = partial(
            self._agent,
            episode.row,
            base_url=base_url,
            api_key=session.api_key,
            model=self._limits.model,
            **self._rollout.options,
        )
        program = _Program(call, session, is_async=_is_async(self._agent))
        try:
            async with work_timeout.running():
                value, raised = await session.outcome
        except TimeoutError as error:
            raise self._late(program) from error
        except EpisodeFailed:
            self._endpoint.end(session)
            if not await program.ends_within(self._rollout.turn_timeout_s):
                raise self._late(program) from None
            raise
        finally:
            self._endpoint.end(session)
            program.cancel()
        if isinstance(raised, UserError):
            raise raised
        if raised is not None:
            TRACEBACKS.write(raised)
            raise EpisodeFailed(
                f"agent `{self._name}` raised {described(raised)}{_refused(session)}"
            ) from raised
        return value

    def _late(self, program: _Program) -> EpisodeFailed:
        limit_s = self._rollout.turn_timeout_s
        reason = f"agent `{self._name}` did not ask or end for `rollout.turn_timeout_s`={limit_s:g} s"
        return EpisodeFailed(reason) if program.can_be_interrupted else EpisodeHangs(reason)

    def _record(
        self, episode: Episode, session: AgentSession, reward: float, *, seconds: float
    ) -> EpisodeRecord:
        last = session.capture.longest()
        if last is None:
            what = "returned without a token sampled from the model"
            raise EpisodeFailed(f"agent `{self._name}` {what}{_refused(session)}")
        assert last.completion.finish is not None, "the worker refuses what was cut short"
        turns = last.turns()
        return EpisodeRecord(
            episode.id,
            turns,
            (0.0,) * (len(turns) - 1) + (reward,),
            FinishReason.LENGTH if session.is_cut_off else last.completion.finish,
            reward >= 1.0,
            components=_metrics(session, last, num_turns=len(turns)),
            prompt=self._tokenizer.decode(_ids(turns[0].fed), skip_special=False),
            text=self._text(turns),
            seconds=seconds,
        )

    def _reward(self, value: Any) -> float:
        if inspect.isawaitable(value):
            if inspect.iscoroutine(value):
                value.close()
            raise EpisodeFailed(f"agent `{self._name}` gave something to await; make it `async def`")
        (number,) = checked(self._name, [value], count=1)
        if isinstance(number, str):
            raise EpisodeFailed(
                f"agent `{self._name}`: expected a finite number as its reward, got {value!r:.200}"
            )
        return number

    def _text(self, turns: tuple[Turn, ...]) -> str:
        """Text of the episode: the model's replies and, in brackets, the input between them."""
        inputs = [self._tokenizer.decode(_ids(turn.fed), skip_special=False) for turn in turns[1:]]
        replies = [
            self._tokenizer.text_of_completion(
                _ids(turn.completion.tokens), ended=turn.completion.finish is FinishReason.EOS
            )
            for turn in turns
        ]
        rest = zip(inputs, replies[1:], strict=True)
        return replies[0] + "".join(f"⟨{given}⟩{reply}" for given, reply in rest)


class _WorkTimeout:
    """Time limit of a program between two requests: its clock stops while the program waits for the model."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._timeout: asyncio.Timeout | None = None
        self._working_since: float | None = None
        self.spent_s = 0.0
        """Total time that the program has worked."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Enforce the limit within the block; raises TimeoutError."""
        async with asyncio.timeout(None) as self._timeout:
            self.resume()
            try:
                yield
            finally:
                self.pause()
                self._timeout = None

    def pause(self) -> None:
        if self._timeout is None or self._working_since is None:
            return
        self.spent_s += asyncio.get_running_loop().time() - self._working_since
        self._working_since = None
        if not self._timeout.expired():
            self._timeout.reschedule(None)

    def resume(self) -> None:
        if self._timeout is None or self._timeout.expired():
            return
        self._working_since = asyncio.get_running_loop().time()
        self._timeout.reschedule(self._working_since + self._limit_s)


class _Program:
    """A running call of the agent; its result becomes the session's outcome."""

    def __init__(self, call: Callable[[], Any], session: AgentSession, *, is_async: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._session = session
        self.can_be_interrupted = is_async
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._task: asyncio.Task[None] | None = None
        if is_async:
            self._task = self._loop.create_task(self._await(call), name=f"agent {session.id}")
        else:
            Thread(target=self._call, args=(call,), name=f"agent {session.id}", daemon=True).start()

    def cancel(self) -> None:
        """Cancel a task. A thread cannot be interrupted; its later requests are refused."""
        if self._task is not None:
            self._task.cancel()

    async def _await(self, call: Callable[[], Any]) -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = await call(), None
        except BaseException as error:  # noqa: BLE001 - the user's function may raise anything, also what cancels
            outcome = None, error
        self._settle(outcome)

    def _call(self, call: Callable[[], Any]) -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = call(), None
        except BaseException as error:  # noqa: BLE001 - the user's function may raise anything
            outcome = None, error
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._settle, outcome)

    async def ends_within(self, timeout_s: float) -> bool:
        """Whether the program ends in time; one that can be cancelled always does."""
        if self.can_be_interrupted:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended
        except TimeoutError:
            return False
        return True

    def _settle(self, outcome: tuple[Any, BaseException | None]) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
        if not self._session.outcome.done():
            self._session.outcome.set_result(outcome)


class _Demonstrator:
    """Policy that returns the replies of a row."""

    def __init__(self, row: Row, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._replies = row.columns.get(REPLIES) or [row.columns[COMPLETION]]
        if not isinstance(self._replies, list) or not all(isinstance(each, str) for each in self._replies):
            raise DataError(f"expected a list of texts in the column `{REPLIES}`, got {self._replies!r:.80}")
        self._num_given = 0

    async def complete(
        self,
        prompt: Sequence[int],
        *,
        turn: int,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        temperature: float | None = None,
    ) -> Completion:
        if self._num_given == len(self._replies):
            raise DataError(
                f"expected a demonstration of as many replies as the agent asks for, got {self._num_given}"
            )
        reply = self._replies[self._num_given]
        self._num_given += 1
        ends = [place + len(each) for each in stop if (place := reply.find(each)) >= 0]
        if ends and min(ends) < len(reply):
            raise DataError(f"reply {reply!r:.80} goes on after the text at which the agent stops the model")
        ids = self._tokenizer.encode(reply)
        if not ends:
            ids.append(self._tokenizer.eos_token_id)
        if len(ids) > max_new_tokens:
            raise DataError(f"reply {reply!r:.80} has {len(ids)} tokens, the agent asks for {max_new_tokens}")
        return demonstrated_completion(ids, finish=FinishReason.STOP if ends else FinishReason.EOS)

    def working(self) -> None:
        pass


def _is_async(agent: Agent) -> bool:
    call = getattr(agent, "__call__", None)  # noqa: B004 - an object's own `async def __call__`
    return inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(call)


def _metrics(session: AgentSession, last: CapturedReply, *, num_turns: int) -> dict[str, float]:
    """Metrics of an episode in addition to its reward."""
    capture = session.capture
    return {
        "turns": float(num_turns),
        "branches": float(capture.num_branches),
        "untrained_tokens": float(capture.num_sampled - last.num_sampled),
        "refused_requests": float(session.num_refused),
    }


def _refused(session: AgentSession) -> str:
    """Describe the last refused request of the program, which is often why it failed."""
    last = session.last_refusal
    if last is None:
        return ""
    return f"; its last refused request: {last.code or last.status.value}: {last.message:.300}"


def _ids(content: bytes) -> list[int]:
    ids: list[int] = memoryview(content).cast("i").tolist()
    return ids


def _reach_directly(host: str) -> None:
    """Exclude a host from the proxies that HTTP clients take from the environment."""
    for name in ("NO_PROXY", "no_proxy"):
        known = list(filter(None, os.environ.get(name, "").split(",")))
        os.environ[name] = ",".join(known if host in known else [*known, host])
