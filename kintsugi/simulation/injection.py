"""Lets the faults of a plan happen to a simulated cluster, each when the master has come to where it waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kintsugi.control.phases import Phase
from kintsugi.control.protocol import Tick
from kintsugi.messages import Body, Register, Save
from kintsugi.simulation.coverage import NOTIFYING
from kintsugi.simulation.faults import Kind, Plan, Planned
from kintsugi.simulation.master import Crash, SimulatedMaster
from kintsugi.simulation.network import Process
from kintsugi.simulation.workers import Worker
from kintsugi.stages import stages
from kintsugi.supervision import ProcessExited, ProcessSuspected, StartProcess
from kintsugi.transport.exchange import Delivery

if TYPE_CHECKING:
    from kintsugi.simulation.cluster import Cluster
    from kintsugi.simulation.hosts import Host

ABANDON_S = 40.0
"""Faults whose moment has not come by then do not happen: faults stop."""
LARGE_WRITE = 4096
"""No decision writes more bytes than these into the journal."""
POISON = "the user's mistake"
"""What a run says in the end that nothing can save."""


class Injector:
    """The faults of one run. `touched` says whom they hit, so that everybody else must keep its incarnation."""

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self._cluster, self.plan = cluster, plan
        self._world, self._network = cluster.world, cluster.network
        self._touched: set[str] = set()
        self._all_touched = False
        self._where: tuple[str, int] = ("", 0)
        self._held: list[tuple[SimulatedMaster, Callable[..., None], tuple[Any, ...]]] = []
        self._slow: dict[str, float] = {}
        self.last_at = 0.0
        """When the last fault so far is over."""
        self.take(plan)

    def take(self, plan: Plan) -> None:
        """Let this plan happen, before the run begins."""
        self.plan, self._holding = plan, plan.hold is not None
        self._waiting = [*plan.faults, *plan.scalings]
        self.resumes = any(fault.kind is Kind.SIGNAL for fault in plan.faults)

    def begin(self) -> None:
        weather = self._network.weather
        weather.loss, weather.repetition, weather.spike = self.plan.weather
        if self.plan.faults:
            self.last_at = ABANDON_S
            self._world.after(ABANDON_S, self._calm)

    def _calm(self) -> None:
        """From here on nothing new breaks."""
        self._waiting.clear()
        if self._cluster.master is not None:
            self._cluster.master.crashes = []
        self.release()
        self._holding = False
        weather = self._network.weather
        weather.loss = weather.repetition = weather.spike = 0.0

    def touched(self, process: str) -> bool:
        return self._all_touched or process in self._touched

    @property
    def poisoned(self) -> bool:
        """Whether a fault happened that no run can survive."""
        return any(fault.kind is Kind.POISON and fault.fired_in is not None for fault in self.plan.faults)

    # When.

    def master_born(self, master: SimulatedMaster) -> None:
        master.gate = self._gate if self._holding else None
        self._arm(master)

    def worker_born(self, worker: Worker) -> None:
        """What made its predecessor slow is still there."""
        worker.slowness_s = self._slow.get(worker.name, 0.0)

    def _arm(self, master: SimulatedMaster) -> None:
        step = master.master.state.step
        master.crashes = [
            Crash(fault.state, fault.other, fault.after, self._crashed(fault))
            for fault in self._waiting
            if fault.kind is Kind.CRASH and step >= fault.step
        ]

    def _crashed(self, fault: Planned) -> Callable[[], None]:
        def crashed() -> None:
            self._waiting.remove(fault)
            fault.fired_in = fault.state
            self._touched.add("master-0")
            self.last_at = max(self.last_at, self._world.now)

        return crashed

    def follow(self, master: SimulatedMaster) -> None:
        """The master has decided something: has it come to where a fault waits?"""
        where = (master.state, master.master.state.step)
        if where == self._where:
            return
        self._where = where
        self._arm(master)
        state, step = where
        for fault in [fault for fault in self._waiting if fault.kind is not Kind.CRASH]:
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
            return False  # Its first arrival is not what is meant.
        if kind == "Replied" and self._world.random.random() < 0.9:
            return False
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

    # What.

    def _fire(self, fault: Planned) -> None:
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

    def _act(self, fault: Planned) -> bool:
        """Do it; False if there was nothing to hit."""
        match fault.kind:
            case Kind.KILL_HOST | Kind.POWER_CUT:
                return self._lose_host(self._cluster.hosts[fault.target], fault)
            case Kind.LOSS | Kind.SPIKES:
                return self._disturb(fault)
            case Kind.SCALE:
                self._cluster.scale(fault.servers)
                return True
            case _:
                process = self._cluster.process(fault.target)
                return process is not None and self._hit(process, fault)

    def _hit(self, process: Process, fault: Planned) -> bool:
        if self._never_came_up(process):
            return False
        self._touched.add(process.name)
        match fault.kind:
            case Kind.KILL:
                process.end(-9)
            case Kind.STOP | Kind.PAUSE:
                if process.stopped:
                    return False
                process.stop()
                if process.name.startswith("agent"):
                    self._world.after(1.0 + 0.3 * self._world.random.random(), self._end_if_stopped, process)
                if fault.kind is Kind.PAUSE:
                    self._world.after(fault.duration_s, process.go_on)
                elif process.name == "master-0" or process.name.startswith("agent"):
                    self._world.after(6.0, self._end_if_stopped, process)
            case Kind.SLOW:
                self._slow[process.name] = process.slowness_s = fault.share
                self._world.after(fault.duration_s, self._quicken, process.name)
            case Kind.CHIP:
                return self._break_chip(process)
            case Kind.PARTITION:
                return self._cut(process.name, fault.other, fault.duration_s)
            case Kind.FAIL | Kind.POISON:
                return self._let_fail(process, fault)
            case Kind.SIGNAL:
                assert isinstance(process, SimulatedMaster)
                self._world.after(0.0, process.enter, process.request_stop, ())
            case _:
                raise AssertionError(fault.kind)
        return True

    def _break_chip(self, process: Process) -> bool:
        agents = [host.agent for host in self._cluster.hosts.values() if process.name in host.children]
        for agent in agents:
            if agent is not None and agent.alive and not agent.stopped:
                self._world.after(0.0, agent.chip_breaks, process)
                return True
        return False

    def _never_came_up(self, process: Process) -> bool:
        """Before the first step, a process that does not come up ends the run: that is no fault to survive."""
        master = self._cluster.master
        starting = master is not None and master.state == "starting"
        return starting and isinstance(process, Worker) and not process.registered

    def _end_if_stopped(self, process: Process) -> None:
        """The launcher looks after its agents as they do after their children."""
        if process.stopped and process.alive:
            process.end(-9)

    def _quicken(self, name: str) -> None:
        self._slow.pop(name, None)
        process = self._cluster.process(name)
        if process is not None:
            process.slowness_s = 0.0

    def _cut(self, source: str, target: str, duration_s: float) -> bool:
        self._touched.update((source, target))
        self._network.weather.cut(source, target)
        self._world.after(duration_s, self._network.weather.mend, source, target)
        return True

    def _disturb(self, fault: Planned) -> bool:
        weather = self._network.weather
        if fault.share > 0.1:  # Lost messages may make anybody look dead, if enough of them are lost.
            self._all_touched = True
        before = (weather.loss, weather.spike)
        if fault.kind is Kind.LOSS:
            weather.loss = fault.share
        else:
            weather.spike = fault.share

        def calm() -> None:
            weather.loss, weather.spike = before

        self._world.after(fault.duration_s, calm)
        return True

    def _lose_host(self, host: Host, fault: Planned) -> bool:
        """Everything on a host ends at once, and with it the memory that its processes held."""
        processes = [*host.children.values(), host.master, host.agent]
        living = [process for process in processes if process is not None and process.alive]
        if not living:
            return False
        self._touched.update(process.name for process in living)
        if self._cluster.master is not None:  # Also who was only ordered there.
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
        if fault.kind is Kind.POWER_CUT and host.name == "host-0":
            self._cluster.cut_power(torn_bytes=int(fault.share * LARGE_WRITE))
        if agent is not None:
            agent.end(-9)
        return True

    def _is_last(self, save: Save) -> bool:
        """The last save of a run, or of its session, must not fail: nothing comes after it that could be better."""
        master = self._cluster.master
        stopping = master is not None and master.master.state.stop_reason is not None
        return stopping or save.step >= stages(self._cluster.config)[-1].last_step

    def _let_fail(self, process: Process, fault: Planned) -> bool:
        """Answer the next request of a kind with a fault; it counts only once that has happened."""
        handle = process.handle

        def failing(delivery: Delivery) -> None:
            body: Body = delivery.body
            master = self._cluster.master
            if type(body).__name__ != fault.other or (isinstance(body, Save) and self._is_last(body)):
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
            if fault.kind is Kind.POISON:
                process.endpoint.fail(delivery, "DataError", POISON)
            else:
                kind = "StorageError" if fault.other == "Save" else "Hiccup"
                process.endpoint.fail(delivery, kind, "it failed once")

        process.handle = failing  # type: ignore[method-assign]
        self.last_at = max(self.last_at, self._world.now + 1.0)
        return False


def _is_about(delivery: object, process: str) -> bool:
    """Whether a message to the master tells of this process."""
    match getattr(delivery, "body", None):
        case Register(peer=peer):
            return peer.process == process
        case ProcessExited() | ProcessSuspected() as told:
            return told.process == process
        case _:
            return False
