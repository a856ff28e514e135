"""From what happened in an experiment to its record: what surfaced where, what was diagnosed and when, what it cost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from kintsugi.diagnosis.verdict import Cause
from kintsugi.errors import UserError
from kintsugi.lab import baselines, experiments, impacts, measuring, scoring
from kintsugi.lab.baselines import ErrorLine
from kintsugi.lab.blind import Look
from kintsugi.lab.experiments import BASELINE_STEPS, Loaded, Profile, Truth
from kintsugi.lab.injection import Injected
from kintsugi.lab.records import (
    Diagnosed,
    InjectedRecord,
    Moment,
    RunRecord,
    Surfaced,
    diagnosed,
    first_cause,
    injected_record,
)
from kintsugi.lab.systems import System
from kintsugi.lab.watching import Watch
from kintsugi.observe.figures import FigureRecord, figures_in
from kintsugi.runtime import SYSTEM_CLOCK
from kintsugi.types import role_of

IN_TIME_S = 10.0
"""From the first effect to the verdict."""
LOG_STAMP_S = 0.001
REACTION_S = 0.005
"""Our master moves on first, and says why right after."""
CLEANING_UP = frozenset({"ending", "ended"})
AFTER_A_COMMIT = frozenset({"saving", "evaluating"})
"""Phases in which the master is busy with the step that it has committed last, and not yet with the next one."""
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
    commits: list[tuple[float, int]] = []
    """(wall clock, step)."""
    ended: float | None = None
    """Wall clock of the moment that it was no longer followed."""

    def take(self, system: System, watch: Watch) -> None:
        """What only the system can tell."""
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
        """Fine-tuning, for contrast, is that of the fragile system."""
        return self.profile is not Profile.OURS

    @property
    def culprit(self) -> Injected:
        """Of several faults the one that the diagnosis is to name: the first of the right kind."""
        kinds = set(self.truth.kinds)
        fitting = [each for each in self.injected if scoring.KINDS[each.injection.ability] & kinds]
        return (fitting or self.injected)[0]

    @property
    def truth(self) -> Truth:
        """What a right diagnosis says. A contrast is judged by what it is the contrast of: the same fault."""
        own = self.loaded.experiment
        if not own.contrast_of:
            return own.cause
        try:
            return _beside(self.loaded, own.contrast_of).experiment.cause
        except UserError:
            return own.cause

    def step_at(self, t: float, phase: str) -> int | None:
        """The step that the master was busy with; None where nothing is known of its steps."""
        if not self.commits:
            return None
        committed = max((step for at, step in self.commits if at <= t), default=0)
        return committed if phase in AFTER_A_COMMIT else committed + 1

    def phase_at(self, t: float) -> str:
        """When an error was told. A log tells milliseconds: of phases that meet in one, the one that went wrong is not
        that in which the run is cleaned up."""
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


def _beside(loaded: Loaded, name: str) -> Loaded:
    """Another experiment: of the same folder, or one of those that everybody has."""
    try:
        return experiments.find(name, folder=loaded.path.parent)
    except UserError:
        return experiments.find(name)


def record_of(happened: Happened) -> RunRecord:
    """An experiment of which no fault struck says nothing, and is never right."""
    experiment = happened.loaded.experiment
    record = RunRecord(
        scenario=experiment.name,
        profile=happened.profile.value,
        workload=happened.loaded.config.name,
        challenges=experiment.challenges,
        injected=tuple(_injected(happened, each) for each in happened.injected),
        surfaced=None,
        hops=0,
        diagnosed=None,
        correct=False,
        first_effect=None,
        recovered=happened.completed,
        steps_lost=happened.steps_lost,
        log_files=None,
        log_lines=None,
        seconds=happened.seconds,
        expected_stage=experiment.fragile.stage if experiment.fragile else "",
        as_expected=False,
        baseline={},
        timeline=(),
        series={},
        folder=str(happened.folder),
        kinds=tuple(kind.value for kind in happened.truth.kinds),
        contrast_of=experiment.contrast_of,
        ended=happened.ended,
        problem=happened.problem,
    )
    if happened.run_dir is None or not happened.injected:
        return msgspec.structs.replace(record, problem=happened.problem or "no fault struck")
    record = _measured(record, happened, happened.run_dir)
    return msgspec.structs.replace(record, as_expected=_is_as_expected(record, happened))


def _injected(happened: Happened, each: Injected, samples: Sequence[FigureRecord] = ()) -> InjectedRecord:
    """In the words of the run: the injector knows the machine, the run its hosts."""
    hosts = measuring.hosts_of(samples, each.process)
    return injected_record(
        each,
        host=happened.host_of.get(each.process) or next(iter(hosts), ""),
        step=happened.step_at(each.start, each.phase),
        culprit=each is happened.culprit,
    )


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
    samples = figures_in(run_dir)
    figures = measuring.figures_of(samples, process=first.process)
    since, until = _baseline_time(steps, before=min(each.start for each in happened.injected))
    spread = measuring.spreads({**steps, **figures}, since=since, until=until)
    effect = measuring.first_effect(
        steps=steps,
        figures=figures,
        baseline=spread,
        since=first.start,
        errors=[each.t for each in errors],
        least=impacts.SYMPTOMS.get(first.injection.ability),
        until=None if happened.completed else happened.ended,
    )
    # Without an error nobody would have begun to read.
    read = surfaced and baselines.to_read(
        run_dir, target=first.process, since=first.start, until=surfaced.t, beyond=happened.logs
    )
    way = _way(happened, first, surfaced, verdict, errors)
    return msgspec.structs.replace(
        record,
        injected=tuple(_injected(happened, each, samples) for each in happened.injected),
        surfaced=surfaced,
        hops=max(0, len(way) - 1),
        way=way,
        diagnosed=verdict,
        correct=_is_correct(happened, first, verdict),
        first_effect=effect,
        log_files=read.files if read else None,
        log_lines=read.lines if read else None,
        baseline=spread,
        timeline=_timeline(happened, errors, verdicts),
        series=measuring.thinned({**steps, **figures}),
        diagnosed_after_s=None if verdict is None or effect is None else verdict.t - effect,
        verdicts=tuple(verdicts),
        readings=readings,
    )


def _is_correct(happened: Happened, first: Injected, verdict: Diagnosed | None) -> bool:
    if verdict is None or happened.problem:
        return False
    truth = happened.truth
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
    ends = [t for t, _ in steps.get(measuring.STEP, []) if t <= before][-BASELINE_STEPS - 1 :]
    return (ends[0], ends[-1]) if len(ends) > 1 else (before, before)


def _surfaced(happened: Happened, errors: Sequence[ErrorLine]) -> Surfaced | None:
    """Ours: the first that a person is told. Others: the last, which is what one sees of a dead run."""
    if not errors:
        return None
    of_the_master = [error for error in errors if error.process == baselines.MASTER] or list(errors)
    error = of_the_master[-1] if happened.is_fragile else of_the_master[0]
    phase = happened.phase_at(error.t)
    return Surfaced(phase, error.process, error.message, error.t, happened.step_at(error.t, phase))


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


def _way(
    happened: Happened,
    first: Injected,
    surfaced: Surfaced | None,
    verdict: Diagnosed | None,
    errors: Sequence[ErrorLine],
) -> tuple[str, ...]:
    """Ours: the path that was told. Others: parts that showed an error, one after the other, up to the one that a
    person saw; workers of one role are one part, named for the first of them."""
    if not happened.is_fragile:
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


def _after(seconds: float) -> str:
    """
    >>> _after(2.5), _after(-0.4)
    ('2.5 s after', '0.4 s before')
    """
    return f"{abs(seconds):.1f} s {'before' if seconds < 0 else 'after'}"


def told(record: RunRecord) -> str:
    """For people, in a few lines."""
    if record.problem and record.diagnosed is None:
        return f"  says nothing: {record.problem}"
    shown = record.surfaced
    surfaced = f"{shown.process} while {shown.stage}: {shown.message[:100]}" if shown else "no error was seen"
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
        f"  {ended}, {record.steps_lost} steps lost, {record.seconds:.0f} s"
        f"{'' if record.as_expected else ': NOT as expected'}{problem}"
    )
