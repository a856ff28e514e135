"""What processes and hosts looked like, about once a second: the vocabulary of everything that is measured over time.

Two recorders write it, each to its own file `<run folder>/figures/<process>.jsonl`, in the line format of events:

- every process says of itself what its heartbeat says (`Beat`), so that its waits and its progress outlive it;
- every node agent looks at its children, its host and their links from outside (`ProcessSample`, `HostSample`,
  `LinkSample`), so that one who is stopped, starved or dead is measured too, and how its clock stands to the master's
  (`ClockSample`).

Values are plain numbers by name. Names that end in `_s` and `_bytes` of `ProcessSample` and `HostSample` are running
totals where they say so in `docs/metrics.md`; who reads them takes differences.
"""

from __future__ import annotations

import msgspec

from kintsugi.types import Wait


class _Sample(msgspec.Struct, frozen=True, tag=True, tag_field="kind", omit_defaults=True):
    pass


class Beat(_Sample, frozen=True):
    """What a process said of itself: its heartbeat."""

    incarnation: str
    counters: dict[str, int] = {}
    load: float = 0.0
    waits: tuple[Wait, ...] = ()
    gauges: dict[str, float] = {}


class ProcessSample(_Sample, frozen=True):
    """A process of this host, seen from outside."""

    of: str
    pid: int
    state: str
    """As of /proc: R, S, D, T, Z."""
    values: dict[str, float] = {}


class HostSample(_Sample, frozen=True):
    """The host itself: processors, memory, disk of the run folder, network, accelerators."""

    host: str
    values: dict[str, float] = {}


class LinkSample(_Sample, frozen=True):
    """The connections of a process of this host with a peer, as the kernel knows them."""

    of: str
    peer: str
    """Process at the other end; an address where it is nobody of the run."""
    port: int
    """Where the one who was connected to listens."""
    state: str
    """Of the worst one: ESTABLISHED, SYN_SENT, …"""
    values: dict[str, float] = {}


class ClockSample(_Sample, frozen=True):
    """How far this host's wall clock is ahead of the master's, and how wrong that may be."""

    host: str
    offset_s: float
    error_s: float


Sample = Beat | ProcessSample | HostSample | LinkSample | ClockSample
