"""Nothing of ours is left, however a run ends: real launchers, agents and processes around a fake master."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from kintsugi.config import ClusterSection, Config
from kintsugi.messages import StartProcess
from kintsugi.types import Placement, Role, role_of

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.cluster


def until(condition: Callable[[], object], what: str, *, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.005)


class Run:
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
        exit_code: int | None = None,
        kill_itself: bool = False,
    ) -> subprocess.Popen[str]:
        orders = {"starts": {"agent-0": starts}, "exit_code": exit_code, "kill_itself": kill_itself}
        if hosts == 2:
            orders["starts"] = {"agent-0": starts[:1], "agent-1": starts[1:]}
        entries = {Role.MASTER: "cluster_programs:master", Role.MODEL: "cluster_programs:idle"}
        entries |= {Role.ROLLOUT: "cluster_programs:parent_of_sleepers", **(programs or {})}
        table = {"entries": entries, "preload": preload, "forked": [Role.MODEL]}
        config = Config(
            name="test", cluster=ClusterSection(hosts=hosts, port=port, start_timeout_s=start_timeout_s)
        )
        for name, content in (("orders", orders), ("programs", table), ("config", config)):
            (self.run_dir / f"{name}.json").write_bytes(msgspec.json.encode(content))
        environment = {**os.environ, "PYTHONPATH": str(PROGRAMS), "KINTSUGI_TEST_MARK": self.mark}
        self.launcher = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "cluster_launcher.py"), str(self.run_dir)],
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
        for folder in Path("/proc").iterdir():
            if not folder.name.isdecimal():
                continue
            try:
                marked = f"KINTSUGI_TEST_MARK={self.mark}".encode() in (folder / "environ").read_bytes()
                if marked:
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return found

    def agent_pid(self) -> int:
        (pid,) = [pid for pid, command in self.pids().items() if "kintsugi.cluster.agent" in command]
        return pid

    def result(self) -> tuple[int, str]:
        assert self.launcher is not None
        _, errors = self.launcher.communicate(timeout=20)
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


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    for pid in run.pids():
        os.kill(pid, signal.SIGKILL)
    if run.launcher is not None:
        run.launcher.communicate(timeout=10)


def start_of(process: str, **placement: Any) -> StartProcess:
    role = role_of(process)
    return StartProcess(
        process=process, role=role, incarnation=uuid4().hex[:8], placement=Placement(**placement)
    )


def test_the_exit_code_is_the_masters_and_nothing_is_left(run: Run) -> None:
    run.start(start_of("model-0"), start_of("rollout-0"), exit_code=3)
    assert run.result() == (3, "")
    assert not run.pids()
    assert not (run.run_dir / "launcher.json").exists()
    assert not list((run.run_dir / "agents").iterdir())


def test_two_hosts_end_with_the_masters_exit_code(run: Run) -> None:
    run.start(start_of("model-0"), start_of("model-1"), hosts=2, exit_code=0)
    assert run.result() == (0, "")
    assert not run.pids()
    assert [event for event in run.happened() if event[0] == "started"]


def test_ctrl_c_stops_the_master_gracefully_and_leaves_nothing(run: Run) -> None:
    launcher = run.start_and_wait(start_of("model-0"), start_of("rollout-0"))
    run.note_sockets()
    os.killpg(launcher.pid, signal.SIGINT)
    assert run.result() == (0, "")
    run.assert_nothing_left()
    assert not [event for event in run.happened() if event[0] == "exited"], "workers must not hear Ctrl-C"


def test_a_second_ctrl_c_ends_even_a_stubborn_run_at_once(run: Run) -> None:
    launcher = run.start(programs={Role.MASTER: "cluster_programs:stubborn"})
    until((run.run_dir / "events" / "master-0.jsonl").exists, "the master's first event")
    run.note_sockets()
    launcher.send_signal(signal.SIGINT)
    until((run.run_dir / "master-0.asked_to_end.json").exists, "the first signal to reach the master")
    assert launcher.poll() is None
    begun = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    code, _ = run.result()
    assert code == 1
    assert time.monotonic() - begun < 2.0
    run.assert_nothing_left()


def test_kill_9_of_the_launcher_leaves_nothing(run: Run) -> None:
    launcher = run.start_and_wait(start_of("model-0"), start_of("model-1"), start_of("rollout-0"), hosts=2)
    run.note_sockets()
    launcher.kill()
    run.assert_nothing_left(timeout_s=5.0)


def test_kill_9_of_launcher_and_agent_together_ends_the_workers_by_their_lifeline(run: Run) -> None:
    launcher = run.start_and_wait(start_of("model-0"), start_of("model-1"), preload=("json",))
    run.note_sockets()
    agent = run.agent_pid()
    os.kill(agent, signal.SIGKILL)
    launcher.kill()
    run.assert_nothing_left(timeout_s=5.0)


def test_kill_9_of_the_agent_ends_the_run_with_its_name_and_leaves_nothing(run: Run) -> None:
    run.start_and_wait(start_of("model-0"), programs={Role.MODEL: "cluster_programs:stubborn"})
    run.note_sockets()
    os.kill(run.agent_pid(), signal.SIGKILL)
    code, errors = run.result()
    assert code == 99
    assert "ProcessDied: agent-0 killed by SIGKILL" in errors
    run.assert_nothing_left()


def test_a_killed_master_ends_the_run_with_its_name_and_leaves_nothing(run: Run) -> None:
    run.start(start_of("model-0"), start_of("rollout-0"), kill_itself=True)
    code, errors = run.result()
    assert code == 99
    assert "ProcessDied: master-0 was killed by SIGKILL" in errors
    assert not run.pids()


def test_a_master_that_cannot_be_imported_names_process_phase_and_reason(run: Run) -> None:
    run.start(programs={Role.MASTER: "cluster_program_that_breaks:main"})
    code, errors = run.result()
    assert code == 99
    assert errors == (
        "StartFailed: master-0 failed to start while importing cluster_program_that_breaks:main: "
        "RuntimeError: a library is missing\n"
    )
    assert not run.pids()


def test_a_start_that_takes_too_long_is_ended_and_leaves_nothing(run: Run) -> None:
    run.start(programs={Role.MASTER: "cluster_program_that_hangs:main"}, start_timeout_s=0.5)
    code, errors = run.result()
    assert code == 99
    assert errors == (
        "StartFailed: agent-0 failed to start while starting the master: "
        "not ready after 0.5 s (cluster.start_timeout_s)\n"
    )
    assert not run.pids()


def test_ctrl_c_while_the_master_is_still_starting_leaves_nothing(run: Run) -> None:
    launcher = run.start(programs={Role.MASTER: "cluster_program_that_hangs:main"})
    until(lambda: any("master-0" in command for command in run.pids().values()), "the master's process")
    launcher.send_signal(signal.SIGINT)
    assert run.result() == (1, "")
    assert not run.pids()


def test_a_worker_that_cannot_be_imported_is_told_to_the_master_and_nothing_of_it_is_left(run: Run) -> None:
    run.start_and_wait(
        start_of("model-0"), start_of("server-0"), programs={Role.SERVER: "cluster_program_that_breaks:main"}
    )
    (failed,) = [event[1] for event in run.happened() if event[0] == "failed"]
    assert "server-0 failed to start while importing cluster_program_that_breaks:main" in failed
    assert "RuntimeError: a library is missing" in failed
    commands = [command for command in run.pids().values() if "server-0" in command]
    assert not commands


def test_a_taken_port_is_the_users_mistake_and_is_known_before_anything_starts(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run.start(port=port)
        code, errors = run.result()
    assert code == 99
    assert (
        errors == f"ConfigError: cluster.port: port {port} of 127.0.0.1 is taken; expected a free one, or 0\n"
    )
    assert not (run.run_dir / "logs").exists()


def test_a_folder_is_run_by_one_launcher_at_a_time(run: Run) -> None:
    first = run.start_and_wait()
    second = subprocess.run(first.args, capture_output=True, text=True, check=False, timeout=20)
    assert second.returncode == 99
    assert f"is in use: process {first.pid} runs it" in second.stderr
    assert first.poll() is None
