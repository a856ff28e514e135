"""Simulated hosts: their agents, the processes that agents start and watch, and the launcher that restarts agents.

The list of children belongs to the host, not to the agent: a restarted agent finds them again. Memory that the agent
holds for ranks survives it as well, and is lost only with the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from kintsugi.protocol.agents import (
    ChipFault,
    Inspect,
    Inspected,
    ProcessExited,
    ProcessStarted,
    ProcessSuspected,
    StartProcess,
    StopProcess,
)
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.messages import Body
from kintsugi.protocol.recovery import FetchState, ForgetStates, KeepState
from kintsugi.simulation.network import SimulatedProcess
from kintsugi.simulation.ranks import HostMemory, state_message, state_of
from kintsugi.simulation.workers import SimulatedWorker
from kintsugi.transport.rpc import Delivery
from kintsugi.types import ChildReport, Role

FORK_S = (0.01, 0.05)
"""Time from the request to the start of the child."""
KERNEL_S = 0.002
"""Time from the end of a process to the report of the kernel."""
STOPPED_S = 1.0
"""Time after which a stopped child is reported."""

Spawn = Callable[["SimulatedHost", StartProcess, int], SimulatedWorker]
"""Start a process of a role on a host, under the term of its agent."""


class SimulatedHost:
    """One machine: an agent (while it is live), its children, and the memory that survives both."""

    def __init__(self, name: str, *, memory: HostMemory, spawn: Spawn) -> None:
        self.name, self.memory, self.spawn = name, memory, spawn
        self.agent: SimulatedAgent | None = None
        self.children: dict[str, SimulatedProcess] = {}
        """Live children by name, without the master."""
        self.master: SimulatedProcess | None = None

    def adopt(self, child: SimulatedProcess) -> None:
        if child.role is Role.MASTER:
            self.master = child
        else:
            self.children[child.name] = child
        child.on_exit = self._child_ended

    def _child_ended(self, child: SimulatedProcess, status: int) -> None:
        if self.children.get(child.name) is child:
            del self.children[child.name]
        if self.master is child:
            self.master = None
        if self.agent is not None:
            self.agent.after(KERNEL_S, self.agent.child_ended, child, status)


class SimulatedAgent(SimulatedWorker):
    """Starts, stops and watches the processes of its host for the master."""

    def __init__(
        self, *arguments: Any, home: SimulatedHost, restart_master: Callable[[], None], **names: Any
    ) -> None:
        super().__init__(*arguments, **names)
        self.home, self._restart_master = home, restart_master
        self._stopped: set[tuple[str, str]] = set()
        self._untold: deque[Body] = deque()
        self._successors: dict[str, tuple[Delivery, StartProcess]] = {}
        home.agent = self

    def children(self) -> tuple[ChildReport, ...]:
        living = self.home.children.values()
        return tuple(
            ChildReport(child.name, child.incarnation, getattr(child, "pid", 0), child.key)
            for child in living
        )

    def tick(self) -> None:
        super().tick()
        while self._untold and self.registered:
            self.endpoint.send("master-0", self._untold.popleft())
        watched = list(self.home.children.values())
        if self.home.master is not None:
            watched.append(self.home.master)
        stopped = {(child.name, child.incarnation): child for child in watched if child.stopped}
        for (
            name,
            child,
        ) in stopped.items():  # In a fixed order: a set's depends on the hash seed of the interpreter.
            if name not in self._stopped:
                self.after(STOPPED_S, self._still_stopped, child)
        self._stopped = set(stopped)

    def _still_stopped(self, child: SimulatedProcess) -> None:
        """Replace a master that stays stopped; report any other stopped child to the master, once per stop."""
        if not (child.stopped and child.alive):
            return
        if child.role is Role.MASTER:
            child.end(-9)
        else:
            self._tell_master(ProcessSuspected(child.name, child.incarnation, "it is stopped (state T)"))

    def chip_breaks(self, child: SimulatedProcess) -> None:
        """Report the broken accelerator of a child."""
        users = {child.name: child.incarnation}
        chip = f"chip of {child.name} {child.incarnation}"
        self._tell_master(
            ChipFault(self.home.name, chip, chip, "xid", "XID 79", num_healthy=1, processes=users)
        )

    def _tell_master(self, body: Body) -> None:
        """Send a message to the master now, or once it is registered there."""
        if self.registered:
            self.endpoint.send("master-0", body)
        else:
            self._untold.append(body)

    def child_ended(self, child: SimulatedProcess, status: int) -> None:
        """Take the exit of a child."""
        if child.role is Role.MASTER:
            if status < 0:
                self._restart_master()
            return
        self._tell_master(ProcessExited(child.name, child.incarnation, status))
        order = self._successors.pop(child.name, None)
        if order is not None:
            self._start(*order)

    def serve(self, delivery: Delivery, body: Body) -> None:
        match body:
            case StartProcess():
                self._start(delivery, body)
            case StopProcess():
                child = self._child(body.process, body.incarnation)
                if child is not None:
                    child.end(-9)
                self.after(KERNEL_S, self.endpoint.reply, delivery, Ok())
            case Inspect():
                self.endpoint.reply(delivery, self._inspect(self._child(body.process, body.incarnation)))
            case KeepState():
                self.home.memory.keep(state_of(body.state))
                self.endpoint.reply(delivery, Ok())
            case ForgetStates():
                self.home.memory.forget_before(body.step, living=self.home.children)
            case FetchState():
                kept = self.home.memory.replicas.get((body.box, body.step))
                if kept is not None:
                    self.endpoint.reply(delivery, state_message(kept))
                else:
                    self.endpoint.fail(delivery, "RefusedError", f"no copy of step {body.step}")
            case _:
                self.endpoint.fail(delivery, "RefusedError", f"an agent does not do {type(body).__name__}")

    def _child(self, process: str, incarnation: str) -> SimulatedProcess | None:
        child = self.home.children.get(process)
        return child if child is not None and child.incarnation == incarnation else None

    def _start(self, delivery: Delivery, order: StartProcess) -> None:
        """Start a process. One that runs under this incarnation is reported again; any other is ended first."""
        running = self.home.children.get(order.process)
        if running is not None and running.incarnation != order.incarnation:
            self._successors[order.process] = (delivery, order)
            running.end(-9)
        else:
            self.after(self.world.random.uniform(*FORK_S), self._fork, delivery, order)

    def _fork(self, delivery: Delivery, order: StartProcess) -> None:
        child = self._child(order.process, order.incarnation)
        if child is None and order.process in self.home.children:
            self._start(delivery, order)  # Another one has started meanwhile, and is ended first.
            return
        if child is None:
            child = self.home.spawn(self.home, order, self.endpoint.term)
            self.home.adopt(child)
        pid = getattr(child, "pid", 0)
        self.endpoint.reply(delivery, ProcessStarted(order.process, order.incarnation, pid, child.key))

    @staticmethod
    def _inspect(child: SimulatedProcess | None) -> Inspected:
        """Return the state of a child from outside. It records heartbeats unless one call keeps it, which sleeps."""
        if child is None or not child.alive:
            return Inspected("")
        if child.kept_since is not None:
            return Inspected("S", child.kept_since, recorded=child.kept_since)
        now = child.world.now
        return Inspected("T" if child.stopped else "S", now, recorded=now)
