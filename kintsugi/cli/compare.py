"""`kintsugi compare`: differences in configuration, metric curves, and paired tests on held-out problems.

Reads run folders only, of running and ended runs. `remarks` state the limits of a comparison.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from kintsugi.config.recipe import fields_of, shown
from kintsugi.config.stages import stages
from kintsugi.errors import UserError
from kintsugi.run_folder import reader
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.eval_stats import difference_interval, mcnemar, unpaired_interval
from kintsugi.telemetry.step_metrics import EvalAnswerRecord

METRICS = ("reward/mean", "loss", "eval/accuracy", "kl", "entropy", "completions/mean_length")
"""Metrics that are shown by default, if a run has them."""
NOT_A_DIFFERENCE = frozenset({"run_dir", "name"})
BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 24
POINTS = 6
WIDTH = 100


class ComparedRun(msgspec.Struct, frozen=True):
    """One of the runs, with the letter that refers to it in the output."""

    label: str
    folder: str
    state: str
    step: int
    total_steps: int
    seed: int
    accuracy: float | None
    """Accuracy of the last evaluation."""


class Difference(msgspec.Struct, frozen=True):
    """A configuration field with different values; one value and origin per run."""

    field: str
    values: tuple[str, ...]
    origins: tuple[str, ...]
    """Empty if the run did not record it."""


class MetricCurve(msgspec.Struct, frozen=True):
    """One metric over the steps of the main stage, for each run."""

    metric: str
    steps: tuple[tuple[int, ...], ...]
    values: tuple[tuple[float, ...], ...]


class PairedResult(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of the last evaluations of two runs; `difference` is second − first, with its 95 % interval."""

    first: str
    second: str
    steps: tuple[int, int]
    difference: float
    low: float
    high: float
    paired: bool
    """Whether both were evaluated on the same problems, so that the answers are compared in pairs."""
    problems: tuple[int, int]
    only_first: int = 0
    only_second: int = 0
    p_value: float | None = None
    """P-value of McNemar's exact test; None if the problems differ."""


class SeedSummary(msgspec.Struct, frozen=True):
    """Runs that differ only in the seed."""

    labels: tuple[str, ...]
    accuracies: tuple[float, ...]


class Comparison(msgspec.Struct, frozen=True):
    """Result of `kintsugi compare`."""

    runs: tuple[ComparedRun, ...]
    differences: tuple[Difference, ...]
    curves: tuple[MetricCurve, ...]
    judgements: tuple[PairedResult, ...]
    seeds: tuple[SeedSummary, ...]
    remarks: tuple[str, ...]


def compare(folders: Sequence[Path], *, metrics: Sequence[str] = ()) -> Comparison:
    """Compare two or more runs."""
    if len(folders) < 2:
        raise UserError(f"expected two runs or more to compare, got {len(folders)}")
    for first, second in combinations(folders, 2):
        if first.resolve() == second.resolve():
            raise UserError(f"expected different runs to compare, got {first} twice")
    statuses = [reader.read_status(folder) for folder in folders]
    labels = [_label(index) for index in range(len(folders))]
    compared = tuple(map(_compared, labels, statuses))
    verdicts = [_last_verdicts(folder) for folder in folders]
    judgements = tuple(
        _judged(compared[i], compared[j], statuses[i], statuses[j], verdicts[i], verdicts[j])
        for i, j in combinations(range(len(folders)), 2)
        if statuses[i].evaluations and statuses[j].evaluations
    )
    differences = tuple(_differences(folders, statuses))
    seeds = tuple(_seeds(compared, statuses))
    return Comparison(
        compared,
        differences,
        tuple(_curves(folders, statuses, metrics)),
        judgements,
        seeds,
        tuple(_remarks(compared, statuses, differences, judgements, seeds)),
    )


def _label(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else f"R{index + 1}"


def _compared(label: str, status: reader.RunStatus) -> ComparedRun:
    return ComparedRun(
        label,
        str(status.folder),
        status.state,
        status.step,
        status.total_steps,
        status.config.seed,
        status.evaluations[-1]["eval/accuracy"] if status.evaluations else None,
    )


def _differences(folders: Sequence[Path], statuses: Sequence[reader.RunStatus]) -> Iterator[Difference]:
    """Yield the fields with different values, in the order of the configuration."""
    configs = [fields_of(status.config) for status in statuses]
    origins = [_origins(folder) for folder in folders]
    for field in dict.fromkeys(field for config in configs for field in config):
        values = tuple(shown(config[field]) if field in config else "–" for config in configs)
        if field not in NOT_A_DIFFERENCE and len(set(values)) > 1:
            yield Difference(field, values, tuple(origin.get(field, "") for origin in origins))


def _origins(folder: Path) -> dict[str, str]:
    """Read the origins of a run's values; empty if it did not record them."""
    try:
        return msgspec.json.decode(RunFolder(folder).origins_file.read_bytes(), type=dict[str, str])
    except (FileNotFoundError, msgspec.DecodeError):
        return {}


def _curves(
    folders: Sequence[Path], statuses: Sequence[reader.RunStatus], metrics: Sequence[str]
) -> Iterator[MetricCurve]:
    """Yield the curves of the main stage; the warm-up has a different loss."""
    every = []
    for folder, status in zip(folders, statuses, strict=True):
        first = stages(status.config)[-1].first_step
        lines, _ = reader.read_metrics(folder)
        every.append([line for line in lines if (line["step"] or 0) >= first - reader.is_evaluation(line)])
    for metric in metrics or METRICS:
        points = [
            [(int(line["step"] or 0), line[metric]) for line in lines if line.get(metric) is not None]
            for lines in every
        ]
        if any(points):
            yield MetricCurve(
                metric,
                tuple(tuple(step for step, _ in run) for run in points),
                tuple(tuple(float(value or 0.0) for _, value in run) for run in points),
            )
        elif metrics:
            known = sorted({name for lines in every for line in lines for name in line})
            raise UserError(f"--metric: expected one of {', '.join(known)}, got {metric!r}")


def _last_verdicts(folder: Path) -> EvalAnswerRecord | None:
    records = reader.read_verdicts(folder)
    return records[-1] if records else None


def _judged(
    first: ComparedRun,
    second: ComparedRun,
    first_status: reader.RunStatus,
    second_status: reader.RunStatus,
    first_verdicts: EvalAnswerRecord | None,
    second_verdicts: EvalAnswerRecord | None,
) -> PairedResult:
    """Compare two runs: in pairs if both were evaluated on the same problems, else as independent samples."""
    named: dict[str, Any] = {"first": first.label, "second": second.label}
    last = [status.evaluations[-1] for status in (first_status, second_status)]
    steps = (int(last[0]["step"] or 0), int(last[1]["step"] or 0))
    accuracies = [float(line["eval/accuracy"] or 0.0) for line in last]
    counts = (int(last[0].get("eval/problems") or 0), int(last[1].get("eval/problems") or 0))
    if (
        first_verdicts is None
        or second_verdicts is None
        or first_verdicts.problems != second_verdicts.problems
        or (first_verdicts.step, second_verdicts.step) != steps
    ):
        low, high = unpaired_interval(accuracies[0], accuracies[1], counts=counts)
        return PairedResult(
            **named,
            steps=steps,
            difference=accuracies[1] - accuracies[0],
            low=low,
            high=high,
            paired=False,
            problems=counts,
        )
    pairs = list(zip(first_verdicts.right, second_verdicts.right, strict=True))
    only_first, only_second = pairs.count((True, False)), pairs.count((False, True))
    low, high = difference_interval(
        both=pairs.count((True, True)),
        only_first=only_first,
        only_second=only_second,
        neither=pairs.count((False, False)),
    )
    return PairedResult(
        **named,
        steps=steps,
        difference=(only_second - only_first) / len(pairs),
        low=low,
        high=high,
        paired=True,
        problems=(len(pairs), len(pairs)),
        only_first=only_first,
        only_second=only_second,
        p_value=mcnemar(only_first=only_first, only_second=only_second),
    )


def _seeds(compared: Sequence[ComparedRun], statuses: Sequence[reader.RunStatus]) -> Iterator[SeedSummary]:
    """Group runs that differ only in their seed; the first run of each seed counts."""
    groups: dict[bytes, dict[int, ComparedRun]] = {}
    for run, status in zip(compared, statuses, strict=True):
        alike = msgspec.structs.replace(status.config, seed=0, run_dir=None, name="")
        groups.setdefault(msgspec.json.encode(alike), {}).setdefault(run.seed, run)
    for group in groups.values():
        yield SeedSummary(
            tuple(run.label for run in group.values()),
            tuple(run.accuracy for run in group.values() if run.accuracy is not None),
        )


def _remarks(
    compared: Sequence[ComparedRun],
    statuses: Sequence[reader.RunStatus],
    differences: Sequence[Difference],
    judgements: Sequence[PairedResult],
    seeds: Sequence[SeedSummary],
) -> Iterator[str]:
    """Yield notes that limit the conclusions from the numbers."""
    for run in compared:
        if run.state != reader.RunState.FINISHED:
            yield f"{run.label} is {run.state} at step {run.step} of {run.total_steps}."
    if len({judgement.steps for judgement in judgements} | {j.steps[::-1] for j in judgements}) > 1:
        yield "The last evaluations were not all made after the same number of steps."
    if any(not judgement.paired for judgement in judgements):
        yield (
            "Not all runs were evaluated on the same held-out problems (or they did not record the answers), so "
            "their accuracies are compared as independent samples."
        )
    if len({status.config.algorithm.reward[0] for status in statuses}) > 1:
        yield "The first reward function differs; it decides whether an answer is right."
    if {difference.field for difference in differences} == {"seed"}:
        yield (
            "The runs differ only in the seed: the differences show the variance of this recipe, not the effect "
            "of a change."
        )
    elif not differences:
        yield "The runs have the same configuration."
    elif all(len(group.labels) == 1 for group in seeds):
        yield (
            "One seed each: the intervals describe the difference between these two sets of weights on these "
            "problems. To compare the recipes rather than the seeds, run each with several seeds and compare all "
            "of these runs together."
        )


def comparison_text(comparison: Comparison) -> str:
    """Format the comparison for a terminal."""
    parts = [
        "\n".join(_run_lines(comparison)),
        "\n".join(_difference_lines(comparison)),
        *("\n".join(_curve_lines(curve, comparison)) for curve in comparison.curves),
        "\n".join(_judgement_lines(comparison)),
        "\n".join(_seed_lines(comparison)),
        "\n".join(textwrap.fill(remark, WIDTH) for remark in comparison.remarks),
    ]
    return "\n\n".join(filter(None, parts))


def _run_lines(comparison: Comparison) -> Iterator[str]:
    for run in comparison.runs:
        yield f"{run.label}  {run.folder}  {run.state}, {run.step} of {run.total_steps} steps, seed {run.seed}"


def _difference_lines(comparison: Comparison) -> Iterator[str]:
    if not comparison.differences:
        return
    yield "configuration differences"
    width = max(len(difference.field) for difference in comparison.differences)
    for difference in comparison.differences:
        for run, value, origin in zip(comparison.runs, difference.values, difference.origins, strict=True):
            field = difference.field if run is comparison.runs[0] else ""
            yield f"  {field:{width}}  {run.label}  {value:24} {origin}".rstrip()


def _curve_lines(curve: MetricCurve, comparison: Comparison) -> Iterator[str]:
    """A sparkline per run on a common scale, and means over equal intervals of steps, below the last step of each."""
    every_step = sorted({step for steps in curve.steps for step in steps})
    values = [value for run in curve.values for value in run]
    fine, coarse = min(SPARK_WIDTH, len(every_step)), min(POINTS, len(every_step))
    ends = [every_step[-(-(point + 1) * len(every_step) // coarse) - 1] for point in range(coarse)]
    yield f"{curve.metric:{SPARK_WIDTH + 5}}{''.join(f'{end:>10}' for end in ends)}"
    for run, steps, own in zip(comparison.runs, curve.steps, curve.values, strict=True):
        points = dict(zip(steps, own, strict=True))
        bars = sparkline(_means(points, every_step, count=fine), low=min(values), high=max(values))
        means = _means(points, every_step, count=coarse)
        numbers = "".join(f"{'' if value is None else f'{value:.3g}':>10}" for value in means)
        yield f"  {run.label}  {bars:{SPARK_WIDTH}}{numbers}".rstrip()


def _means(points: Mapping[int, float], steps: Sequence[int], *, count: int) -> list[float | None]:
    """Means over `count` equal intervals of the steps; None if a run has no value there."""
    intervals: list[list[float]] = [[] for _ in range(count)]
    for index, step in enumerate(steps):
        if step in points:
            intervals[index * count // len(steps)].append(points[step])
    return [fmean(interval) if interval else None for interval in intervals]


def sparkline(values: Sequence[float | None], *, low: float, high: float) -> str:
    """`sparkline([0.0, 0.5, None, 1.0], low=0.0, high=1.0) == "▁▅ █"`."""
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else BARS[int((value - low) * scale + 0.5)] for value in values)


def _judgement_lines(comparison: Comparison) -> Iterator[str]:
    if not comparison.judgements:
        return
    yield "held-out accuracy, last evaluations"
    for run in comparison.runs:
        yield f"  {run.label}  {'not measured' if run.accuracy is None else f'{run.accuracy:.1%}'}"
    for each in comparison.judgements:
        interval = f"{each.low * 100:+.1f} … {each.high * 100:+.1f} at 95 %"
        line = f"  {each.second} − {each.first}: {each.difference * 100:+.1f} points ({interval})"
        if each.p_value is None:
            yield f"{line}, {each.problems[0]} and {each.problems[1]} problems"
            continue
        yield (
            f"{line}, the same {each.problems[0]} problems: only {each.first} right {each.only_first}, "
            f"only {each.second} right {each.only_second}, McNemar p = {each.p_value:.2g}"
        )


def _seed_lines(comparison: Comparison) -> Iterator[str]:
    several = [group for group in comparison.seeds if len(group.accuracies) > 1]
    if not several:
        return
    yield "runs that differ only in the seed"
    for group in several:
        low, high = min(group.accuracies), max(group.accuracies)
        yield (
            f"  {', '.join(group.labels)}: accuracy {fmean(group.accuracies):.1%} on average, from {low:.1%} to "
            f"{high:.1%} over {len(group.accuracies)} seeds"
        )


def plot(comparison: Comparison, path: Path) -> None:
    """Write the curves as an image; needs the extra `plots`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("--png needs matplotlib: `pip install 'kintsugi[plots]'`") from error
    if not comparison.curves:
        raise UserError("--png: expected runs with at least one step, got none")
    figure = Figure(figsize=(8, 2.5 * len(comparison.curves)), layout="constrained")
    axes = figure.subplots(len(comparison.curves), squeeze=False)[:, 0]
    for axis, curve in zip(axes, comparison.curves, strict=True):
        for run, steps, values in zip(comparison.runs, curve.steps, curve.values, strict=True):
            axis.plot(steps, values, label=f"{run.label} {Path(run.folder).name}")
        axis.set_ylabel(curve.metric)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    axes[0].legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"--png: expected a file that can be written, {path}: {error}") from error
