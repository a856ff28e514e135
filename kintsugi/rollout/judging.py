"""The worker's side of its reward process: what it has been asked, how long that may take, and who replaces it.

A group's time counts from when its functions begin. One that takes too long, or during which the process dies, has
failed this attempt; a new process is executed, and whatever only waited is handed to that one. A group that has failed
before is judged alone, so that in the end only the guilty one is blamed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from kintsugi.config import Config
from kintsugi.errors import ConfigError, DataError, DeadlineExceeded
from kintsugi.rollout.judge import (
    Begun,
    Case,
    Failed,
    FromJudge,
    Judged,
    Opening,
    Ready,
    Refused,
    attempt_send,
    receive,
)
from kintsugi.runtime import SYSTEM_CLOCK, Child, Clock, Processes, SystemProcesses, describe_status, wait

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from kintsugi.rollout.judge import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
MOST_AT_ONCE = 64
"""Cases in the process; more wait here."""
GRACE_S = 0.5
"""Beyond the limit, for the process to say by itself that an `async def` function reached it."""
END_S = 5.0
MOST_STARTS = 3
"""In a row that end before the functions are imported."""


class Loop(Protocol):
    """Where a descriptor is watched for something to read."""

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None: ...

    def unwatch(self, descriptor: int) -> None: ...


class Asked(msgspec.Struct):
    """A case that has no verdict yet."""

    case: Case
    alone: bool
    begun_at: float = math.inf


class Judging:
    """Hands cases to the reward process; `take` gives verdicts."""

    def __init__(
        self,
        config: Config,
        *,
        loop: Loop,
        note: Callable[[str], None],
        processes: Processes | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        rollout = config.rollout
        self._opening = Opening(config.algorithm.reward, rollout.reward_timeout_s, rollout.allow_unsandboxed)
        self._loop, self._note, self._clock = loop, note, clock
        self._processes = processes or SystemProcesses()
        self._start_timeout_s = config.cluster.start_timeout_s
        self._waiting: deque[Asked] = deque()
        self._sent: dict[int, Asked] = {}
        self._verdicts: list[Judged | Failed] = []
        self._starts = 0
        self._is_ready = False
        self._started_at = self._heard_at = math.inf
        self._connection: socket.socket
        self._child: Child | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return None if self._child is None else self._child.pid

    def prepare(self) -> None:
        """Something will be submitted soon: have the process import its functions meanwhile."""
        if self._child is None:
            self._start()

    def submit(self, case: Case, *, alone: bool = False) -> None:
        """Ask for a verdict. DataError if a column is nothing that can be handed to another process."""
        try:
            msgspec.msgpack.encode(case.columns)
        except (TypeError, OverflowError) as error:
            raise DataError(
                f"the columns of prompt {case.prompt[:40]!r} can not be given to a reward: {error}"
            ) from error
        self.prepare()
        self._waiting.append(Asked(case, alone))
        self._send_more()

    def take(self, now: float) -> list[Judged | Failed]:
        """Verdicts since the last call, after what is overdue has been ended. ConfigError: there will be none."""
        late = [asked for asked in self._sent.values() if now >= self._until(asked)]
        if late:
            self._replace(self._too_long(), blamed=late)
        elif not self._is_ready and now >= self._started_at + self._start_timeout_s:
            raise ConfigError(
                f"`algorithm.reward`: importing {', '.join(self._opening.rewards)} took longer than "
                f"`cluster.start_timeout_s`={self._start_timeout_s:g}"
            )
        self._send_more()
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def next_deadline(self) -> float:
        """When `take` has something to do though nothing has come."""
        if not self._sent:
            return math.inf
        if not self._is_ready:
            return self._started_at + self._start_timeout_s
        return min(map(self._until, self._sent.values()))

    def close(self) -> None:
        """End the process; what was not judged never will be."""
        self._waiting.clear()
        self._sent.clear()
        self._end()

    def _until(self, asked: Asked) -> float:
        """A process that begins nothing, though it has something to begin, is stuck as well."""
        limit_s = self._opening.timeout_s + GRACE_S
        if math.isfinite(asked.begun_at):
            return asked.begun_at + limit_s
        is_due = self._is_ready and not any(math.isfinite(other.begun_at) for other in self._sent.values())
        return self._heard_at + limit_s if is_due else math.inf

    def _too_long(self) -> str:
        return f"the reward took longer than `rollout.reward_timeout_s`={self._opening.timeout_s:g} s"

    def _send_more(self) -> None:
        while self._waiting and len(self._sent) < MOST_AT_ONCE:
            first = self._waiting[0]
            if self._sent and (first.alone or any(asked.alone for asked in self._sent.values())):
                return
            try:
                if not attempt_send(self._connection, first.case):
                    return
            except ConnectionError:  # Its end is about to be seen.
                return
            self._heard_at = self._clock.monotonic()
            self._sent[first.case.id] = self._waiting.popleft()

    def _start(self) -> None:
        self._starts += 1
        self._is_ready = False
        self._started_at = self._heard_at = self._clock.monotonic()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        attempt_send(self._connection, self._opening)
        with theirs:
            self._child = self._processes.spawn(
                [
                    sys.executable,
                    "-c",
                    _PROGRAM,
                    json.dumps(sys.path),
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=(theirs.fileno(),),
                new_session=True,
            )
        self._loop.watch(self._connection.fileno(), self._heard)

    def _heard(self) -> None:
        self._heard_at = self._clock.monotonic()
        content = receive(self._connection)
        if content is None:
            self._gone()
            return
        match msgspec.msgpack.decode(content, type=FromJudge):
            case Ready():
                self._is_ready, self._starts = True, 0
            case Refused(message):
                raise ConfigError(message)
            case Begun(id):
                self._sent[id].begun_at = self._heard_at
            case Judged() | Failed() as verdict:
                del self._sent[verdict.id]
                self._verdicts.append(verdict)
        self._send_more()

    def _gone(self) -> None:
        """It has died by itself: whoever was being judged may be the reason."""
        assert self._child is not None
        try:
            self._wait_ended(self._child)
            reason = f"the reward process {describe_status(self._child.status())}"
        except DeadlineExceeded:
            reason = "the reward process closed its connection to the worker"
        if not self._is_ready and self._starts >= MOST_STARTS:
            raise ConfigError(
                f"`algorithm.reward`: {reason} while it imported {', '.join(self._opening.rewards)}, "
                f"{MOST_STARTS} times in a row"
            )
        begun = [asked for asked in self._sent.values() if math.isfinite(asked.begun_at)]
        self._replace(reason, blamed=begun)

    def _replace(self, reason: str, *, blamed: list[Asked]) -> None:
        """Another process; the blamed cases have failed, the others are asked of it in their order."""
        self._note(f"{reason}; it is replaced")
        self._end()
        guilty = {asked.case.id for asked in blamed}
        self._verdicts += [Failed(id, reason) for id in guilty]
        for id, asked in reversed(self._sent.items()):
            if id not in guilty:
                asked.begun_at = math.inf
                self._waiting.appendleft(asked)
        self._sent.clear()
        self._start()

    def _end(self) -> None:
        if self._child is None:
            return
        self._loop.unwatch(self._connection.fileno())
        self._connection.close()
        self._child.send_signal(signal.SIGKILL)
        self._wait_ended(self._child)
        self._child.status()
        self._child.close()
        self._child = None

    def _wait_ended(self, child: Child) -> None:
        """And end what it had started; while its remains are there, the number of its group is nobody else's."""
        poller = select.poll()
        poller.register(child.pidfd, select.POLLIN)
        wait(
            lambda remaining_s: poller.poll(remaining_s * 1000) or None,
            whom="reward process",
            what="its exit",
            timeout_s=END_S,
        )
        if child.is_ours():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
