"""What was measured, in words, and which of it shows a fault."""

from __future__ import annotations

from kintsugi.lab.records import RunRecord
from kintsugi.lab.report import measures

MOST_METRICS = 2
WHOLE_STEP = "timing/step"
FIGURES = {
    "cpu_s": "processor time [s per s]",
    "run_delay_s": "wanted to run and was not run [s per s]",
    "throttled_s": "throttled [s per s]",
    "io_delay_s": "waited for the disk [s per s]",
    "rss_bytes": "memory [bytes]",
    "memory_used_bytes": "memory of its group [bytes]",
    "fsync_s": "time of an fsync [s]",
    "fsync_pending_s": "fsync that has not come back [s]",
    "disk_free_bytes": "free disk [bytes]",
    "cpu_iowait_s": "idle because of the disk [s per s]",
    "tcp_retransmits": "retransmissions [per s]",
    "retransmits": "retransmissions [per s]",
    "resolve_s": "time to resolve a name [s]",
    "rtt_s": "round trip [s]",
    "send_queue_bytes": "waiting to be sent [bytes]",
    "tokens_per_s": "tokens per second",
}
OF_A_KIND = {
    "cpu": ("throttled_s", "run_delay_s", "cpu_s"),
    "memory": ("memory_used_bytes", "rss_bytes"),
    "device_memory": ("device_memory_bytes", "memory_used_bytes"),
    "disk_fill": ("disk_free_bytes",),
    "disk_load": ("fsync_s", "fsync_pending_s", "io_delay_s", "cpu_iowait_s"),
    "disk_error": ("fsync_s", "fsync_pending_s"),
    "network_delay": ("rtt_s", "send_queue_bytes"),
    "network_loss": ("retransmits", "tcp_retransmits", "rtt_s"),
    "network_cut": ("retransmits", "send_queue_bytes"),
    "dns": ("resolve_s",),
    "stop": ("cpu_s",),
    "kill": ("cpu_s",),
}
"""Which figures a kind of fault is expected to move."""


def chosen(run: RunRecord) -> list[str]:
    """Of what belongs to the fault, what it moved the most; of the parts of a step, what it held up the most."""
    names = sorted(
        (name for name, values in run.series.items() if values), key=lambda name: -measures.anomaly(run, name)
    )
    kinds = {figure for fault in run.injected for figure in OF_A_KIND.get(fault.kind, ())}
    of_the_fault = [name for name in names if name.rpartition(" ")[2] in kinds]
    parts = [
        name for name in names if name in run.baseline and name.startswith("timing/") and name != WHOLE_STEP
    ]
    of_the_step = sorted(parts, key=lambda name: -_held_up_s(run, name))
    return list(dict.fromkeys([*of_the_fault[:1], *of_the_step[:1], *names]))[:MOST_METRICS]


def _held_up_s(run: RunRecord, name: str) -> float:
    start = measures.start_of(run) or 0.0
    return max((value for t, value in run.series[name] if t >= start), default=0.0) - run.baseline[name].mean


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
