"""The worker's side of the process in which the user's code runs (`user_code.py`): what it has been asked, how long
that may take, and who replaces it.

A group's time counts from when its reward functions begin. An episode keeps its own time; but a process that owes the
next word of an episode, and says nothing at all for as long as the user's code may take, is stuck. What takes too long,
or what the process dies of, has failed this attempt; a new process is executed, and the others are handed to that one.
Where several may have been the reason, each is tried alone, so that in the end only the guilty one is blamed.
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

from kintsugi.config import Config
from kintsugi.errors import ConfigError, DataError, DeadlineExceeded
from kintsugi.rollout.channel import (
    Answered,
    Begun,
    Case,
    Ended,
    Failed,
    FromUserCode,
    FromWorker,
    Judged,
    Opening,
    Ready,
    Refused,
    Wanted,
    attempt_send,
    receive,
)
from kintsugi.rollout.environment import Episode, EpisodeRecord
from kintsugi.runtime import SYSTEM_CLOCK, Child, Clock, Processes, SystemProcesses, describe_status, wait

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from kintsugi.rollout.user_code import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
MOST_CASES, MOST_EPISODES = 64, 1024
"""In the process at once; more wait here."""
MOST_HEARD = 64
GRACE_S = 0.5
"""Beyond the limit, for the process to say by itself what has reached it."""
EXIT_S = 1.0
"""For the process to be gone after it has closed its connection."""
END_S = 2.0
"""For a killed one to be gone; both together are less than the worker may be silent for."""
MOST_STARTS = 3
"""In a row that end before the user's code is imported."""


class Loop(Protocol):
    """Where a descriptor is watched for something to read."""

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None: ...

    def unwatch(self, descriptor: int) -> None: ...


class Asked(msgspec.Struct):
    """A case or an episode that has not ended yet."""

    body: Case | Episode
    alone: bool
    begun_at: float = math.inf
    """When the user's code began, of a case; of an episode, when it was handed over, answered by the model or begun
    with the next call."""
    num_wanted: int = 0
    """What an episode has asked of the model and was not answered."""

    @property
    def is_theirs(self) -> bool:
        """Whether the process is to say the next word, with the user's code."""
        return math.isfinite(self.begun_at) and self.num_wanted == 0


class UserProcess:
    """Hands cases and episodes to the process; `take` gives what it says."""

    def __init__(
        self,
        config: Config,
        *,
        loop: Loop,
        note: Callable[[str], None],
        processes: Processes | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._config, self._loop, self._note, self._clock = config, loop, note, clock
        self._processes = processes or SystemProcesses()
        self._kind = _kind_of(config)
        self._waiting: deque[Asked] = deque()
        self._sent: dict[int, Asked] = {}
        self._wanted: dict[int, tuple[Asked, int]] = {}
        """Who asked the model, and under which number of its process; by a number of ours, which is unique over all of
        them: a late answer to a process that is gone must not reach another."""
        self._numbers = itertools.count()
        self._answers: deque[Answered] = deque()
        self._said: list[Ended | Wanted] = []
        self._starts = 0
        self._unexplained = 0
        """Deaths in a row at which nobody's code was running, without anything that ended in between."""
        self._leaving: list[Child] = []
        """Killed, but not gone yet."""
        self._is_ready = False
        self._started_at = self._heard_at = math.inf
        self._connection: socket.socket
        self._child: Child | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return None if self._child is None else self._child.pid

    @property
    def name(self) -> str:
        """What it is called where somebody waits for it."""
        return self._kind.name

    @property
    def is_asked(self) -> bool:
        """Whether anything is expected of it."""
        return bool(self._waiting or self._sent or self._said)

    def prepare(self) -> None:
        """Something will be submitted soon: have the process import the user's code meanwhile."""
        if self._child is None:
            self._start()

    def submit(self, body: Case | Episode, *, alone: bool = False) -> None:
        """Ask for an outcome. DataError if a column is nothing that can be handed to another process."""
        prompt, columns = (
            (body.prompt, body.columns) if isinstance(body, Case) else (body.row.prompt, body.row.columns)
        )
        try:
            msgspec.msgpack.encode(columns)
        except (TypeError, OverflowError, RecursionError, UnicodeEncodeError) as error:
            raise DataError(
                f"the columns of prompt {prompt[:40]!r} can not be given to {self._kind.code}: {error}"
            ) from error
        self.prepare()
        self._waiting.append(Asked(body, alone))
        self._send_more()

    def answer(self, answer: Answered) -> None:
        """What the model said to a `Wanted`; of a process that is gone, nobody wants to know."""
        if answer.id not in self._wanted:
            return
        asked, number = self._wanted.pop(answer.id)
        asked.num_wanted -= 1
        asked.begun_at = self._clock.monotonic()
        self._answers.append(msgspec.structs.replace(answer, id=number))
        self._send_more()

    def take(self, now: float) -> list[Ended | Wanted]:
        """What was said since the last call, after what is overdue has been ended. ConfigError: there will be
        nothing."""
        self._bury()
        late = [asked for asked in self._sent.values() if now >= self._until(asked)]
        if late:
            self._replace(self._too_long(), blamed=late)
        elif not self._is_ready and now >= self._started_at + self._config.cluster.start_timeout_s:
            raise ConfigError(
                f"`{self._kind.field}`: importing {self._kind.paths} took longer than "
                f"`cluster.start_timeout_s`={self._config.cluster.start_timeout_s:g}"
            )
        self._send_more()
        said, self._said = self._said, []
        return said

    def next_deadline(self) -> float:
        """When `take` has something to do though nothing has come."""
        if not self._sent:
            return math.inf
        if not self._is_ready:
            return self._started_at + self._config.cluster.start_timeout_s
        return min(map(self._until, self._sent.values()))

    def close(self) -> None:
        """End the process; what has not ended never will."""
        self._waiting.clear()
        self._sent.clear()
        self._end()

    def _until(self, asked: Asked) -> float:
        """A process that begins nothing, though it has something to begin, is stuck as well."""
        limit_s = self._kind.limit_s + GRACE_S
        if isinstance(asked.body, Episode):
            return (
                max(asked.begun_at, self._heard_at) + limit_s
                if self._is_ready and asked.is_theirs
                else math.inf
            )
        if math.isfinite(asked.begun_at):
            return asked.begun_at + limit_s
        is_due = self._is_ready and not any(math.isfinite(other.begun_at) for other in self._sent.values())
        return self._heard_at + limit_s if is_due else math.inf

    def _too_long(self) -> str:
        return f"{self._kind.code} took longer than `rollout.{self._kind.limit}`={self._kind.limit_s:g} s"

    def _send_more(self) -> None:
        while self._answers and self._attempt_send(self._answers[0]):
            self._answers.popleft()
        while self._waiting and len(self._sent) < self._kind.most_at_once:
            first = self._waiting[0]
            if self._sent and (first.alone or any(asked.alone for asked in self._sent.values())):
                return
            if not self._attempt_send(first.body):
                return
            self._heard_at = self._clock.monotonic()
            if isinstance(first.body, Episode):
                first.begun_at = self._heard_at
            self._sent[first.body.id] = self._waiting.popleft()

    def _attempt_send(self, body: FromWorker) -> bool:
        try:
            return attempt_send(self._connection, body)
        except ConnectionError:  # Its end is about to be seen.
            return False

    def _start(self) -> None:
        self._starts += 1
        self._is_ready = False
        self._started_at = self._heard_at = self._clock.monotonic()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        attempt_send(self._connection, Opening(self._config))
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
        """Take in what was said, up to a bound: the endpoint has others to listen to."""
        self._heard_at = self._clock.monotonic()
        connection = self._connection
        for _ in range(MOST_HEARD):
            try:
                content = receive(connection)
            except BlockingIOError:
                break
            if content is None:
                self._gone()
                return
            self._take_in(content)
            if self._connection is not connection:  # It was replaced.
                return
        self._send_more()

    def _take_in(self, content: bytes) -> None:
        try:
            message = msgspec.msgpack.decode(content, type=FromUserCode)
        except msgspec.DecodeError as error:  # The user's code can write to our socket.
            self._replace(
                f"the {self._kind.name} said what can not be understood: {error}", blamed=self._theirs()
            )
            return
        match message:
            case Ready():
                self._is_ready, self._starts = True, 0
            case Refused(message):
                raise ConfigError(message)
            case Begun(id):
                self._sent[id].begun_at = self._heard_at
            case Wanted() as wanted:
                asked, number = self._sent[wanted.episode], next(self._numbers)
                asked.num_wanted += 1
                self._wanted[number] = (asked, wanted.id)
                self._said.append(msgspec.structs.replace(wanted, id=number))
            case Judged() | EpisodeRecord() | Failed() as outcome:
                self._end_of(outcome)

    def _end_of(self, outcome: Ended) -> None:
        ended = self._sent.pop(outcome.id)
        self._unexplained = 0
        if ended.num_wanted:  # An agent program that did not wait for what it asked.
            self._wanted = {number: each for number, each in self._wanted.items() if each[0] is not ended}
        self._said.append(outcome)
        if isinstance(outcome, Failed) and outcome.hangs:
            self._replace(outcome.message, blamed=[])

    def _gone(self) -> None:
        """It has died by itself: whoever's code was running may be the reason. If that was nobody's, again and again,
        it may be what the code of an episode does behind everybody's back."""
        assert self._child is not None
        try:
            self._wait_ended(self._child, timeout_s=EXIT_S)
            _end_started_by(self._child)
            reason = f"the {self._kind.name} {describe_status(self._child.status())}"
        except DeadlineExceeded:
            reason = f"the {self._kind.name} closed its connection to the worker"
        if not self._is_ready and self._starts >= MOST_STARTS:
            raise ConfigError(
                f"`{self._kind.field}`: {reason} while it imported {self._kind.paths}, "
                f"{MOST_STARTS} times in a row"
            )
        blamed = self._theirs()
        self._unexplained = 0 if blamed else self._unexplained + 1
        if self._unexplained >= MOST_STARTS:
            blamed = [asked for asked in self._sent.values() if isinstance(asked.body, Episode)]
        self._replace(reason, blamed=blamed)

    def _theirs(self) -> list[Asked]:
        return [asked for asked in self._sent.values() if asked.is_theirs]

    def _replace(self, reason: str, *, blamed: list[Asked]) -> None:
        """Another process; the blamed have failed, the others are asked of it in their order. Of several episodes one
        is guilty, and nobody knows which: each is played alone."""
        self._note(f"{reason}; it is replaced")
        self._end()
        suspects = {asked.body.id for asked in blamed}
        are_episodes = len(blamed) > 1 and all(isinstance(asked.body, Episode) for asked in blamed)
        guilty = set() if are_episodes else suspects
        self._said = [said for said in self._said if not isinstance(said, Wanted)]
        self._said += [Failed(id, reason) for id in sorted(guilty)]
        for id, asked in reversed(self._sent.items()):
            if id not in guilty:
                alone = asked.alone or id in suspects
                self._waiting.appendleft(Asked(asked.body, alone))
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
        _end_started_by(child)
        self._leaving.append(child)
        try:
            self._wait_ended(child, timeout_s=END_S)
        except DeadlineExceeded:  # It frees much memory, or waits for a device; it can do nothing any more.
            self._note(f"the {self._kind.name} {child.pid} was killed and is not gone yet")
        self._bury()

    def _bury(self) -> None:
        """Take away the remains of those that are gone."""
        for child in [each for each in self._leaving if each.ended()]:
            child.status()
            child.close()
            self._leaving.remove(child)

    def _wait_ended(self, child: Child, *, timeout_s: float) -> None:
        poller = select.poll()
        poller.register(child.pidfd, select.POLLIN)
        wait(
            lambda remaining_s: poller.poll(remaining_s * 1000) or None,
            whom=self._kind.name,
            what="its exit",
            timeout_s=timeout_s,
        )


def _end_started_by(child: Child) -> None:
    """As long as its remains are there, the number of its group is nobody else's."""
    if child.is_ours():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


class _Kind(msgspec.Struct, frozen=True):
    """How a process is spoken of, and what it may take."""

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
