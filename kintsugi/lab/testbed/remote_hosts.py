"""Hosts of a run on other machines, as the laboratory reaches them.

    ssh, srun ──────────────────────────────► kintsugi host-signals, on the host (`remote_signals.py`)
    pod_signals.py ── API of Kubernetes ────► the same, in the pod
    ray_signals.py ── Ray ──────────────────► the same orders, to an actor on the node

The connection to a host is made once, so that a fault takes milliseconds. Nothing of it goes through the run, which
carries no order to disturb its own processes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from kintsugi.cluster.backends.command import Conversation
from kintsugi.cluster.backends.slurm import job_of, read_allocation, step_command
from kintsugi.cluster.backends.ssh import other_machines, ssh_command
from kintsugi.cluster.host_supervisor import default_scratch
from kintsugi.config.schema import Config
from kintsugi.errors import UserError, WorldError
from kintsugi.lab.injector.injection import Ability, Injection
from kintsugi.lab.testbed.remote_orders import (
    ANSWER_BEGINS,
    PROGRAM,
    FaultAnswer,
    FaultOrder,
    Order,
    Signalled,
    SignalOrder,
    unreached,
)
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.process_reports import read_processes
from kintsugi.types import Role

HERE = "host-0"
SIGNALLED = frozenset({Ability.KILL, Ability.STOP, Ability.HOST_LOSS})
"""Faults that are one signal, which every program on a host may send to processes of its own user."""
ANSWER_S = 15.0
"""Time for a host to carry out an order."""
FAULT_S = 60.0
"""Time for a host to prepare, begin or undo a fault: interpreters are started for it."""
CONNECT_S = 150.0
"""Time for the first answer of a host: over ssh a second or two; on Ray, interpreters are started on both sides, which
takes a minute where forty processes share two cores."""
CLOSE_S = 3.0
_NUMBERED = frozenset({Role.AGENT.value, Role.SUPERVISOR.value})
"""Roles of which the process N is on host N."""
POD_PROGRAM = ("-P", "-m", "kintsugi.lab.testbed.pod_signals")
RAY_PROGRAM = ("-P", "-m", "kintsugi.lab.testbed.ray_signals")


def check_reach(config: Config) -> None:
    """Raise UserError or WorldError if the laboratory can not signal processes of these hosts; before a run starts."""
    commands_of(config)
    if config.cluster.on == "k8s":
        from kintsugi.lab.testbed.pod_signals import check_laboratory_rights

        check_laboratory_rights(config.cluster.kubernetes.namespace)


def refusals(config: Config, faults: Sequence[tuple[str, Injection]]) -> dict[str, str]:
    """Return host → why a fault can not be injected there, of hosts with faults that are not signals. The hosts are
    asked, before a run starts; pods do not exist by then, and their template tells."""
    changing = [(host, fault) for host, fault in faults if fault.ability not in SIGNALLED]
    if not changing:
        return {}
    if config.cluster.on == "k8s":
        from kintsugi.lab.testbed.pod_signals import refusal_of_pods

        why = refusal_of_pods(config.cluster.kubernetes, [fault for _, fault in changing])
        return {changing[0][0]: why} if why else {}
    found: dict[str, str] = {}
    remote = RemoteHosts(config, run_dir=Path(os.devnull))
    try:
        for host, fault in changing:
            answer = remote.order_fault(host, FaultOrder(do="probe", injection=fault), timeout_s=CONNECT_S)
            if answer.why:
                found.setdefault(host, answer.why)
    finally:
        remote.close()
    return found


def commands_of(config: Config) -> dict[str, list[str]]:
    """Return host → the command that takes orders for it on standard input. UserError outside of an allocation."""
    match config.cluster.on:
        case "ray":
            address = config.cluster.ray.address
            return _per_host(config, [sys.executable, *RAY_PROGRAM], address)
        case "k8s":
            namespace = config.cluster.kubernetes.namespace
            return _per_host(config, [sys.executable, *POD_PROGRAM], namespace)
        case "slurm":
            return _in_allocation(config)
    return {
        f"host-{number}": ssh_command(
            host,
            [
                host.python or sys.executable,
                *PROGRAM,
                f"host-{number}",
                host.scratch or str(default_scratch()),
            ],
        )
        for number, host in enumerate(other_machines(Path(config.cluster.on)), 1)
    }


def _per_host(config: Config, program: list[str], where: str) -> dict[str, list[str]]:
    """Return the commands of an engine that is asked from this machine."""
    hosts = [f"host-{number}" for number in range(1, config.cluster.hosts)]
    return {host: [*program, host, where] for host in hosts}


def _in_allocation(config: Config) -> dict[str, list[str]]:
    if not job_of(os.environ):
        raise UserError(
            "--on slurm: expected an allocation, as `salloc -N 3 --no-kill kintsugi soak …` makes one"
        )
    allocation = read_allocation(os.environ)
    scratch = config.cluster.slurm.scratch or str(default_scratch())
    return {
        host: step_command(
            allocation.job,
            node.name,
            host="kintsugi-lab",
            command=[sys.executable, *PROGRAM, host, scratch],
        )
        for host, node in ((f"host-{number}", node) for number, node in enumerate(allocation.others, 1))
    }


class RemoteHosts:
    """The hosts of one run. `close` ends the connections, and nothing of the run."""

    def __init__(self, config: Config, *, run_dir: Path) -> None:
        self._commands = commands_of(config)
        self._run_dir = run_dir
        self._connections: dict[str, Conversation] = {}
        self._turns = {host: threading.Lock() for host in self._commands}
        """Faults are injected by several threads; a host gets one order after the other."""
        self._with_faults: set[str] = set()
        """Hosts that may have something to undo."""
        self._reached: set[str] = set()
        """Hosts that have answered, and were not lost by a fault since then."""

    def host_of(self, process: str) -> str:
        """Return the host of a process, as the master knows it; `HERE` for one that it does not know."""
        role, _, number = process.rpartition("-")
        if role in _NUMBERED:
            return f"host-{number}"
        reports = read_processes(self._run_dir)
        known = {} if reports is None else {each.process: each.host for each in reports.processes}
        return known.get(process, HERE)

    def is_elsewhere(self, process: str) -> bool:
        return self.host_of(process) != HERE

    def processes_on(self, host: str) -> dict[str, int]:
        """Return the processes of a host with their pids there, as the master knows them."""
        reports = read_processes(self._run_dir)
        there = () if reports is None else reports.processes
        return {each.process: each.pid for each in there if each.host == host and each.status == "live"}

    def signal(
        self, host: str, number: signal.Signals, pids: Mapping[str, int], *, is_whole: bool = False
    ) -> frozenset[str]:
        """Signal processes of a host, or with `is_whole` its supervisor and all below it; return those of `pids` that
        got it: none if the host does not answer."""
        order = SignalOrder(self._job(), int(number), dict(pids), is_whole=is_whole)
        signalled = self._ask(host, order)
        if is_whole:
            self._reached.discard(host)
        return frozenset(signalled.hit)

    def connect(self, host: str) -> bool:
        """Connect to a host, which takes a while; a fault may come while the master is held. False if it is not there
        yet, or does not answer; WorldError if no fault can be injected there."""
        connection = self._connections.get(host)
        if host in self._reached and connection is not None and not connection.has_ended:
            return True
        is_reached = self._ask(host, SignalOrder(self._job(), 0), timeout_s=CONNECT_S).is_reached
        if is_reached:
            self._reached.add(host)
        return is_reached

    def order_fault(self, host: str, order: FaultOrder, *, timeout_s: float = FAULT_S) -> FaultAnswer:
        """Have an order about a fault carried out on a host."""
        if order.do == "prepare":
            self._with_faults.add(host)
        order = msgspec.structs.replace(order, job=self._job())
        answer = msgspec.json.decode(self._exchange(host, order, timeout_s=timeout_s), type=FaultAnswer)
        if not answer.is_reached:
            return msgspec.structs.replace(answer, why=answer.why or f"{host} does not answer")
        return answer

    def ports_of(self, host: str, pid: int) -> frozenset[int] | None:
        """Return the ports of a process on a host; None if that does not answer."""
        answer = self.order_fault(host, FaultOrder(do="look_up", pid=pid))
        return frozenset(answer.ports) if answer.is_reached else None

    def _ask(self, host: str, order: SignalOrder, *, timeout_s: float = ANSWER_S) -> Signalled:
        signalled = msgspec.json.decode(self._exchange(host, order, timeout_s=timeout_s), type=Signalled)
        if not signalled.is_reached:
            self._reached.discard(host)
        if signalled.why:
            raise WorldError(f"{host}: {signalled.why}")
        return signalled

    def _exchange(self, host: str, order: Order, *, timeout_s: float) -> bytes:
        """Say an order and return the answer, that of `unreached` if none comes in time."""
        with self._turns[host]:
            connection = self._connections.get(host)
            if connection is None or connection.has_ended:
                if connection is not None:
                    connection.close(timeout_s=CLOSE_S)
                connection = self._connections[host] = Conversation(self._commands[host])
            connection.say(msgspec.json.encode(order))
            answer = connection.hear(begin=ANSWER_BEGINS, timeout_s=timeout_s)
            if answer is None:
                connection.end()  # The next order connects again.
                return unreached(order)
            return answer

    def _job(self) -> str:
        """Return the session of the run, as its host manager has recorded it."""
        try:
            content = RunFolder(self._run_dir).hosts_file.read_bytes()
            return msgspec.json.decode(content, type=_Session).job
        except (OSError, msgspec.DecodeError):
            return ""

    def close(self) -> None:
        """End the connections. WorldError names a host where something could not be undone; one that does not answer
        undoes everything by itself."""
        problems = []
        for host in sorted(self._with_faults):
            connection = self._connections.get(host)
            if connection is None or connection.has_ended:
                continue  # The program there has ended with it, and has undone everything.
            answer = self.order_fault(host, FaultOrder(do="close"))
            if answer.is_reached and answer.why:
                problems.append(f"{host}: {answer.why}")
        self._with_faults.clear()
        for connection in self._connections.values():
            connection.close(timeout_s=CLOSE_S)
        self._connections.clear()
        if problems:
            raise WorldError("; ".join(problems))


class _Session(msgspec.Struct, frozen=True):
    """The first field of `joined_hosts.json`."""

    job: str
