"""Figure 1: propagation of a fault, time × component."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from kintsugi.lab.report import measures
from kintsugi.lab.report.plotting import COLOURS, RenderedFigure, canvas, drawn, profile_name
from kintsugi.lab.scenarios.records import RunRecord, TimedEvent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW_IN = 0.44
LINE_IN = 0.145
"""Height of a line of the key."""
LINE_CHARACTERS, MOST_LINES = 66, 3
"""Limits of one entry of the key."""
APART = 0.045
"""Marks of one row that are closer than this share of the width are merged."""
ABOVE = 0.4
"""Offset in rows of the cross where its position is taken by a number."""
ORDER = ("controller", "weight sync", "scheduler", "host", "train", "rollout")


class Mark(msgspec.Struct, frozen=True):
    """Merged stations of one process at almost the same time: `Mark("2,3", 1.5, -1)`."""

    label: str
    x: float
    y: int


def propagation(runs: Sequence[RunRecord], *, name: str) -> RenderedFigure:
    """Draw one panel per system: target, propagation, visible error, and time of the verdict."""
    stations = [measures.stations_of(run) for run in runs]
    keys = [_key(run, station) for run, station in zip(runs, stations, strict=True)]
    rows = max((len(_components(run, each)) for run, each in zip(runs, stations, strict=True)), default=1)
    lines = max(len(key) for key in keys)
    upper, lower = 0.9 + ROW_IN * rows, 0.1 + LINE_IN * lines
    with canvas(upper + lower + 0.3, panels=len(runs)) as figure:
        grid = figure.add_gridspec(2, len(runs), height_ratios=[upper, lower])
        shown = _common_range(runs, stations)
        for column, (run, each, key) in enumerate(zip(runs, stations, keys, strict=True)):
            _draw_panel(figure.add_subplot(grid[0, column]), run, each, shown=shown)
            below = figure.add_subplot(grid[1, column])
            below.axis("off")
            below.text(0, 1, "\n".join(key), va="top", ha="left", fontsize=7.5, linespacing=1.35)
        return drawn(figure, name)


def _components(run: RunRecord, stations: Sequence[TimedEvent]) -> list[str]:
    named = [fault.target for fault in run.injected] + [moment.process for moment in stations]
    if run.surfaced is not None:
        named.append(run.surfaced.process)

    def place(process: str) -> tuple[int, str]:
        stage = measures.stage_of(process)
        return (ORDER.index(stage) if stage in ORDER else len(ORDER), process)

    return sorted(dict.fromkeys(named), key=place)


def _common_range(runs: Sequence[RunRecord], stations: Sequence[Sequence[TimedEvent]]) -> tuple[float, float]:
    """Return the first and the last instant of all panels, with the whole of every fault that ended."""
    instants = [0.0, 1.0]
    for run, each in zip(runs, stations, strict=True):
        start = measures.start_of(run) or 0.0
        times = [fault.start for fault in run.injected]
        times += [fault.end for fault in run.injected if fault.end is not None]
        times += [moment.t for moment in each]
        times += [found.t for found in (run.surfaced, run.diagnosed) if found is not None]
        instants += [t - start for t in times]
    return min(instants), max(instants)


def _draw_panel(
    axes: Axes, run: RunRecord, stations: Sequence[TimedEvent], *, shown: tuple[float, float]
) -> None:
    start = measures.start_of(run) or 0.0
    components = _components(run, stations)
    row = {process: -number for number, process in enumerate(components)}
    first, last = shown
    width = last - first
    _draw_faults(axes, run, row, last=last + 0.08 * width)
    marks = marks_of(
        [(moment.t - start, row[moment.process]) for moment in stations], apart=APART * 1.12 * width
    )
    _draw_path(axes, marks, begin=_beginning(run, stations, row))
    if run.surfaced is not None:
        x, y = run.surfaced.t - start, row[run.surfaced.process]
        is_taken = any(mark.y == y and abs(mark.x - x) < APART * 1.12 * width for mark in marks)
        at = (x, y + (ABOVE if is_taken else 0.0))
        axes.plot(*at, "X", ms=9, mfc=COLOURS["error"], mec=COLOURS["paper"], mew=0.8, zorder=6)
    if run.diagnosed is not None:
        colour = COLOURS["ours"] if run.correct else COLOURS["fragile"]
        axes.axvline(run.diagnosed.t - start, color=colour, lw=1.6, ls=(0, (4, 2)), zorder=2)
    axes.set_yticks([row[process] for process in components], components)
    axes.set_ylim(-len(components) + 0.4, 0.7)
    axes.set_xlim(first - 0.04 * width, last + 0.08 * width)
    axes.set_xlabel("seconds since the injection")
    axes.grid(visible=True, axis="both")
    axes.set_title(profile_name(run))


def _draw_faults(axes: Axes, run: RunRecord, row: dict[str, int], *, last: float) -> None:
    start = measures.start_of(run) or 0.0
    for fault in run.injected:
        begin = fault.start - start
        end = last if fault.end is None else min(last, fault.end - start)
        axes.barh(
            row[fault.target],
            max(end - begin, last * 0.01),
            left=begin,
            height=0.62,
            color=COLOURS["fault"],
            alpha=0.5,
            lw=0,
        )


def _beginning(
    run: RunRecord, stations: Sequence[TimedEvent], row: dict[str, int]
) -> tuple[float, int] | None:
    """Return where the path begins if not with its first station."""
    fault = measures.target_fault_of(run)
    if fault is None or not stations or stations[0].process == fault.target:
        return None
    return (0.0, row[fault.target])


def marks_of(stations: Sequence[tuple[float, int]], *, apart: float) -> list[Mark]:
    """Place a mark at each time; marks of one row that would overlap are merged, at the time of the first.

    >>> [mark.label for mark in marks_of([(0.0, -1), (1.0, -1), (1.1, -1), (1.1, 0)], apart=0.5)]
    ['1', '2,3', '4']
    """
    marks: list[Mark] = []
    for number, (x, y) in enumerate(stations, 1):
        near = next((mark for mark in marks if mark.y == y and abs(mark.x - x) < apart), None)
        if near is None:
            marks.append(Mark(str(number), x, y))
        else:
            marks[marks.index(near)] = msgspec.structs.replace(near, label=f"{near.label},{number}")
    return marks


def _draw_path(axes: Axes, marks: Sequence[Mark], *, begin: tuple[float, int] | None) -> None:
    points = [(mark.x, mark.y) for mark in marks]
    if begin is not None:
        points.insert(0, begin)
        axes.plot(*begin, "o", ms=5, color=COLOURS["ink"], zorder=4)
    for before, after in pairwise(points):
        # A vertical arrow would cross the marks of the rows between.
        is_steep = abs(after[1] - before[1]) > 1 and any(
            mark.y not in (before[1], after[1]) and mark.x == before[0] for mark in marks
        )
        arrow = {"arrowstyle": "-|>", "color": COLOURS["soft"], "lw": 1.1, "shrinkA": 6, "shrinkB": 7}
        if is_steep:
            side = (1 if after[0] >= before[0] else -1) * (1 if after[1] > before[1] else -1)
            arrow["connectionstyle"] = f"arc3,rad={0.3 * side}"
        axes.annotate("", xy=after, xytext=before, arrowprops=arrow)
    for mark in marks:
        axes.annotate(
            mark.label,
            (mark.x, mark.y),
            ha="center",
            va="center",
            fontsize=7.5,
            zorder=5,
            bbox={
                "boxstyle": "circle,pad=0.25" if len(mark.label) == 1 else "round,pad=0.3,rounding_size=0.8",
                "fc": COLOURS["paper"],
                "ec": COLOURS["ink"],
                "lw": 0.9,
            },
        )


def _key(run: RunRecord, stations: Sequence[TimedEvent]) -> list[str]:
    """Describe the marks of a panel with their times."""
    start = measures.start_of(run) or 0.0
    lines: list[str] = []

    def add(mark: str, text: str, t: float | None) -> None:
        when = "" if t is None else f" ({t - start:+.1f}\u00a0s)"
        lines.extend(entry(f"{mark}\u2002{text}", when))

    for fault in run.injected:
        add("bar", f"injected: {fault.kind.replace('_', ' ')} at {fault.target}", fault.start)
    for number, moment in enumerate(stations, 1):
        add(str(number), f"{moment.process}: {measures.message_of(moment.what)}", moment.t)
    if run.surfaced is not None:
        seen = (run.surfaced.process, run.surfaced.message)
        is_listed = any((moment.process, moment.what) == seen for moment in stations)
        message = "" if is_listed else f": {measures.message_of(run.surfaced.message)}"
        add("cross", f"visible error, in {run.surfaced.process}{message}", run.surfaced.t)
    else:
        add("cross", "no visible error", None)
    if run.diagnosed is not None:
        right = "right" if run.correct else "wrong"
        kind = run.diagnosed.kind.replace("_", " ")
        add("dashes", f"named: {run.diagnosed.process}, {kind} ({right})", run.diagnosed.t)
    else:
        add("dashes", "no cause was named", None)
    return lines


def entry(text: str, when: str) -> list[str]:
    """Return the lines of an entry of the key; a long message is shortened, its time is always kept."""
    lines = _wrapped(text + when)
    for length in range(LINE_CHARACTERS * MOST_LINES, 0, -1):
        if len(lines) <= MOST_LINES:
            break
        lines = _wrapped(f"{text[:length].rstrip()}…{when}")
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, LINE_CHARACTERS, subsequent_indent="\u2003\u2002")
