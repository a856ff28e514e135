"""The one seam to the machine: clock, randomness, disk, processes, and the one function that blocks.

Everything above takes these as arguments, so that the simulator runs the same code on virtual time, with a disk that
fails on demand. A process blocks only in `wait`, which records for whom, for what, since and until when:
heartbeats carry `WAITS.declared()` to the master, and no wait is unbounded.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Protocol, TypeVar

from kintsugi.errors import DeadlineExceeded
from kintsugi.types import Progress, Wait

T = TypeVar("T")


class Clock(Protocol):
    """Time as the process sees it: `monotonic` for durations and deadlines, `wall` for people."""

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class WorkingClock:
    """A clock on which time does not pass that this process did not work through: waiting for a full disk, stopped by a
    signal, on a host that was suspended. What others owe it is measured by this one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._skipped_s = 0.0

    def monotonic(self) -> float:
        return self._clock.monotonic() - self._skipped_s

    def wall(self) -> float:
        return self._clock.wall()

    def skip(self, seconds: float) -> None:
        self._skipped_s += max(0.0, seconds)


class VirtualClock:
    """Stands still until it is advanced: for the simulator and for tests of deadlines."""

    def __init__(self, *, start: float = 0.0, wall: float = 1_700_000_000.0) -> None:
        self._now = start
        self._wall_offset = wall - start

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._wall_offset

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, f"time does not run backwards: {seconds}"
        self._now += seconds


SYSTEM_CLOCK = SystemClock()


def random_stream(seed: int, *names: str | int) -> random.Random:
    """An independent stream per name, the same in every process and on every run.

    >>> random_stream(7, "shuffle", 0).random() == random_stream(7, "shuffle", 0).random()
    True
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in (seed, *names):
        text = f"{type(part).__name__}:{part}".encode()
        digest.update(len(text).to_bytes(4, "little") + text)
    return random.Random(int.from_bytes(digest.digest(), "little"))


class WaitTable:
    """What this process is waiting for right now, in all of its threads."""

    def __init__(self) -> None:
        # Single operations on a dict and a counter are atomic; a lock would cost every message two turns on it.
        self._waits: dict[int, Wait] = {}
        self._tokens = itertools.count()

    def begin(self, wait: Wait) -> int:
        token = next(self._tokens)
        self._waits[token] = wait
        return token

    def end(self, token: int) -> None:
        del self._waits[token]

    def declared(self) -> tuple[Wait, ...]:
        return tuple(self._waits.copy().values())


WAITS = WaitTable()


def wait(
    attempt: Callable[[float], T | None],
    *,
    whom: str,
    what: str,
    timeout_s: float,
    clock: Clock = SYSTEM_CLOCK,
    waits: WaitTable = WAITS,
) -> T:
    """Block until `attempt` gives a value; the only place where a process of ours stands still.

    `attempt(remaining_s)` blocks at most that long and returns None when nothing came. It is called at least once.
    At the deadline `DeadlineExceeded` names whom and what was waited for.
    """
    since = clock.monotonic()
    until = since + timeout_s
    token = waits.begin(Wait(whom, what, since, until))
    try:
        remaining_s = max(0.0, timeout_s)
        while True:
            value = attempt(remaining_s)
            if value is not None:
                return value
            now = clock.monotonic()
            remaining_s = until - now
            if remaining_s <= 0:
                raise DeadlineExceeded(whom=whom, what=what, waited_s=now - since)
    finally:
        waits.end(token)


class Counters:
    """Progress counters of this process. They only grow; which of them moved tells slow from stuck."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, int] = {}

    def add(self, name: str, amount: int = 1) -> None:
        assert amount >= 0, f"counter {name} only grows, got {amount}"
        with self._lock:
            self._values[name] = self._values.get(name, 0) + amount

    def snapshot(self) -> Progress:
        with self._lock:
            return Progress(dict(self._values))


COUNTERS = Counters()


class Idleness:
    """How much of its life this process had nothing to do; for people, who look for the bottleneck."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._since = clock.monotonic()
        self._idle_s = 0.0

    def begin(self) -> None:
        """Life begins: a process may have been forked from one that waited."""
        self._since, self._idle_s = self._clock.monotonic(), 0.0

    def add(self, seconds: float) -> None:
        self._idle_s += seconds

    def gauges(self) -> dict[str, float]:
        alive_s = self._clock.monotonic() - self._since
        return {"idle_s": round(self._idle_s, 3), "alive_s": round(alive_s, 3)}


IDLENESS = Idleness()


class Spans:
    """What took how long in this process. Recorded where somebody wants to know, which is in real processes only."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._record: Callable[[str, Mapping[str, object], float, float], None] | None = None

    def record_to(self, record: Callable[[str, Mapping[str, object], float, float], None] | None) -> None:
        """`record(name, attributes, since, until)` is called at the end of each, in the thread that ends it."""
        self._record = record

    def add(
        self, name: str, attributes: Mapping[str, object], *, since: float, until: float | None = None
    ) -> None:
        """From a monotonic time until now, unless another end is given; attributes that are None are left out. Nobody
        changes the attributes any more."""
        if self._record is not None:
            self._record(name, attributes, since, self._clock.monotonic() if until is None else until)


SPANS = Spans()


def describe_status(status: int | None) -> str:
    """`describe_status(-9) == "killed by SIGKILL"`."""
    if status is None:
        return "ended, status unknown"
    if status >= 0:
        return f"exited with code {status}"
    # Most real-time signals have no name.
    names = {each.value: each.name for each in signal.Signals}
    return f"killed by {names.get(-status, f'signal {-status}')}"


HELD_S = 0.25
"""Whether a debugger holds what has ended is asked so often by who waits for the end."""


class Child:
    """A process we started or adopted, held by pidfd: its end is an event, and its number can not be mistaken."""

    def __init__(self, *, pid: int, pidfd: int, popen: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self.pidfd = pidfd
        """Becomes readable when the process has ended, unless a debugger holds its remains."""
        self._popen = popen
        self._status: int | None = None

    def ended(self) -> bool:
        """Whether it has ended; does not block and does not take its status."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0)) or self.is_held()

    def is_held(self) -> bool:
        """Whether only its remains are there, and somebody who traces it does not let go of them. No thread of it will
        run again; but the kernel does not call that an end, and has no status for its parent until they are let go."""
        try:
            if _state(f"/proc/{self.pid}/stat") not in "ZX":
                return False
            threads = os.listdir(f"/proc/{self.pid}/task")
            return all(_state(f"/proc/{self.pid}/task/{thread}/stat") in "ZX" for thread in threads)
        except (FileNotFoundError, ProcessLookupError):
            return False

    def status(self) -> int | None:
        """Exit code, or minus the signal; None while it runs, for an adopted process that another parent reaps, and for
        one that is held."""
        if self._popen is not None:
            return self._popen.poll()
        if self._status is None:
            try:
                result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                return None
            if result is not None:
                by_itself = result.si_code == os.CLD_EXITED
                self._status = result.si_status if by_itself else -result.si_status
        return self._status

    def is_ours(self) -> bool:
        """Whether this process is its parent, whose it is to take its remains away."""
        try:
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def send_signal(self, number: int) -> None:
        """Signal exactly this process; one that has ended is left alone."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return

    def wait_ended(self, *, whom: str, timeout_s: float) -> int | None:
        """Block until it has ended and give its status; DeadlineExceeded if it does not end in time."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        wait(
            lambda remaining_s: poller.poll(min(remaining_s, HELD_S) * 1000) or self.is_held() or None,
            whom=whom,
            what="its exit",
            timeout_s=timeout_s,
        )
        return self.status()

    def close(self) -> None:
        """Let go of the descriptor; the process itself is not touched."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _state(path: str) -> str:
    with open(path, "rb", buffering=0) as file:
        return chr(file.read(512).rpartition(b")")[2][1])


class Processes(Protocol):
    """How processes come into being."""

    def spawn(
        self,
        argv: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        before_exec: Callable[[], None] | None = None,
        new_session: bool = False,
    ) -> Child: ...

    def adopt(self, pid: int) -> Child: ...


class SystemProcesses:
    """Real processes of this machine."""

    def spawn(
        self,
        argv: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        before_exec: Callable[[], None] | None = None,
        new_session: bool = False,
    ) -> Child:
        """Start `argv`; standard input is empty, only `pass_fds` are inherited. `before_exec` runs in the child."""
        popen = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=None if environment is None else dict(environment),
            pass_fds=tuple(pass_fds),
            preexec_fn=before_exec,  # noqa: PLW1509 - who passes one has a single thread
            start_new_session=new_session,
        )
        return Child(pid=popen.pid, pidfd=os.pidfd_open(popen.pid), popen=popen)

    def adopt(self, pid: int) -> Child:
        """Hold a process that somebody else started; raises ProcessLookupError when it is gone."""
        return Child(pid=pid, pidfd=os.pidfd_open(pid))
