"""Peaks of this process's memory, as heartbeats report them.

The peak of the host's memory is the kernel's. Those of a device are noted by the thread that computes: the statistics
of its allocator wait for the allocator's lock, for which a heartbeat must not wait.
"""

from __future__ import annotations

import resource
import threading
from typing import Any, Protocol

PEAK_RSS = "peak_rss_bytes"
PEAK_ALLOCATED = "peak_device_allocated_bytes"
PEAK_RESERVED = "peak_device_reserved_bytes"
PEAK_UPDATE = "peak_device_update_bytes"
"""Peak of the allocated memory while an update was applied and copied: without activations."""
PARAMETERS = "trained_parameters"
PEAKS_REPORTED = (PEAK_RSS, PEAK_ALLOCATED, PEAK_RESERVED, PEAK_UPDATE, PARAMETERS)
"""Gauges of which the summary of a run keeps the maximum over all incarnations of a process."""


class DeviceStatistics(Protocol):
    """`torch.cuda`."""

    def max_memory_allocated(self, device: Any) -> int: ...

    def max_memory_reserved(self, device: Any) -> int: ...

    def reset_peak_memory_stats(self, device: Any) -> None: ...


class PeakMemory:
    """Largest sizes that were noted, by name; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._largest: dict[str, float] = {}

    def note(self, name: str, size: float) -> None:
        with self._lock:
            self._largest[name] = max(size, self._largest.get(name, 0.0))

    def note_device(self, statistics: DeviceStatistics, device: Any, *, part: str = "") -> None:
        """Note the peak since the last call, also under the name of the part of the work that ends now."""
        allocated = float(statistics.max_memory_allocated(device))
        self.note(PEAK_ALLOCATED, allocated)
        self.note(PEAK_RESERVED, float(statistics.max_memory_reserved(device)))
        if part:
            self.note(part, allocated)
        statistics.reset_peak_memory_stats(device)

    def gauges(self) -> dict[str, float]:
        with self._lock:
            noted = dict(self._largest)
        return {PEAK_RSS: float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10), **noted}


PEAKS = PeakMemory()
