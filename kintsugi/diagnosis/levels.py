"""Kinds of faults as a table of figures and bounds: what is wrong when it is high (`rules.py`)."""

from __future__ import annotations

import msgspec

from kintsugi.diagnosis.verdict import FaultKind

GAP_S = 3.2
"""Wrong moments so close to each other are one trouble; samples come once a second, and may be late."""
TRIES_S = 6.2
"""The same for tries that fail, of which each may take a few seconds."""


class Level(msgspec.Struct, frozen=True):
    """A figure that is wrong when it is high."""

    figure: str
    kind: FaultKind
    least: float
    """What hurts nobody, however unusual it is."""
    factor: float
    """So many times its own past."""
    peers: float
    """So many times what the others have at the same time; 0: they are not asked."""
    moments: int
    """Samples in a row that it takes."""
    strength: float
    words: str
    """`{value}`, `{usual}`, `{others}` are filled in."""
    gap_s: float = GAP_S


PROCESS_LEVELS = (
    Level("throttled", FaultKind.CPU, 0.08, 4.0, 4.0, 2, 0.9,
          "was kept from the processor by its quota for {value:.0%} of the time, usually {usual:.0%}"),
    Level("io_delay", FaultKind.DISK_SLOW, 0.4, 5.0, 3.0, 2, 0.6,
          "waited for the disk for {value:.0%} of the time, usually {usual:.0%}, others {others:.0%}"),
    Level("awaited_s", FaultKind.SLOW, 0.9, 6.0, 3.0, 2, 0.6,
          "lets others wait for {value:.1f} s, usually {usual:.2f} s"),
    Level("user_code_s", FaultKind.USER_CODE, 2.0, 6.0, 3.0, 3, 0.75,
          "has waited {value:.1f} s for the process beside it that runs the user's code, usually {usual:.2f} s"),
    Level("memory_share", FaultKind.MEMORY, 0.93, 1.15, 1.1, 1, 0.85,
          "uses {value:.0%} of its memory limit, usually {usual:.0%}"),
    Level("descriptor_share", FaultKind.DESCRIPTORS, 0.98, 1.15, 1.1, 2, 0.85,
          "has {value:.0%} of the descriptors open that it may have, usually {usual:.0%}"),
)  # fmt: skip
HOST_LEVELS = (
    Level("fsync_s", FaultKind.DISK_SLOW, 0.25, 8.0, 0.0, 2, 0.75,
          "a small write takes {value:.2f} s to reach the disk of its host, usually {usual:.3f} s"),
    Level("fsync_pending_s", FaultKind.DISK_SLOW, 1.5, 8.0, 0.0, 1, 0.8,
          "a small write to the disk of its host is under way for {value:.1f} s"),
    Level("steal", FaultKind.CPU, 0.35, 4.0, 2.0, 3, 0.6,
          "its host lost {value:.0%} of its processors to others, usually {usual:.0%}"),
    Level("resolve_s", FaultKind.DNS, 0.7, 8.0, 0.0, 1, 0.85,
          "resolving the master's name takes {value:.1f} s, usually {usual:.3f} s"),
    Level("resolve_pending_s", FaultKind.DNS, 1.5, 8.0, 0.0, 2, 0.85,
          "the master's name is not resolved after {value:.1f} s", TRIES_S),
    Level("resolve_errors", FaultKind.DNS, 0.25, 8.0, 0.0, 2, 0.85,
          "the master's name can not be resolved: {value:.1f} tries a second fail", TRIES_S),
    Level("fsync_errors", FaultKind.DISK_ERROR, 0.25, 8.0, 0.0, 2, 0.8,
          "the disk of its host refuses a small write: {value:.1f} tries a second fail", TRIES_S),
    Level("device_memory_share", FaultKind.DEVICE_MEMORY, 0.97, 1.15, 0.0, 3, 0.6,
          "an accelerator of its host has {value:.0%} of its memory in use, usually {usual:.0%}"),
)  # fmt: skip
