"""Tables about scenarios: injected faults, visible errors, verdicts, comparison with fine-tuning, human study."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from kintsugi.lab.campaign.log_readers import FIRST_ERROR, LAST_ERROR
from kintsugi.lab.human_study import StudyAttempt
from kintsugi.lab.report import measures
from kintsugi.lab.report.document import MISSING, ReportTable
from kintsugi.lab.report.expectations import (
    CHALLENGES,
    EXPECTATIONS,
    SCENARIOS,
    Expectation,
    scenario_named,
    scenario_of,
)
from kintsugi.lab.report.measures import seconds, share, stage_of
from kintsugi.lab.scenarios.records import DiagnosisRecord, InjectedRecord, RunRecord, RunsFile

FRAGILE, OURS, SFT = "fragile", "ours", "sft"
PROFILE_ORDER = (FRAGILE, OURS, SFT)
STAGES = {
    "collecting": "rollout",
    "training": "train",
    "committing": "commit",
    "publishing": "weight update",
    "saving": "save",
    "evaluating": "evaluation",
    "recovering": "recovery",
}
"""Names of the master's phases in the report."""


def ordered(runs: Iterable[RunRecord]) -> list[RunRecord]:
    """Sort by scenario, the fragile system first."""

    def rank(run: RunRecord) -> tuple[str, int]:
        known = PROFILE_ORDER.index(run.profile) if run.profile in PROFILE_ORDER else len(PROFILE_ORDER)
        return (scenario_of(run), known)

    return sorted(runs, key=rank)


def valid_runs(runs: Iterable[RunRecord]) -> list[RunRecord]:
    """Return the runs without those that could not be carried out."""
    return [run for run in ordered(runs) if not run.problem]


class MeasuredValue(msgspec.Struct, frozen=True):
    """Measured values of one run, for comparison with the expected ones."""

    run: RunRecord
    scale: float
    contrast: RunRecord | None
    """Counterpart on fine-tuning."""

    def hops(self) -> str:
        way = " → ".join(map(stage_of, measures.way_of(self.run)))
        return f"{self.run.hops} ({way})" if way else str(self.run.hops)

    def stages(self) -> str:
        surfaced, target = self.run.surfaced, measures.target_fault_of(self.run)
        if target is None:
            return MISSING
        fault = stage_of(target.target)
        return f"{fault} → {stage_word(surfaced.stage)}" if surfaced else f"{fault} → no error"

    def steps_late(self) -> str:
        late = measures.steps_late(self.run)
        if late is None:
            return MISSING if self.run.surfaced else "no error"
        return f"{late} step{'' if late == 1 else 's'}"

    def masking(self) -> str:
        if self.run.surfaced is None:
            return "no error"
        return measures.with_unscaled(measures.masking_s(self.run), self.run, scale=self.scale)

    def files(self) -> str:
        return count(self.run.log_files)

    def lines(self) -> str:
        return count(self.run.log_lines)

    def time_to_diagnose(self) -> str:
        took = measures.with_unscaled(measures.diagnosis_s(self.run), self.run, scale=self.scale)
        return took if took == MISSING else f"{took}, {'right' if self.run.correct else 'wrong'}"

    def contrasted(self) -> str:
        if self.contrast is None:
            return MISSING
        hops = self.contrast.hops
        ended = "completed" if self.contrast.recovered else "did not complete"
        return f"{hops} hop{'' if hops == 1 else 's'}, {ended}"

    def value_of(self, expectation: Expectation) -> str:
        return str(
            getattr(self, "contrasted" if expectation.measure == "contrast" else expectation.measure)()
        )


def stage_word(phase: str) -> str:
    return STAGES.get(phase, phase)


def kind_name(name: str) -> str:
    """Format a fault kind: `network_delay` → network delay."""
    return name.replace("_", " ")


def label(run: RunRecord) -> str:
    return f"{scenario_of(run)} {run.profile}"


def injections_table(runs: Sequence[RunRecord]) -> ReportTable:
    rows = []
    for run in valid_runs(runs):
        for fault in run.injected:
            lasted = None if fault.end is None else fault.end - fault.start
            rows.append(
                (
                    label(run),
                    _target(fault),
                    kind_name(fault.kind),
                    _amount(fault),
                    fault.mechanism,
                    _moment(fault),
                    "until the run's end" if lasted is None else seconds(lasted),
                )
            )
    return ReportTable(
        name="injections",
        caption="Injected faults and their mechanisms on this host.",
        head=("run", "target", "kind", "strength", "mechanism", "during", "for"),
        rows=tuple(rows),
    )


def coupling_table(runs: Sequence[RunRecord]) -> ReportTable:
    rows = []
    for run in valid_runs(runs):
        fault = measures.target_fault_of(run)
        late = measures.steps_late(run)
        rows.append(
            (
                label(run),
                _where(fault.target, fault.phase) if fault else MISSING,
                _where(run.surfaced.process, run.surfaced.stage) if run.surfaced else "no error",
                "–" if run.surfaced is None or fault is None else _differs(fault, run),
                str(run.hops),
                "–" if late is None else str(late),
                count(run.log_files),
                count(run.log_lines),
            )
        )
    return ReportTable(
        name="coupling",
        caption="Location of the fault and of the visible error, hops between them, and logs to read.",
        head=("run", "fault in", "error shows in", "elsewhere?", "hops", "steps late", "files", "lines"),
        rows=tuple(rows),
        note="Files and lines: the controller's log and those of all processes of the target's role, "
        "between the fault and the error; none without an error. Stages are those of the controller at that time. "
        "Steps late: the step in which the error shows minus the step that was hit.",
    )


def diagnosis_table(runs: Sequence[RunRecord], *, scale: float) -> ReportTable:
    rows = [
        (
            label(run),
            _error_after(run, scale=scale),
            _blame(run, run.readings.get(LAST_ERROR)),
            _blame(run, run.readings.get(FIRST_ERROR)),
            _verdict(run) if run.profile == OURS else "–",
            seconds(measures.diagnosis_s(run)) if run.profile == OURS else "–",
            after_effect(run) if run.profile == OURS else "–",
        )
        for run in valid_runs(runs)
    ]
    return ReportTable(
        name="diagnosis",
        caption="Named cause, and when: by the last error in the controller's log, by the first error in "
        "any log, and by the diagnosis, which sees the run folder but no marker.",
        head=(
            "run",
            "error after",
            "last error blames",
            "first error blames",
            "diagnosis says",
            "after",
            "after first effect",
        ),
        rows=tuple(rows),
        note="Times are from the injection, the last ones from the first effect, which is measured once a second: "
        "a verdict may come before it. ✓ the process and kind "
        "that were injected, ✗ something else. The fragile system and its fine-tuning have no diagnosis.",
    )


def outcome_table(runs: Sequence[RunRecord]) -> ReportTable:
    rows = [
        (
            label(run),
            "yes" if run.recovered else "no",
            str(run.steps_lost),
            "yes" if run.as_expected else "no",
            seconds(run.seconds),
        )
        for run in valid_runs(runs)
    ]
    return ReportTable(
        name="outcomes",
        caption="Outcome of the runs. As expected: ours named the right cause in time, lost no step and "
        "completed; the fragile system showed the expected error.",
        head=("run", "completed", "steps lost", "as expected", "took"),
        rows=tuple(rows),
    )


def challenges_table(runs: Sequence[RunRecord], *, scale: float) -> ReportTable:
    """One line per challenge and system, with the measured values."""
    rows = []
    for challenge in CHALLENGES:
        for profile in (FRAGILE, OURS):
            chosen = [run for run in valid_runs(runs) if run.profile == profile and challenge in _proves(run)]
            if chosen:
                rows.append((f"{challenge}, {profile}", *_challenge_row(chosen, scale=scale)))
    return ReportTable(
        name="challenges",
        caption="The three challenges in numbers, over the scenarios that are evidence for each. Numbers in "
        "a cell are those of the scenarios, in order.",
        head=(
            "challenge, system",
            "scenarios",
            "error elsewhere",
            "hops",
            "files",
            "lines",
            "time to diagnose",
            "misdiagnosed",
        ),
        rows=tuple(rows),
        note="Time to diagnose: ours, from the injection to the verdict; fragile, to the last error, at "
        "which log reading can begin (with scaled time-outs). Misdiagnosed: by the last error in the "
        "controller's log, and by the diagnosis.",
    )


def _challenge_row(runs: Sequence[RunRecord], *, scale: float) -> tuple[str, ...]:
    def listed(values: Iterable[object]) -> str:
        return " · ".join(map(str, values))

    return (
        listed(scenario_of(run) for run in runs),
        listed(
            _differs(fault, run) if run.surfaced and (fault := measures.target_fault_of(run)) else "no error"
            for run in runs
        ),
        listed(run.hops for run in runs),
        listed(count(run.log_files) for run in runs),
        listed(count(run.log_lines) for run in runs),
        listed(seconds(measures.diagnosis_s(run)) for run in runs),
        _fraction(not run.correct for run in runs),
    )


def expectations_table(file: RunsFile) -> ReportTable:
    """Compare with what was expected of the scenarios that were tried."""
    rows = []
    tried = {scenario_of(run) for run in file.runs}
    for expectation in (each for each in EXPECTATIONS if each.scenario in tried):
        found = {profile: find(file.runs, expectation.scenario, profile) for profile in (FRAGILE, OURS)}
        contrast = find(file.runs, expectation.scenario, SFT)
        if expectation.measure == "contrast":
            run = found[FRAGILE] or found[OURS]
            values = [MeasuredValue(run, file.scale, contrast).value_of(expectation) if run else MISSING, "–"]
        else:
            values = [
                MeasuredValue(run, file.scale, contrast).value_of(expectation) if run else MISSING
                for run in found.values()
            ]
        rows.append(
            (
                f"{expectation.challenge}, {expectation.scenario}",
                expectation.metric,
                expectation.expected,
                *values,
            )
        )
    return ReportTable(
        name="expectations",
        caption="Expected and measured values.",
        head=("challenge", "metric", "expected", "measured, fragile (or SFT)", "measured, ours"),
        rows=tuple(rows),
        note="Expected values are for 32 train and 16 rollout workers on GPUs; measured values are for the host and "
        "workload named above, so counts of files and lines are those of a smaller system.",
    )


def baseline_table(runs: Sequence[RunRecord]) -> ReportTable | None:
    """Fault-free baseline: the phases of a step, which every run has."""
    names = sorted({name for run in runs for name in run.baseline if name.startswith("timing/")})
    names += [name for name in ("tokens_per_s",) if any(name in run.baseline for run in runs)]
    chosen = [run for run in valid_runs(runs) if run.baseline]
    if not names or not chosen:
        return None
    rows = []
    for run in chosen:
        cells = []
        for name in names:
            spread, scale = run.baseline.get(name), 1000 if "/" in name else 1
            values = (spread.mean, 2 * spread.sigma) if spread is not None else ()
            cells.append(" ± ".join(_number(scale * value) for value in values) or "–")
        rows.append((label(run), *cells))
    heads = (name.removeprefix("timing/").replace("_", " ") if "/" in name else "tokens/s" for name in names)
    return ReportTable(
        name="baseline",
        caption="Without a fault: mean ± 2σ over the steps before the injection, times in ms.",
        head=("run", *heads),
        rows=tuple(rows),
    )


def participants_table(attempts: Sequence[StudyAttempt]) -> ReportTable:
    """Human study: answers given from the master's log alone, per run and in total."""
    runs = sorted({(scenario_named(each.scenario), each.profile) for each in attempts})
    groups = [
        (
            f"{name} {profile}",
            [a for a in attempts if (scenario_named(a.scenario), a.profile) == (name, profile)],
        )
        for name, profile in runs
    ]
    rows = tuple((name, *_participants_row(group)) for name, group in [*groups, ("all", list(attempts))])
    participants = len({attempt.person for attempt in attempts})
    return ReportTable(
        name="people",
        caption=f"Answers of {participants} engineers with the controller's log only.",
        head=("run", "answers", "right", "misdiagnosed", "gave up", "time to answer, median"),
        rows=rows,
        note="Right: the process and the kind that were injected. In parentheses: counts and "
        "Wilson's 95 % interval.",
    )


def _participants_row(attempts: Sequence[StudyAttempt]) -> tuple[str, ...]:
    times = [attempt.seconds for attempt in attempts if attempt.seconds is not None]
    return (
        str(len(attempts)),
        str(share(attempt.correct for attempt in attempts)),
        str(share(attempt.said and not attempt.correct for attempt in attempts)),
        str(sum(not attempt.said for attempt in attempts)),
        seconds(statistics.median(times)) if times else MISSING,
    )


# Cells.


def find(runs: Iterable[RunRecord], scenario: str, profile: str) -> RunRecord | None:
    found = (run for run in runs if scenario_of(run) == scenario and run.profile == profile)
    return next((run for run in found if not run.problem), None)


def _proves(run: RunRecord) -> tuple[str, ...]:
    scenario = SCENARIOS.get(scenario_of(run))
    return scenario.proves if scenario else run.challenges


def _where(process: str, phase: str) -> str:
    return f"`{process}`, {stage_word(phase)}" if phase else f"`{process}`"


def _differs(fault: InjectedRecord, run: RunRecord) -> str:
    """Describe whether the error shows in another place than the fault."""
    assert run.surfaced is not None
    if stage_of(fault.target) != stage_of(run.surfaced.process):
        return "other part"
    return "other process" if fault.target != run.surfaced.process else "no"


def _blame(run: RunRecord, said: DiagnosisRecord | None) -> str:
    if said is None:
        return "none"
    return f"{'✓' if measures.says_right(run, said) else '✗'} `{said.process}` {kind_name(said.kind)}"


def _verdict(run: RunRecord) -> str:
    if run.diagnosed is None:
        return "✗ nothing"
    return f"{'✓' if run.correct else '✗'} `{run.diagnosed.process}` {kind_name(run.diagnosed.kind)}"


def _error_after(run: RunRecord, *, scale: float) -> str:
    if run.surfaced is None:
        return "no error"
    return measures.with_unscaled(measures.error_delay_s(run), run, scale=scale)


def after_effect(run: RunRecord) -> str:
    """Format the time from the first measured effect to the verdict, which may come before it."""
    after_s = run.diagnosed_after_s
    return f"{seconds(-after_s)} before" if after_s is not None and after_s < 0 else seconds(after_s)


def _target(fault: InjectedRecord) -> str:
    link = [f"`{fault.peer}`"] if fault.peer else []
    link += [f"port {fault.port}"] if fault.port is not None else []
    return " → ".join([f"`{fault.target}`", *([", ".join(link)] if link else [])])


def _amount(fault: InjectedRecord) -> str:
    return ", ".join(measures.strength(name, value) for name, value in fault.amount.items()) or "–"


def _moment(fault: InjectedRecord) -> str:
    return f"step {fault.step}, {stage_word(fault.phase)}" if fault.phase else "any time"


def _fraction(values: Iterable[bool]) -> str:
    counted = share(values)
    return f"{counted.part} of {counted.whole}"


def count(value: int | None) -> str:
    """Format a number of files or lines."""
    return "–" if value is None else f"{value:,}"


def _number(value: float) -> str:
    """
    >>> _number(1234.5), _number(99.7), _number(9.96), _number(0.123)
    ('1,234', '100', '10', '0.12')
    """
    return f"{value:,.0f}" if abs(value) >= 9.5 else f"{value:.2g}"
