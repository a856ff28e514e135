"""Comparison with fine-tuning: how much larger the same fault becomes in RL, and through which components."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kintsugi.lab.report import measures
from kintsugi.lab.report.document import MISSING, ReportTable
from kintsugi.lab.report.expectations import SCENARIOS, scenario_of
from kintsugi.lab.report.tables import FRAGILE, OURS, SFT, count, find, label, valid_runs
from kintsugi.lab.scenarios.records import RunRecord

OTHER_FAULT = "not the same fault"
HOW = (
    "the geometric mean of three factors: processes that the fault reached (hops + 1), the longest time without a "
    "committed step, and steps to be repeated (lost steps + 1); a lower bound, because the fragile system's "
    "time-outs are scaled down"
)
MOST_CHARACTERS = 110


def pairs(runs: Sequence[RunRecord]) -> Iterator[tuple[RunRecord, RunRecord]]:
    """Yield every run with its fine-tuning counterpart, those of the fragile system first."""
    for contrast in valid_runs(runs):
        for profile in (FRAGILE, OURS) if contrast.profile == SFT else ():
            run = find(runs, scenario_of(contrast), profile)
            if run is not None:
                yield run, contrast


def factors(run: RunRecord, contrast: RunRecord) -> tuple[float | None, ...]:
    """Return the factors by which RL makes a fault larger; None where one of the two was not measured."""
    stalled_s, as_long_s = measures.stalled_s(run), measures.stalled_s(contrast)
    return (
        measures.factor(measures.reached(run), measures.reached(contrast)),
        None if stalled_s is None or as_long_s is None else measures.factor(stalled_s, as_long_s),
        measures.factor(run.steps_lost + 1, contrast.steps_lost + 1),
    )


def amplification(run: RunRecord, contrast: RunRecord) -> float | None:
    """Return the mean factor; None where the faults were not the same."""
    if not measures.same_faults(run, contrast):
        return None
    return measures.geometric_mean([value for value in factors(run, contrast) if value is not None])


def contrast_table(runs: Sequence[RunRecord], *, scale: float) -> ReportTable | None:
    """Compare RL with fine-tuning; None where no fine-tuning was run."""
    rows = []
    for run, contrast in pairs(runs):
        factor = amplification(run, contrast)
        rows.append(
            (
                label(run),
                f"{run.hops} / {contrast.hops}",
                _both(map(count, (run.log_files, contrast.log_files))),
                _both(map(count, (run.log_lines, contrast.log_lines))),
                _both(
                    measures.with_unscaled(measures.stalled_s(each), each, scale=scale)
                    for each in (run, contrast)
                ),
                f"{run.steps_lost} / {contrast.steps_lost}",
                *map(times, factors(run, contrast)),
                times(factor) if measures.same_faults(run, contrast) else OTHER_FAULT,
            )
        )
    if not rows:
        return None
    return ReportTable(
        name="contrast",
        caption="A fault in reinforcement learning and in fine-tuning (RL / SFT), and how much larger it is in RL.",
        head=(
            *("run", "hops", "files", "lines", "no step for", "steps lost"),
            *("× processes", "× time", "× steps", "amplification"),
        ),
        rows=tuple(rows),
        note=f"Amplification: {HOW}; only where both had the same faults. SFT runs on the fragile system, so the "
        "rows of ours also contain the difference between the two systems. Without an error there is nothing to "
        "read: –.",
    )


def coupling_points_table(runs: Sequence[RunRecord]) -> ReportTable:
    """List the components that fine-tuning does not have, with the measurements of the scenarios that were tried."""
    rows = []
    tried = {scenario_of(run) for run in runs}
    for name, scenario in SCENARIOS.items():
        if name not in tried:
            continue
        fragile, contrast = find(runs, name, FRAGILE), find(runs, name, SFT)
        rows.append(
            (
                name,
                scenario.coupling,
                scenario.absent_in_sft,
                _shown(fragile) if fragile else MISSING,
                _shown(contrast) if contrast else MISSING,
            )
        )
    return ReportTable(
        name="coupling_points",
        caption="Points at which an RL system couples components that fine-tuning keeps separate.",
        head=("scenario", "coupling point", "in SFT", "seen in RL (fragile)", "seen in SFT"),
        rows=tuple(rows),
    )


def _shown(run: RunRecord) -> str:
    if run.surfaced is None:
        return f"no error; {run.hops} hop{'' if run.hops == 1 else 's'}"
    message = measures.message_of(run.surfaced.message)
    short = message if len(message) <= MOST_CHARACTERS else f"{message[:MOST_CHARACTERS]}…"
    return f"`{run.surfaced.process}`: {short}"


def _both(cells: Iterable[str]) -> str:
    return " / ".join(cells)


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}×"
