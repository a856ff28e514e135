"""Judges groups by the user's reward functions, in the process beside a rollout worker (`user_code.py`).

Ordinary functions run one group after the other in the main thread, where libraries that use signals work. `async def`
functions are awaited in an event loop beside it, many groups at once. The worker is told when a group begins, because
its time counts from then.
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
from kintsugi.rollout.channel import Begun, Case, Failed, FromUserCode, Judged, Ready, attempt_send, receive
from kintsugi.rollout.scoring import Reward, RewardFailed, arguments, checked, combined, failure
from kintsugi.runtime import wait

_IDLE_S = 1.0


_Work = tuple[Case, "asyncio.Future[dict[str, Any]] | None"]
"""A case for the ordinary functions, and where to put what they say if it is not all that there is to say."""


class Judge:
    """The functions, the loop of the asynchronous ones, and the work of the others."""

    def __init__(self, connection: socket.socket, rewards: tuple[Reward, ...], *, timeout_s: float) -> None:
        self._connection, self._rewards, self._timeout_s = connection, rewards, timeout_s
        self._ordinary = tuple(reward for reward in rewards if not reward.is_async)
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()

    def run(self) -> None:
        """Until the worker is gone. Consumes what the loop hands over; waits for the next piece only."""
        Thread(target=self._run_loop, name="rewards", daemon=True).start()
        while True:
            try:
                work = wait(self._attempt, whom="rollout worker", what="a group", timeout_s=_IDLE_S)
            except DeadlineExceeded:
                continue
            if work[0] is None:
                return
            case, rest = work[0]
            self._say(Begun(case.id))
            outcomes = {reward.name: call(reward, case) for reward in self._ordinary}
            if os.getpid() != self._pid:
                os._exit(0)  # A copy that a function forked and let return: one of them answers.
            if rest is not None:
                self._loop.call_soon_threadsafe(rest.set_result, outcomes)
            else:
                # Said before the next one begins, which may be the end of this process.
                self._say(self._verdict(case, outcomes))

    def _attempt(self, remaining_s: float) -> tuple[_Work | None] | None:
        try:
            return (self._work.get(timeout=remaining_s),)
        except Empty:
            return None

    # In the loop's thread.

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.add_reader(self._connection, self._take)
        self._say(Ready())
        self._loop.run_forever()

    def _take(self) -> None:
        content = receive(self._connection)
        if content is None:
            self._work.put(None)
            self._loop.stop()
            return
        case = msgspec.msgpack.decode(content, type=Case)
        if len(self._ordinary) == len(self._rewards):
            self._work.put((case, None))
            return
        task = self._loop.create_task(self._judge(case), name=f"case {case.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _judge(self, case: Case) -> None:
        ordinary: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        if self._ordinary:
            self._work.put((case, ordinary))
        else:
            self._say(Begun(case.id))
            ordinary.set_result({})
        awaited = [reward for reward in self._rewards if reward.is_async]
        answers = await asyncio.gather(*(self._call_async(reward, case) for reward in awaited))
        outcomes = {
            **await ordinary,
            **{reward.name: answer for reward, answer in zip(awaited, answers, strict=True)},
        }
        self._say(self._verdict(case, outcomes))

    async def _call_async(self, reward: Reward, case: Case) -> tuple[list[float | str] | Exception, float]:
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

    def _verdict(self, case: Case, outcomes: dict[str, Any]) -> Judged | Failed:
        ordered = {reward.name: outcomes[reward.name] for reward in self._rewards}
        errors = [answer for answer, _ in ordered.values() if isinstance(answer, Exception)]
        if errors:
            first = next((error for error in errors if isinstance(error, UserError)), errors[0])
            return Failed(case.id, str(first), type(first).__name__)
        values = {name: answer for name, (answer, _) in ordered.items()}
        components, reasons = combined(values, count=len(case.completions))
        return Judged(case.id, components, reasons, {name: taken for name, (_, taken) in ordered.items()})

    def _say(self, body: FromUserCode) -> None:
        """The worker reads all the time: where there is no room for a word, it is about to kill this process."""
        wait(
            lambda remaining_s: attempt_send(self._connection, body, remaining_s=remaining_s) or None,
            whom="rollout worker",
            what="room for an answer",
            timeout_s=self._timeout_s,
        )


def too_long(name: str, limit_s: float) -> RewardFailed:
    return RewardFailed(f"reward '{name}' took longer than `rollout.reward_timeout_s`={limit_s:g} s")


def call(reward: Reward, case: Case) -> tuple[list[float | str] | Exception, float]:
    """What an ordinary function says to a case, or why it says nothing; and the seconds it took."""
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
