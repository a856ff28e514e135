"""The same faults in fine-tuning: how much larger reinforcement learning makes them, and through which parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kintsugi.lab.records import RunRecord
from kintsugi.lab.report import measures
from kintsugi.lab.report.document import MISSING, Table
from kintsugi.lab.report.plan import SCENARIOS, scenario_of
from kintsugi.lab.report.tables import FRAGILE, OURS, SFT, count, find, label, said_something

OTHER_FAULT = "not the same fault"
HOW = (
    "the geometric mean of three factors: processes that the fault reached (hops and one), the longest time without a "
    "committed step, and steps to be done again (those lost and the one that was hit), with the fragile system's "
    "time-outs as they are shortened here, so that it is a lower bound"
)
MOST_CHARACTERS = 110


def pairs(runs: Sequence[RunRecord]) -> Iterator[tuple[RunRecord, RunRecord]]:
    """Every run with its counterpart on fine-tuning, the fragile system's first."""
    for contrast in said_something(runs):
        for profile in (FRAGILE, OURS) if contrast.profile == SFT else ():
            run = find(runs, scenario_of(contrast), profile)
            if run is not None:
                yield run, contrast


def factors(run: RunRecord, contrast: RunRecord) -> tuple[float | None, ...]:
    """By how much reinforcement learning made a fault larger; None where one of the two was not measured."""
    stalled_s, as_long_s = measures.stalled_s(run), measures.stalled_s(contrast)
    return (
        measures.factor(measures.reached(run), measures.reached(contrast)),
        None if stalled_s is None or as_long_s is None else measures.factor(stalled_s, as_long_s),
        measures.factor(run.steps_lost + 1, contrast.steps_lost + 1),
    )


def amplification(run: RunRecord, contrast: RunRecord) -> float | None:
    """None where not the same struck both."""
    if not measures.same_faults(run, contrast):
        return None
    return measures.geometric_mean([value for value in factors(run, contrast) if value is not None])


def contrast_table(runs: Sequence[RunRecord], *, scale: float) -> Table | None:
    """None where nothing was run on fine-tuning."""
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
    return Table(
        name="contrast",
        caption="A fault in reinforcement learning and in fine-tuning (RL / SFT), and how much larger it is in RL.",
        head=(
            *("run", "hops", "files", "lines", "no step for", "steps lost"),
            *("× processes", "× time", "× steps", "amplification"),
        ),
        rows=tuple(rows),
        note=f"Amplification: {HOW}; only where what struck both was the same in kind and strength. SFT is the "
        "fragile system's; the rows of ours therefore also contain what separates the two systems. Without an error "
        "there is nothing to read: –.",
    )


def coupling_points_table(runs: Sequence[RunRecord]) -> Table:
    """The parts that fine-tuning does not have, each with what was measured about it."""
    rows = []
    for name, scenario in SCENARIOS.items():
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
    return Table(
        name="coupling_points",
        caption="Points at which an RL system couples what fine-tuning keeps apart.",
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
