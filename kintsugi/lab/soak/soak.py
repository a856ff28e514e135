"""Soak test: one run without faults, the same run with faults, and a comparison of the two.

undisturbed run  ─► reference: the state that every step must leave
disturbed run(s) ─► one fault after another, each after the recovery from the last; some during a recovery
full restarts    ─► cost of the same loss without recovery: all processes killed, resumed from the last checkpoint
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from kintsugi.config.schema import Config
from kintsugi.config.stages import stages
from kintsugi.control.phases.table import Phase
from kintsugi.errors import DeadlineExceeded
from kintsugi.journal.journal import read_facts
from kintsugi.lab.injector.injection import INJECTABLE_PHASES, Ability
from kintsugi.lab.injector.injector import Injector, watch_of
from kintsugi.lab.soak import report as reports
from kintsugi.lab.soak.faults import RECOVERY_TIMEOUT_S, FaultSequence, InjectedIncident
from kintsugi.lab.soak.journal_audit import JournalAudit, audit, first_difference
from kintsugi.lab.soak.leak_check import ResourceGrowth
from kintsugi.lab.soak.plan import HERE_ROLES, SIGNAL_ABILITIES, FaultPlan, FaultRole
from kintsugi.lab.soak.report import MIN_FAULTS_PER_PAIR, FaultReport, Report, Totals
from kintsugi.lab.testbed.outputs import Output
from kintsugi.lab.testbed.run import MarkedRun
from kintsugi.lab.testbed.watch import RunWatch, StepCommit, detected_at
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.reader import read_faults
from kintsugi.runtime.clock import SYSTEM_CLOCK, random_stream

STEPS_PER_FAULT = 3
"""Steps of a run per fault: one or two until the recovery, then up to `checkpoint.every` until the planned phase."""
STEPS_PER_COLD_FAULT = 7
"""The same without a fork server: the run continues while a new server imports its libraries."""
STEPS_PER_FAULT_AWAY = 20
"""The same on other machines: the run continues while a lost one is started again."""
EXTRA_STEPS = 12
EXTRA_STEPS_AHEAD = 40
MOST_RUNS = 6
START_TIMEOUT_S = 60.0
STEP_TIMEOUT_S = 5.0
"""Bound for a run that is stuck, per step and independent of faults."""
RESTARTS = (7, 13, 16)
"""Steps after which all processes are killed: two, three and one after a checkpoint, which is what a random fault
loses."""

Say = Callable[[str], None]


class Soak:
    """One soak in one folder. `run` returns the report; no process is left running, even after an error. With `output`
    the disturbed runs have their live view, on that output."""

    def __init__(
        self,
        config: Config,
        *,
        folder: Path,
        num_faults: int,
        seed: int,
        cold: bool = False,
        roles: Collection[FaultRole] | None = None,
        phases: Collection[Phase] = INJECTABLE_PHASES,
        abilities: Sequence[Ability] = SIGNAL_ABILITIES,
        num_restarts: int = len(RESTARTS),
        output: Output | None = None,
        say: Say = lambda line: None,
    ) -> None:
        is_away = bool(config.cluster.on)
        if roles is None:
            roles = tuple(FaultRole) if is_away else HERE_ROLES
        # An asynchronous run continues while a process is replaced.
        continues = cold or config.asynchrony.max_staleness > 0
        steps_per_fault = STEPS_PER_COLD_FAULT if continues else STEPS_PER_FAULT
        if is_away:
            steps_per_fault = STEPS_PER_FAULT_AWAY
        extra = EXTRA_STEPS_AHEAD if config.asynchrony.max_staleness > 0 else EXTRA_STEPS
        self._config = with_steps(config, steps=steps_per_fault * num_faults + extra)
        self._folder = folder
        self._num_faults = num_faults
        self._seed = seed
        self._cold = cold
        # What is on other machines ends only when the launcher was away for `cluster.away_s`: no full restart to time.
        self._num_restarts = 0 if is_away else num_restarts
        self._start_s = START_TIMEOUT_S + (config.cluster.start_timeout_s if is_away else 0.0)
        self._output = output
        self._say = say
        self._plan = FaultPlan(random_stream(seed, "faults"), roles=roles, phases=phases, abilities=abilities)
        self._needs_coverage = num_faults >= MIN_FAULTS_PER_PAIR * len(roles) * len(phases)
        self._growth = ResourceGrowth()
        self._faults: list[FaultReport] = []
        self._runs = 0
        self._incidents = 0
        self._missed = 0
        self._failures: list[str] = []
        self._failed_audits: list[JournalAudit] = []
        """Audits of runs that failed; the steps before the failure still have to be equal."""
        self._processes_left = 0

    def run(self) -> Report:
        began = SYSTEM_CLOCK.monotonic()
        last_step = stages(self._config)[-1].last_step
        self._say(f"undisturbed: {last_step} steps")
        reference, commits = self._undisturbed()
        audits: list[JournalAudit] = []
        wall_s = 0.0
        while not self._enough() and self._runs < MOST_RUNS:
            self._say(f"disturbed: {len(self._faults)} of {self._num_faults} faults so far")
            audited, seconds = self._disturbed()
            if audited is not None:
                audits.append(audited)
                wall_s += seconds
        self._say("full restarts")
        restarts = self._restarts() if self._num_restarts else []
        return Report(
            tuple(self._faults),
            self._totals(
                reference,
                audits,
                commits=commits,
                disturbed_s=wall_s,
                restarts=restarts,
                wall_s=SYSTEM_CLOCK.monotonic() - began,
            ),
        )

    def _enough(self) -> bool:
        covered = not (self._needs_coverage and self._plan.uncovered(at_least=MIN_FAULTS_PER_PAIR))
        return len(self._faults) >= self._num_faults and covered

    # Runs.

    def _undisturbed(self) -> tuple[JournalAudit, list[StepCommit]]:
        run, watch = self._prepare("undisturbed")
        try:
            run.start()
            if (why := self._finish(run, watch)) is not None:
                raise RuntimeError(f"the undisturbed run failed: {why}")
            return audit(read_facts(RunFolder(run.run_dir).journal_file)), watch.commits
        finally:
            watch.close()
            run.close()

    def _disturbed(self) -> tuple[JournalAudit | None, float]:
        """Run once with faults until there are enough or the steps are used up; no audit of a run that failed."""
        self._runs += 1
        run, watch = self._prepare(f"disturbed-{self._runs}", output=self._output)
        injector = Injector(run, self._folder / f"faults-{self._runs}", watch=watch)
        sequence = FaultSequence(run, watch, plan=self._plan, growth=self._growth, injector=injector)
        incidents: list[InjectedIncident] = []
        why: str | None = None
        try:
            run.start()
            sequence.until(lambda: watch.step > 0, what="the first step", timeout_s=self._start_s)
            while not self._full(incidents) and sequence.has_room:
                incident = sequence.inject(self._plan.draw())
                if incident is None:
                    self._missed += 1
                    continue
                incidents.append(incident)
                self._say(incident.line())
                if incident.recovered is None and run.running:
                    raise DeadlineExceeded(whom="the run", what="the recovery", waited_s=RECOVERY_TIMEOUT_S)
            why = self._finish(run, watch)
        except DeadlineExceeded as error:
            why = str(error)
        finally:
            injector.close()
            watch.close()
            run.close()
        return self._settle(run, watch, incidents, why)

    def _full(self, incidents: list[InjectedIncident]) -> bool:
        injected = len(self._faults) + sum(len(incident.faults) for incident in incidents)
        return injected >= self._num_faults and not (
            self._needs_coverage and self._plan.uncovered(at_least=MIN_FAULTS_PER_PAIR)
        )

    def _settle(
        self, run: MarkedRun, watch: RunWatch, incidents: list[InjectedIncident], why: str | None
    ) -> tuple[JournalAudit | None, float]:
        audited = audit(read_facts(RunFolder(run.run_dir).journal_file))
        self._faults += [
            fault for incident in incidents for fault in self._fault_reports(incident, audited, watch)
        ]
        unrecovered = [incident.line() for incident in incidents if incident.recovered is None]
        if why is None and unrecovered:
            self._failures += [f"{run.run_dir.name}: {line}" for line in unrecovered]
        if why is not None:
            after = f" after {incidents[-1].line()}" if incidents else ""
            self._failures.append(f"{run.run_dir.name}: {why}{after}")
            self._say(self._failures[-1])
            self._failed_audits.append(audited)
            return None, 0.0
        return audited, watch.commits[-1].at - watch.commits[0].at

    def _restarts(self) -> list[float]:
        """Return the seconds from killing all processes until a step after the last committed one is committed."""
        steps = RESTARTS[: self._num_restarts]
        run, watch = self._prepare("restarts", steps=steps[-1] + 8)
        seconds = []
        try:
            run.start()
            for step in steps:
                timeout_s = START_TIMEOUT_S + STEP_TIMEOUT_S * step
                watch.until(lambda step=step: watch.step >= step, what=f"step {step}", timeout_s=timeout_s)  # type: ignore[misc]
                reached, at = watch.step, SYSTEM_CLOCK.monotonic()
                run.kill_everything()
                run.start(resume=True)
                watch.until(
                    lambda reached=reached, at=at: _beyond(watch, reached, at) is not None,  # type: ignore[misc]
                    what=f"step {reached + 1} after a full restart",
                    timeout_s=timeout_s,
                )
                beyond = _beyond(watch, reached, at)
                assert beyond is not None
                seconds.append(beyond.at - at)
                self._say(f"full restart after step {reached}: {seconds[-1]:.1f} s")
        except DeadlineExceeded as error:
            self._failures.append(f"full restart: {error}: {run.output()}")
        finally:
            watch.close()
            run.close()
        return seconds

    def _prepare(
        self, name: str, *, steps: int | None = None, output: Output | None = None
    ) -> tuple[MarkedRun, RunWatch]:
        config = self._config if steps is None else with_steps(self._config, steps=steps)
        run = MarkedRun(config, run_dir=self._folder / name, cold=self._cold, output=output)
        return run, watch_of(run)

    def _finish(self, run: MarkedRun, watch: RunWatch) -> str | None:
        """Follow a run to its end; return None when it succeeded, else the reason."""
        since = SYSTEM_CLOCK.wall()
        remaining = stages(self._config)[-1].last_step - watch.step
        watch.until(
            lambda: not run.running,
            what="the end of the run",
            timeout_s=self._start_s + STEP_TIMEOUT_S * remaining,
            pause_s=0.05,
        )
        self._processes_left += len(run.pids())
        watch.look(force=True)
        code = run.exit_code()
        if code == 0:
            return None
        faults = "; ".join(f"{f.process}: {f.message}" for f in read_faults(run.run_dir, since=since - 60))
        return f"it ended with code {code}: {faults or run.output()[-300:]}"

    # Results.

    def _fault_reports(
        self, incident: InjectedIncident, audited: JournalAudit, watch: RunWatch
    ) -> list[FaultReport]:
        self._incidents += 1
        first, last = incident.faults[0], incident.faults[-1]
        next_step = watch.committed_after(last.at)
        upper = incident.recovered.step if incident.recovered else first.step
        processes = {process for fault in incident.faults for process in fault.processes}
        timing = next(
            (
                known.timing
                for known in reversed(audited.incidents)
                if first.step <= known.step < max(upper, first.step + 1) and known.processes & processes
            ),
            {},
        )
        lost = sum(
            max(0, rollback.step - rollback.to)
            for rollback in audited.rollbacks
            if first.step <= rollback.step <= upper
        )
        made = []
        for fault in incident.faults:
            times = [detected_at(watch.records, process=p, after=fault.at) for p in fault.processes]
            detected = min((at for at in times if at is not None), default=None)
            detected_ms = None if detected is None else (detected - fault.at) * 1000
            split = {part: seconds * 1000 for part, seconds in timing.items()}
            made.append(
                FaultReport(
                    incident=self._incidents,
                    role=fault.planned.role.value,
                    kind=fault.planned.ability.value,
                    phase=fault.phase,
                    processes=tuple(fault.processes),
                    step=fault.step,
                    detected_ms=detected_ms,
                    recovered_ms=(incident.recovered.at - last.at) * 1000 if incident.recovered else None,
                    next_step_ms=(next_step.at - last.at) * 1000 if next_step else None,
                    steps_lost=lost,
                    healthy_pids_unchanged=incident.healthy_unchanged,
                    split=split if detected_ms is None else {"detect": detected_ms, **split},
                )
            )
        return made

    def _totals(
        self,
        reference: JournalAudit,
        audits: list[JournalAudit],
        *,
        commits: list[StepCommit],
        disturbed_s: float,
        restarts: list[float],
        wall_s: float,
    ) -> Totals:
        undisturbed_s = commits[-1].at - commits[0].at
        whole = [first_difference(reference, audited) for audited in audits]
        parts = [first_difference(reference, part, common_steps_only=True) for part in self._failed_audits]
        different = [step for step in (*whole, *parts) if step is not None]
        states = [record.state for record in reference.steps.values()]
        return Totals(
            weights_sha256=", ".join(sorted({audited.weights_sha256 for audited in audits})),
            weights_sha256_undisturbed=reference.weights_sha256,
            steps=len(reference.steps),
            runs=self._runs,
            step_hashes_equal=not different,
            first_different_step=min(different, default=None),
            states_distinct=len(set(states)) == len(states),
            max_staleness=self._config.asynchrony.max_staleness,
            staleness_max=max((audited.staleness_max for audited in audits), default=0),
            reward=min((audited.last_reward for audited in audits), default=None),
            reward_undisturbed=reference.last_reward,
            samples_trained=reference.samples_issued * len(audits),
            samples_lost=sum(audited.samples_lost for audited in audits),
            samples_duplicated=sum(audited.samples_duplicated for audited in audits),
            processes_left=self._processes_left,
            fd_growth=self._growth.fd_growth,
            rss_growth_mb=self._growth.rss_growth_mb,
            num_processes=self._growth.num_processes,
            growth=self._growth.by_process,
            ettr=undisturbed_s * len(audits) / disturbed_s if disturbed_s else 0.0,
            step_s=statistics.median(after.at - before.at for before, after in pairwise(commits)),
            wall_s=wall_s,
            detected=reports.detection(self._faults),
            recovered=reports.recovery(self._faults),
            coverage=self._plan.coverage,
            uncovered=tuple(self._plan.uncovered(at_least=MIN_FAULTS_PER_PAIR)),
            missed=self._missed,
            full_restart=reports.full_restart(restarts, self._faults),
            failures=tuple(self._failures),
            cold=self._cold,
            seed=self._seed,
        )


def with_steps(config: Config, *, steps: int) -> Config:
    """Return the same configuration with this number of steps."""
    replace = msgspec.structs.replace
    return replace(config, algorithm=replace(config.algorithm, steps=steps))


def _beyond(watch: RunWatch, step: int, moment: float) -> StepCommit | None:
    return next((commit for commit in watch.commits if commit.at > moment and commit.step > step), None)
