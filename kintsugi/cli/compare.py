"""`kintsugi compare`: the comparison of runs (`run_folder/comparison.py`) as text and as an image."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from kintsugi.cli.output import counted
from kintsugi.errors import UserError
from kintsugi.run_folder.comparison import Comparison, MetricCurve

BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 19
POINTS = 5
"""Steps at which values are printed; the last column is the mean over all steps."""
COLUMN = 9
WIDTH = 80


def comparison_text(comparison: Comparison, *, starters: Mapping[str, str] | None = None) -> str:
    """Format the comparison for a terminal. `starters` has the user that started a run, by its folder."""
    parts = [
        "\n".join(_run_lines(comparison, starters or {})),
        "\n".join(_difference_lines(comparison)),
        *("\n".join(_curve_lines(curve, comparison)) for curve in comparison.curves),
        "\n".join(_judgement_lines(comparison)),
        "\n".join(_seed_lines(comparison)),
        "\n".join(textwrap.fill(remark, WIDTH) for remark in comparison.remarks),
    ]
    return "\n\n".join(filter(None, parts))


def _run_lines(comparison: Comparison, starters: Mapping[str, str]) -> Iterator[str]:
    for run in comparison.runs:
        steps = f"{run.step} of {counted(run.total_steps, 'step')}"
        line = f"{run.label}  {run.folder}  {run.state}, {steps}, seed {run.seed}"
        starter = starters.get(run.folder)
        yield f"{line}, started by {starter}" if starter else line


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
    """A sparkline per run on a common scale, values at a few steps, and the mean over all steps of the run."""
    every_step = sorted({step for steps in curve.steps for step in steps})
    values = [value for run in curve.values for value in run]
    count = min(POINTS, len(every_step))
    at = [every_step[round(index * (len(every_step) - 1) / max(1, count - 1))] for index in range(count)]
    heads = [*(f"step {step}" if step < 1000 else f"{step}" for step in at), "mean"]
    yield f"{curve.metric:{SPARK_WIDTH + 5}}{''.join(f'{head:>{COLUMN}}' for head in heads)}"
    for run, steps, own in zip(comparison.runs, curve.steps, curve.values, strict=True):
        points = dict(zip(steps, own, strict=True))
        means = _means(points, every_step, count=min(SPARK_WIDTH, len(every_step)))
        bars = sparkline(means, low=min(values), high=max(values))
        shown = [*(points.get(step) for step in at), fmean(own) if own else None]
        numbers = "".join(f"{_number(value):>{COLUMN}}" for value in shown)
        yield f"  {run.label}  {bars:{SPARK_WIDTH}}{numbers}".rstrip()


def _number(value: float | None) -> str:
    """A number that leaves a space in its column; nothing for None.

    >>> _number(0.5), _number(-0.000189123), _number(None)
    ('0.5', '-1.9e-04', '')
    """
    if value is None:
        return ""
    text = f"{value:.3g}"
    return text if len(text) < COLUMN else f"{value:.1e}"


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
