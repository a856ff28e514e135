from __future__ import annotations

from typing import Any

from kintsugi.runtime.peak_memory import (
    PEAK_ALLOCATED,
    PEAK_RESERVED,
    PEAK_RSS,
    PEAK_UPDATE,
    PeakMemory,
)


class Statistics:
    """The peak since the last reset, as torch keeps it."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0

    def max_memory_allocated(self, device: Any) -> int:
        return self.allocated

    def max_memory_reserved(self, device: Any) -> int:
        return self.reserved

    def reset_peak_memory_stats(self, device: Any) -> None:
        self.allocated = 0


def test_a_peak_stays_after_the_statistics_were_reset() -> None:
    peaks, device = PeakMemory(), Statistics()
    for device.allocated, device.reserved in ((70, 80), (30, 80)):
        peaks.note_device(device, "cuda:0")
    assert device.allocated == 0
    gauges = peaks.gauges()
    assert (gauges[PEAK_ALLOCATED], gauges[PEAK_RESERVED]) == (70, 80)


def test_the_peak_of_a_part_is_that_since_the_last_note() -> None:
    peaks, device = PeakMemory(), Statistics()
    device.allocated = 70
    peaks.note_device(device, "cuda:0")
    device.allocated = 18
    peaks.note_device(device, "cuda:0", part=PEAK_UPDATE)
    gauges = peaks.gauges()
    assert (gauges[PEAK_ALLOCATED], gauges[PEAK_UPDATE]) == (70, 18)


def test_the_hosts_peak_is_the_kernels() -> None:
    before = PeakMemory().gauges()[PEAK_RSS]
    held = bytearray(64 << 20)
    held[::4096] = bytes([1]) * len(held[::4096])
    assert PeakMemory().gauges()[PEAK_RSS] >= max(before, 64 << 20)
