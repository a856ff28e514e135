"""The worker's side of the user process (`main.py`): pending work, time limits, and replacement of the process.

The time limit of a group counts from the start of its reward functions. An episode enforces its own limits; but a
process that owes the next message of an episode, and sends nothing at all for that long, is stuck. Work that takes too
long, or that was executing when the process died, has failed this attempt; a new process is started and gets all other
work. If several episodes may be the cause, each is retried alone, so that in the end only the failing one is blamed.
"""

from __future__ import annotations

import contextlib
import itertools
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

from kintsugi.config.schema import Config
from kintsugi.errors import ConfigError, DataError, DeadlineExceeded, ProcessDied
from kintsugi.rollout.environments.protocol import Episode, EpisodeRecord
from kintsugi.rollout.user_code.channel import (
    Ended,
    FromUserCode,
    FromWorker,
    GenerationAnswered,
    GenerationWanted,
    GroupScored,
    OpenUserCode,
    RewardCase,
    UserCodeFailed,
    UserCodeReady,
    UserCodeRefused,
    WorkBegun,
    attempt_send,
    receive,
)
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.processes import Child, Processes, SystemProcesses, describe_status
from kintsugi.runtime.waits import wait

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from kintsugi.rollout.user_code.main import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
MOST_CASES, MOST_EPISODES = 64, 1024
"""Limits of concurrent work in the process; more waits in a queue."""
MOST_RECEIVED = 64
"""Messages handled in one iteration of the worker's loop."""
GRACE_S = 0.5
"""Time beyond the limit in which the process can report the timeout itself."""
EXIT_S = 1.0
"""Time for the process to exit after it has closed its connection."""
END_S = 2.0
"""Time for a killed process to exit; with `EXIT_S` less than the heartbeat timeout of the worker."""
MOST_STARTS = 3
"""Consecutive processes that may end before the user's code is imported."""


class UserCodeLoop(Protocol):
    """Event loop that watches descriptors for input."""

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None: ...

    def unwatch(self, descriptor: int) -> None: ...


class PendingWork(msgspec.Struct):
    """A case or an episode that has not ended."""

    body: RewardCase | Episode
    alone: bool
    begun_at: float = math.inf
    """Start of the user's code of a case; for an episode the latest of its submission, an answer of the model, and the
    start of a call."""
    num_wanted: int = 0
    """Requests of an episode to the model that are not answered."""

    @property
    def is_executing(self) -> bool:
        """Whether the user's code is executing, and the process owes the next message."""
        return math.isfinite(self.begun_at) and self.num_wanted == 0


class UserProcess:
    """Sends cases and episodes to the process; `take` returns its messages."""

    def __init__(
        self,
        config: Config,
        *,
        loop: UserCodeLoop,
        note: Callable[[str], None],
        processes: Processes | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._config = config
        self._loop = loop
        self._note = note
        self._clock = clock
        self._processes = processes or SystemProcesses()
        self._kind = _kind_of(config)
        self._waiting: deque[PendingWork] = deque()
        self._sent: dict[int, PendingWork] = {}
        self._wanted: dict[int, tuple[PendingWork, int]] = {}
        """Episode and request id of each request to the model, by an id of ours that is unique over all processes: a
        late answer for an ended process must not reach its successor."""
        self._numbers = itertools.count()
        self._answers: deque[GenerationAnswered] = deque()
        self._messages: list[Ended | GenerationWanted] = []
        self._starts = 0
        self._unexplained = 0
        """Consecutive deaths at which no user code was executing, without any finished work in between."""
        self._exiting: list[Child] = []
        """Killed processes that have not exited yet."""
        self._is_ready = False
        self._started_at = self._received_at = math.inf
        self._connection: socket.socket
        self._child: Child | None = None

    @property
    def pid(self) -> int | None:
        """Pid of the process, if there is one."""
        return None if self._child is None else self._child.pid

    @property
    def name(self) -> str:
        """Name of the process in declared waits."""
        return self._kind.name

    @property
    def is_busy(self) -> bool:
        """Whether work or messages are pending."""
        return bool(self._waiting or self._sent or self._messages)

    def prepare(self) -> None:
        """Start the process, so that it imports the user's code before work is submitted."""
        if self._child is None:
            self._start()

    def submit(self, body: RewardCase | Episode, *, alone: bool = False) -> None:
        """Submit work; `alone` keeps other work out of the process. DataError if a column cannot be serialized."""
        prompt, columns = (
            (body.prompt, body.columns)
            if isinstance(body, RewardCase)
            else (body.row.prompt, body.row.columns)
        )
        try:
            msgspec.msgpack.encode(columns)
        except (TypeError, OverflowError, RecursionError, UnicodeEncodeError) as error:
            raise DataError(
                f"the columns of prompt {prompt[:40]!r} can not be given to {self._kind.code}: {error}"
            ) from error
        self.prepare()
        self._waiting.append(PendingWork(body, alone))
        self._send_more()

    def answer(self, answer: GenerationAnswered) -> None:
        """Send the answer to a `GenerationWanted`; one for an ended process is dropped."""
        if answer.id not in self._wanted:
            return
        work, number = self._wanted.pop(answer.id)
        work.num_wanted -= 1
        work.begun_at = self._clock.monotonic()
        self._answers.append(msgspec.structs.replace(answer, id=number))
        self._send_more()

    def take(self, now: float) -> list[Ended | GenerationWanted]:
        """End overdue work and return the messages since the last call. ConfigError: the user's code cannot be run."""
        self._reap()
        late = self._overdue(now)
        if late and self._has_message():
            # The worker itself did not run meanwhile: one call kept it, or its host was busy.
            self._receive()
            late = self._overdue(now)
        if late:
            self._replace(self._too_long(), blamed=late)
        elif not self._is_ready and now >= self._started_at + self._config.cluster.start_timeout_s:
            raise ConfigError(
                f"`{self._kind.field}`: importing {self._kind.paths} took longer than "
                f"`cluster.start_timeout_s`={self._config.cluster.start_timeout_s:g}"
            )
        self._send_more()
        messages, self._messages = self._messages, []
        return messages

    def next_deadline(self) -> float:
        """Time at which `take` has to be called even without messages."""
        if not self._sent:
            return math.inf
        if not self._is_ready:
            return self._started_at + self._config.cluster.start_timeout_s
        return min(map(self._deadline, self._sent.values()))

    def close(self) -> None:
        """End the process and drop all pending work."""
        self._waiting.clear()
        self._sent.clear()
        self._end()

    def _overdue(self, now: float) -> list[PendingWork]:
        return [work for work in self._sent.values() if now >= self._deadline(work)]

    def _has_message(self) -> bool:
        """Whether a message of the process has arrived that is not handled yet."""
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        return bool(poller.poll(0))

    def _deadline(self, work: PendingWork) -> float:
        """Deadline of pending work; also for a process that has work but does not start it."""
        limit_s = self._kind.limit_s + GRACE_S
        if isinstance(work.body, Episode):
            return (
                max(work.begun_at, self._received_at) + limit_s
                if self._is_ready and work.is_executing
                else math.inf
            )
        if math.isfinite(work.begun_at):
            return work.begun_at + limit_s
        is_due = self._is_ready and not any(math.isfinite(other.begun_at) for other in self._sent.values())
        return self._received_at + limit_s if is_due else math.inf

    def _too_long(self) -> str:
        return f"{self._kind.code} took longer than `rollout.{self._kind.limit}`={self._kind.limit_s:g} s"

    def _send_more(self) -> None:
        while self._answers and self._attempt_send(self._answers[0]):
            self._answers.popleft()
        while self._waiting and len(self._sent) < self._kind.most_at_once:
            first = self._waiting[0]
            if self._sent and (first.alone or any(work.alone for work in self._sent.values())):
                return
            if not self._attempt_send(first.body):
                return
            self._received_at = self._clock.monotonic()
            if isinstance(first.body, Episode):
                first.begun_at = self._received_at
            self._sent[first.body.id] = self._waiting.popleft()

    def _attempt_send(self, body: FromWorker) -> bool:
        try:
            return attempt_send(self._connection, body)
        except ConnectionError:  # `_receive` is about to see the end of the process.
            return False

    def _start(self) -> None:
        self._starts += 1
        self._is_ready = False
        self._started_at = self._received_at = self._clock.monotonic()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        attempt_send(self._connection, OpenUserCode(self._config))
        with theirs:
            self._child = self._processes.spawn(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    _PROGRAM,
                    json.dumps(sys.path),
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=(theirs.fileno(),),
                new_session=True,
            )
        self._loop.watch(self._connection.fileno(), self._receive)

    def _receive(self) -> None:
        """Handle received messages, up to a bound, so that the worker's loop stays responsive."""
        self._received_at = self._clock.monotonic()
        connection = self._connection
        for _ in range(MOST_RECEIVED):
            try:
                content = receive(connection)
            except BlockingIOError:
                break
            if content is None:
                self._on_closed()
                return
            self._handle(content)
            if self._connection is not connection:  # The process was replaced.
                return
        self._send_more()

    def _handle(self, content: bytes) -> None:
        try:
            message = msgspec.msgpack.decode(content, type=FromUserCode)
        except msgspec.DecodeError as error:  # The user's code can write to our socket.
            self._replace(
                f"the {self._kind.name} sent a message that cannot be decoded: {error}",
                blamed=self._executing(),
            )
            return
        match message:
            case UserCodeReady():
                self._is_ready = True
                self._starts = 0
            case UserCodeRefused(message):
                raise ConfigError(message)
            case WorkBegun(id):
                self._sent[id].begun_at = self._received_at
            case GenerationWanted() as wanted:
                work, number = self._sent[wanted.episode], next(self._numbers)
                work.num_wanted += 1
                self._wanted[number] = (work, wanted.id)
                self._messages.append(msgspec.structs.replace(wanted, id=number))
            case GroupScored() | EpisodeRecord() | UserCodeFailed() as outcome:
                self._take_outcome(outcome)

    def _take_outcome(self, outcome: Ended) -> None:
        ended = self._sent.pop(outcome.id)
        self._unexplained = 0
        if ended.num_wanted:  # An agent program that did not wait for its requests.
            self._wanted = {number: each for number, each in self._wanted.items() if each[0] is not ended}
        self._messages.append(outcome)
        if isinstance(outcome, UserCodeFailed) and outcome.hangs:
            self._replace(outcome.message, blamed=[])

    def _on_closed(self) -> None:
        """Replace a process that died. Blame the work that was executing; after `MOST_STARTS` deaths with none
        executing, blame all episodes, because their background threads may be the cause."""
        assert self._child is not None
        try:
            self._wait_ended(self._child, timeout_s=EXIT_S)
            _kill_process_group(self._child)
            reason = f"the {self._kind.name} {describe_status(self._child.status())}"
        except DeadlineExceeded:
            reason = f"the {self._kind.name} closed its connection to the worker"
        if not self._is_ready and self._starts >= MOST_STARTS:
            raise ConfigError(
                f"`{self._kind.field}`: {reason} while it imported {self._kind.paths}, "
                f"{MOST_STARTS} times in a row"
            )
        blamed = self._executing()
        self._unexplained = 0 if blamed else self._unexplained + 1
        if self._unexplained >= MOST_STARTS:
            blamed = [work for work in self._sent.values() if isinstance(work.body, Episode)]
        self._replace(reason, blamed=blamed)

    def _executing(self) -> list[PendingWork]:
        return [work for work in self._sent.values() if work.is_executing]

    def _replace(self, reason: str, *, blamed: list[PendingWork]) -> None:
        """Start another process. Blamed work has failed; all other work is submitted again in its order. If several
        episodes are blamed, the cause is unknown, and each is run alone."""
        self._note(f"{reason}; it is replaced")
        self._end()
        suspects = {work.body.id for work in blamed}
        are_episodes = len(blamed) > 1 and all(isinstance(work.body, Episode) for work in blamed)
        failed = set() if are_episodes else suspects
        self._messages = [each for each in self._messages if not isinstance(each, GenerationWanted)]
        self._messages += [UserCodeFailed(id, reason, ProcessDied.__name__) for id in sorted(failed)]
        for id, work in reversed(self._sent.items()):
            if id not in failed:
                alone = work.alone or id in suspects
                self._waiting.appendleft(PendingWork(work.body, alone))
        self._sent.clear()
        self._wanted.clear()
        self._answers.clear()
        self._start()

    def _end(self) -> None:
        if self._child is None:
            return
        child, self._child = self._child, None
        self._loop.unwatch(self._connection.fileno())
        self._connection.close()
        child.send_signal(signal.SIGKILL)
        _kill_process_group(child)
        self._exiting.append(child)
        try:
            self._wait_ended(child, timeout_s=END_S)
        except DeadlineExceeded:  # It frees much memory, or waits for a device; it runs no code any more.
            self._note(f"the {self._kind.name} {child.pid} was killed and is not gone yet")
        self._reap()

    def _reap(self) -> None:
        """Reap the killed processes that have exited."""
        for child in [each for each in self._exiting if each.ended()]:
            child.status()
            child.close()
            self._exiting.remove(child)

    def _wait_ended(self, child: Child, *, timeout_s: float) -> None:
        poller = select.poll()
        poller.register(child.pidfd, select.POLLIN)
        wait(
            lambda remaining_s: poller.poll(remaining_s * 1000) or None,
            whom=self._kind.name,
            what="its exit",
            timeout_s=timeout_s,
        )


def _kill_process_group(child: Child) -> None:
    """Kill the processes that the child started. Until the child is reaped, its process group id is not reused."""
    if child.is_ours():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


class _Kind(msgspec.Struct, frozen=True):
    """Names and limits of a kind of user process, for messages and deadlines."""

    name: str
    code: str
    field: str
    paths: str
    limit: str
    limit_s: float
    most_at_once: int


def _kind_of(config: Config) -> _Kind:
    rollout = config.rollout
    if rollout.environment is None:
        return _Kind(
            name="reward process",
            code="the reward",
            field="algorithm.reward",
            paths=", ".join(config.algorithm.reward),
            limit="reward_timeout_s",
            limit_s=rollout.reward_timeout_s,
            most_at_once=MOST_CASES,
        )
    return _Kind(
        name="environment process",
        code="the environment",
        field="rollout.environment",
        paths=rollout.environment,
        limit="turn_timeout_s",
        limit_s=rollout.turn_timeout_s,
        most_at_once=MOST_EPISODES,
    )
