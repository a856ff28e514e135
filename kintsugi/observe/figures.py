"""What processes and hosts looked like, about once a second: the vocabulary of everything that is measured over time.

Two recorders write it, each to its own file `<run folder>/figures/<process>.jsonl`, in the line format of events:

- every process says of itself what its heartbeat says (`Beat`), so that its waits and its progress outlive it;
- every node agent looks at its children, its host and their links from outside (`ProcessSample`, `HostSample`,
  `LinkSample`), so that one who is stopped, starved or dead is measured too, and how its clock stands to the master's
  (`ClockSample`).

Values are plain numbers by name (`docs/metrics.md`). Some are running totals; who reads them takes differences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from kintsugi.observe.events import Stamp, stamped
from kintsugi.observe.lines import LineFile, LineWriter, lines_in
from kintsugi.runtime import SYSTEM_CLOCK, Clock
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


class FigureRecord(msgspec.Struct, frozen=True):
    """A sample as it was read back; `stamp.process` is who recorded it."""

    stamp: Stamp
    sample: Sample


LARGEST_SIZE = 16 << 20
"""Of a file; with the three older ones that are kept, hours of a small run, …"""
KEPT_S = 900.0
"""… and of any run so long: more than a diagnosis looks back. Where connections are many, files grow larger for it …"""
MOST_SIZE = 256 << 20
"""… up to this. 32 processes that all use their connections with all others write 0.45 MB a second."""
TOTALS = frozenset(
    {"cpu_s", "run_delay_s", "io_delay_s", "throttled_s", "read_bytes", "write_bytes", "major_faults"}
    | {"voluntary_switches", "involuntary_switches"}
    | {"cpu_busy_s", "cpu_iowait_s", "cpu_steal_s", "oom_kills", "disk_busy_s", "disk_read_bytes"}
    | {"disk_write_bytes", "network_in_bytes", "network_out_bytes", "tcp_retransmits"}
    | {"pressure_cpu_s", "pressure_io_s", "pressure_memory_s"}
    | {"retransmits", "needless", "out_bytes", "in_bytes", "receiver_limited_s", "children_cpu_s"}
    | {"fsync_errors", "resolve_errors"}
)
"""Values of samples that only grow."""

_sample_decoder: msgspec.json.Decoder[Sample] = msgspec.json.Decoder(Sample)
_stamp_decoder = msgspec.json.Decoder(Stamp)


def figures_path(run_dir: str | Path, process: str) -> Path:
    """Where a process of a run writes its samples."""
    return Path(run_dir) / "figures" / f"{process}.jsonl"


class FiguresLog:
    """Appends the samples of one process, from any of its threads; never raises and never waits for the disk."""

    def __init__(self, run_dir: str | Path, *, process: str, clock: Clock = SYSTEM_CLOCK) -> None:
        path = figures_path(run_dir, process)
        file = LineFile(path, largest_size=LARGEST_SIZE, kept_s=KEPT_S, most_size=MOST_SIZE)
        self._writer = LineWriter(file, lost="figures.dropped", encode=b"".join)
        self._process, self._clock = process, clock

    def stamp(self) -> Stamp:
        """Of this moment."""
        return Stamp(round(self._clock.wall(), 6), round(self._clock.monotonic(), 6), self._process)

    def write(self, *samples: Sample, stamp: Stamp | None = None) -> None:
        """All of one moment, of this one if none is given, in one write."""
        if samples:
            self._writer.put(stamped(stamp or self.stamp(), *samples))

    def close(self) -> None:
        self._writer.close()


def figures_in(
    run_dir: str | Path, *, process: str | None = None, since: float = -math.inf
) -> list[FigureRecord]:
    """What a run, or one process of it, recorded from a wall clock on, in the order of their wall clocks."""
    records = [
        record
        for path in sorted((Path(run_dir) / "figures").glob("*.jsonl"))
        if process is None or path.name.partition(".")[0] == process
        if path.stat().st_mtime >= since
        for record in samples_in(line for line in lines_in(path.read_bytes()) if _is_recent(line, since))
    ]
    return sorted(records, key=lambda record: record.stamp.time)


def _is_recent(line: bytes, since: float) -> bool:
    """Torn ones may be."""
    time = time_of(line)
    return time is None or time >= since


def time_of(line: bytes) -> float | None:
    """What every line begins with, which is far cheaper to read than the line; None of a torn one."""
    try:
        return float(line[len(b'{"time":') : line.index(b",")])
    except ValueError:
        return None


def samples_in(lines: Iterable[bytes]) -> Iterator[FigureRecord]:
    """The samples that these lines hold; torn ones, and kinds of a later version, are skipped."""
    for line in filter(None, lines):
        try:
            yield FigureRecord(_stamp_decoder.decode(line), _sample_decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
