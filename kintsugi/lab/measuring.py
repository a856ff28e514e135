"""Figures of a run over time, what they look like without a fault, and when they first leave that. Reads only.

A series is `[(wall clock, value), …]`. Running totals become rates. A figure that is looked at every second leaves
mean ± 2σ by chance once in twenty looks, so one look outside is not yet an effect, and two in a row are.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from kintsugi.errors import KintsugiError
from kintsugi.lab.records import Spread
from kintsugi.observe.events import Span, read_events
from kintsugi.observe.figures import TOTALS, FigureRecord, HostSample, LinkSample, ProcessSample
from kintsugi.runs import is_evaluation, read_metrics
from kintsugi.types import Role, process_id

Point = tuple[float, float]
Series = dict[str, list[Point]]

LEAST_SPREAD = 0.05
"""Of the mean: what never moved must not be outside with its first twitch."""
MOST_POINTS = 400
STEP = "timing/step"
OF_A_PROCESS = ("cpu_s", "run_delay_s", "throttled_s", "io_delay_s", "rss_bytes", "memory_used_bytes")
OF_A_HOST = (
    *("fsync_s", "fsync_pending_s", "fsync_errors", "disk_free_bytes", "cpu_iowait_s", "tcp_retransmits"),
    *("resolve_s", "resolve_pending_s", "resolve_errors"),
)
OF_A_LINK = ("rtt_s", "retransmits", "send_queue_bytes")


def steps_of(run_dir: Path) -> Series:
    """How long each step took, in all and by phase, at the moment it was committed."""
    series: Series = defaultdict(list)
    try:
        lines, _ = read_metrics(run_dir)
    except KintsugiError:
        lines = []
    written = set()
    for line in lines:
        at = line.get("time")
        if at is None or is_evaluation(line):
            continue
        written.add(line.get("step"))
        for name, value in line.items():
            if value is not None and (name.startswith("timing/") or name == "tokens_per_s"):
                series[name].append((at, value))
    # A full disk takes metrics, which nothing depends on; events have their place there in advance.
    more = [(at, took_s) for step, at, took_s in _spans_of_steps(run_dir) if step not in written]
    if more:
        series[STEP] = sorted([*series[STEP], *more])
    return dict(series)


def _spans_of_steps(run_dir: Path) -> Iterator[tuple[int, float, float]]:
    """(step, when it was committed, how long it took), as the master's events tell it."""
    for record in read_events(run_dir, process=process_id(Role.MASTER, 0)):
        match record.event:
            case Span(name="step", duration_s=duration_s, attributes={"step": step}):
                yield int(step), record.stamp.time, duration_s
            case _:
                pass


def hosts_of(samples: Sequence[FigureRecord], process: str) -> list[str]:
    """Where it was, the last one first: whoever looks at a process looks at the host that both are on."""
    looked = [
        record.stamp.process
        for record in samples
        if isinstance(record.sample, ProcessSample) and record.sample.of == process
    ]
    host_of = {
        record.stamp.process: record.sample.host
        for record in samples
        if isinstance(record.sample, HostSample)
    }
    return [host_of[recorder] for recorder in dict.fromkeys(reversed(looked)) if recorder in host_of]


def figures_of(samples: Sequence[FigureRecord], *, process: str) -> Series:
    """Of one process, its host, its links: `{"model-1 cpu_s": …, "host-0 fsync_s": …, "model-1>agent-0 rtt_s": …}`.

    A link is as good as the worst of its connections.
    """
    hosts = hosts_of(samples, process)
    raw: dict[tuple[str, int], list[Point]] = defaultdict(list)

    def take(t: float, values: Mapping[str, float], figures: Sequence[str], name: str, port: int = 0) -> None:
        for figure in figures:
            if figure in values:
                raw[f"{name} {figure}", port].append((t, values[figure]))

    for record in samples:
        t = record.stamp.time
        match record.sample:
            case ProcessSample(of=of, values=values) if of == process:
                take(t, values, OF_A_PROCESS, process)
            case HostSample(host=name, values=values) if name in hosts:
                take(t, values, OF_A_HOST, name)
            case LinkSample(of=of, peer=peer, port=port, values=values) if process in (of, peer):
                take(t, values, OF_A_LINK, f"{of}>{peer}", port)
            case _:
                pass
    found: dict[str, dict[float, float]] = defaultdict(dict)
    for (name, _), points in raw.items():
        for t, value in rates(points) if name.rsplit(" ", 1)[1] in TOTALS else points:
            found[name][t] = max(value, found[name].get(t, value))
    return {name: sorted(values.items()) for name, values in found.items()}


def rates(totals: Sequence[Point]) -> list[Point]:
    """A running total per second; one that began anew with another process has no rate there.

    >>> rates([(0.0, 1.0), (2.0, 5.0), (3.0, 0.0), (4.0, 1.0)])
    [(2.0, 2.0), (4.0, 1.0)]
    """
    return [
        (t, (value - before) / (t - earlier))
        for (earlier, before), (t, value) in pairwise(totals)
        if t > earlier and value >= before
    ]


def spreads(series: Series, *, since: float, until: float) -> dict[str, Spread]:
    """Mean and deviation of each figure in the time of the baseline; figures that were not seen twice have none."""
    found = {}
    for name, points in series.items():
        values = [value for t, value in points if since <= t <= until]
        if len(values) >= 2:
            mean = statistics.fmean(values)
            found[name] = Spread(mean, max(statistics.stdev(values), LEAST_SPREAD * abs(mean) / 2, 1e-9))
    return found


def first_outside(points: Sequence[Point], spread: Spread, *, since: float) -> float | None:
    """When a figure that is sampled left mean ± 2σ, for two looks in a row."""
    later = [(t, spread.holds(value)) for t, value in points if t > since]
    return next((t for (t, holds), (_, still) in pairwise(later) if not holds and not still), None)


def first_overdue(
    steps: Sequence[Point], spread: Spread, *, since: float, until: float | None = None
) -> float | None:
    """When a step was not over though it should have been: that is seen before it ends. Of a run that came to no end
    of its own, the step that it was in was never over (`until`: so long it was followed)."""
    limit_s = spread.mean + 2 * spread.sigma
    for ended, took_s in steps:
        if ended > since and took_s > limit_s:
            return max(since, ended - took_s + limit_s)
    if until is not None and steps and until > (due := max(since, steps[-1][0] + limit_s)):
        return due
    return None


def first_effect(
    *,
    steps: Series,
    figures: Series,
    baseline: Mapping[str, Spread],
    since: float,
    errors: Iterable[float],
    least: Mapping[str, float] | None = None,
    until: float | None = None,
) -> float | None:
    """The earliest of: a figure outside mean ± 2σ, a step overdue, an error told.

    A figure that was not there before was nothing. It may be new for reasons of its own, as that of a connection is,
    and counts where it belongs to the kind of fault, from that size on (`least`).
    """
    outside = [
        first_outside(points, baseline[name], since=since)
        if name in baseline
        else first_from(points, (least or {}).get(name.rsplit(" ", 1)[1]), since=since)
        for name, points in figures.items()
    ]
    overdue = [
        first_overdue(steps[name], baseline[name], since=since, until=until)
        for name in (STEP,)
        if name in steps and name in baseline
    ]
    told = [t for t in errors if t > since]
    return min((t for t in (*outside, *overdue, *told) if t is not None), default=None)


def first_from(points: Sequence[Point], least: float | None, *, since: float) -> float | None:
    """When a figure that had been nothing was as large as this."""
    if least is None:
        return None
    return next((t for t, value in points if t > since and value >= least), None)


def thinned(series: Series) -> Series:
    """For a report: at most so many points each."""
    return {name: points[:: 1 + len(points) // MOST_POINTS] for name, points in series.items() if points}
