"""Whether processes that live long hold on to descriptors or memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import msgspec
import psutil

from kintsugi.runtime import SYSTEM_CLOCK

SAMPLE_S = 1.0
MIB = 1 << 20
MIN_SAMPLES = 20
"""Of a process that counts: one that has just started still grows."""


class Sample(msgspec.Struct, frozen=True):
    num_fds: int
    rss_mb: float


class Growth:
    """Samples processes about once a second; a process counts when it was there for half of all samples or more."""

    def __init__(self) -> None:
        self._samples: dict[int, list[Sample]] = {}
        self._num_samples = 0
        self._next = 0.0

    def sample(self, pids: Iterable[int]) -> None:
        now = SYSTEM_CLOCK.monotonic()
        if now < self._next:
            return
        self._next = now + SAMPLE_S
        self._num_samples += 1
        for pid in pids:
            try:
                process = psutil.Process(pid)
                sample = Sample(process.num_fds(), process.memory_info().rss / MIB)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            self._samples.setdefault(pid, []).append(sample)

    @property
    def fd_growth(self) -> int:
        """Of the process that grew most, from its first quarter to its last."""
        return round(max(map(fd_growth_of, self._long_lived()), default=0.0))

    @property
    def rss_growth_mb(self) -> float:
        return max(map(rss_growth_of, self._long_lived()), default=0.0)

    @property
    def num_processes(self) -> int:
        return len(self._long_lived())

    def _long_lived(self) -> list[list[Sample]]:
        return [
            samples
            for samples in self._samples.values()
            if len(samples) >= max(MIN_SAMPLES, self._num_samples / 2)
        ]


def fd_growth_of(samples: list[Sample]) -> float:
    return _growth([float(sample.num_fds) for sample in samples])


def rss_growth_of(samples: list[Sample]) -> float:
    return _growth([sample.rss_mb for sample in samples])


def _growth(values: list[float]) -> float:
    quarter = len(values) // 4
    return statistics.median(values[-quarter:]) - statistics.median(values[:quarter])
