"""From what happened in an experiment to its record: what surfaced where, what was diagnosed and when, what it cost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kintsugi.diagnosis.verdict import Cause
from kintsugi.lab import baselines, measuring, scoring
from kintsugi.lab.baselines import ErrorLine
from kintsugi.lab.blind import Look
from kintsugi.lab.experiments import BASELINE_STEPS, Loaded, Profile
from kintsugi.lab.injection import Injected
from kintsugi.lab.records import (
    Diagnosed,
    Moment,
    RunRecord,
    Surfaced,
    diagnosed,
    first_cause,
    injected_record,
)
from kintsugi.lab.systems import System
from kintsugi.lab.watching import Watch
from kintsugi.runtime import SYSTEM_CLOCK
from kintsugi.types import role_of

IN_TIME_S = 10.0
"""From the first effect to the verdict."""
LOG_STAMP_S = 0.001
CLEANING_UP = frozenset({"ending", "ended"})
BY_DIAGNOSIS = "kintsugi diagnose"
BY_LAST_ERROR = "last error in the master's log"
BY_FIRST_ERROR = "first error in any log"


class Happened(msgspec.Struct, kw_only=True):
    """An experiment as it was carried out; taken before its run folder moves."""

    loaded: Loaded
    profile: Profile
    folder: Path
    injected: list[Injected] = []
    looks: list[Look] = []
    problem: str = ""
    seconds: float = 0.0
    run_dir: Path | None = None
    """None: it never ran."""
    host_of: dict[str, str] = {}
    completed: bool = False
    steps_lost: int = 0
    logs: baselines.LogSizes = {}
    """As they were before the first fault."""
    phases: list[tuple[float, str]] = []
    """(wall clock, phase of the master that began)."""

    def take(self, system: System, watch: Watch) -> None:
        """What only the system can tell."""
        self.run_dir = system.run.run_dir
        self.host_of = system.host_of()
        self.completed = system.completed()
        self.steps_lost = system.steps_lost(reached=watch.step)
        offset = SYSTEM_CLOCK.wall() - SYSTEM_CLOCK.monotonic()
        self.phases = [(at + offset, phase) for at, phase in watch.phases()]

    @property
    def is_fragile(self) -> bool:
        """Fine-tuning, for contrast, is that of the fragile system."""
        return self.profile is not Profile.OURS

    @property
    def culprit(self) -> Injected:
        """Of several faults the one that the diagnosis is to name: the first of the right kind."""
        kinds = set(self.loaded.experiment.cause.kinds)
        fitting = [each for each in self.injected if scoring.KINDS[each.injection.ability] & kinds]
        return (fitting or self.injected)[0]

    def phase_at(self, t: float) -> str:
        """When an error was told. A log tells milliseconds: of phases that meet in one, the one that went wrong is not
        that in which the run is cleaned up."""
        began = [(at, phase) for at, phase in self.phases if at <= t + LOG_STAMP_S]
        if not began:
            return ""
        meeting = [phase for at, phase in began if at > t]
        before = [phase for at, phase in began if at <= t][-1:]
        failed = [phase for phase in (*before, *meeting) if phase not in CLEANING_UP]
        return failed[-1] if failed else began[-1][1]


def record_of(happened: Happened) -> RunRecord:
    """An experiment of which no fault struck says nothing, and is never right."""
    experiment = happened.loaded.experiment
    record = RunRecord(
        scenario=experiment.name,
        profile=happened.profile.value,
        workload=happened.loaded.config.name,
        challenges=experiment.challenges,
        injected=tuple(map(injected_record, happened.injected)),
        surfaced=None,
        hops=0,
        diagnosed=None,
        correct=False,
        first_effect=None,
        recovered=happened.completed,
        steps_lost=happened.steps_lost,
        log_files=0,
        log_lines=0,
        seconds=happened.seconds,
        expected_stage=experiment.fragile.stage if experiment.fragile else "",
        as_expected=False,
        baseline={},
        timeline=(),
        series={},
        folder=str(happened.folder),
        problem=happened.problem,
    )
    if happened.run_dir is None or not happened.injected:
        return msgspec.structs.replace(record, problem=happened.problem or "no fault struck")
    record = _measured(record, happened, happened.run_dir)
    return msgspec.structs.replace(record, as_expected=_is_as_expected(record, happened))


def _measured(record: RunRecord, happened: Happened, run_dir: Path) -> RunRecord:
    first = happened.culprit
    errors = baselines.errors_in(run_dir, since=first.start, beyond=happened.logs)
    surfaced = _surfaced(happened, errors)
    verdicts = _verdicts(happened.looks, since=first.start)
    readings = {
        baselines.LAST_ERROR: _reading(baselines.last_error(errors), by=BY_LAST_ERROR),
        baselines.FIRST_ERROR: _reading(baselines.first_error(errors), by=BY_FIRST_ERROR),
    }
    verdict = readings[baselines.LAST_ERROR] if happened.is_fragile else next(iter(verdicts), None)
    steps = measuring.steps_of(run_dir)
    figures = measuring.figures_of(measuring.samples_in(run_dir), process=first.process, host=first.host)
    since, until = _baseline_time(steps, before=first.start)
    spread = measuring.spreads({**steps, **figures}, since=since, until=until)
    effect = measuring.first_effect(
        steps=steps, figures=figures, baseline=spread, since=first.start, errors=[each.t for each in errors]
    )
    ended = surfaced.t if surfaced else first.start + happened.seconds
    read = baselines.to_read(
        run_dir, target=first.process, since=first.start, until=ended, beyond=happened.logs
    )
    return msgspec.structs.replace(
        record,
        surfaced=surfaced,
        hops=_hops(happened, first, surfaced, verdict, errors),
        diagnosed=verdict,
        correct=_is_correct(happened, first, verdict),
        first_effect=effect,
        log_files=read.files,
        log_lines=read.lines,
        baseline=spread,
        timeline=_timeline(happened, errors, verdicts),
        series=measuring.thinned({**steps, **figures}),
        diagnosed_after_s=None if verdict is None or effect is None else max(0.0, verdict.t - effect),
        verdicts=tuple(verdicts),
        readings=readings,
    )


def _is_correct(happened: Happened, first: Injected, verdict: Diagnosed | None) -> bool:
    if verdict is None or happened.problem:
        return False
    truth = happened.loaded.experiment.cause
    # A fragile system may have another process for the part that was hit.
    target = first.process if happened.is_fragile else truth.process
    culprit = scoring.culprit(
        first.injection.ability,
        target=target,
        start=first.start,
        host_of=happened.host_of,
        kinds=truth.kinds,
    )
    return scoring.is_right(verdict.process, verdict.kind, [culprit])


def _baseline_time(steps: measuring.Series, *, before: float) -> tuple[float, float]:
    """The last steps that nothing had happened to."""
    ends = [t for t, _ in steps.get("timing/step", []) if t <= before][-BASELINE_STEPS - 1 :]
    return (ends[0], ends[-1]) if len(ends) > 1 else (before, before)


def _surfaced(happened: Happened, errors: Sequence[ErrorLine]) -> Surfaced | None:
    """Ours: the first that a person is told. Others: the last, which is what one sees of a dead run."""
    if not errors:
        return None
    of_the_master = [error for error in errors if error.process == baselines.MASTER] or list(errors)
    error = of_the_master[-1] if happened.is_fragile else of_the_master[0]
    return Surfaced(happened.phase_at(error.t), error.process, error.message, error.t)


def _verdicts(looks: Sequence[Look], *, since: float) -> list[Diagnosed]:
    """Every change of the first cause that was named after the first fault."""
    found: list[Diagnosed] = []
    for look in looks:
        cause = first_cause(look.diagnosis) if look.diagnosis is not None and look.t >= since else None
        if cause is None or (found and (found[-1].process, found[-1].kind) == (cause.process, cause.kind)):
            continue
        found.append(diagnosed(cause, t=look.t, by=BY_DIAGNOSIS))
    return found


def _reading(cause: Cause | None, *, by: str) -> Diagnosed | None:
    return diagnosed(cause, t=cause.onset, by=by) if cause is not None else None


def _hops(
    happened: Happened,
    first: Injected,
    surfaced: Surfaced | None,
    verdict: Diagnosed | None,
    errors: Sequence[ErrorLine],
) -> int:
    """Ours: of the path that was told. Others: parts that showed an error, one after the other, up to the one that a
    person saw; workers of one role are one part."""
    if not happened.is_fragile:
        return scoring.num_hops([station.process for station in verdict.path]) if verdict else 0
    if surfaced is None:
        return 0
    shown = [first.process, *(error.process for error in errors if error.t <= surfaced.t), surfaced.process]
    return len(dict.fromkeys(map(_part, shown))) - 1


def _part(process: str) -> str:
    try:
        return role_of(process).value
    except ValueError:
        return process


def _timeline(
    happened: Happened, errors: Sequence[ErrorLine], verdicts: Sequence[Diagnosed]
) -> tuple[Moment, ...]:
    moments = [
        Moment(each.process, f"injected: {each.injection.ability}", each.start) for each in happened.injected
    ]
    moments += [
        Moment(each.process, f"undone: {each.injection.ability}", each.end)
        for each in happened.injected
        if each.end is not None
    ]
    moments += [Moment(error.process, error.message, error.t) for error in errors]
    moments += [Moment(each.process, f"diagnosed: {each.kind}: {each.summary}", each.t) for each in verdicts]
    return tuple(sorted(moments, key=lambda moment: moment.t))


def _is_as_expected(record: RunRecord, happened: Happened) -> bool:
    """Ours: right, in time, nothing lost. Fragile: shown where and in the words that the file says. Fine-tuning: shown
    in the stage in which it was done, or not at all, because there is no stage that it could travel to."""
    if record.problem:
        return False
    surface = happened.loaded.experiment.fragile
    if not happened.is_fragile:
        in_time = record.diagnosed_after_s is not None and record.diagnosed_after_s <= IN_TIME_S
        return record.correct and in_time and record.recovered and record.steps_lost == 0
    shown = record.surfaced
    if happened.profile is Profile.SFT:
        return shown is None or shown.stage == happened.culprit.phase
    return (
        surface is not None
        and shown is not None
        and shown.stage == surface.stage
        and re.search(surface.message, shown.message) is not None
    )


def told(record: RunRecord) -> str:
    """For people, in a few lines."""
    if record.problem and record.diagnosed is None:
        return f"  says nothing: {record.problem}"
    shown = record.surfaced
    surfaced = f"{shown.process} while {shown.stage}: {shown.message[:100]}" if shown else "no error was seen"
    verdict = record.diagnosed
    after = (
        ""
        if record.diagnosed_after_s is None
        else f", {record.diagnosed_after_s:.1f} s after the first effect"
    )
    said = f"{verdict.process} {verdict.kind}{after}" if verdict else "nothing"
    by = BY_DIAGNOSIS if record.profile == Profile.OURS else BY_LAST_ERROR
    ended = "completed" if record.recovered else "did not complete"
    problem = f"\n  problem: {record.problem}" if record.problem else ""
    return (
        f"  surfaced: {surfaced}\n  {by}: {said} ({'right' if record.correct else 'wrong'})\n"
        f"  {ended}, {record.steps_lost} steps lost, {record.seconds:.0f} s"
        f"{'' if record.as_expected else ': NOT as expected'}{problem}"
    )
