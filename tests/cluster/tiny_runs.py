"""Runs of tiny programs: real launchers, agents and processes around a fake master (`programs/cluster_programs.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from kintsugi.config.schema import ClusterSection, Config
from kintsugi.lab.testbed.process_tags import carriers
from kintsugi.protocol.agents import StartProcess
from kintsugi.types import Placement, Role, role_of

PROGRAMS = Path(__file__).parent / "programs"


def until(condition: Callable[[], object], what: str, *, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.005)


class TinyRun:
    """One run of the fake master. Every process of it inherits a mark in its environment, by which it is found."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.mark = uuid4().hex
        self.shared_memory = set(os.listdir("/dev/shm"))
        self.launcher: subprocess.Popen[str] | None = None

    def start(
        self,
        *starts: StartProcess,
        hosts: int = 1,
        port: int = 0,
        start_timeout_s: float = 60.0,
        preload: tuple[str, ...] = (),
        programs: dict[Role, str] | None = None,
        spares: int = 0,
        exit_code: int | None = None,
        kill_itself: bool = False,
        supervised: bool = False,
    ) -> subprocess.Popen[str]:
        """Start a launcher; `supervised`: a command whose launcher runs in a session of its own, with a standby."""
        orders = {"starts": {"agent-0": starts}, "exit_code": exit_code, "kill_itself": kill_itself}
        if hosts == 2:
            orders["starts"] = {"agent-0": starts[:1], "agent-1": starts[1:]}
        entries = {Role.MASTER: "cluster_programs:master", Role.MODEL: "cluster_programs:idle"}
        entries |= {Role.ROLLOUT: "cluster_programs:parent_of_sleepers", **(programs or {})}
        table = {"entries": entries, "preload": preload, "forked": [Role.MODEL]}
        cluster = ClusterSection(hosts=hosts, port=port, start_timeout_s=start_timeout_s, spares=spares)
        config = Config(name="test", cluster=cluster)
        for name, content in (("orders", orders), ("programs", table), ("config", config)):
            (self.run_dir / f"{name}.json").write_bytes(msgspec.json.encode(content))
        path = os.pathsep.join([str(PROGRAMS), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "KINTSUGI_TEST_MARK": self.mark}
        self.launcher = subprocess.Popen(
            [
                sys.executable,
                str(PROGRAMS / "cluster_launcher.py"),
                str(self.run_dir),
                *["supervised"][:supervised],
            ],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self.launcher

    def start_and_wait(self, *starts: StartProcess, **options: Any) -> subprocess.Popen[str]:
        launcher = self.start(*starts, **options)
        until(
            lambda: ["complete"] in self.happened() or launcher.poll() is not None, "the run to be complete"
        )
        assert launcher.poll() is None, launcher.communicate()[1]
        return launcher

    def happened(self) -> list[list[Any]]:
        path = self.run_dir / "master-0.happened.json"
        happened: list[list[Any]] = json.loads(path.read_text()) if path.exists() else []
        return happened

    def pids(self) -> dict[int, str]:
        """Every living process of this run, with its command line."""
        found = {}
        for pid in carriers(self.mark):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def kill_all(self) -> bool:
        """Kill every process of this run; whether there was one. Who dies may leave one that is just being born."""
        pids = self.pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(pids)

    def agent_pid(self, agent: str = "agent-0") -> int:
        (pid,) = [
            pid for pid, command in self.pids().items() if f"kintsugi.cluster.agent {agent} " in command
        ]
        return pid

    def launchers(self) -> tuple[int, int]:
        """Pids of the launcher and of its standby, as the run folder has them; 0 for one that does not run."""
        try:
            record = json.loads((self.run_dir / "launcher.json").read_text())
        except FileNotFoundError:
            return 0, 0
        pids = self.pids()
        return tuple(pid if pid in pids else 0 for pid in (record["pid"], record["standby_pid"]))  # type: ignore[return-value]

    def pair(self, *, other_than: tuple[int, ...] = ()) -> tuple[int, int]:
        """Wait for a launcher and a standby that are none of these processes; return their pids."""
        until(lambda: all(pid and pid not in other_than for pid in self.launchers()), "launcher and standby")
        return self.launchers()

    def master(self) -> tuple[int, bool, str]:
        """Pid of the master that wrote last, whether it was to adopt, and its address."""
        _, pid, adopting, address = next(event for event in self.happened() if event[0] == "master")
        return pid, adopting, address

    def started(self) -> dict[str, int]:
        """Process → pid, as the master was told."""
        return {event[1]: event[2] for event in self.happened() if event[0] == "started"}

    def registrations(self, agent: str) -> list[tuple[int, list[int]]]:
        """Incarnation and living children of every agent of this name that the present master has seen."""
        return [(int(event[2]), event[3]) for event in self.happened() if event[:2] == ["registered", agent]]

    def result(self) -> tuple[int, str]:
        assert self.launcher is not None
        _, errors = self.launcher.communicate(timeout=60)
        return self.launcher.returncode, errors

    def assert_nothing_left(self, *, timeout_s: float = 0.0) -> None:
        """At once after a clean end; within a bounded time when whoever would clean up was killed."""
        until(lambda: not self.pids(), f"the end of {self.pids()}", timeout_s=timeout_s)
        assert set(os.listdir("/dev/shm")) == self.shared_memory
        assert f"kintsugi-{self.job()}" not in Path("/proc/net/unix").read_text()
        assert not [path for path in self.run_dir.rglob("*") if path.is_socket() or path.is_fifo()]

    def job(self) -> str:
        """Part of the abstract sockets' names; "" would match those of other runs, so none is no answer."""
        names = {line.split()[-1] for line in (self.run_dir / "sockets").read_text().splitlines()}
        (job,) = {name.split("-")[1] for name in names}
        return job

    def note_sockets(self) -> None:
        """The agents' sockets, found by what they have open."""
        lines = Path("/proc/net/unix").read_text().splitlines()
        inodes = {
            os.readlink(descriptor)
            for pid in self.pids()
            for descriptor in Path(f"/proc/{pid}/fd").iterdir()
            if descriptor.is_symlink()
        }
        ours = [line for line in lines if "@kintsugi-" in line and f"socket:[{line.split()[6]}]" in inodes]
        (self.run_dir / "sockets").write_text("\n".join(ours))
        assert ours


def start_of(process: str, **placement: Any) -> StartProcess:
    role = role_of(process)
    return StartProcess(
        process=process, role=role, incarnation=uuid4().hex[:8], placement=Placement(**placement)
    )
