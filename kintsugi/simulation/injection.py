"""Injects the faults of a plan into a simulated cluster, each when the master reaches its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kintsugi.config.stages import stages
from kintsugi.control.phases.table import Phase
from kintsugi.control.protocol import Tick
from kintsugi.protocol.agents import ProcessExited, ProcessSuspected, StartProcess
from kintsugi.protocol.membership import Register
from kintsugi.protocol.messages import Body
from kintsugi.protocol.training import Save
from kintsugi.simulation.coverage import NOTIFYING
from kintsugi.simulation.faults import PlannedSimFault, SimulatedFaultKind, SimulatedFaultPlan
from kintsugi.simulation.master import Crash, SimulatedMaster
from kintsugi.simulation.network import SimulatedProcess
from kintsugi.simulation.workers import SimulatedWorker
from kintsugi.transport.rpc import Delivery
from kintsugi.types import kind_of

if TYPE_CHECKING:
    from kintsugi.simulation.cluster import SimulatedCluster
    from kintsugi.simulation.hosts import SimulatedHost

ABANDON_S = 40.0
"""Time after which pending faults are dropped, so that faults stop."""
LARGE_WRITE = 4096
"""Bytes that no decision exceeds in the journal."""
POISON = "the user's mistake"
"""Outcome of a run with an unrecoverable fault."""


class SimulatedInjector:
    """Faults of one run. `touched` tells which processes they hit; all others must keep their incarnation."""

    def __init__(self, cluster: SimulatedCluster, plan: SimulatedFaultPlan) -> None:
        self._cluster, self.plan = cluster, plan
        self._world, self._network = cluster.world, cluster.network
        self._touched: set[str] = set()
        self._all_touched = False
        self._where: tuple[str, int] = ("", 0)
        self._held: list[tuple[SimulatedMaster, Callable[..., None], tuple[Any, ...]]] = []
        self._num_failed_starts = 0
        """Failures of starts so far that could be held back."""
        self._slow: dict[str, float] = {}
        self.last_at = 0.0
        """Time at which the last fault so far is over."""
        self.take(plan)

    def take(self, plan: SimulatedFaultPlan) -> None:
        """Schedule a plan, before the run begins."""
        self.plan, self._holding = plan, plan.hold is not None
        self._waiting = [*plan.faults, *plan.scalings]
        self.resumes = any(fault.kind is SimulatedFaultKind.SIGNAL for fault in plan.faults)

    def begin(self) -> None:
        conditions = self._network.conditions
        conditions.loss, conditions.repetition, conditions.spike = self.plan.conditions
        if self.plan.faults:
            self.last_at = ABANDON_S
            self._world.after(ABANDON_S, self._stop_injecting)

    def _stop_injecting(self) -> None:
        """Inject no further faults from here on."""
        self._waiting.clear()
        if self._cluster.master is not None:
            self._cluster.master.crashes = []
        self.release()
        self._holding = False
        conditions = self._network.conditions
        conditions.loss = conditions.repetition = conditions.spike = 0.0

    def touched(self, process: str) -> bool:
        return self._all_touched or process in self._touched

    @property
    def poisoned(self) -> bool:
        """Whether an unrecoverable fault was injected."""
        return any(
            fault.kind is SimulatedFaultKind.POISON and fault.fired_in is not None
            for fault in self.plan.faults
        )

    # Time.

    def master_born(self, master: SimulatedMaster) -> None:
        master.gate = self._gate if self._holding else None
        self._arm(master)

    def worker_started(self, worker: SimulatedWorker) -> None:
        """Apply the slowness of its predecessor to a new worker."""
        worker.slowness_s = self._slow.get(worker.name, 0.0)

    def _arm(self, master: SimulatedMaster) -> None:
        step = master.master.state.step
        master.crashes = [
            Crash(fault.state, fault.other, fault.after, self._crashed(fault))
            for fault in self._waiting
            if fault.kind is SimulatedFaultKind.CRASH and step >= fault.step
        ]

    def _crashed(self, fault: PlannedSimFault) -> Callable[[], None]:
        def crashed() -> None:
            self._waiting.remove(fault)
            fault.fired_in = fault.state
            self._touched.add("master-0")
            self.last_at = max(self.last_at, self._world.now)

        return crashed

    def follow(self, master: SimulatedMaster) -> None:
        """After a decision of the master, inject the faults that wait for its new state."""
        where = (master.state, master.master.state.step)
        if where == self._where:
            return
        self._where = where
        self._arm(master)
        state, step = where
        for fault in [fault for fault in self._waiting if fault.kind is not SimulatedFaultKind.CRASH]:
            is_there = fault.state in ("", state) or (fault.or_last and state == NOTIFYING)
            if step >= fault.step and is_there:
                self._waiting.remove(fault)
                self._world.after(fault.delay_s, self._fire, fault)
        hold = self.plan.hold
        if hold is not None and self._holding and state == hold.state:
            if hold.event == "Tick":
                self._world.after(0.0, master.enter, master.feed, (Tick(),))
            self.release()

    # Held messages.

    def _gate(
        self, master: SimulatedMaster, kind: str, action: Callable[..., None], arguments: tuple[Any, ...]
    ) -> bool:
        hold = self.plan.hold
        assert hold is not None
        if not self._holding or kind != hold.event or master.state == hold.state or self._held:
            return False
        if hold.about and (master.state == Phase.STARTING or not _is_about(arguments[0], hold.about)):
            return False  # Its first registration is not meant.
        if kind == "Replied" and self._world.random.random() < 0.9:
            return False
        if kind == "RequestFailed" and isinstance(arguments[0].body, StartProcess):
            self._num_failed_starts += 1
            if self._num_failed_starts > 1:
                return False  # A rank that can not be started for a while would seem to be away for longer.
        self._held.append((master, action, arguments))
        self._world.after(hold.longest_s, self.release)
        self.plan.faults += hold.leads
        self._waiting += hold.leads
        hold.leads, self._where = [], ("", 0)
        return True

    def release(self) -> None:
        held, self._held = self._held, []
        for master, action, arguments in held:
            self._world.after(0.0, master.enter, action, arguments)

    # Effect.

    def _fire(self, fault: PlannedSimFault) -> None:
        cluster = self._cluster
        if cluster.outcome is not None:
            return
        state = (
            cluster.master.state
            if cluster.process("master-0") is not None and cluster.master
            else "recovering: no master"
        )
        if self._act(fault):
            fault.fired_in = state
            self.last_at = max(self.last_at, self._world.now + fault.duration_s)
            self._world.remark("fault", f"{fault.kind} {fault.target} {fault.other} in {state}")

    def _act(self, fault: PlannedSimFault) -> bool:
        """Inject a fault; False if it had no target."""
        match fault.kind:
            case SimulatedFaultKind.KILL_HOST | SimulatedFaultKind.POWER_CUT:
                return self._lose_host(self._cluster.hosts[fault.target], fault)
            case SimulatedFaultKind.LOSS | SimulatedFaultKind.SPIKES:
                return self._disturb(fault)
            case SimulatedFaultKind.SCALE:
                self._cluster.scale(fault.servers)
                return True
            case _:
                process = self._cluster.process(fault.target)
                return process is not None and self._hit(process, fault)

    def _hit(self, process: SimulatedProcess, fault: PlannedSimFault) -> bool:
        if self._never_came_up(process):
            return False
        self._touched.add(process.name)
        match fault.kind:
            case SimulatedFaultKind.KILL:
                process.end(-9)
            case SimulatedFaultKind.STOP | SimulatedFaultKind.PAUSE:
                if process.stopped:
                    return False
                process.stop()
                if process.name.startswith("agent"):
                    self._world.after(1.0 + 0.3 * self._world.random.random(), self._end_if_stopped, process)
                if fault.kind is SimulatedFaultKind.PAUSE:
                    self._world.after(fault.duration_s, process.resume)
                elif process.name == "master-0" or process.name.startswith("agent"):
                    self._world.after(6.0, self._end_if_stopped, process)
            case SimulatedFaultKind.BUSY:
                if process.stopped or process.kept_since is not None:
                    return False
                process.keep()
                self._world.after(fault.duration_s, process.resume)
            case SimulatedFaultKind.SLOW:
                self._slow[process.name] = process.slowness_s = fault.share
                self._world.after(fault.duration_s, self._quicken, process.name)
            case SimulatedFaultKind.CHIP:
                return self._break_chip(process)
            case SimulatedFaultKind.PARTITION:
                return self._cut(process.name, fault.other, fault.duration_s)
            case SimulatedFaultKind.FAIL | SimulatedFaultKind.POISON:
                return self._let_fail(process, fault)
            case SimulatedFaultKind.SIGNAL:
                assert isinstance(process, SimulatedMaster)
                self._world.after(0.0, process.enter, process.request_stop, ())
            case _:
                raise AssertionError(fault.kind)
        return True

    def _break_chip(self, process: SimulatedProcess) -> bool:
        agents = [host.agent for host in self._cluster.hosts.values() if process.name in host.children]
        for agent in agents:
            if agent is not None and agent.alive and not agent.stopped:
                self._world.after(0.0, agent.chip_breaks, process)
                return True
        return False

    def _never_came_up(self, process: SimulatedProcess) -> bool:
        """Return whether a process has never registered: before the first step, that ends the run."""
        master = self._cluster.master
        starting = master is not None and master.state == "starting"
        return starting and isinstance(process, SimulatedWorker) and not process.registered

    def _end_if_stopped(self, process: SimulatedProcess) -> None:
        """Let the launcher replace a stopped agent."""
        if process.stopped and process.alive:
            process.end(-9)

    def _quicken(self, name: str) -> None:
        self._slow.pop(name, None)
        process = self._cluster.process(name)
        if process is not None:
            process.slowness_s = 0.0

    def _cut(self, source: str, target: str, duration_s: float) -> bool:
        self._touched.update((source, target))
        self._network.conditions.cut(source, target)
        self._world.after(duration_s, self._network.conditions.restore, source, target)
        return True

    def _disturb(self, fault: PlannedSimFault) -> bool:
        conditions = self._network.conditions
        if fault.share > 0.1:  # If enough messages are lost, any process may seem dead.
            self._all_touched = True
        before = (conditions.loss, conditions.spike)
        if fault.kind is SimulatedFaultKind.LOSS:
            conditions.loss = fault.share
        else:
            conditions.spike = fault.share

        def calm() -> None:
            conditions.loss, conditions.spike = before

        self._world.after(fault.duration_s, calm)
        return True

    def _lose_host(self, host: SimulatedHost, fault: PlannedSimFault) -> bool:
        """End all processes of a host, and lose the memory that they held."""
        processes = [*host.children.values(), host.master, host.agent]
        living = [process for process in processes if process is not None and process.alive]
        if not living:
            return False
        self._touched.update(process.name for process in living)
        if self._cluster.master is not None:  # Also processes that were only requested there.
            members = self._cluster.master.master.state.members.members.values()
            self._touched.update(member.process for member in members if member.host == host.name)
        agent = host.agent
        for process in living:
            if process is not agent:
                process.on_exit = lambda process, status: None
                process.end(-9)
        host.children.clear()
        host.master = None
        self._cluster.lose_memory(host)
        if fault.kind is SimulatedFaultKind.POWER_CUT and host.name == "host-0":
            self._cluster.cut_power(torn_bytes=int(fault.share * LARGE_WRITE))
        if agent is not None:
            agent.end(-9)
        return True

    def _is_last(self, save: Save) -> bool:
        """Return whether a save is the last of the run or its session: it must not fail, as none follows."""
        master = self._cluster.master
        stopping = master is not None and master.master.state.stop_reason is not None
        return stopping or save.step >= stages(self._cluster.config)[-1].last_step

    def _let_fail(self, process: SimulatedProcess, fault: PlannedSimFault) -> bool:
        """Answer the next request of a kind with a fault; it counts only once that has happened."""
        handle = process.handle

        def failing(delivery: Delivery) -> None:
            body: Body = delivery.body
            master = self._cluster.master
            if kind_of(body) != fault.other or (isinstance(body, Save) and self._is_last(body)):
                handle(delivery)
                return
            if fault.about and getattr(body, "process", "") != fault.about:
                handle(delivery)
                return
            if isinstance(body, StartProcess):
                self._touched.add(body.process)
            fault.times -= 1
            if fault.times == 0:
                process.handle = handle  # type: ignore[method-assign]
            fault.fired_in = master.state if master is not None else ""
            if fault.kind is SimulatedFaultKind.POISON:
                process.endpoint.fail(delivery, "DataError", POISON)
            else:
                kind = "StorageError" if fault.other == "Save" else "Hiccup"
                process.endpoint.fail(delivery, kind, "it failed once")

        process.handle = failing  # type: ignore[method-assign]
        self.last_at = max(self.last_at, self._world.now + 1.0)
        return False


def _is_about(delivery: object, process: str) -> bool:
    """Return whether a message to the master is about this process."""
    match getattr(delivery, "body", None):
        case Register(peer=peer):
            return peer.process == process
        case ProcessExited() | ProcessSuspected() as told:
            return told.process == process
        case _:
            return False
