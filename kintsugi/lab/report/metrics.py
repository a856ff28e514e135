"""What was measured, in words, and which of it shows a fault."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kintsugi.lab.measuring import first_outside
from kintsugi.lab.records import RunRecord
from kintsugi.lab.report import measures

MOST_METRICS = 2
OUTSIDE = 2.0
"""σ: what stays within shows nothing."""
FIGURES = {
    "cpu_s": "processor time [s per s]",
    "run_delay_s": "wanted to run and was not run [s per s]",
    "throttled_s": "throttled [s per s]",
    "io_delay_s": "waited for the disk [s per s]",
    "rss_bytes": "memory [bytes]",
    "memory_used_bytes": "memory of its group [bytes]",
    "fsync_s": "time of an fsync [s]",
    "fsync_pending_s": "fsync that has not come back [s]",
    "fsync_errors": "fsyncs that failed [per s]",
    "disk_free_bytes": "free disk [bytes]",
    "cpu_iowait_s": "idle because of the disk [s per s]",
    "tcp_retransmits": "retransmissions [per s]",
    "retransmits": "retransmissions [per s]",
    "resolve_s": "time to resolve a name [s]",
    "resolve_pending_s": "name that is not resolved yet [s]",
    "resolve_errors": "names that were not resolved [per s]",
    "device_memory_bytes": "memory of its device [bytes]",
    "rtt_s": "round trip [s]",
    "send_queue_bytes": "waiting to be sent [bytes]",
    "tokens_per_s": "tokens per second",
}
OF_A_KIND = {
    "cpu": ("throttled_s", "run_delay_s", "cpu_s"),
    "memory": ("memory_used_bytes", "rss_bytes"),
    "device_memory": ("device_memory_bytes", "memory_used_bytes", "rss_bytes"),
    "disk_fill": ("disk_free_bytes",),
    "disk_load": ("fsync_s", "fsync_pending_s", "io_delay_s", "cpu_iowait_s"),
    "disk_error": ("fsync_errors", "fsync_s", "fsync_pending_s"),
    "network_delay": ("rtt_s", "send_queue_bytes"),
    "network_loss": ("retransmits", "tcp_retransmits", "rtt_s"),
    "network_cut": ("retransmits", "send_queue_bytes"),
    "dns": ("resolve_s", "resolve_pending_s", "resolve_errors"),
    "stop": ("cpu_s",),
    "kill": ("cpu_s",),
}
"""Which figures a kind of fault is expected to move, the most telling first."""


def chosen(run: RunRecord) -> list[str]:
    """Of what belongs to the fault that is to be named, the most telling that it moved, else of what belongs to the
    others; of the parts of a step, what it held up the most: the whole one where it never ended. Where it held nothing
    up, another figure of the fault."""
    names = sorted(
        (name for name, values in run.series.items() if values), key=lambda name: -measures.anomaly(run, name)
    )
    moved = [name for name in names if measures.anomaly(run, name) > OUTSIDE]
    culprit = measures.culprit_of(run)
    faults = [*([culprit] if culprit is not None else []), *run.injected]
    of_the_fault = [
        name
        for fault in faults
        for figure in OF_A_KIND.get(fault.kind, ())
        for name in sorted(moved, key=lambda name: _moved_at(run, name))
        if name.rpartition(" ")[2] == figure
    ]
    first = of_the_fault[:1]
    others = [name for name in of_the_fault if not first[0].endswith(name.rpartition(" ")[2])]
    shown = list(dict.fromkeys([*first, *_of_the_step(run, moved)[:1], *others, *moved]))
    return (shown or names)[:MOST_METRICS]


def _of_the_step(run: RunRecord, names: Sequence[str]) -> list[str]:
    if measures.unfinished_since(run) is not None:
        return [measures.STEP_SERIES]
    parts = [
        name
        for name in names
        if name in run.baseline and name.startswith("timing/") and name != measures.STEP_SERIES
    ]
    return sorted(parts, key=lambda name: -_held_up_s(run, name))


def _moved_at(run: RunRecord, name: str) -> float:
    """When it left its band; what was not there before is the fault's own, and left at once."""
    start, band = measures.start_of(run) or 0.0, run.baseline.get(name)
    at = None if band is None else first_outside(run.series[name], band, since=start)
    if band is None:
        return start if measures.is_of_a_limit(name) else math.inf
    return math.inf if at is None else at


def _held_up_s(run: RunRecord, name: str) -> float:
    start, end = measures.start_of(run) or 0.0, measures.last_instant(run) + measures.SECONDS_AFTER
    longest_s = max((value for t, value in run.series[name] if start <= t <= end), default=0.0)
    return longest_s - run.baseline[name].mean


def words(metric: str) -> str:
    """
    >>> words("model-1>agent-0 rtt_s")
    'model-1 → agent-0: round trip [s]'
    """
    if metric.startswith("timing/"):
        return f"time of: {metric.removeprefix('timing/')} [s]"
    whose, _, figure = metric.rpartition(" ")
    what = FIGURES.get(figure, figure.replace("_", " "))
    return f"{whose.replace('>', ' → ')}: {what}" if whose else what
