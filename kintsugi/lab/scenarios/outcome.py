"""Result of an experiment: what surfaced where, what was diagnosed and when, and what the fault cost."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from kintsugi.diagnosis.verdict import Cause
from kintsugi.errors import UserError
from kintsugi.lab.campaign import fault_effect, log_readers, scoring
from kintsugi.lab.campaign.blind import Look
from kintsugi.lab.campaign.log_readers import ErrorLine
from kintsugi.lab.injector.injection import Injected
from kintsugi.lab.scenarios import experiments, measuring
from kintsugi.lab.scenarios.experiments import BASELINE_STEPS, GroundTruth, LoadedExperiment, Profile
from kintsugi.lab.scenarios.records import (
    DiagnosisRecord,
    InjectedRecord,
    RunRecord,
    SurfacedError,
    TimedEvent,
    diagnosed,
    first_cause,
    injected_record,
)
from kintsugi.lab.scenarios.system import System
from kintsugi.lab.testbed.watch import RunWatch
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.telemetry.readings import ReadingRecord, figures_in
from kintsugi.types import role_of

IN_TIME_S = 10.0
"""Limit from the first effect to the verdict."""
LOG_STAMP_S = 0.001
REACTION_S = 0.005
"""Our master changes its phase first, and reports the reason right after."""
CLEANING_UP = frozenset({"ending", "ended"})
AFTER_A_COMMIT = frozenset({"saving", "evaluating"})
"""Phases in which the master works on the last committed step, not on the next one."""
MESSAGE_WIDTH = 160
"""Characters of the visible error that the terminal shows; the report has all of it."""
BY_DIAGNOSIS = "kintsugi diagnose"
BY_LAST_ERROR = "last error in the master's log"
BY_FIRST_ERROR = "first error in any log"


class ObservedOutcome(msgspec.Struct, kw_only=True):
    """Observations of an experiment; collected before its run folder is moved."""

    loaded: LoadedExperiment
    profile: Profile
    folder: Path
    injected: list[Injected] = []
    looks: list[Look] = []
    problem: str = ""
    seconds: float = 0.0
    run_dir: Path | None = None
    """None when the run never started."""
    host_of: dict[str, str] = {}
    completed: bool = False
    steps_lost: int = 0
    logs: log_readers.LogSizes = {}
    """Log sizes before the first fault."""
    phases: list[tuple[float, str]] = []
    """(wall clock, phase of the master that began)."""
    commits: list[tuple[float, int]] = []
    """(wall clock, step)."""
    ended: float | None = None
    """Wall clock at which the observation ended."""

    def take(self, system: System, watch: RunWatch) -> None:
        """Collect what only the running system knows."""
        self.run_dir = system.run.run_dir
        self.host_of = system.host_of()
        self.completed = system.completed()
        self.steps_lost = system.steps_lost(reached=watch.step)
        offset = SYSTEM_CLOCK.wall() - SYSTEM_CLOCK.monotonic()
        self.phases = [(at + offset, phase) for at, phase in watch.phases()]
        self.commits = [(commit.at + offset, commit.step) for commit in watch.commits]
        self.ended = SYSTEM_CLOCK.wall()

    @property
    def is_fragile(self) -> bool:
        """Whether this is the fragile system; fine-tuning for contrast runs on it too."""
        return self.profile is not Profile.OURS

    @property
    def target_fault(self) -> Injected:
        """The fault that the diagnosis has to name: the first one of the right kind."""
        kinds = set(self.truth.kinds)
        fitting = [each for each in self.injected if scoring.KINDS[each.injection.ability] & kinds]
        return (fitting or self.injected)[0]

    @property
    def truth(self) -> GroundTruth:
        """Right diagnosis. A fine-tuning counterpart has that of its original experiment: the same fault."""
        own = self.loaded.experiment
        if not own.contrast_of:
            return own.cause
        try:
            return _sibling(self.loaded, own.contrast_of).experiment.cause
        except UserError:
            return own.cause

    def step_at(self, t: float, phase: str) -> int | None:
        """Return the step that the master worked on; None when no step is known."""
        if not self.commits:
            return None
        committed = max((step for at, step in self.commits if at <= t), default=0)
        return committed if phase in AFTER_A_COMMIT else committed + 1

    def phase_at(self, t: float) -> str:
        """Return the phase in which an error occurred. Log times have millisecond resolution: where phases meet within
        one, the phase that failed is preferred to the clean-up."""
        if not self.is_fragile:
            began = [(at, phase) for at, phase in self.phases if at <= t]
            moved_on = len(began) > 1 and began[-1][0] > t - REACTION_S
            return began[-2 if moved_on else -1][1] if began else ""
        began = [(at, phase) for at, phase in self.phases if at <= t + LOG_STAMP_S]
        if not began:
            return ""
        meeting = [phase for at, phase in began if at > t]
        before = [phase for at, phase in began if at <= t][-1:]
        failed = [phase for phase in (*before, *meeting) if phase not in CLEANING_UP]
        return failed[-1] if failed else began[-1][1]


def _sibling(loaded: LoadedExperiment, name: str) -> LoadedExperiment:
    """Load another experiment from the same folder, or from the package."""
    try:
        return experiments.find(name, folder=loaded.path.parent)
    except UserError:
        return experiments.find(name)


def record_of(observed: ObservedOutcome) -> RunRecord:
    """Build the record; an experiment in which no fault was injected is never right."""
    experiment = observed.loaded.experiment
    record = RunRecord(
        scenario=experiment.name,
        profile=observed.profile.value,
        workload=observed.loaded.config.name,
        challenges=experiment.challenges,
        injected=tuple(_injected(observed, each) for each in observed.injected),
        surfaced=None,
        hops=0,
        diagnosed=None,
        correct=False,
        first_effect=None,
        recovered=observed.completed,
        steps_lost=observed.steps_lost,
        log_files=None,
        log_lines=None,
        seconds=observed.seconds,
        expected_stage=experiment.fragile.stage if experiment.fragile else "",
        as_expected=False,
        baseline={},
        timeline=(),
        series={},
        folder=str(observed.folder),
        kinds=tuple(kind.value for kind in observed.truth.kinds),
        contrast_of=experiment.contrast_of,
        ended=observed.ended,
        problem=observed.problem,
    )
    if observed.run_dir is None or not observed.injected:
        return msgspec.structs.replace(record, problem=observed.problem or "no fault was injected")
    record = _measured(record, observed, observed.run_dir)
    return msgspec.structs.replace(record, as_expected=_is_as_expected(record, observed))


def _injected(
    observed: ObservedOutcome, each: Injected, samples: Sequence[ReadingRecord] = ()
) -> InjectedRecord:
    """Convert a marker, with host and step as the run counts them."""
    hosts = measuring.hosts_of(samples, each.process)
    return injected_record(
        each,
        host=observed.host_of.get(each.process) or next(iter(hosts), ""),
        step=observed.step_at(each.start, each.phase),
        culprit=each is observed.target_fault,
    )


def _measured(record: RunRecord, observed: ObservedOutcome, run_dir: Path) -> RunRecord:
    first = observed.target_fault
    errors = log_readers.errors_in(run_dir, since=first.start, beyond=observed.logs)
    surfaced = _surfaced(observed, errors)
    verdicts = _verdicts(observed.looks, since=first.start)
    readings = {
        log_readers.LAST_ERROR: _reading(log_readers.last_error(errors), by=BY_LAST_ERROR),
        log_readers.FIRST_ERROR: _reading(log_readers.first_error(errors), by=BY_FIRST_ERROR),
    }
    verdict = readings[log_readers.LAST_ERROR] if observed.is_fragile else next(iter(verdicts), None)
    steps = measuring.steps_of(run_dir)
    samples = figures_in(run_dir)
    metrics = measuring.metrics_of(samples, process=first.process)
    since, until = _baseline_time(steps, before=min(each.start for each in observed.injected))
    spread = measuring.spreads({**steps, **metrics}, since=since, until=until)
    effect = measuring.first_effect(
        steps=steps,
        metrics=metrics,
        baseline=spread,
        since=first.start,
        errors=[each.t for each in errors],
        least=fault_effect.SYMPTOMS.get(first.injection.ability),
        until=None if observed.completed else observed.ended,
    )
    # Without a visible error no one would read logs.
    read = surfaced and log_readers.to_read(
        run_dir, target=first.process, since=first.start, until=surfaced.t, beyond=observed.logs
    )
    path = _path(observed, first, surfaced, verdict, errors)
    return msgspec.structs.replace(
        record,
        injected=tuple(_injected(observed, each, samples) for each in observed.injected),
        surfaced=surfaced,
        hops=max(0, len(path) - 1),
        way=path,
        diagnosed=verdict,
        correct=_is_correct(observed, first, verdict),
        first_effect=effect,
        log_files=read.files if read else None,
        log_lines=read.lines if read else None,
        baseline=spread,
        timeline=_timeline(observed, errors, verdicts),
        series=measuring.thin_out({**steps, **metrics}),
        diagnosed_after_s=None if verdict is None or effect is None else verdict.t - effect,
        verdicts=tuple(verdicts),
        readings=readings,
    )


def _is_correct(observed: ObservedOutcome, first: Injected, verdict: DiagnosisRecord | None) -> bool:
    if verdict is None or observed.problem:
        return False
    truth = observed.truth
    # The fragile system may have another process for the same part.
    target = first.process if observed.is_fragile else truth.process
    expected = scoring.expected_cause(
        first.injection.ability,
        target=target,
        start=first.start,
        host_of=observed.host_of,
        kinds=truth.kinds,
    )
    return scoring.is_right(verdict.process, verdict.kind, [expected])


def _baseline_time(steps: measuring.Series, *, before: float) -> tuple[float, float]:
    """Return the time range of the last steps before the first fault."""
    ends = [t for t, _ in steps.get(measuring.STEP, []) if t <= before][-BASELINE_STEPS - 1 :]
    return (ends[0], ends[-1]) if len(ends) > 1 else (before, before)


def _surfaced(observed: ObservedOutcome, errors: Sequence[ErrorLine]) -> SurfacedError | None:
    """Return the visible error: for our system the first one reported, for others the last one, which a dead run
    shows."""
    if not errors:
        return None
    of_the_master = [error for error in errors if error.process == log_readers.MASTER] or list(errors)
    error = of_the_master[-1] if observed.is_fragile else of_the_master[0]
    phase = observed.phase_at(error.t)
    return SurfacedError(phase, error.process, error.message, error.t, observed.step_at(error.t, phase))


def _verdicts(looks: Sequence[Look], *, since: float) -> list[DiagnosisRecord]:
    """Return every change of the first named cause after the first fault."""
    found: list[DiagnosisRecord] = []
    for look in looks:
        cause = first_cause(look.diagnosis) if look.diagnosis is not None and look.t >= since else None
        if cause is None or (found and (found[-1].process, found[-1].kind) == (cause.process, cause.kind)):
            continue
        found.append(diagnosed(cause, t=look.t, by=BY_DIAGNOSIS))
    return found


def _reading(cause: Cause | None, *, by: str) -> DiagnosisRecord | None:
    return diagnosed(cause, t=cause.onset, by=by) if cause is not None else None


def _path(
    observed: ObservedOutcome,
    first: Injected,
    surfaced: SurfacedError | None,
    verdict: DiagnosisRecord | None,
    errors: Sequence[ErrorLine],
) -> tuple[str, ...]:
    """Return the propagation path: ours as diagnosed; for others the parts that reported errors, in order, up to the
    visible one. Workers of one role are one part, named after the first of them."""
    if not observed.is_fragile:
        path = [station.process for station in verdict.path] if verdict else []
        return (*path[:1], *(after for before, after in pairwise(path) if before != after))
    if surfaced is None:
        return (first.process,)
    between: dict[str, str] = {}
    for error in errors:
        is_new = _part(error.process) not in (_part(first.process), _part(surfaced.process))
        if is_new and error.t <= surfaced.t:
            between.setdefault(_part(error.process), error.process)
    if not between and _part(first.process) == _part(surfaced.process):
        return (first.process,)
    return (first.process, *between.values(), surfaced.process)


def _part(process: str) -> str:
    try:
        return role_of(process).value
    except ValueError:
        return process


def _timeline(
    observed: ObservedOutcome, errors: Sequence[ErrorLine], verdicts: Sequence[DiagnosisRecord]
) -> tuple[TimedEvent, ...]:
    moments = [
        TimedEvent(each.process, f"injected: {each.injection.ability}", each.start)
        for each in observed.injected
    ]
    moments += [
        TimedEvent(each.process, f"undone: {each.injection.ability}", each.end)
        for each in observed.injected
        if each.end is not None
    ]
    moments += [TimedEvent(error.process, error.message, error.t) for error in errors]
    moments += [
        TimedEvent(each.process, f"diagnosed: {each.kind}: {each.summary}", each.t) for each in verdicts
    ]
    return tuple(sorted(moments, key=lambda moment: moment.t))


def _is_as_expected(record: RunRecord, observed: ObservedOutcome) -> bool:
    """Whether the result is as expected. Ours: right, in time, no step lost. Fragile: visible in the stage and with the
    message of the file. Fine-tuning: visible in the stage of the fault or not at all, since it can not propagate to
    another stage."""
    if record.problem:
        return False
    surface = observed.loaded.experiment.fragile
    if not observed.is_fragile:
        in_time = record.diagnosed_after_s is not None and record.diagnosed_after_s <= IN_TIME_S
        return record.correct and in_time and record.recovered and record.steps_lost == 0
    visible = record.surfaced
    if observed.profile is Profile.SFT:
        return visible is None or visible.stage == observed.target_fault.phase
    return (
        surface is not None
        and visible is not None
        and visible.stage == surface.stage
        and re.search(surface.message, visible.message) is not None
    )


def _after(seconds: float) -> str:
    """
    >>> _after(2.5), _after(-0.4)
    ('2.5 s after', '0.4 s before')
    """
    return f"{abs(seconds):.1f} s {'before' if seconds < 0 else 'after'}"


def format_record(record: RunRecord) -> str:
    """Format a record in a few lines for the terminal."""
    if record.problem and record.diagnosed is None:
        return f"  void: {record.problem}"
    visible = record.surfaced
    surfaced = "no visible error"
    if visible is not None:
        message = textwrap.shorten(visible.message, MESSAGE_WIDTH, placeholder=" …")
        surfaced = f"{visible.process} while {visible.stage}: {message}"
    verdict = record.diagnosed
    after = (
        "" if record.diagnosed_after_s is None else f", {_after(record.diagnosed_after_s)} the first effect"
    )
    said = f"{verdict.process} {verdict.kind}{after}" if verdict else "nothing"
    by = BY_DIAGNOSIS if record.profile == Profile.OURS else BY_LAST_ERROR
    ended = "completed" if record.recovered else "did not complete"
    problem = f"\n  problem: {record.problem}" if record.problem else ""
    return (
        f"  surfaced: {surfaced}\n  {by}: {said} ({'right' if record.correct else 'wrong'})\n"
        f"  {ended}, {record.steps_lost} step{'' if record.steps_lost == 1 else 's'} lost, {record.seconds:.0f} s"
        f"{'' if record.as_expected else ': NOT as expected'}{problem}"
    )
