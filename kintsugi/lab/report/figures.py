"""The figures: how a fault travelled, what it did to what was measured, and how long it took to name it.

Colours are of a fixed set, so that the page can replace each by a variable that follows light and dark.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kintsugi.errors import UserError
from kintsugi.lab.records import Moment, RunRecord
from kintsugi.lab.report import measures, metrics
from kintsugi.lab.report.campaign import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "paper": "#ffffff",
    "ink": "#1a1a1a",
    "soft": "#5b5b5b",
    "rule": "#d9d9d4",
    "grid": "#e6e6e1",
    "fragile": "#c2410c",
    "ours": "#0b5fa5",
    "contrast": "#0a7d5a",
    "fault": "#e09f1f",
    "error": "#b91c1c",
    "other": "#7c4d9e",
}
PROFILES = {"fragile": "fragile system", "ours": "Kintsugi", "sft": "fragile system, SFT"}
PROFILE_COLOURS = {"fragile": COLOURS["fragile"], "ours": COLOURS["ours"], "sft": COLOURS["contrast"]}
WIDTH_IN = 10.0
NARROW_IN = 6.0
"""Of a figure of one panel."""
DOTS_PER_INCH = 200
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
"""A time axis of decades has no zero."""
LARGE = 1e4
"""From here on, an axis says `20 k`."""
SECONDS_BEFORE = 15.0
SECONDS_AFTER = 8.0
"""Around the instants of a run, in a figure of what was measured."""

STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "axes.edgecolor": COLOURS["soft"],
    "axes.labelcolor": COLOURS["ink"],
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.8,
    "text.color": COLOURS["ink"],
    "xtick.color": COLOURS["soft"],
    "ytick.color": COLOURS["soft"],
    "xtick.labelcolor": COLOURS["ink"],
    "ytick.labelcolor": COLOURS["ink"],
    "figure.facecolor": COLOURS["paper"],
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",
}


class Drawn(msgspec.Struct, frozen=True):
    """A figure, before it is given to page and files."""

    name: str
    svg: str
    png: bytes
    width_in: float

    def write(self, folder: Path) -> None:
        (folder / f"{self.name}.svg").write_text(self.svg, encoding="utf-8")
        (folder / f"{self.name}.png").write_bytes(self.png)

    def inline(self, label: str) -> str:
        """For the page: colours that follow it, ids that no other figure has, no background of its own."""
        body = self.svg[self.svg.index("<svg") :]
        body = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", body, count=1)
        body = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", body, count=1)
        quoted = label.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
        width = f"max-width: {self.width_in / WIDTH_IN:.0%}"
        body = body.replace("<svg", f'<svg role="img" aria-label="{quoted}" style="{width}"', 1)
        body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
        body = re.sub(r'\bid="([^"]+)"', rf'id="{self.name}-\1"', body)
        body = re.sub(r'href="#([^"]+)"', rf'href="#{self.name}-\1"', body)
        body = re.sub(r"url\(#([^)]+)\)", rf"url(#{self.name}-\1)", body)
        for name, colour in COLOURS.items():
            body = re.sub(rf": {colour}\b", f": var(--{name})", body)
        return body


def require_matplotlib() -> None:
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError as error:
        raise UserError("the report's figures need matplotlib: `pip install 'kintsugi[plots]'`") from error


@contextmanager
def _figure(height_in: float, *, panels: int) -> Iterator[Figure]:
    """So many panels beside each other."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        yield Figure(figsize=(WIDTH_IN if panels > 1 else NARROW_IN, height_in), layout="constrained")


def _drawn(figure: Figure, name: str) -> Drawn:
    """The same data give the same bytes: no date, and ids from the name."""
    import matplotlib as mpl

    svg, png = io.StringIO(), io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    # The layout that the first drawing found holds for the second, and finding it is most of the work.
    figure.set_layout_engine("none")
    figure.savefig(png, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return Drawn(name, svg.getvalue(), png.getvalue(), figure.get_figwidth())


# Figure 1: time × component.


def propagation(runs: Sequence[RunRecord], *, name: str) -> Drawn:
    """One panel per profile, side by side: who was hit, whom it went through, where it showed, when it was named."""
    stations = [measures.stations_of(run) for run in runs]
    keys = [_key(run, station) for run, station in zip(runs, stations, strict=True)]
    rows = max((len(_components(run, each)) for run, each in zip(runs, stations, strict=True)), default=1)
    lines = max(len(key) for key in keys)
    upper, lower = 0.9 + 0.36 * rows, 0.1 + 0.145 * lines
    with _figure(upper + lower + 0.3, panels=len(runs)) as figure:
        grid = figure.add_gridspec(2, len(runs), height_ratios=[upper, lower])
        for column, (run, each, key) in enumerate(zip(runs, stations, keys, strict=True)):
            _draw_panel(figure.add_subplot(grid[0, column]), run, each)
            below = figure.add_subplot(grid[1, column])
            below.axis("off")
            below.text(0, 1, "\n".join(key), va="top", ha="left", fontsize=7.5, linespacing=1.35)
        return _drawn(figure, name)


def _components(run: RunRecord, stations: Sequence[Moment]) -> list[str]:
    named = [fault.target for fault in run.injected] + [moment.process for moment in stations]
    if run.surfaced is not None:
        named.append(run.surfaced.process)
    order = ("controller", "weight sync", "scheduler", "host", "train", "rollout")

    def place(process: str) -> tuple[int, str]:
        stage = measures.stage_of(process)
        return (order.index(stage) if stage in order else len(order), process)

    return sorted(dict.fromkeys(named), key=place)


def _draw_panel(axes: Axes, run: RunRecord, stations: Sequence[Moment]) -> None:
    start = measures.start_of(run) or 0.0
    components = _components(run, stations)
    row = {process: -number for number, process in enumerate(components)}
    instants = [0.0, *(moment.t - start for moment in stations)]
    instants += [each.t - start for each in (run.surfaced, run.diagnosed) if each is not None]
    last = max(*instants, 1.0)
    places = spread([moment.t - start for moment in stations], apart=0.035 * last)
    last = max(last, *places, 0.0)
    for fault in run.injected:
        begin = fault.start - start
        end = min(last * 1.08, (fault.end or start + last) - start)
        axes.barh(
            row[fault.target],
            max(end - begin, last * 0.01),
            left=begin,
            height=0.62,
            color=COLOURS["fault"],
            alpha=0.5,
            lw=0,
        )
    points = [(x, row[moment.process]) for x, moment in zip(places, stations, strict=True)]
    if stations and run.injected and stations[0].process != run.injected[0].target:
        points.insert(0, (0.0, row[run.injected[0].target]))
        axes.plot(*points[0], "o", ms=5, color=COLOURS["ink"], zorder=4)
    for before, after in pairwise(points):
        axes.annotate(
            "",
            xy=after,
            xytext=before,
            arrowprops={"arrowstyle": "-|>", "color": COLOURS["soft"], "lw": 1.1, "shrinkA": 6, "shrinkB": 7},
        )
    for number, at in enumerate(points[-len(stations) :] if stations else [], 1):
        axes.plot(*at, "o", ms=11, mfc=COLOURS["paper"], mec=COLOURS["ink"], mew=1.0, zorder=4)
        axes.annotate(str(number), at, ha="center", va="center_baseline", fontsize=7.5, zorder=5)
    if run.surfaced is not None:
        at = (run.surfaced.t - start, row[run.surfaced.process])
        axes.plot(*at, "X", ms=10, mfc=COLOURS["error"], mec=COLOURS["paper"], mew=0.8, zorder=6)
    if run.diagnosed is not None:
        colour = COLOURS["ours"] if run.correct else COLOURS["fragile"]
        axes.axvline(run.diagnosed.t - start, color=colour, lw=1.6, ls=(0, (4, 2)), zorder=2)
    axes.set_yticks([row[process] for process in components], components)
    axes.set_ylim(-len(components) + 0.4, 0.6)
    axes.set_xlim(min(0.0, *instants) - 0.04 * last, last * 1.08)
    axes.set_xlabel("seconds since the injection")
    axes.grid(visible=True, axis="both")
    axes.set_title(PROFILES.get(run.profile, run.profile))


def spread(places: Sequence[float], *, apart: float) -> list[float]:
    """Moved to the right just so far that marks can be told from each other.

    >>> spread([0.0, 1.0, 1.0, 5.0], apart=0.5)
    [0.0, 1.0, 1.5, 5.0]
    """
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + apart) if moved else place)
    return moved


def _key(run: RunRecord, stations: Sequence[Moment]) -> list[str]:
    """What the marks of a panel mean, in words and seconds."""
    start = measures.start_of(run) or 0.0
    said: list[str] = []

    def add(mark: str, text: str, t: float | None) -> None:
        when = "" if t is None else f" ({t - start:+.1f}\u00a0s)"
        wrapped = textwrap.wrap(f"{mark}  {text}{when}", 66, subsequent_indent="\u2003\u2002")
        said.extend(wrapped[:3])

    for fault in run.injected:
        add("▬", f"injected: {fault.kind.replace('_', ' ')} at {fault.target}", fault.start)
    for number, moment in enumerate(stations, 1):
        add(str(number), f"{moment.process}: {measures.message_of(moment.what)}", moment.t)
    if run.surfaced is not None:
        seen = (run.surfaced.process, run.surfaced.message)
        told = any((moment.process, moment.what) == seen for moment in stations)
        message = "" if told else f": {measures.message_of(run.surfaced.message)}"
        add("✖", f"error that a person sees, in {run.surfaced.process}{message}", run.surfaced.t)
    else:
        add("✖", "no error was seen", None)
    if run.diagnosed is not None:
        right = "right" if run.correct else "wrong"
        add(
            "¦",
            f"named: {run.diagnosed.process}, {run.diagnosed.kind.replace('_', ' ')} ({right})",
            run.diagnosed.t,
        )
    else:
        add("¦", "no cause was named", None)
    return said


# Figure 2: what was measured, with the instants of injection and error.


def has_series(run: RunRecord) -> bool:
    return measures.start_of(run) is not None and any(run.series.values())


def anomalies(runs: Sequence[RunRecord], *, name: str) -> Drawn:
    """Per run: what was hit, and what that did to the step."""
    chosen = [metrics.chosen(run) for run in runs]
    rows = max(map(len, chosen))
    with _figure(0.7 + 1.65 * rows, panels=len(runs)) as figure:
        grid = figure.subplots(rows, len(runs), squeeze=False)
        for column, (run, names) in enumerate(zip(runs, chosen, strict=True)):
            for number in range(rows):
                axes = grid[number][column]
                if number >= len(names):
                    axes.axis("off")
                    continue
                _draw_series(axes, run, names[number])
                if number == 0:
                    axes.set_title(f"{PROFILES.get(run.profile, run.profile)}\n", loc="left")
                if number == len(names) - 1:
                    axes.set_xlabel("seconds since the injection")
        handles, labels = _legend()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels) if len(runs) > 1 else 3)
        return _drawn(figure, name)


def _draw_series(axes: Axes, run: RunRecord, metric: str) -> None:
    from matplotlib.ticker import EngFormatter

    start = measures.start_of(run) or 0.0
    values = run.series[metric]
    times = [t - start for t, _ in values]
    for fault in run.injected:
        end = (fault.end or values[-1][0]) - start
        axes.axvspan(fault.start - start, end, color=COLOURS["fault"], alpha=0.25, lw=0)
    band = run.baseline.get(metric)
    if band is not None:
        low, high = band.mean - 2 * band.sigma, band.mean + 2 * band.sigma
        axes.axhspan(low, high, color=COLOURS["soft"], alpha=0.18, lw=0)
        axes.axhline(band.mean, color=COLOURS["soft"], lw=0.8)
    axes.plot(times, [value for _, value in values], color=COLOURS["ink"], lw=1.2, marker=".", ms=3)
    if run.surfaced is not None:
        axes.axvline(run.surfaced.t - start, color=COLOURS["error"], lw=1.5)
    if run.diagnosed is not None:
        colour = COLOURS["ours"] if run.correct else COLOURS["fragile"]
        axes.axvline(run.diagnosed.t - start, color=colour, lw=1.5, ls=(0, (4, 2)))
    if max(abs(value) for _, value in values) >= LARGE:
        axes.yaxis.set_major_formatter(EngFormatter())
    axes.text(0, 1.02, metrics.words(metric), transform=axes.transAxes, ha="left", va="bottom", fontsize=8)
    instants = [each.t for each in (run.surfaced, run.diagnosed) if each is not None]
    last = max(*instants, *(fault.end or fault.start for fault in run.injected)) - start
    axes.margins(x=0.02, y=0.15)
    axes.set_xlim(max(times[0], -SECONDS_BEFORE), min(max(times[-1], last), last + SECONDS_AFTER))


def _legend() -> tuple[list[Any], list[str]]:
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
    return handles, names


# Figure 3: how long it takes to name the cause.


def diagnosis_times(runs: Sequence[RunRecord], curves: Sequence[Curve], *, scale: float, name: str) -> Drawn:
    """Scenario by scenario, and over a whole campaign where there was one."""
    panels = bool(runs) + bool(curves)
    height_in = 3.8 if curves else 1.5 + 0.46 * len({run.scenario for run in runs})
    with _figure(height_in, panels=panels) as figure:
        axes = figure.subplots(1, panels, squeeze=False)[0]
        if runs:
            _draw_scenarios(axes[0], runs, scale=scale)
        if curves:
            _draw_curves(axes[-1], curves)
        return _drawn(figure, name)


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
    _scenario_legend(axes)


def _scenario_legend(axes: Axes) -> None:
    from matplotlib.lines import Line2D

    dot: dict[str, Any] = {"marker": "o", "ls": "", "ms": 7, "mew": 1.6}
    fragile, ours = COLOURS["fragile"], COLOURS["ours"]
    handles = [
        Line2D([], [], mec=fragile, mfc=COLOURS["paper"], **dot),
        Line2D([], [], mec=ours, mfc=ours, **dot),
        Line2D([], [], color=fragile, ls=":", marker="|", ms=9, mew=1.5),
    ]
    labels = [
        "last error in the log (hollow: wrong cause)",
        "diagnosis (filled: right)",
        "with the time-outs of the plan",
    ]
    axes.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=1)


def _draw_curves(axes: Axes, curves: Sequence[Curve]) -> None:
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
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=1)
