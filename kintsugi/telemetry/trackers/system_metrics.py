"""Figures of hosts and accelerators for the trackers, from the readings of the node agents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.jsonl_log import lines_backwards
from kintsugi.telemetry.readings import HostReading, ReadingRecord, samples_in
from kintsugi.telemetry.trackers.tracker import SYSTEM
from kintsugi.types import Role

EVERY_S = 10.0
"""Shortest time between two looks at the readings."""
MOST_LINES = 4096
"""Lines that are searched for the last reading of a host: that of many processes is followed by those of its links."""
RATES = {
    "cpu_iowait_s": "cpu_iowait_share",
    "disk_read_bytes": "disk_read_bytes_per_s",
    "disk_write_bytes": "disk_write_bytes_per_s",
    "network_in_bytes": "network_in_bytes_per_s",
    "network_out_bytes": "network_out_bytes_per_s",
}
"""Running totals of a reading, and the names of their rates."""
DEVICE = "device_"
"""Prefix of the values of an accelerator."""


class SystemMetrics:
    """Looks at the last reading of every host at most every ten seconds."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = RunFolder(run_dir).readings_folder
        self._before: dict[str, ReadingRecord] = {}
        """Reading of each host at the last look."""
        self._looked_at = 0.0

    def due(self, time: float) -> dict[str, float]:
        """Return the figures of all hosts since the last look, `{"system/host-0/cpu_share": 0.4, …}`; nothing if it is
        too early, or there is no new reading."""
        if abs(time - self._looked_at) < EVERY_S:  # The clock may be set back.
            return {}
        self._looked_at = time
        figures: dict[str, float] = {}
        for path in sorted(self._folder.glob(f"{Role.AGENT.value}-*.jsonl")):
            with suppress(OSError):  # Put aside at this moment.
                record = last_host_reading(path)
                if record is not None and isinstance(record.sample, HostReading):
                    figures |= self._since_last(record, host=record.sample.host, values=record.sample.values)
        return figures

    def _since_last(
        self, record: ReadingRecord, *, host: str, values: Mapping[str, float]
    ) -> dict[str, float]:
        before = self._before.get(host)
        if before is not None and before.stamp.time >= record.stamp.time:
            return {}
        self._before[host] = record
        figures = dict(_levels(values))
        if before is not None and isinstance(before.sample, HostReading):
            elapsed_s = record.stamp.time - before.stamp.time
            figures |= dict(_rates(before.sample.values, values, elapsed_s=elapsed_s))
        return {f"{SYSTEM}{host}/{name}": value for name, value in figures.items()}


def last_host_reading(path: Path) -> ReadingRecord | None:
    """Return the last reading of the host in the file of an agent, without reading what is before it."""
    for _, line in islice(lines_backwards(path), MOST_LINES):
        if b'"HostSample"' in line:
            for record in samples_in([line]):
                return record
    return None


def _levels(values: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    if "memory_total_bytes" in values and "memory_available_bytes" in values:
        yield "memory_used_bytes", values["memory_total_bytes"] - values["memory_available_bytes"]
    if "load_1" in values:
        yield "load_1", values["load_1"]
    yield from ((name, value) for name, value in values.items() if name.startswith(DEVICE))


def _rates(
    before: Mapping[str, float], after: Mapping[str, float], *, elapsed_s: float
) -> Iterator[tuple[str, float]]:
    """Yield rates of totals. A total that fell was reset, as by a restart of the host."""
    if "cpu_busy_s" in before and "cpu_busy_s" in after and after.get("cpu_count"):
        used = (after["cpu_busy_s"] - before["cpu_busy_s"]) / elapsed_s / after["cpu_count"]
        yield "cpu_share", min(1.0, max(0.0, used))
    for total, name in RATES.items():
        if total in before and after.get(total, -1.0) >= before[total]:
            yield name, (after[total] - before[total]) / elapsed_s
