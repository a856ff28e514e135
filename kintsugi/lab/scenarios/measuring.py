"""Metrics of a run over time, their baseline, and the time at which they first leave it. Reads files only.

A series is `[(wall clock, value), …]`. Running totals become rates. A metric that is sampled every second leaves mean ±
2σ by chance once in twenty samples, so one sample outside is no effect, two consecutive ones are.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from kintsugi.errors import KintsugiError
from kintsugi.lab.scenarios.records import Spread
from kintsugi.run_folder.reader import is_evaluation, read_metrics
from kintsugi.telemetry.events import Span, read_events
from kintsugi.telemetry.readings import TOTALS, HostReading, LinkReading, ProcessReading, ReadingRecord
from kintsugi.types import Role, process_id

Point = tuple[float, float]
Series = dict[str, list[Point]]

LEAST_SPREAD = 0.05
"""Smallest spread as a share of the mean, so that a constant metric is not outside with its first small change."""
MOST_POINTS = 400
STEP = "timing/step"
OF_A_PROCESS = ("cpu_s", "run_delay_s", "throttled_s", "io_delay_s", "rss_bytes", "memory_used_bytes")
OF_A_HOST = (
    *("fsync_s", "fsync_pending_s", "fsync_errors", "disk_free_bytes", "cpu_iowait_s", "tcp_retransmits"),
    *("resolve_s", "resolve_pending_s", "resolve_errors"),
)
OF_A_LINK = ("rtt_s", "retransmits", "send_queue_bytes")


def steps_of(run_dir: Path) -> Series:
    """Return the duration of each step, in total and by phase, at the time of its commit."""
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
    # A full disk loses metrics, which nothing depends on; events have preallocated space.
    more = [(at, took_s) for step, at, took_s in _spans_of_steps(run_dir) if step not in written]
    if more:
        series[STEP] = sorted([*series[STEP], *more])
    return dict(series)


def _spans_of_steps(run_dir: Path) -> Iterator[tuple[int, float, float]]:
    """Yield (step, time of the commit, duration) from the master's events."""
    for record in read_events(run_dir, process=process_id(Role.MASTER, 0)):
        match record.event:
            case Span(name="step", duration_s=duration_s, attributes={"step": step}):
                yield int(step), record.stamp.time, duration_s
            case _:
                pass


def hosts_of(samples: Sequence[ReadingRecord], process: str) -> list[str]:
    """Return the hosts of a process, the last one first: a process is sampled by an agent on the same host."""
    looked = [
        record.stamp.process
        for record in samples
        if isinstance(record.sample, ProcessReading) and record.sample.of == process
    ]
    host_of = {
        record.stamp.process: record.sample.host
        for record in samples
        if isinstance(record.sample, HostReading)
    }
    return [host_of[recorder] for recorder in dict.fromkeys(reversed(looked)) if recorder in host_of]


def metrics_of(samples: Sequence[ReadingRecord], *, process: str) -> Series:
    """Return the metrics of a process, its host and its links: `{"model-1 cpu_s": …, "host-0 fsync_s": …,
    "model-1>agent-0 rtt_s": …}`.

    The value of a link is that of its worst connection.
    """
    hosts = hosts_of(samples, process)
    raw: dict[tuple[str, int], list[Point]] = defaultdict(list)

    def take(t: float, values: Mapping[str, float], metrics: Sequence[str], name: str, port: int = 0) -> None:
        for metric in metrics:
            if metric in values:
                raw[f"{name} {metric}", port].append((t, values[metric]))

    for record in samples:
        t = record.stamp.time
        match record.sample:
            case ProcessReading(of=of, values=values) if of == process:
                take(t, values, OF_A_PROCESS, process)
            case HostReading(host=name, values=values) if name in hosts:
                take(t, values, OF_A_HOST, name)
            case LinkReading(of=of, peer=peer, port=port, values=values) if process in (of, peer):
                take(t, values, OF_A_LINK, f"{of}>{peer}", port)
            case _:
                pass
    found: dict[str, dict[float, float]] = defaultdict(dict)
    for (name, _), points in raw.items():
        for t, value in rates(points) if name.rsplit(" ", 1)[1] in TOTALS else points:
            found[name][t] = max(value, found[name].get(t, value))
    return {name: sorted(values.items()) for name, values in found.items()}


def rates(totals: Sequence[Point]) -> list[Point]:
    """Convert a running total to a rate per second; where a new process restarted the total, there is no rate.

    >>> rates([(0.0, 1.0), (2.0, 5.0), (3.0, 0.0), (4.0, 1.0)])
    [(2.0, 2.0), (4.0, 1.0)]
    """
    return [
        (t, (value - before) / (t - earlier))
        for (earlier, before), (t, value) in pairwise(totals)
        if t > earlier and value >= before
    ]


def spreads(series: Series, *, since: float, until: float) -> dict[str, Spread]:
    """Return mean and deviation of each metric during the baseline; none for metrics with fewer than two values."""
    found = {}
    for name, points in series.items():
        values = [value for t, value in points if since <= t <= until]
        if len(values) >= 2:
            mean = statistics.fmean(values)
            found[name] = Spread(mean, max(statistics.stdev(values), LEAST_SPREAD * abs(mean) / 2, 1e-9))
    return found


def first_outside(points: Sequence[Point], spread: Spread, *, since: float) -> float | None:
    """Return when a sampled metric left mean ± 2σ for two consecutive samples."""
    later = [(t, spread.holds(value)) for t, value in points if t > since]
    return next((t for (t, holds), (_, still) in pairwise(later) if not holds and not still), None)


def first_overdue(
    steps: Sequence[Point], spread: Spread, *, since: float, until: float | None = None
) -> float | None:
    """Return when a step exceeded its usual duration, which is visible before it ends. For a run that did not complete,
    its last step never ended (`until`: end of the observation)."""
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
    metrics: Series,
    baseline: Mapping[str, Spread],
    since: float,
    errors: Iterable[float],
    least: Mapping[str, float] | None = None,
    until: float | None = None,
) -> float | None:
    """Return the earliest of: a metric outside mean ± 2σ, a step overdue, an error reported.

    A metric without a baseline counts as zero before. It may be new for another reason, as for a new connection, so it
    counts only if it belongs to the fault type, from a threshold on (`least`).
    """
    outside = [
        first_outside(points, baseline[name], since=since)
        if name in baseline
        else first_from(points, (least or {}).get(name.rsplit(" ", 1)[1]), since=since)
        for name, points in metrics.items()
    ]
    overdue = [
        first_overdue(steps[name], baseline[name], since=since, until=until)
        for name in (STEP,)
        if name in steps and name in baseline
    ]
    reported = [t for t in errors if t > since]
    return min((t for t in (*outside, *overdue, *reported) if t is not None), default=None)


def first_from(points: Sequence[Point], least: float | None, *, since: float) -> float | None:
    """Return when a metric without a baseline reached a threshold."""
    if least is None:
        return None
    return next((t for t, value in points if t > since and value >= least), None)


def thin_out(series: Series) -> Series:
    """Thin out the series to at most `MOST_POINTS` points each, for a report."""
    return {name: points[:: 1 + len(points) // MOST_POINTS] for name, points in series.items() if points}
