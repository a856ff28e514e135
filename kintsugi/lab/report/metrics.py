"""Names of the metrics, and selection of those that show a fault."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kintsugi.lab.report import measures
from kintsugi.lab.scenarios.measuring import first_outside
from kintsugi.lab.scenarios.records import RunRecord

MOST_METRICS = 2
OUTSIDE = 2.0
"""Deviation in σ above which a metric shows something."""
NAMES = {
    "cpu_s": "CPU time [s per s]",
    "run_delay_s": "waiting for a CPU [s per s]",
    "throttled_s": "throttled [s per s]",
    "io_delay_s": "waiting for the disk [s per s]",
    "rss_bytes": "memory [bytes]",
    "memory_used_bytes": "memory of its control group [bytes]",
    "fsync_s": "time of an fsync [s]",
    "fsync_pending_s": "pending fsync [s]",
    "fsync_errors": "failed fsyncs [per s]",
    "disk_free_bytes": "free disk [bytes]",
    "cpu_iowait_s": "idle because of the disk [s per s]",
    "tcp_retransmits": "retransmissions [per s]",
    "retransmits": "retransmissions [per s]",
    "resolve_s": "time to resolve a name [s]",
    "resolve_pending_s": "pending name resolution [s]",
    "resolve_errors": "failed name resolutions [per s]",
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
    "grow": ("device_memory_bytes", "rss_bytes"),
    "stop": ("cpu_s",),
    "kill": ("cpu_s",),
}
"""Metrics that a fault type is expected to change, the most specific first."""


def chosen(run: RunRecord) -> list[str]:
    """Select the metrics of a run: the most specific one that the target fault changed (else one of the other faults),
    and the part of a step that it delayed most, or the whole step where it never ended. Without a delay, another metric
    of the fault."""
    names = sorted(
        (name for name, values in run.series.items() if values), key=lambda name: -measures.anomaly(run, name)
    )
    moved = [name for name in names if measures.anomaly(run, name) > OUTSIDE]
    target = measures.target_fault_of(run)
    faults = [*([target] if target is not None else []), *run.injected]
    of_the_fault = [
        name
        for fault in faults
        for metric in OF_A_KIND.get(fault.kind, ())
        for name in sorted(moved, key=lambda name: _moved_at(run, name))
        if name.rpartition(" ")[2] == metric
    ]
    first = of_the_fault[:1]
    others = [name for name in of_the_fault if not first[0].endswith(name.rpartition(" ")[2])]
    selected = list(dict.fromkeys([*first, *_of_the_step(run, moved)[:1], *others, *moved]))
    return (selected or names)[:MOST_METRICS]


def _of_the_step(run: RunRecord, names: Sequence[str]) -> list[str]:
    if measures.unfinished_since(run) is not None:
        return [measures.STEP_SERIES]
    parts = [
        name
        for name in names
        if name in run.baseline and name.startswith("timing/") and name != measures.STEP_SERIES
    ]
    return sorted(parts, key=lambda name: -_delay_s(run, name))


def _moved_at(run: RunRecord, name: str) -> float:
    """Return when a metric left its band; a new metric of the fault counts from its start."""
    start, band = measures.start_of(run) or 0.0, run.baseline.get(name)
    at = None if band is None else first_outside(run.series[name], band, since=start)
    if band is None:
        return start if measures.is_own_metric(name) else math.inf
    return math.inf if at is None else at


def _delay_s(run: RunRecord, name: str) -> float:
    start, end = measures.start_of(run) or 0.0, measures.last_instant(run) + measures.SECONDS_AFTER
    longest_s = max((value for t, value in run.series[name] if start <= t <= end), default=0.0)
    return longest_s - run.baseline[name].mean


def label_of(metric: str) -> str:
    """
    >>> label_of("model-1>agent-0 rtt_s")
    'model-1 → agent-0: round trip [s]'
    """
    if metric.startswith("timing/"):
        return f"time of: {metric.removeprefix('timing/')} [s]"
    owner, _, name = metric.rpartition(" ")
    what = NAMES.get(name, name.replace("_", " "))
    return f"{owner.replace('>', ' → ')}: {what}" if owner else what
