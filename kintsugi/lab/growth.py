"""Whether processes that live long hold on to descriptors or memory."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import msgspec
import psutil

from kintsugi.runtime import SYSTEM_CLOCK

SAMPLE_S = 1.0
MIB = 1 << 20
MIN_SAMPLES = 20
"""Of a process that counts."""
SETTLED_S = 10.0
"""A process that was started later than so long ago still imports, connects and allocates."""


class Sample(msgspec.Struct, frozen=True):
    num_fds: int
    rss_mb: float


class Growth:
    """Samples processes about once a second; a process counts when it was there for half of all samples or more."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int], list[Sample]] = {}
        self._num_samples = 0
        self._next = 0.0

    def sample(self, pids: Mapping[str, int]) -> None:
        """Look at processes, given by name, if it is time to."""
        now = SYSTEM_CLOCK.monotonic()
        if now < self._next:
            return
        self._next = now + SAMPLE_S
        self._num_samples += 1
        for name, pid in pids.items():
            try:
                process = psutil.Process(pid)
                if SYSTEM_CLOCK.wall() - process.create_time() < SETTLED_S:
                    continue
                sample = Sample(process.num_fds(), process.memory_info().rss / MIB)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            self._samples.setdefault((name, pid), []).append(sample)

    @property
    def by_process(self) -> dict[str, tuple[int, float]]:
        """Descriptors and MB that each process gained from its first quarter to its last."""
        least = max(MIN_SAMPLES, self._num_samples / 2)
        return {
            name: (round(fd_growth_of(samples)), round(rss_growth_of(samples), 1))
            for (name, _), samples in self._samples.items()
            if len(samples) >= least
        }

    @property
    def fd_growth(self) -> int:
        """Of the process that gained most."""
        return max((fds for fds, _ in self.by_process.values()), default=0)

    @property
    def rss_growth_mb(self) -> float:
        return max((mb for _, mb in self.by_process.values()), default=0.0)


def fd_growth_of(samples: list[Sample]) -> float:
    return _growth([float(sample.num_fds) for sample in samples])


def rss_growth_of(samples: list[Sample]) -> float:
    return _growth([sample.rss_mb for sample in samples])


def _growth(values: list[float]) -> float:
    quarter = len(values) // 4
    return statistics.median(values[-quarter:]) - statistics.median(values[:quarter])
