"""Injection of one fault after another into a running job: wait for a phase, signal a process, wait for recovery."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from kintsugi.cluster.child import ChildrenTable
from kintsugi.config.stages import stages
from kintsugi.control.phases.table import Phase
from kintsugi.errors import DeadlineExceeded
from kintsugi.lab.injector.injection import Ability, Injected
from kintsugi.lab.injector.injector import Injector
from kintsugi.lab.soak.leak_check import ResourceGrowth
from kintsugi.lab.soak.plan import WHOLE_HOSTS, FaultPlan, FaultRole, PlannedFault
from kintsugi.lab.testbed.run import MarkedRun
from kintsugi.lab.testbed.watch import RunWatch, StepCommit
from kintsugi.run_folder.layout import RunFolder

PHASE_WAIT_STEPS = 7
"""Steps that a planned fault waits for its phase, which may occur only every few steps, or pass too quickly."""
PHASE_WAIT_TIMEOUT_S = 60.0
RECOVERY_TIMEOUT_S = 30.0
NODE_TIMEOUT_S = 120.0
"""Time for a machine that was lost to join the run again, and for the run to go on without it."""
RESERVE_STEPS = 8
"""Steps left at the end of a run, so that recovery from the last fault completes before it."""
RESERVE_STEPS_AHEAD = 40
"""The same for an asynchronous run, which continues while a process is replaced, with short steps."""
ALL_OF = {FaultRole.HOST: "host of ", FaultRole.NODE: "machine of "}
FIRST_FAULT_PHASES = (Phase.COLLECTING, Phase.TRAINING)
"""Phases in which a rank is killed so that the next fault can begin during its recovery."""


class InjectedFault(msgspec.Struct, frozen=True):
    """Planned fault and what was injected for it: one process, or every process of a host."""

    planned: PlannedFault
    injected: tuple[Injected, ...]

    @property
    def phase(self) -> str:
        """Phase that the master was in."""
        return self.injected[0].phase

    @property
    def processes(self) -> dict[str, int]:
        """Process → pid."""
        return {each.process: each.pid for each in self.injected}

    @property
    def at(self) -> float:
        """Monotonic time of the signal."""
        return self.injected[0].monotonic

    @property
    def step(self) -> int:
        """Last step committed before the fault."""
        return self.injected[0].step - 1


class InjectedIncident(msgspec.Struct, frozen=True):
    """Faults that overlap, and their recovery."""

    faults: tuple[InjectedFault, ...]
    recovered: StepCommit | None
    """First step committed with every process restored; None when that did not happen in time."""
    healthy_unchanged: bool

    def line(self) -> str:
        """`kill server-1 while publishing (step 4): recovered after 0.43 s`."""
        faults = ", then ".join(
            f"{fault.planned.ability.value} "
            f"{ALL_OF.get(fault.planned.role, '')}{next(iter(fault.processes))} "
            f"while {fault.phase} (step {fault.step + 1})"
            for fault in self.faults
        )
        if self.recovered is None:
            return f"{faults}: not recovered"
        changed = "" if self.healthy_unchanged else "; a healthy process changed"
        return f"{faults}: recovered after {self.recovered.at - self.faults[-1].at:.2f} s{changed}"


class FaultSequence:
    """Faults of a plan, injected into one run, each after the recovery from the one before."""

    def __init__(
        self,
        run: MarkedRun,
        watch: RunWatch,
        *,
        plan: FaultPlan,
        growth: ResourceGrowth,
        injector: Injector,
    ) -> None:
        self._run = run
        self._watch = watch
        self._plan = plan
        self._growth = growth
        self._injector = injector
        self._last_step = stages(run.config)[-1].last_step

    @property
    def has_room(self) -> bool:
        """Whether there are steps left for another fault."""
        is_ahead = self._run.config.asynchrony.max_staleness > 0
        reserve = RESERVE_STEPS_AHEAD if is_ahead else RESERVE_STEPS
        return self._run.running and self._watch.step < self._last_step - reserve

    def until(self, condition: Callable[[], bool], *, what: str, timeout_s: float) -> None:
        """Follow the run until the condition holds or the run has ended; DeadlineExceeded after `timeout_s`."""
        launcher = self._run.launcher
        assert launcher is not None

        def holds() -> bool:
            pids = {
                process: presence.pid
                for process, presence in self._watch.processes.items()
                if self._run.remote is None or not self._run.remote.is_elsewhere(process)
            }
            self._growth.sample({"launcher": launcher.pid, **pids})
            return condition() or not self._run.running

        self._watch.until(holds, what=what, timeout_s=timeout_s)

    def inject(self, planned: PlannedFault) -> InjectedIncident | None:
        """Inject one planned fault and wait for the recovery; None when no process was hit."""
        before = {process: presence.pid for process, presence in self._watch.processes.items()}
        faults: list[InjectedFault] = []
        if planned.phase is Phase.RECOVERING:
            phase = FIRST_FAULT_PHASES[self._plan.fraction() < 0.5]
            first = self._inject_in_phase(PlannedFault(FaultRole.MODEL, Ability.KILL, phase))
            if first is None:
                return None
            faults.append(first)
        if (fault := self._inject_in_phase(planned)) is not None:
            faults.append(fault)
        else:
            self._plan.record_missed(planned)
        if not faults:
            return None
        incident = self._recovered(faults, before=before)
        if fault is not None and planned.role is FaultRole.NODE and not self._is_back(fault):
            return msgspec.structs.replace(incident, recovered=None)
        return incident

    def _is_back(self, fault: InjectedFault) -> bool:
        """Wait until the machine of a fault has joined the run again; the run went on meanwhile."""
        agent = next(process for process in fault.processes if process.startswith(FaultRole.AGENT.value))
        watch = self._watch
        with suppress(DeadlineExceeded):
            self.until(
                lambda: watch.processes[agent].pid != fault.processes[agent],
                what=f"the return of {agent}",
                timeout_s=NODE_TIMEOUT_S,
            )
        # The run may have ended before: then there is no host to wait for.
        return watch.processes[agent].pid != fault.processes[agent] or not self._run.running

    def _inject_in_phase(self, planned: PlannedFault) -> InjectedFault | None:
        """Wait for the phase and a random position inside it, then inject; None when every attempt came too late."""
        watch, phase = self._watch, planned.phase
        # A recovery is over with the next step; there will be another one only after another fault.
        last = watch.step if phase is Phase.RECOVERING else watch.step + PHASE_WAIT_STEPS
        while watch.step <= last and self._run.running:
            try:
                self.until(
                    lambda: watch.is_in(phase.value) or watch.step > last,
                    what=f"the phase {phase.value}",
                    timeout_s=PHASE_WAIT_TIMEOUT_S,
                )
                self._wait_inside(phase)
            except DeadlineExceeded:
                return None
            if watch.is_in(phase.value) and (targets := self.choose(planned)):
                injection = planned.injection(next(iter(targets)))
                is_whole = planned.role is FaultRole.NODE
                if injected := self._injector.signal_in_phase(injection, targets, is_whole_host=is_whole):
                    fault = InjectedFault(planned, injected)
                    self._plan.record_injected(planned.role, fault.phase)
                    return fault
            if phase is Phase.RECOVERING:
                return None
            self._leave(phase)
        return None

    def choose(self, planned: PlannedFault) -> dict[str, int]:
        """Choose the processes of a planned fault, with their pids; empty when none of the role is running."""
        pids = {
            process: presence.pid
            for process, presence in self._watch.processes.items()
            if self._run.has(process, presence.pid)
        }
        of_host, remote = planned.role in WHOLE_HOSTS, self._run.remote
        role = FaultRole.AGENT if of_host else planned.role
        names = sorted(process for process in pids if process.startswith(f"{role.value}-"))
        if planned.role is FaultRole.NODE:
            names = [name for name in names if remote is not None and remote.is_elsewhere(name)]
        if not names:
            return {}
        name = self._plan.choose(names)
        chosen = {name: pids[name]}
        if of_host and remote is not None and remote.is_elsewhere(name):
            chosen |= remote.processes_on(remote.host_of(name))
        elif of_host:
            chosen |= children_of_agent(self._run.run_dir, name)
        return chosen

    def _wait_inside(self, phase: Phase) -> None:
        """Let a random part of the usual length of the phase pass."""
        watch = self._watch
        lengths = watch.lengths_s(phase.value)[-20:]
        if not lengths or (length_s := statistics.median(lengths)) < 0.02:
            return
        until_s = self._plan.fraction() * 0.8 * length_s
        with suppress(DeadlineExceeded):
            self.until(lambda: not watch.is_in(phase.value), what="a moment in the phase", timeout_s=until_s)

    def _leave(self, phase: Phase) -> None:
        """Wait for the end of the phase: one phase of one step gets one attempt."""
        if self._watch.is_in(phase.value):
            self.until(
                lambda: not self._watch.is_in(phase.value),
                what=f"the end of {phase.value}",
                timeout_s=RECOVERY_TIMEOUT_S,
            )

    def _recovered(self, faults: list[InjectedFault], *, before: dict[str, int]) -> InjectedIncident:
        """Wait until every process that was hit has a successor and a step is committed since."""
        watch = self._watch
        hit = {process: pid for fault in faults for process, pid in fault.processes.items()}
        lost = {
            process
            for fault in faults
            if fault.planned.role is FaultRole.NODE
            for process in fault.processes
            if process.startswith(FaultRole.AGENT.value)
        }
        """Agents of machines that are lost: the run goes on without them."""
        timeout_s = NODE_TIMEOUT_S if lost else RECOVERY_TIMEOUT_S

        def first_whole_step() -> StepCommit | None:
            now = {process: watch.processes[process] for process in hit if process in watch.processes}
            now = {process: presence for process, presence in now.items() if process not in lost}
            if any(presence.pid == hit[process] for process, presence in now.items()):
                return None
            return watch.committed_after(max([faults[-1].at, *(presence.at for presence in now.values())]))

        with suppress(DeadlineExceeded):
            self.until(
                lambda: first_whole_step() is not None,
                what=f"the recovery of {', '.join(hit)}",
                timeout_s=timeout_s,
            )
        healthy = {process: pid for process, pid in before.items() if process not in hit}
        unchanged = all(
            watch.processes[process].pid == pid and self._run.has(process, pid)
            for process, pid in healthy.items()
        )
        return InjectedIncident(tuple(faults), first_whole_step(), unchanged)


def children_of_agent(run_dir: Path, agent: str) -> dict[str, int]:
    """Return the processes of an agent's host, from the table that the agent keeps on disk."""
    with suppress(FileNotFoundError, msgspec.DecodeError):
        table = msgspec.json.decode(RunFolder(run_dir).agent_file(agent).read_bytes(), type=ChildrenTable)
        return {child.process: child.pid for child in table.children}
    return {}
