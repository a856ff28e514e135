"""Readings of processes and hosts, about once a second: the schema of everything that is measured over time.

Two kinds of recorders write them, each to its own file `<run folder>/figures/<process>.jsonl`, as lines like events:

- every process records its own heartbeats (`Beat`), so that its waits and its progress outlive it;
- every node agent measures its children, its host and their links from outside (`ProcessSample`, `HostSample`,
  `LinkSample`), so that a stopped, starved or dead process is measured too, and the offset of its clock against the
  master's (`ClockSample`).

Values are plain numbers by name (`docs/metrics.md`). Some are running totals, of which readers take differences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.telemetry.disk_budget import DISK_BUDGET, GROWN_READINGS_SIZE, READINGS_SIZE
from kintsugi.telemetry.events import Stamp, stamped
from kintsugi.telemetry.jsonl_log import NUM_OLD, LineFile, LineWriter, lines_in
from kintsugi.types import Wait


class _Sample(msgspec.Struct, frozen=True, tag=True, tag_field="kind", omit_defaults=True):
    pass


class HeartbeatReading(_Sample, frozen=True, tag="Beat"):
    """A heartbeat that a process recorded about itself."""

    incarnation: str
    counters: dict[str, int] = {}
    load: float = 0.0
    waits: tuple[Wait, ...] = ()
    gauges: dict[str, float] = {}


class ProcessReading(_Sample, frozen=True, tag="ProcessSample"):
    """A process of this host, measured by its agent."""

    of: str
    pid: int
    state: str
    """State in /proc: R, S, D, T, Z."""
    values: dict[str, float] = {}


class HostReading(_Sample, frozen=True, tag="HostSample"):
    """The host itself: CPUs, memory, disk of the run folder, network, accelerators."""

    host: str
    values: dict[str, float] = {}


class LinkReading(_Sample, frozen=True, tag="LinkSample"):
    """Connections of a process of this host with one peer, as the kernel reports them."""

    of: str
    peer: str
    """Process at the other end; an address where it is no process of the run."""
    port: int
    """Port of the listening end."""
    state: str
    """State of the worst connection: ESTABLISHED, SYN_SENT, …"""
    values: dict[str, float] = {}


class ClockOffsetReading(_Sample, frozen=True, tag="ClockSample"):
    """Offset of this host's wall clock against the master's (positive: ahead), and its error."""

    host: str
    offset_s: float
    error_s: float


Sample = HeartbeatReading | ProcessReading | HostReading | LinkReading | ClockOffsetReading


class ReadingRecord(msgspec.Struct, frozen=True):
    """A reading from a file; `stamp.process` is the process that recorded it."""

    stamp: Stamp
    sample: Sample


LARGEST_SIZE = 16 << 20
"""Size of a file of a small run; with the three older files that are kept, it holds hours."""
KEPT_S = 900.0
"""Time that is kept of any run: more than a diagnosis looks back. Files grow beyond `LARGEST_SIZE` for it."""
MOST_SIZE = 256 << 20
"""Limit of that growth. 32 processes that all use their connections with each other write 0.45 MB a second."""
TOTALS = frozenset(
    {"cpu_s", "run_delay_s", "io_delay_s", "throttled_s", "read_bytes", "write_bytes", "major_faults"}
    | {"voluntary_switches", "involuntary_switches"}
    | {"cpu_busy_s", "cpu_iowait_s", "cpu_steal_s", "oom_kills", "disk_busy_s", "disk_read_bytes"}
    | {"disk_write_bytes", "network_in_bytes", "network_out_bytes", "tcp_retransmits", "tcp_checksum_errors"}
    | {"pressure_cpu_s", "pressure_io_s", "pressure_memory_s"}
    | {"retransmits", "needless", "out_bytes", "in_bytes", "receiver_limited_s", "children_cpu_s"}
    | {"fsync_errors", "resolve_errors"}
)
"""Values that are running totals."""

_sample_decoder: msgspec.json.Decoder[Sample] = msgspec.json.Decoder(Sample)
_stamp_decoder = msgspec.json.Decoder(Stamp)


class ReadingsLog:
    """Appends the readings of one process, from any of its threads; never raises and never waits for the disk."""

    def __init__(self, run_dir: str | Path, *, process: str, clock: Clock = SYSTEM_CLOCK) -> None:
        path = RunFolder(run_dir).readings_file(process)
        file = LineFile(
            path,
            largest_size=DISK_BUDGET.file_size(READINGS_SIZE, num_files=NUM_OLD + 1, largest=LARGEST_SIZE),
            kept_s=KEPT_S,
            most_size=DISK_BUDGET.file_size(GROWN_READINGS_SIZE, num_files=NUM_OLD + 1, largest=MOST_SIZE),
        )
        self._writer = LineWriter(file, lost="figures.dropped", encode=b"".join)
        self._process, self._clock = process, clock

    def stamp(self) -> Stamp:
        """Return a stamp of the current time."""
        return Stamp(round(self._clock.wall(), 6), round(self._clock.monotonic(), 6), self._process)

    def write(self, *samples: Sample, stamp: Stamp | None = None) -> None:
        """Write readings of one time, by default the current one, in one write."""
        if samples:
            self._writer.put(stamped(stamp or self.stamp(), *samples))

    def close(self) -> None:
        self._writer.close()


def figures_in(
    run_dir: str | Path, *, process: str | None = None, since: float = -math.inf
) -> list[ReadingRecord]:
    """Return the readings of a run, or of one process, since a wall-clock time, in the order of time."""
    records = [
        record
        for path in sorted(RunFolder(run_dir).readings_folder.glob("*.jsonl"))
        if process is None or path.name.partition(".")[0] == process
        if path.stat().st_mtime >= since
        for record in samples_in(line for line in lines_in(path.read_bytes()) if _is_recent(line, since))
    ]
    return sorted(records, key=lambda record: record.stamp.time)


def _is_recent(line: bytes, since: float) -> bool:
    """Return whether a line is of this time or later; a torn one may be."""
    time = time_of(line)
    return time is None or time >= since


def time_of(line: bytes) -> float | None:
    """Return the time at the beginning of a line without decoding the rest; None for a torn line."""
    try:
        return float(line[len(b'{"time":') : line.index(b",")])
    except ValueError:
        return None


def samples_in(lines: Iterable[bytes]) -> Iterator[ReadingRecord]:
    """Decode the readings of these lines; torn lines, and kinds of a later version, are skipped."""
    for line in filter(None, lines):
        try:
            yield ReadingRecord(_stamp_decoder.decode(line), _sample_decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
