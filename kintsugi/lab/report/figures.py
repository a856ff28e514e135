"""Figures 2 and 3: effect of a fault on metrics, and time to diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kintsugi.lab.report import measures, metrics
from kintsugi.lab.report.campaign import AccuracyCurve
from kintsugi.lab.report.plotting import COLOURS, PROFILE_COLOURS, RenderedFigure, canvas, drawn, profile_name
from kintsugi.lab.scenarios.records import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TICKS = {
    0.01: "10 ms",
    0.1: "0.1 s",
    1: "1 s",
    10: "10 s",
    60: "1 min",
    600: "10 min",
    3600: "1 h",
    36000: "10 h",
}
LEAST_S = 0.01
"""Smallest value on a logarithmic time axis."""
LEGEND_IN = 0.42
"""Distance of a legend from its axes: tick labels and the label of the axis are between."""
LARGE = 1e4
"""Values from here on are labelled with a unit prefix: `20 k`."""
SECONDS_BEFORE = 15.0
"""Time range before the injection that is shown."""
LINE: dict[str, Any] = {"lw": 1.2, "marker": ".", "ms": 3}
UNFINISHED: dict[str, Any] = {"lw": 1.2, "ls": (0, (2, 1.5)), "marker": "^", "ms": 5, "markevery": [-1]}
"""Style of a line that is not finished."""


# Figure 2: metrics over time, with the injection and the error.


def has_series(run: RunRecord) -> bool:
    return measures.start_of(run) is not None and any(run.series.values())


def anomalies(runs: Sequence[RunRecord], *, name: str) -> RenderedFigure:
    """Draw the affected metrics and their effect on the step, one row per metric and one column per run. Rows and
    columns have common axes, so that runs can be compared."""
    names = list(dict.fromkeys(name for run in runs for name in metrics.chosen(run)))[: metrics.MOST_METRICS]
    spans = [_span(run, there) for run in runs if (there := [name for name in names if run.series.get(name)])]
    shown = min(low for low, _ in spans), max(high for _, high in spans)
    with canvas(0.7 + 1.65 * len(names), panels=len(runs)) as figure:
        grid = figure.subplots(len(names), len(runs), squeeze=False, sharex=True, sharey="row")
        for row, metric in zip(grid, names, strict=True):
            levels = [
                level
                for axes, run in zip(row, runs, strict=True)
                for level in _draw_series(axes, run, metric, shown=shown)
            ]
            if levels:
                margin = 0.1 * (max(levels) - min(levels)) or 0.1 * abs(levels[0]) or 1.0
                row[0].set_ylim(min(levels) - margin, max(levels) + margin)
        for axes, run in zip(grid[0], runs, strict=True):
            axes.set_title(f"{profile_name(run)}\n", loc="left")
            axes.set_xlim(shown)
        for axes in grid[-1]:
            axes.set_xlabel("seconds since the injection")
        handles, labels = _legend(runs)
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        return drawn(figure, name)


def _span(run: RunRecord, names: Sequence[str]) -> tuple[float, float]:
    """Return the time range of a run that is shown: its events, and some of the metrics before and after them."""
    start = measures.start_of(run) or 0.0
    times = [t - start for name in names for t, _ in run.series[name]]
    last = measures.last_instant(run) - start
    return max(min(times), -SECONDS_BEFORE), max(last, min(max(times), last + measures.SECONDS_AFTER)) + 0.3


def _draw_series(axes: Axes, run: RunRecord, metric: str, *, shown: tuple[float, float]) -> list[float]:
    """Draw a metric of a run; return the values that its axis has to show."""
    from matplotlib.ticker import EngFormatter

    start = measures.start_of(run) or 0.0
    points = [(t - start, value) for t, value in run.series.get(metric, ())]
    if not points:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", fontsize=8)
    for fault in run.injected:
        end = shown[1] if fault.end is None else fault.end - start
        axes.axvspan(fault.start - start, end, color=COLOURS["fault"], alpha=0.25, lw=0)
    band = run.baseline.get(metric)
    levels = [value for t, value in points if shown[0] <= t <= shown[1]]
    if band is not None:
        low, high = band.mean - 2 * band.sigma, band.mean + 2 * band.sigma
        axes.axhspan(low, high, color=COLOURS["soft"], alpha=0.18, lw=0)
        axes.axhline(band.mean, color=COLOURS["soft"], lw=0.8)
        levels += [low, high]
    axes.plot([t for t, _ in points], [value for _, value in points], color=COLOURS["ink"], **LINE)
    if metric == measures.STEP_SERIES:
        levels += _draw_unfinished(axes, run)
    if run.surfaced is not None:
        axes.axvline(run.surfaced.t - start, color=COLOURS["error"], lw=1.5)
    if run.diagnosed is not None:
        colour = COLOURS["ours"] if run.correct else COLOURS["fragile"]
        axes.axvline(run.diagnosed.t - start, color=colour, lw=1.5, ls=(0, (4, 2)))
    if levels and max(map(abs, levels)) >= LARGE:
        axes.yaxis.set_major_formatter(EngFormatter())
    axes.text(0, 1.02, metrics.label_of(metric), transform=axes.transAxes, ha="left", va="bottom", fontsize=8)
    return levels


def _draw_unfinished(axes: Axes, run: RunRecord) -> list[float]:
    """Draw the duration of the step in which the run ended; return the values."""
    start, since, end = measures.start_of(run) or 0.0, measures.unfinished_since(run), measures.end_of(run)
    if since is None or end is None or end <= since:
        return []
    times, lengths = [since - start, end - start], [0.0, end - since]
    axes.plot(times, lengths, color=COLOURS["ink"], **UNFINISHED)
    return lengths


def _legend(runs: Sequence[RunRecord]) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(color=COLOURS["fault"], alpha=0.25, lw=0),
        Patch(color=COLOURS["soft"], alpha=0.18, lw=0),
        Line2D([], [], color=COLOURS["error"], lw=1.5),
        Line2D([], [], color=COLOURS["ours"], lw=1.5, ls=(0, (4, 2))),
        Line2D([], [], color=COLOURS["fragile"], lw=1.5, ls=(0, (4, 2))),
    ]
    names = ["fault injected", "mean ± 2σ without fault", "error shows", "cause named", "wrong cause named"]
    if any(measures.unfinished_since(run) is not None for run in runs):
        handles.append(Line2D([], [], color=COLOURS["ink"], **UNFINISHED))
        names.append("step that never ended")
    return handles, names


# Figure 3: time to diagnosis.


def diagnosis_times(
    runs: Sequence[RunRecord], curves: Sequence[AccuracyCurve], *, scale: float, name: str
) -> RenderedFigure:
    """Draw the times per scenario, and over a whole campaign where there is one."""
    panels = bool(runs) + bool(curves)
    height_in = 3.8 if curves else 1.5 + 0.46 * len({run.scenario for run in runs})
    with canvas(height_in, panels=panels) as figure:
        axes = figure.subplots(1, panels, squeeze=False)[0]
        if runs:
            _draw_scenarios(axes[0], runs, scale=scale)
        if curves:
            _draw_curves(axes[-1], curves)
        return drawn(figure, name)


def _draw_scenarios(axes: Axes, runs: Sequence[RunRecord], *, scale: float) -> None:
    names = sorted({run.scenario for run in runs})
    every = [max(took_s, LEAST_S) for run in runs if (took_s := measures.diagnosis_s(run)) is not None]
    real = [each for run in runs if (each := measures.unscaled(measures.diagnosis_s(run), run, scale=scale))]
    least, most = min(every), max([*every, *real])
    offsets = {"fragile": 0.18, "ours": -0.18}
    for run in runs:
        took_s = measures.diagnosis_s(run)
        if took_s is None or run.profile not in offsets:
            continue
        took_s = max(took_s, LEAST_S)
        y, colour = -names.index(run.scenario) + offsets[run.profile], PROFILE_COLOURS[run.profile]
        stands_for = measures.unscaled(took_s, run, scale=scale)
        if stands_for is not None:
            axes.plot([took_s, stands_for], [y, y], color=colour, lw=1.0, ls=":")
            axes.plot(stands_for, y, "|", color=colour, ms=9, mew=1.5)
        axes.plot(took_s, y, "o", ms=8, mec=colour, mew=1.6, mfc=colour if run.correct else COLOURS["paper"])
        place, side = ((0, 7), "center") if run.profile == "fragile" else ((-8, -3), "right")
        text = measures.seconds(took_s)
        axes.annotate(text, (took_s, y), place, textcoords="offset points", ha=side, fontsize=7)
    axes.set_xscale("log")
    axes.set_xticks(list(TICKS), list(TICKS.values()))
    axes.minorticks_off()
    axes.set_yticks([-number for number in range(len(names))], names)
    axes.set_ylim(-len(names) + 0.25, 0.75)
    axes.set_xlim(min(least * 0.2, 0.8), max(most * 3, 12))
    axes.set_xlabel("time from the injection to a verdict")
    axes.set_title("a  Scenarios")
    _scenario_legend(axes, with_unscaled=bool(real))


def _scenario_legend(axes: Axes, *, with_unscaled: bool) -> None:
    from matplotlib.lines import Line2D

    dot: dict[str, Any] = {"marker": "o", "ls": "", "ms": 7, "mew": 1.6}
    fragile, ours = COLOURS["fragile"], COLOURS["ours"]
    handles = [
        Line2D([], [], mec=fragile, mfc=COLOURS["paper"], **dot),
        Line2D([], [], mec=ours, mfc=ours, **dot),
    ]
    labels = ["last error in the log (hollow: wrong cause)", "diagnosis (filled: right)"]
    if with_unscaled:
        handles.append(Line2D([], [], color=fragile, ls=":", marker="|", ms=9, mew=1.5))
        labels.append("with unscaled time-outs")
    _legend_below(axes, handles, labels)


def _legend_below(axes: Axes, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Place the legend under the label of the x axis: a distance in inches, however high the axes are."""
    from matplotlib.transforms import ScaledTranslation

    figure = axes.figure
    below = axes.transAxes + ScaledTranslation(0, -LEGEND_IN, figure.dpi_scale_trans)
    axes.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.0), bbox_transform=below, ncols=1)


def _draw_curves(axes: Axes, curves: Sequence[AccuracyCurve]) -> None:
    colours = {"ours": COLOURS["ours"], "last_error": COLOURS["fragile"], "first_error": COLOURS["other"]}
    longest = max((curve.seconds[-1] for curve in curves if curve.seconds), default=1.0) * 1.1
    for curve in curves:
        times = [0.0, *curve.seconds, longest]
        named = [0.0, *((number + 1) / curve.cases for number in range(len(curve.seconds)))]
        heights = [100 * value for value in (*named, named[-1])]
        colour = colours.get(curve.method, COLOURS["soft"])
        axes.step(times, heights, where="post", color=colour, lw=1.8, label=curve.label)
    axes.set_ylim(0, 103)
    axes.set_xlim(0, longest)
    axes.set_xlabel("seconds since the fault began")
    axes.set_ylabel("faults named right [%]")
    axes.set_title(f"b  Campaign, {curves[0].cases} faults")
    _legend_below(axes, *axes.get_legend_handles_labels())
