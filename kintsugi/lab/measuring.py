"""Figures of a run over time, what they look like without a fault, and when they first leave that. Reads only.

A series is `[(wall clock, value), …]`. Running totals become rates. A figure that is looked at every second leaves
mean ± 2σ by chance once in twenty looks, so one look outside is not yet an effect, and two in a row are.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from kintsugi.errors import KintsugiError
from kintsugi.lab.records import Spread
from kintsugi.observe.figures import TOTALS, HostSample, LinkSample, ProcessSample, Sample, figures_in
from kintsugi.runs import is_evaluation, read_metrics

Point = tuple[float, float]
Series = dict[str, list[Point]]

LEAST_SPREAD = 0.05
"""Of the mean: what never moved must not be outside with its first twitch."""
MOST_POINTS = 400
OF_A_PROCESS = ("cpu_s", "run_delay_s", "throttled_s", "io_delay_s", "rss_bytes", "memory_used_bytes")
OF_A_HOST = (
    *("fsync_s", "fsync_pending_s", "fsync_errors", "disk_free_bytes", "cpu_iowait_s", "tcp_retransmits"),
    *("resolve_s", "resolve_pending_s", "resolve_errors"),
)
OF_A_LINK = ("rtt_s", "retransmits", "send_queue_bytes")


def samples_in(run_dir: Path, *, since: float = 0.0) -> list[tuple[float, Sample]]:
    """Everything that was measured, by time; torn lines are skipped."""
    return [(record.stamp.time, record.sample) for record in figures_in(run_dir, since=since)]


def steps_of(run_dir: Path) -> Series:
    """How long each step took, in all and by phase, at the moment it was committed."""
    series: Series = defaultdict(list)
    try:
        lines, _ = read_metrics(run_dir)
    except KintsugiError:
        return {}
    for line in lines:
        at = line.get("time")
        if at is None or is_evaluation(line):
            continue
        for name, value in line.items():
            if value is not None and (name.startswith("timing/") or name == "tokens_per_s"):
                series[name].append((at, value))
    return dict(series)


def figures_of(samples: Iterable[tuple[float, Sample]], *, process: str, host: str) -> Series:
    """Of one process, its host, its links: `{"model-1 cpu_s": …, "host-0 fsync_s": …, "model-1>agent-0 rtt_s": …}`."""
    raw: Series = defaultdict(list)
    for t, sample in samples:
        match sample:
            case ProcessSample(of=of, values=values) if of == process:
                _take(raw, t, values, OF_A_PROCESS, name=process)
            case HostSample(host=name, values=values) if name == host:
                _take(raw, t, values, OF_A_HOST, name=host)
            case LinkSample(of=of, peer=peer, values=values) if process in (of, peer):
                _take(raw, t, values, OF_A_LINK, name=f"{of}>{peer}")
            case _:
                pass
    return {
        name: rates(points) if name.rsplit(" ", 1)[1] in TOTALS else points for name, points in raw.items()
    }


def _take(raw: Series, t: float, values: Mapping[str, float], names: Sequence[str], *, name: str) -> None:
    for figure in names:
        if figure in values:
            raw[f"{name} {figure}"].append((t, values[figure]))


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


def first_overdue(steps: Sequence[Point], spread: Spread, *, since: float) -> float | None:
    """When a step was not over though it should have been: that is seen before it ends."""
    for ended, took_s in steps:
        if ended > since and took_s > spread.mean + 2 * spread.sigma:
            return max(since, ended - took_s + spread.mean + 2 * spread.sigma)
    return None


def first_effect(
    *, steps: Series, figures: Series, baseline: Mapping[str, Spread], since: float, errors: Iterable[float]
) -> float | None:
    """The earliest of: a figure outside mean ± 2σ, a step overdue, an error told."""
    outside = [
        first_outside(points, baseline[name], since=since)
        for name, points in figures.items()
        if name in baseline
    ]
    overdue = [
        first_overdue(steps[name], baseline[name], since=since)
        for name in ("timing/step",)
        if name in steps and name in baseline
    ]
    told = [t for t in errors if t > since]
    return min((t for t in (*outside, *overdue, *told) if t is not None), default=None)


def thinned(series: Series) -> Series:
    """For a report: at most so many points each."""
    return {name: points[:: 1 + len(points) // MOST_POINTS] for name, points in series.items() if points}
