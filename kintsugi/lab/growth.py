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
"""Of a process that counts: each is compared with itself, over its own life, however short the others live."""
SETTLED_S = 10.0
"""A process that was started later than so long ago still imports, connects and allocates."""


class Sample(msgspec.Struct, frozen=True):
    num_fds: int
    rss_mb: float


class Growth:
    """Samples processes about once a second. One of them serves many runs: a process is known by its name, its pid
    and when it began."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int, float], list[Sample]] = {}
        self._next = 0.0

    def sample(self, pids: Mapping[str, int]) -> None:
        """Look at processes, given by name, if it is time to."""
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
                sample = Sample(process.num_fds(), process.memory_info().rss / MIB)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            self._samples.setdefault((name, pid, began), []).append(sample)

    @property
    def num_processes(self) -> int:
        """That lived long enough to be counted."""
        return len(self._counted)

    @property
    def by_process(self) -> dict[str, tuple[int, float]]:
        """Descriptors and MB gained from the first quarter of a life to its last; the most of all that had a name."""
        worst: dict[str, tuple[int, float]] = {}
        for name, samples in self._counted:
            fds, mb = round(fd_growth_of(samples)), round(rss_growth_of(samples), 1)
            most_fds, most_mb = worst.get(name, (fds, mb))
            worst[name] = (max(fds, most_fds), max(mb, most_mb))
        return worst

    @property
    def fd_growth(self) -> int | None:
        """Of the process that gained most; None when nothing lived long enough to say."""
        return max((fds for fds, _ in self.by_process.values()), default=None)

    @property
    def rss_growth_mb(self) -> float | None:
        return max((mb for _, mb in self.by_process.values()), default=None)

    @property
    def _counted(self) -> list[tuple[str, list[Sample]]]:
        return [
            (name, samples) for (name, _, _), samples in self._samples.items() if len(samples) >= MIN_SAMPLES
        ]


def fd_growth_of(samples: list[Sample]) -> float:
    return _growth([float(sample.num_fds) for sample in samples])


def rss_growth_of(samples: list[Sample]) -> float:
    return _growth([sample.rss_mb for sample in samples])


def _growth(values: list[float]) -> float:
    quarter = len(values) // 4
    return statistics.median(values[-quarter:]) - statistics.median(values[:quarter])
