"""Scoring of groups by the user's reward functions, in the user process (`main.py`).

Synchronous functions run in the main thread, one group after the other, so that libraries that use signals work.
`async def` functions are awaited in an event loop in another thread, many groups concurrently. The worker is notified
when a group starts, because its time limit counts from then.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import msgspec

from kintsugi.errors import DeadlineExceeded, UserError
from kintsugi.rollout.rewards.spec import RewardFailed, RewardSpec, arguments, checked, combined, failure
from kintsugi.rollout.user_code.channel import (
    FromUserCode,
    GroupScored,
    RewardCase,
    UserCodeFailed,
    UserCodeReady,
    WorkBegun,
    attempt_send,
    receive,
)
from kintsugi.runtime.waits import wait

_IDLE_S = 1.0


_Work = tuple[RewardCase, "asyncio.Future[dict[str, Any]] | None"]
"""A case for the synchronous functions, and the future for their results if there are asynchronous ones too."""


class RewardRunner:
    """Runs the reward functions: the event loop of the asynchronous ones, and the queue of the synchronous ones."""

    def __init__(
        self, connection: socket.socket, rewards: tuple[RewardSpec, ...], *, timeout_s: float
    ) -> None:
        self._connection = connection
        self._rewards = rewards
        self._timeout_s = timeout_s
        self._synchronous = tuple(reward for reward in rewards if not reward.is_async)
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()

    def run(self) -> None:
        """Score cases until the worker closes the connection. Consumes the queue that the event loop fills, and waits
        for nothing else."""
        Thread(target=self._run_loop, name="rewards", daemon=True).start()
        while True:
            try:
                work = wait(self._attempt, whom="rollout worker", what="a group", timeout_s=_IDLE_S)
            except DeadlineExceeded:
                continue
            if work[0] is None:
                return
            case, rest = work[0]
            self._send(WorkBegun(case.id))
            outcomes = {reward.name: call(reward, case) for reward in self._synchronous}
            if os.getpid() != self._pid:
                os._exit(0)  # A copy that a function forked and that returned: only the original answers.
            if rest is not None:
                self._loop.call_soon_threadsafe(rest.set_result, outcomes)
            else:
                # Sent before the next case starts, because that one may end this process.
                self._send(self._result(case, outcomes))

    def _attempt(self, remaining_s: float) -> tuple[_Work | None] | None:
        try:
            return (self._work.get(timeout=remaining_s),)
        except Empty:
            return None

    # The methods below run in the thread of the event loop.

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.add_reader(self._connection, self._take)
        self._send(UserCodeReady())
        self._loop.run_forever()

    def _take(self) -> None:
        content = receive(self._connection)
        if content is None:
            self._work.put(None)
            self._loop.stop()
            return
        case = msgspec.msgpack.decode(content, type=RewardCase)
        if len(self._synchronous) == len(self._rewards):
            self._work.put((case, None))
            return
        task = self._loop.create_task(self._score(case), name=f"case {case.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _score(self, case: RewardCase) -> None:
        synchronous: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        if self._synchronous:
            self._work.put((case, synchronous))
        else:
            self._send(WorkBegun(case.id))
            synchronous.set_result({})
        awaited = [reward for reward in self._rewards if reward.is_async]
        answers = await asyncio.gather(*(self._call_async(reward, case) for reward in awaited))
        outcomes = {
            **await synchronous,
            **{reward.name: answer for reward, answer in zip(awaited, answers, strict=True)},
        }
        self._send(self._result(case, outcomes))

    async def _call_async(
        self, reward: RewardSpec, case: RewardCase
    ) -> tuple[list[float | str] | Exception, float]:
        since = time.monotonic()
        count = len(case.completions)
        given = arguments(case.prompt, case.completions, case.columns)
        answer: list[float | str] | Exception
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = checked(reward.name, await reward.function(**given), count=count)
        except TimeoutError as error:
            is_ours = time.monotonic() - since >= self._timeout_s
            answer = too_long(reward.name, self._timeout_s) if is_ours else failure(reward.name, error)
        except (RewardFailed, UserError) as error:
            answer = error
        except BaseException as error:  # noqa: BLE001 - the user's function may raise anything, also what cancels
            answer = failure(reward.name, error)
        return answer, time.monotonic() - since

    def _result(self, case: RewardCase, outcomes: dict[str, Any]) -> GroupScored | UserCodeFailed:
        ordered = {reward.name: outcomes[reward.name] for reward in self._rewards}
        errors = [answer for answer, _ in ordered.values() if isinstance(answer, Exception)]
        if errors:
            first = next((error for error in errors if isinstance(error, UserError)), errors[0])
            return UserCodeFailed(case.id, str(first), type(first).__name__)
        values = {name: answer for name, (answer, _) in ordered.items()}
        components, reasons = combined(values, count=len(case.completions))
        return GroupScored(
            case.id, components, reasons, {name: taken for name, (_, taken) in ordered.items()}
        )

    def _send(self, body: FromUserCode) -> None:
        """Send a message. The worker reads continuously: if the socket stays full, it is about to kill this process."""
        wait(
            lambda remaining_s: attempt_send(self._connection, body, remaining_s=remaining_s) or None,
            whom="rollout worker",
            what="room for an answer",
            timeout_s=self._timeout_s,
        )


def too_long(name: str, limit_s: float) -> RewardFailed:
    return RewardFailed(f"reward '{name}' took longer than `rollout.reward_timeout_s`={limit_s:g} s")


def call(reward: RewardSpec, case: RewardCase) -> tuple[list[float | str] | Exception, float]:
    """Call a synchronous function on a case; return its rewards or its error, and the seconds it took."""
    since = time.monotonic()
    answer: list[float | str] | Exception
    try:
        given = arguments(case.prompt, case.completions, case.columns)
        answer = checked(reward.name, reward.function(**given), count=len(case.completions))
    except (RewardFailed, UserError) as error:
        answer = error
    except BaseException as error:  # noqa: BLE001 - the user's function may raise anything
        answer = failure(reward.name, error)
    return answer, time.monotonic() - since
