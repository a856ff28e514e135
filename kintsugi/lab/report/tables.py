"""The tables about scenarios: what was done, where it showed, who was blamed, how that compares with fine-tuning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kintsugi.lab.baselines import FIRST_ERROR, LAST_ERROR
from kintsugi.lab.records import Diagnosed, InjectedRecord, RunRecord, RunsFile
from kintsugi.lab.report import measures
from kintsugi.lab.report.document import MISSING, Table
from kintsugi.lab.report.measures import seconds, share, stage_of
from kintsugi.lab.report.plan import CHALLENGES, EXPECTATIONS, SCENARIOS, Expectation, scenario_of

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
"""The master's phases in the words of the user's plan."""


def ordered(runs: Iterable[RunRecord]) -> list[RunRecord]:
    """By scenario, the fragile system first."""

    def place(run: RunRecord) -> tuple[str, int]:
        known = PROFILE_ORDER.index(run.profile) if run.profile in PROFILE_ORDER else len(PROFILE_ORDER)
        return (scenario_of(run), known)

    return sorted(runs, key=place)


def said_something(runs: Iterable[RunRecord]) -> list[RunRecord]:
    """Without the experiments that could not be carried out."""
    return [run for run in ordered(runs) if not run.problem]


class Measured(msgspec.Struct, frozen=True):
    """The values that stand beside those which the plan expects, of one run."""

    run: RunRecord
    scale: float
    contrast: RunRecord | None
    """The counterpart on fine-tuning."""

    def hops(self) -> str:
        way = " → ".join(map(stage_of, measures.way_of(self.run)))
        return f"{self.run.hops} ({way})" if way else str(self.run.hops)

    def stages(self) -> str:
        surfaced, culprit = self.run.surfaced, measures.culprit_of(self.run)
        if culprit is None:
            return MISSING
        fault = stage_of(culprit.target)
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


def words(name: str) -> str:
    """A kind of fault for people: `network_delay` → network delay."""
    return name.replace("_", " ")


def label(run: RunRecord) -> str:
    return f"{scenario_of(run)} {run.profile}"


def injections_table(runs: Sequence[RunRecord]) -> Table:
    rows = []
    for run in said_something(runs):
        for fault in run.injected:
            lasted = None if fault.end is None else fault.end - fault.start
            rows.append(
                (
                    label(run),
                    _target(fault),
                    words(fault.kind),
                    _amount(fault),
                    fault.mechanism,
                    _moment(fault),
                    "until the run's end" if lasted is None else seconds(lasted),
                )
            )
    return Table(
        name="injections",
        caption="What was injected, and how it was done on this host.",
        head=("run", "target", "kind", "strength", "mechanism", "during", "for"),
        rows=tuple(rows),
    )


def coupling_table(runs: Sequence[RunRecord]) -> Table:
    rows = []
    for run in said_something(runs):
        fault = measures.culprit_of(run)
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
    return Table(
        name="coupling",
        caption="Where the fault is against where the error shows; how far it travelled; what a person "
        "would have read.",
        head=("run", "fault in", "error shows in", "elsewhere?", "hops", "steps late", "files", "lines"),
        rows=tuple(rows),
        note="Files and lines: the controller's log and those of every process of the culprit's role, "
        "between the fault and the error; without an error nobody would have begun to read. Stages are those of "
        "the controller at that moment. Steps late: the step in which the error shows less the step that was hit.",
    )


def diagnosis_table(runs: Sequence[RunRecord], *, scale: float) -> Table:
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
        for run in said_something(runs)
    ]
    return Table(
        name="diagnosis",
        caption="Who is blamed, and when: by the last error in the controller's log, by the first error in "
        "any log, and by the diagnosis, which sees what was recorded and no marker.",
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


def outcome_table(runs: Sequence[RunRecord]) -> Table:
    rows = [
        (
            label(run),
            "yes" if run.recovered else "no",
            str(run.steps_lost),
            "yes" if run.as_expected else "no",
            seconds(run.seconds),
        )
        for run in said_something(runs)
    ]
    return Table(
        name="outcomes",
        caption="What became of the run. As expected: ours named the right cause in time, lost no step and "
        "completed; the fragile system showed the error that its design leads to.",
        head=("run", "completed", "steps lost", "as expected", "took"),
        rows=tuple(rows),
    )


def challenges_table(runs: Sequence[RunRecord], *, scale: float) -> Table:
    """One line per challenge and profile: the answer to the user's question in numbers."""
    rows = []
    for challenge in CHALLENGES:
        for profile in (FRAGILE, OURS):
            chosen = [
                run for run in said_something(runs) if run.profile == profile and challenge in _proves(run)
            ]
            if chosen:
                rows.append((f"{challenge}, {profile}", *_challenge_row(chosen, scale=scale)))
    return Table(
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
        "which a person can begin to read (its time-outs are shorter than in the plan). Misdiagnosed: by "
        "who believes the last error in the controller's log, and by the diagnosis.",
    )


def _challenge_row(runs: Sequence[RunRecord], *, scale: float) -> tuple[str, ...]:
    def listed(values: Iterable[object]) -> str:
        return " · ".join(map(str, values))

    return (
        listed(scenario_of(run) for run in runs),
        listed(
            _differs(fault, run) if run.surfaced and (fault := measures.culprit_of(run)) else "no error"
            for run in runs
        ),
        listed(run.hops for run in runs),
        listed(count(run.log_files) for run in runs),
        listed(count(run.log_lines) for run in runs),
        listed(seconds(measures.diagnosis_s(run)) for run in runs),
        _fraction(not run.correct for run in runs),
    )


def expectations_table(file: RunsFile) -> Table:
    rows = []
    for expectation in EXPECTATIONS:
        found = {profile: find(file.runs, expectation.scenario, profile) for profile in (FRAGILE, OURS)}
        contrast = find(file.runs, expectation.scenario, SFT)
        if expectation.measure == "contrast":
            run = found[FRAGILE] or found[OURS]
            values = [Measured(run, file.scale, contrast).value_of(expectation) if run else MISSING, "–"]
        else:
            values = [
                Measured(run, file.scale, contrast).value_of(expectation) if run else MISSING
                for run in found.values()
            ]
        rows.append(
            (
                f"{expectation.challenge}, {expectation.scenario}",
                expectation.figure,
                expectation.expected,
                *values,
            )
        )
    return Table(
        name="expectations",
        caption="What the plan expects beside what was measured.",
        head=("challenge", "figure", "expected", "measured, fragile (or SFT)", "measured, ours"),
        rows=tuple(rows),
        note="The plan has 32 train and 16 rollout workers on GPUs; what was measured here ran on the host "
        "named above with the workload named above, so that counts of files and lines are those of a "
        "smaller system.",
    )


def baseline_table(runs: Sequence[RunRecord]) -> Table | None:
    """Of the steps before the first fault; the phases of a step, which every run has."""
    names = sorted({name for run in runs for name in run.baseline if name.startswith("timing/")})
    names += [name for name in ("tokens_per_s",) if any(name in run.baseline for run in runs)]
    chosen = [run for run in said_something(runs) if run.baseline]
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
    return Table(
        name="baseline",
        caption="Without a fault: mean ± 2σ over the steps before the injection, times in ms.",
        head=("run", *heads),
        rows=tuple(rows),
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
    """Whether who looks where the error shows looks at the wrong place."""
    assert run.surfaced is not None
    if stage_of(fault.target) != stage_of(run.surfaced.process):
        return "other part"
    return "other process" if fault.target != run.surfaced.process else "no"


def _blame(run: RunRecord, said: Diagnosed | None) -> str:
    if said is None:
        return "nobody"
    return f"{'✓' if measures.says_right(run, said) else '✗'} `{said.process}` {words(said.kind)}"


def _verdict(run: RunRecord) -> str:
    if run.diagnosed is None:
        return "✗ nothing"
    return f"{'✓' if run.correct else '✗'} `{run.diagnosed.process}` {words(run.diagnosed.kind)}"


def _error_after(run: RunRecord, *, scale: float) -> str:
    if run.surfaced is None:
        return "no error"
    return measures.with_unscaled(measures.error_delay_s(run), run, scale=scale)


def after_effect(run: RunRecord) -> str:
    """A verdict before the first effect that was measured is said as such."""
    after_s = run.diagnosed_after_s
    return f"{seconds(-after_s)} before" if after_s is not None and after_s < 0 else seconds(after_s)


def _target(fault: InjectedRecord) -> str:
    aimed_at = [f"`{fault.peer}`"] if fault.peer else []
    aimed_at += [f"port {fault.port}"] if fault.port is not None else []
    return " → ".join([f"`{fault.target}`", *([", ".join(aimed_at)] if aimed_at else [])])


def _amount(fault: InjectedRecord) -> str:
    return ", ".join(measures.strength(name, value) for name, value in fault.amount.items()) or "–"


def _moment(fault: InjectedRecord) -> str:
    return f"step {fault.step}, {stage_word(fault.phase)}" if fault.phase else "any time"


def _fraction(values: Iterable[bool]) -> str:
    counted = share(values)
    return f"{counted.part} of {counted.whole}"


def count(value: int | None) -> str:
    """Of files or lines that a person would have read."""
    return "–" if value is None else f"{value:,}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2g}"
