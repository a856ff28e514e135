"""Real runs through the command line, as a user starts them, and what can be asked of one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import msgspec
import pytest

from kintsugi.control.protocol import Began
from kintsugi.journal.facts import Fact, ProcessJoined
from kintsugi.journal.inputs import read_inputs
from kintsugi.journal.journal import read_facts
from kintsugi.lab.testbed.process_tags import carriers
from kintsugi.run_folder.reader import Launcher, read_journal, read_summary
from kintsugi.run_folder.summary import Summary
from kintsugi.telemetry.events import ProcessBegan, read_events
from kintsugi.types import Peer

RECIPE = Path(__file__).with_name("recipe.yaml")
PROGRAMS = Path(__file__).with_name("programs")
LAST_STEP = 7
LONGEST_S = 60.0
"""A run takes about four seconds; this only bounds a broken one."""


def until(condition: Callable[[], object], what: str, *, timeout_s: float = LONGEST_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.005)


def in_use_elsewhere(names: set[str]) -> set[str]:
    """Files of /dev/shm that a living process has mapped or open. Once a run has ended, they are of other programs."""
    found: set[str] = set()
    for process in Path("/proc").iterdir() if names else ():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            mapped = (process / "maps").read_text(errors="replace")
            opened = [os.readlink(descriptor) for descriptor in (process / "fd").iterdir()]
            found |= {name for name in names if f"/dev/shm/{name}" in mapped or f"/dev/shm/{name}" in opened}
    return found


class Run:
    """One run folder and the command that runs it. Every process of it inherits a mark, by which it is found."""

    longest_s = LONGEST_S
    """More for a run of many processes."""

    def __init__(self, run_dir: Path, *, program: str = "kintsugi") -> None:
        self.run_dir = run_dir
        self._program = program
        self.gates = run_dir.with_suffix(".gates")
        self.gates.mkdir()
        self.launcher: subprocess.Popen[str] | None = None
        self.environment: dict[str, str] = {}
        """More of it, for the commands."""
        self.output: int | IO[str] = subprocess.PIPE
        """Standard output of the commands."""
        self._commands: list[subprocess.Popen[str]] = []
        self._mark = uuid4().hex
        self._shared_memory = set(os.listdir("/dev/shm"))

    # The command line.

    def command(self, *arguments: str) -> subprocess.Popen[str]:
        return self._start([sys.executable, "-m", self._program, *arguments])

    def shell(self, line: str) -> subprocess.Popen[str]:
        """A line of a shell, as a user types it."""
        return self._start(["sh", "-c", line])

    def _start(self, argv: list[str]) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "COLUMNS": "200",
            "PYTHONPATH": os.pathsep.join([str(PROGRAMS), os.environ.get("PYTHONPATH", "")]),
            "KINTSUGI_TEST_MARK": self._mark,
            "KINTSUGI_TEST_PARENT": str(os.getpid()),
            "KINTSUGI_TEST_RUN": str(self.run_dir),
            **self.environment,
        }
        process = subprocess.Popen(
            argv,
            env=environment,
            cwd=self.run_dir.parent,
            stdout=self.output,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._commands.append(process)
        return process

    def ask(self, *arguments: str) -> tuple[int, str]:
        """Another command to its end: its exit code, and all that it wrote."""
        process = self.command(*arguments)
        output, errors = process.communicate(timeout=LONGEST_S)
        return process.returncode, output + errors

    def start(self, *overrides: str, gates: tuple[int, ...] = ()) -> subprocess.Popen[str]:
        """`kintsugi train`; the run will stand still after each step of `gates` until it is let through."""
        for step in gates:
            (self.gates / str(step)).touch()
        self.launcher = self.command("train", str(RECIPE), f"run_dir={self.run_dir}", *overrides)
        return self.launcher

    def resume(self) -> tuple[int, str]:
        self.launcher = self.command("resume", str(self.run_dir))
        return self.end()

    def end(self) -> tuple[int, str]:
        """Wait for the end: exit code, and what it complained about."""
        assert self.launcher is not None
        _, errors = self.launcher.communicate(timeout=self.longest_s)
        return self.launcher.returncode, errors

    def finish(self) -> None:
        """Wait for a good end that leaves nothing behind."""
        code, errors = self.end()
        assert code == 0, errors
        self.assert_nothing_left()

    # Standing at a step, with everything alive.

    def wait_at(self, step: int) -> None:
        reached, launcher = self.gates / f"{step}.reached", self.launcher
        assert launcher is not None
        until(
            lambda: reached.exists() or launcher.poll() is not None,
            f"step {step} of {self.run_dir}",
            timeout_s=self.longest_s,
        )
        assert launcher.poll() is None, launcher.communicate()[1]

    def let_through(self, step: int) -> None:
        (self.gates / str(step)).unlink()

    def kill(self, process: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal a process of the run, which must be alive."""
        pid = read_journal(self.run_dir).processes.get(process)
        if process == "master-0":
            began = [record.event for record in read_events(self.run_dir, process=process)]
            pid = [event.pid for event in began if isinstance(event, ProcessBegan)][-1]
        assert pid in self.pids(), f"{process} with pid {pid} is not among {self.pids()}"
        os.kill(pid, number)

    def launchers(self) -> tuple[int, int]:
        """Pids of the launcher and its standby, as the run folder has them; 0 for one that does not run."""
        try:
            record = msgspec.json.decode((self.run_dir / "launcher.json").read_bytes(), type=Launcher)
        except FileNotFoundError:
            return 0, 0
        alive = self.pids()
        launcher, standby = (pid if pid in alive else 0 for pid in (record.pid, record.standby_pid))
        return launcher, standby

    def launcher_pair(self, *, other_than: tuple[int, ...] = ()) -> tuple[int, int]:
        """Wait for a launcher and a standby that are none of these processes; return their pids."""
        until(lambda: all(pid and pid not in other_than for pid in self.launchers()), "launcher and standby")
        return self.launchers()

    def kill_launchers(self) -> None:
        """Kill launcher and standby at the same moment; without them the run ends."""
        for pid in self.launcher_pair():
            os.kill(pid, signal.SIGKILL)

    def wait_for_line(self, text: str, *, file: str) -> None:
        path = self.run_dir / file
        until(lambda: path.exists() and text in path.read_text(), f"{text!r} in {path}")

    # What it left.

    @property
    def summary(self) -> Summary:
        summary = read_summary(self.run_dir)
        assert summary is not None
        return summary

    @property
    def facts(self) -> tuple[Fact, ...]:
        return read_facts(self.run_dir / "journal")

    def lines(self, file: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / file).read_text().splitlines()]

    def pids_joined(self) -> dict[str, list[int]]:
        """Process → pid of each of its incarnations."""
        joined: dict[str, list[int]] = {}
        for fact in self.facts:
            if isinstance(fact, ProcessJoined):
                joined.setdefault(fact.peer.process, []).append(fact.pid)
        return joined

    def peers_joined(self) -> list[Peer]:
        """Everybody who registered, every incarnation."""
        return [fact.peer for fact in self.facts if isinstance(fact, ProcessJoined)]

    def pids(self) -> dict[int, str]:
        """Every living process of this run, with its command line."""
        found = {}
        for pid in carriers(self._mark):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def assert_nothing_left(self, *, timeout_s: float = 0.0) -> None:
        """At once after an end that we saw; within a bounded time when whoever would clean up was killed."""
        until(lambda: not self.pids(), f"the end of {self.pids()}", timeout_s=timeout_s)
        left = set(os.listdir("/dev/shm")) - self._shared_memory
        left -= in_use_elsewhere(left)
        assert not left, f"left in shared memory: {left}"
        inputs = self.run_dir / "inputs"
        began = [record.event for record in read_inputs(inputs)] if inputs.exists() else []
        jobs = [e.job for e in began if isinstance(e, Began)]

        def is_closed() -> bool:
            sockets = Path("/proc/net/unix").read_text()
            return not any(f"kintsugi-{job}" in sockets for job in jobs)

        until(is_closed, "the end of its sockets", timeout_s=timeout_s)
        assert not [path for path in self.run_dir.rglob("*") if path.is_socket() or path.is_fifo()]

    def close(self) -> None:
        """End what a failed test left, and every command's pipes."""
        while pids := self.pids():
            kill_all(pids)
        for process in self._commands:
            with process:
                process.wait(timeout=LONGEST_S)


def kill_all(pids: Iterable[int]) -> None:
    """Kill processes, some of which may end by themselves once those before them are dead."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def play(
    scenarios: Mapping[str, Callable[[Run], None]], folder: Path, *, at_once: int = 3
) -> dict[str, Run | BaseException]:
    """Play each scenario on a run of its own, several at a time since they often wait; a failed one gives its error."""

    def one(name: str) -> Run | BaseException:
        run = Run(folder / name.replace(" ", "-"))
        try:
            scenarios[name](run)
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            return error
        finally:
            run.close()
        return run

    with ThreadPoolExecutor(max_workers=at_once) as pool:
        return dict(zip(scenarios, pool.map(one, scenarios), strict=True))


def play_selected(
    scenarios: Mapping[str, Callable[[Run], None]],
    request: pytest.FixtureRequest,
    folder: Path,
    *,
    at_once: int = 3,
) -> Callable[[str], Run]:
    """Play those scenarios together that the selected tests of a module have as their parameter `name`: two groups, one
    after the other, would both wait for their slowest run. Others are played when they are asked for. Returns what
    gives the run of a scenario, or raises its error."""

    items = [item for item in request.session.items if item.path == request.path]
    named = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    chosen = {name: scenario for name, scenario in scenarios.items() if name in named}
    played = play(chosen, folder, at_once=at_once)

    def run_of(name: str) -> Run:
        if name not in played:
            played.update(play({name: scenarios[name]}, folder))
        return finished(played[name])

    return run_of


def finished(run: Run | BaseException) -> Run:
    """The run of a scenario that went through."""
    if isinstance(run, BaseException):
        raise AssertionError(str(run)) from run
    return run
