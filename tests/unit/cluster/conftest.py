"""A node agent under test: a real process, with the test as its launcher and its master."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import msgspec
import pytest

from kintsugi.cluster.handover import AgentHandover, Programs
from kintsugi.cluster.spawn import execute, in_memory
from kintsugi.protocol.agents import (
    ChipFault,
    ProcessExited,
    ProcessStarted,
    ProcessSuspected,
    StartProcess,
    StopProcess,
)
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.membership import Heartbeat, Register, Registered
from kintsugi.protocol.messages import Body
from kintsugi.runtime.processes import Child, SystemProcesses
from kintsugi.transport import Endpoint, new_key_pair
from kintsugi.types import Peer, Placement, Role, role_of

T = TypeVar("T")
FAKE_PROGRAMS = Path(__file__).parents[2] / "cluster" / "programs"


def open_descriptors() -> set[str]:
    """Those of this process."""
    return set(os.listdir("/proc/self/fd"))


class ShortOfDescriptors(SystemProcesses):
    """A host that has a descriptor for a limited number of processes."""

    def __init__(self, number: int) -> None:
        self._number = number

    def adopt(self, pid: int) -> Child:
        if self._number == 0:
            raise OSError(errno.EMFILE, "Too many open files")
        self._number -= 1
        return super().adopt(pid)


def bootstrap_of_an_agent(run_dir: Path) -> Bootstrap:
    """One that nobody else knows of."""
    return Bootstrap(
        job="job",
        run_dir=str(run_dir),
        process="agent-0",
        role=Role.AGENT,
        host="host-0",
        incarnation="a",
        public_key=b"public",
        secret_key=b"a secret",
        master=Peer("master-0", "a", "host-0", "tcp://127.0.0.1:1", b""),
        lifeline=-1,
    )


def until(condition: Callable[[], T | None], what: str, *, timeout_s: float = 20.0) -> T:
    deadline = time.monotonic() + timeout_s
    while (value := condition()) is None or value is False:
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.002)
    return value


class Host:
    """One agent and what it says. Call `turn` to let messages flow; `exits` and `registrations` are what came in."""

    def __init__(
        self,
        run_dir: Path,
        *,
        index: int,
        preload: tuple[str, ...],
        programs: dict[Role, str],
        spares: int = 0,
        prepare: str = "unprepared",
        probe: str = "",
        starts_master: bool = False,
    ) -> None:
        """`starts_master`: the agent also has a child that it takes for the master, whose messages the test sends."""
        job = uuid4().hex[:8]
        public_key, secret_key = new_key_pair()
        self.master = Endpoint(
            job=job, process="master-0", incarnation="m", public_key=public_key, secret_key=secret_key
        )
        own_public, own_secret = new_key_pair()
        self.name = f"agent-{index}"
        self.run_dir = run_dir
        self.exits: list[ProcessExited] = []
        self.suspicions: list[ProcessSuspected] = []
        self.chip_faults: list[ChipFault] = []
        self.counters: dict[str, int] = {}
        """As of the agent's last heartbeat."""
        self.registrations: list[Register] = []
        self.master.admit(Peer(self.name, "0", f"host-{index}", "", own_public))
        lifeline_read, self.lifeline = os.pipe2(os.O_CLOEXEC)
        children_read, self.children_lifeline = os.pipe2(os.O_CLOEXEC)
        self.report, report_write = os.pipe2(os.O_CLOEXEC)
        own = Bootstrap(
            job=job,
            run_dir=str(run_dir),
            process=self.name,
            role=Role.AGENT,
            host=f"host-{index}",
            incarnation="",
            public_key=own_public,
            secret_key=own_secret,
            master=self.master.peer(host="host-0"),
            lifeline=lifeline_read,
        )
        of_master = msgspec.structs.replace(own, process="master-0", role=Role.MASTER, incarnation="m")
        self._handover = AgentHandover(
            bootstrap=own,
            children_lifeline_read=children_read,
            children_lifeline_write=self.children_lifeline,
            report=report_write,
            programs=Programs(
                entries=programs,
                preload=preload,
                forked=(Role.MODEL,),
                prepare=f"cluster_programs:{prepare}",
                probe=probe,
            ),
            spares=spares,
            master=of_master if starts_master else None,
        )
        self.agent = self._start_agent()

    def _start_agent(self) -> Child:
        incarnation = str(len(self.registrations))
        own = msgspec.structs.replace(self._handover.bootstrap, incarnation=incarnation)
        handover = msgspec.structs.replace(self._handover, bootstrap=own)
        handed_over = in_memory(msgspec.msgpack.encode(handover))
        agent = execute(
            SystemProcesses(),
            ["kintsugi.cluster.agent", self.name, str(handed_over)],
            placement=Placement(),
            pass_fds=(handed_over, *handover.descriptors),
        )
        os.close(handed_over)
        until(lambda: self.turn() and len(self.registrations) > int(incarnation), "the agent to register")
        return agent

    def replace_agent(self) -> Register:
        """Kill the agent and start its successor, as the launcher does; gives how that registered."""
        self.agent.send_signal(signal.SIGKILL)
        self.agent.wait_ended(whom="agent", timeout_s=10.0)
        self.agent.close()
        self.agent = self._start_agent()
        return self.registrations[-1]

    def turn(self) -> bool:
        for delivery in self.master.poll(0.005):
            match delivery.body:
                case Register(peer=peer) as register:
                    self.master.admit(peer)
                    self.master.reply(delivery, Registered(0))
                    self.registrations.append(register)
                case ProcessExited() as exited:
                    self.exits.append(exited)
                case ProcessSuspected() as suspected:
                    self.suspicions.append(suspected)
                case ChipFault() as fault:
                    self.chip_faults.append(fault)
                case Heartbeat(progress=progress):
                    self.counters = progress.counters
                case _:
                    pass
        return True

    def ask(self, body: Body) -> Body:
        pending = self.master.request(self.name, body, deadline_s=20.0)
        until(lambda: self.turn() and pending.done, f"an answer to {type(body).__name__}")
        return pending.result().body

    def start(
        self, process: str, *, placement: Placement | None = None, incarnation: str | None = None
    ) -> ProcessStarted:
        order = StartProcess(
            process=process,
            role=role_of(process),
            incarnation=incarnation or uuid4().hex[:8],
            placement=placement or Placement(),
        )
        started = self.ask(order)
        assert isinstance(started, ProcessStarted)
        return started

    def stop(self, started: ProcessStarted, *, grace_s: float = 2.0) -> None:
        self.ask(StopProcess(process=started.process, incarnation=started.incarnation, grace_s=grace_s))

    def exit_of(self, process: str) -> ProcessExited:
        def exited() -> ProcessExited | None:
            self.turn()
            return next((one for one in self.exits if one.process == process), None)

        return until(exited, f"the exit of {process}")

    def wrote(self, process: str, what: str) -> Any:
        path = self.run_dir / f"{process}.{what}.json"
        until(lambda: self.turn() and path.exists(), f"{path.name}")
        return json.loads(path.read_text())

    def close(self) -> None:
        self.agent.send_signal(signal.SIGINT)
        self.agent.wait_ended(whom="agent", timeout_s=10.0)
        self.agent.close()
        self.master.close()
        for descriptor in {self.lifeline, self.report, *self._handover.descriptors}:
            os.close(descriptor)


MakeHost = Callable[..., Host]


@pytest.fixture
def make_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeHost]:
    """Starts agents, each the only one of a host of its own."""
    monkeypatch.setenv("PYTHONPATH", str(FAKE_PROGRAMS), prepend=os.pathsep)
    hosts: list[Host] = []

    def make(
        *,
        preload: tuple[str, ...] = (),
        spares: int = 0,
        prepare: str = "unprepared",
        probe: str = "",
        starts_master: bool = False,
        **programs: str,
    ) -> Host:
        entries = {Role(role): f"cluster_programs:{name}" for role, name in programs.items()}
        hosts.append(
            Host(
                tmp_path,
                index=len(hosts),
                preload=preload,
                programs=entries,
                spares=spares,
                prepare=prepare,
                probe=probe,
                starts_master=starts_master,
            )
        )
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()
