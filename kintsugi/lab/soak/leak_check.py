"""Leak check: growth of descriptors and memory in long-lived processes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import msgspec
import psutil

from kintsugi.runtime.clock import SYSTEM_CLOCK

SAMPLE_S = 1.0
MIB = 1 << 20
MIN_SAMPLES = 20
"""Samples that a process needs to be counted; each process is compared with itself over its own lifetime."""
SETTLED_S = 10.0
"""Age below which a process is not sampled: it is still importing, connecting and allocating."""


class ResourceReading(msgspec.Struct, frozen=True):
    num_fds: int
    rss_mb: float


class ResourceGrowth:
    """Samples processes about once a second, over several runs; a process is identified by name, pid and start time."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int, float], list[ResourceReading]] = {}
        self._next = 0.0

    def sample(self, pids: Mapping[str, int]) -> None:
        """Sample the given processes (name → pid), if the last sample is old enough."""
        now = SYSTEM_CLOCK.monotonic()
        if now < self._next:
            return
        self._next = now + SAMPLE_S
        for name, pid in pids.items():
            try:
                process = psutil.Process(pid)
                began = process.create_time()
                if SYSTEM_CLOCK.wall() - began < SETTLED_S:
                    continue
                sample = ResourceReading(process.num_fds(), process.memory_info().rss / MIB)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            self._samples.setdefault((name, pid, began), []).append(sample)

    @property
    def num_processes(self) -> int:
        """Number of processes that lived long enough to be counted."""
        return len(self._counted)

    @property
    def by_process(self) -> dict[str, tuple[int, float]]:
        """Name → growth in descriptors and MB from the first quarter of the lifetime to the last, of the worst process
        with that name."""
        worst: dict[str, tuple[int, float]] = {}
        for name, samples in self._counted:
            fds, mb = round(fd_growth_of(samples)), round(rss_growth_of(samples), 1)
            most_fds, most_mb = worst.get(name, (fds, mb))
            worst[name] = (max(fds, most_fds), max(mb, most_mb))
        return worst

    @property
    def fd_growth(self) -> int | None:
        """Growth of the worst process; None when no process lived long enough."""
        return max((fds for fds, _ in self.by_process.values()), default=None)

    @property
    def rss_growth_mb(self) -> float | None:
        return max((mb for _, mb in self.by_process.values()), default=None)

    @property
    def _counted(self) -> list[tuple[str, list[ResourceReading]]]:
        return [
            (name, samples) for (name, _, _), samples in self._samples.items() if len(samples) >= MIN_SAMPLES
        ]


def fd_growth_of(samples: list[ResourceReading]) -> float:
    return _growth([float(sample.num_fds) for sample in samples])


def rss_growth_of(samples: list[ResourceReading]) -> float:
    return _growth([sample.rss_mb for sample in samples])


def _growth(values: list[float]) -> float:
    quarter = len(values) // 4
    return statistics.median(values[-quarter:]) - statistics.median(values[:quarter])
