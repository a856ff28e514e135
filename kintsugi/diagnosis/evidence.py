"""Evidence: the records of a run, aligned to the master's clock, as comparable time series and lists of events.

Running totals are turned into rates as they arrive, so that a reading can be compared with that of other seconds and
other processes. Events are sorted by type: phases, steps, faults, ends, alerts, notes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from kintsugi.diagnosis.timeseries import HostClocks, TimeSeries, TimeSeriesSet
from kintsugi.errors import Fault
from kintsugi.run_folder.layout import RELATIVE
from kintsugi.telemetry.events import (
    AcceleratorWarning,
    AlertEvent,
    Event,
    FaultHandled,
    HostLost,
    LeaseUnanswered,
    NoteEvent,
    ProcessBusy,
    SlowLink,
    SlowProcess,
)
from kintsugi.telemetry.readings import (
    ClockOffsetReading,
    HeartbeatReading,
    HostReading,
    LinkReading,
    ProcessReading,
    Sample,
)
from kintsugi.types import Role, Wait, process_id, role_of

MASTER = process_id(Role.MASTER, 0)
OVER = frozenset({"ending", "ended"})
"""Phases after which all processes end because the master requested it."""
LEAST_STEPS, LEAST_PHASES = 50, 400
"""Steps and phases that are kept whatever their age."""
USER_PROCESSES = frozenset({"reward process", "environment process"})
"""Names of user-code processes in the waits of rollout workers."""
LEAST_WORK_S = 0.02
"""Least runnable time per second of a process that can be starved."""


@dataclass(slots=True)
class Observation:
    """A heartbeat: declared waits, with times of the master's clock, and counters."""

    time: float
    waits: tuple[Wait, ...]
    counters: dict[str, int]


@dataclass(slots=True)
class ProcessEnd:
    """End of a process, as its parent recorded it."""

    time: float
    process: str
    pid: int
    status: int | None
    how: str
    oom: bool
    ordered: bool
    """A process of the run had requested it."""
    source: str
    was_stalled: bool = False
    """It had sent no heartbeat for a while before it was replaced."""


@dataclass(slots=True)
class LoggedMessage:
    """A fault, an alert or a note, with the process that recorded it."""

    time: float
    by: str
    message: str
    fault: Fault | None = None
    event: AlertEvent | NoteEvent | None = None

    @property
    def source(self) -> str:
        return str(RELATIVE.events_file(self.by))

    @property
    def about(self) -> str:
        """Process that a fault or an alert is about; empty where it names none."""
        match self.event:
            case (
                FaultHandled()
                | SlowLink()
                | SlowProcess()
                | ProcessBusy()
                | LeaseUnanswered()
                | AcceleratorWarning()
                | HostLost() as alert
            ):
                return alert.of
            case _:
                return self.fault.process if self.fault is not None else ""


@dataclass(slots=True)
class NewEvidence:
    """A new fault, alert or end, for notifications."""

    time: float
    process: str
    event: Event


@dataclass(slots=True)
class PhaseSpan:
    time: float
    name: str
    reason: str


@dataclass(slots=True)
class StepSpan:
    """A committed step."""

    time: float
    number: int
    duration_s: float


LinkKey = tuple[str, str, int]
"""(process, peer, port)."""


@dataclass(slots=True)
class EvidenceBundle:
    """All records of a run up to a moment; times are wall-clock seconds of the master."""

    run: str = ""
    processes: dict[str, TimeSeriesSet] = field(default_factory=lambda: defaultdict(TimeSeriesSet))
    hosts: dict[str, TimeSeriesSet] = field(default_factory=lambda: defaultdict(TimeSeriesSet))
    links: dict[LinkKey, TimeSeriesSet] = field(default_factory=lambda: defaultdict(TimeSeriesSet))
    states: dict[str, list[tuple[float, str, int]]] = field(default_factory=lambda: defaultdict(list))
    """Process → (time, state in /proc, pid)."""
    beats: dict[str, list[Observation]] = field(default_factory=lambda: defaultdict(list))
    incarnations: dict[str, str] = field(default_factory=dict)
    """Process → its latest incarnation."""
    births: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    """Process → (time, pid) of each of its starts."""
    goodbyes: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Process → times at which it recorded its end."""
    ends: list[ProcessEnd] = field(default_factory=list)
    faults: list[LoggedMessage] = field(default_factory=list)
    alerts: list[LoggedMessage] = field(default_factory=list)
    notes: list[LoggedMessage] = field(default_factory=list)
    news: list[NewEvidence] = field(default_factory=list)
    """New events in the order of reading; the watcher removes them."""
    phases: list[PhaseSpan] = field(default_factory=list)
    steps: list[StepSpan] = field(default_factory=list)
    host_of: dict[str, str] = field(default_factory=dict)
    observer_of: dict[str, str] = field(default_factory=dict)
    """Host → the agent that samples it."""
    sampled_at: dict[str, float] = field(default_factory=dict)
    """Host → time of its last sample."""
    listeners: dict[int, str] = field(default_factory=dict)
    """Port → the process that listens there."""
    clocks: dict[str, HostClocks] = field(default_factory=lambda: defaultdict(HostClocks))
    """Host → offsets of its clock against the master's."""
    began: float = 0.0
    at: float = 0.0
    """Time of the last record."""
    _totals: dict[object, tuple[float, int, dict[str, float]]] = field(default_factory=dict)

    # Time.

    def take_clock(self, time: float, recorder: str, sample: ClockOffsetReading) -> None:
        """Add an offset of a clock; `time` is of that clock."""
        self.host_of[recorder] = sample.host
        self.clocks[sample.host].add(time, offset_s=sample.offset_s, error_s=sample.error_s)

    def corrected(self, process: str, time: float) -> float:
        """Return a time of a process on the master's clock."""
        host = self.host_of.get(process, "")
        return time - self.clocks[host].correction_s(time) if host in self.clocks else time

    def moment_of(self, fault: Fault, *, by: str, recorded: float) -> float:
        """Return when a fault was seen, on the master's clock.

        The fault's own time is of the clock of its process or of the process that recorded it; nothing says which. The
        later of those that are not after the recording is taken.
        """
        if not fault.time:
            return recorded
        possible = (self.corrected(process, fault.time) for process in (fault.process, by))
        return max((time for time in possible if time <= recorded), default=recorded)

    # Readings.

    def take(self, time: float, monotonic: float, recorder: str, sample: Sample) -> None:
        """Add a reading, at a time of the master's clock."""
        self.at = max(self.at, time)
        match sample:
            case HeartbeatReading():
                self._beat(time, monotonic, recorder, sample)
            case ProcessReading():
                self._process(time, recorder, sample)
            case HostReading():
                self._host(time, recorder, sample)
            case LinkReading():
                self._link(time, sample)
            case ClockOffsetReading():
                pass  # Added by `take_clock` before the readings that it corrects.

    def _beat(self, time: float, monotonic: float, process: str, beat: HeartbeatReading) -> None:
        on_the_wall = time - monotonic
        waits = tuple(
            Wait(wait.whom, wait.what, wait.since + on_the_wall, wait.until + on_the_wall)
            for wait in beat.waits
        )
        self.incarnations[process] = beat.incarnation
        self.processes.setdefault(process, TimeSeriesSet())
        beats = self.beats[process]
        if beats:
            self._effort(time, process, beat)
        for wait in waits:
            self._awaited(time, process, wait)
        if known_role(process) is Role.ROLLOUT:
            waited = (time - wait.since for wait in waits if wait.whom in USER_PROCESSES)
            self.processes[process]["user_code_s"].add(time, max(waited, default=0.0))
        if (reserved := beat.gauges.get("device_reserved_bytes")) is not None:
            self.processes[process]["device_reserved_bytes"].add(time, reserved)
        beats.append(Observation(time, waits, beat.counters))

    def _awaited(self, time: float, process: str, wait: Wait) -> None:
        """Record how long others wait for a process; the waits of the master say nothing, since it always waits."""
        seconds = time - wait.since
        if process != MASTER and seconds >= 0:
            for whom in awaited_processes(wait):
                if whom != process:
                    self.processes[whom]["awaited_s"].add(time, seconds)

    def _effort(self, time: float, process: str, beat: HeartbeatReading) -> None:
        """Record busy seconds per unit of progress, which distinguish a slow process from one with more work. A unit
        may take longer than the time between two heartbeats."""
        counter = PROGRESS_COUNTERS.get(known_role(process))
        gauges = beat.gauges
        if counter is None or "idle_s" not in gauges:
            return
        key = ("effort", process)
        busy, done = gauges["alive_s"] - gauges["idle_s"], float(beat.counters.get(counter, 0))
        before = self._totals.get(key)
        if before is not None and done == before[2]["done"] and busy >= before[2]["busy"]:
            return
        self._totals[key] = (time, 0, {"busy": busy, "done": done})
        if before is not None and done > before[2]["done"] and busy >= before[2]["busy"]:
            effort_s = (busy - before[2]["busy"]) / (done - before[2]["done"])
            self.processes[process]["effort_s"].add(time, effort_s)

    def _process(self, time: float, recorder: str, sample: ProcessReading) -> None:
        process, values = sample.of, sample.values
        if recorder in self.host_of:
            # Its current host: a replacement may be on another one.
            self.host_of[process] = self.host_of[recorder]
        self.states[process].append((time, sample.state, sample.pid))
        tracks = self.processes[process]
        if "device_memory_bytes" in values:
            tracks["device_memory_bytes"].add(time, values["device_memory_bytes"])
        tracks["frozen"].add(time, values.get("frozen", 0.0))
        tracks["rss_bytes"].add(time, values.get("rss_bytes", 0.0))
        used = values.get("memory_used_bytes", 0.0)
        tracks["memory_bytes"].add(time, max(used, values.get("rss_bytes", 0.0)))
        if values.get("memory_limit_bytes"):
            # Only memory that is charged to the limit counts: a process that is moved under one brings none along.
            tracks["memory_share"].add(time, used / values["memory_limit_bytes"])
        if values.get("descriptor_limit"):
            tracks["descriptor_share"].add(time, values.get("descriptors", 0.0) / values["descriptor_limit"])
        rates = self._changes(("process", process), time, sample.pid, values)
        if rates is None:
            return
        cpu, delay = rates.get("cpu_s", 0.0), rates.get("run_delay_s", 0.0)
        tracks["cpu"].add(time, cpu)
        tracks["run_delay"].add(time, delay)
        if cpu + delay > LEAST_WORK_S:
            tracks["slowdown"].add(time, (cpu + delay) / max(cpu, 0.01))
        for name, series in _PROCESS_RATES.items():
            if name in rates:
                tracks[series].add(time, rates[name])

    def _host(self, time: float, recorder: str, sample: HostReading) -> None:
        host, values = sample.host, sample.values
        self.host_of[recorder] = host
        self.observer_of.setdefault(host, recorder)
        self.sampled_at[host] = max(time, self.sampled_at.get(host, time))
        tracks = self.hosts[host]
        for name in _HOST_LEVELS:
            if name in values:
                tracks[name].add(time, values[name])
        if values.get("disk_total_bytes"):
            tracks["disk_free"].add(time, values["disk_free_bytes"] / values["disk_total_bytes"])
        if values.get("memory_total_bytes"):
            available = values.get("memory_available_bytes", 0.0)
            tracks["memory_free"].add(time, available / values["memory_total_bytes"])
            tracks["memory_free_bytes"].add(time, available)
        # No pending resolution counts as one that takes no time, and a missing counter as 0.
        tracks["resolve_pending_s"].add(time, values.get("resolve_pending_s", 0.0))
        self._devices(time, tracks, values)
        rates = self._changes(("host", host), time, 0, _NO_ERRORS | values)
        if rates is None:
            return
        count = max(1.0, values.get("cpu_count", 1.0))
        for name, series in _HOST_RATES.items():
            if name in rates:
                tracks[series].add(time, rates[name] / (count if name.startswith("cpu_") else 1.0))

    def _devices(self, time: float, tracks: TimeSeriesSet, values: dict[str, float]) -> None:
        """Record the memory of the fullest accelerator of a host, and the utilization of each."""
        shares: list[tuple[float, float, float]] = []
        for name, value in values.items():
            if not name.startswith("device_"):
                continue
            if name.endswith("_utilization"):
                tracks[name].add(time, value)
            if name.endswith("_memory_total_bytes") and value:
                used = values.get(name.replace("_total_", "_"), 0.0)
                shares.append((used / value, used, value))
        if shares:
            share, used, total = max(shares)
            tracks["device_memory_share"].add(time, share)
            tracks["device_memory_free_bytes"].add(time, total - used)
            tracks["device_memory_total_bytes"].add(time, total)

    def _link(self, time: float, sample: LinkReading) -> None:
        """Add a reading of a link. The connecting process on another host is known only there; the listening one is
        known here."""
        peer = sample.peer
        if peer[0].isdigit() and ":" not in peer:
            self.listeners[sample.port] = sample.of
        elif peer[0].isdigit():
            peer = self.listeners.get(sample.port, peer)
        key = (sample.of, peer, sample.port)
        tracks, values = self.links[key], sample.values
        if "rtt_s" in values:
            for name in ("rtt_s", "backoff", "unacked"):
                tracks[name].add(time, values.get(name, 0.0))
        before = self._totals.get(key)
        self._totals[key] = (time, 0, values)
        if before is not None and time > before[0]:
            seconds = time - before[0]
            changes = {name: values.get(name, 0.0) - before[2].get(name, 0.0) for name in _LINK_TOTALS}
            if min(changes.values()) >= 0:
                tracks["out"].add(time, changes["out_bytes"] / seconds)
                # Segments that had arrived were late and not lost; the receiver may report it later.
                tracks["lost"].add(time, (changes["retransmits"] - changes["needless"]) / seconds)

    def _changes(
        self, key: object, time: float, identity: int, values: dict[str, float]
    ) -> dict[str, float] | None:
        """Return the changes per second since the last reading; None for the first one, also of a new process."""
        before = self._totals.get(key)
        self._totals[key] = (time, identity, values)
        if before is None or before[1] != identity or time <= before[0]:
            return None
        seconds = time - before[0]
        return {
            name: (value - before[2][name]) / seconds
            for name, value in values.items()
            if name in before[2] and value >= before[2][name]
        }

    # Queries.

    def tracks(self) -> Iterator[tuple[object, TimeSeries]]:
        """Yield all time series of processes, hosts and links, with their keys."""
        for group in (self.processes, self.hosts, self.links):
            for of, tracks in group.items():
                for name, track in tracks.items():
                    yield (of, name), track

    def role_peers(self, process: str) -> list[str]:
        """Return the other processes of the same role."""
        role = known_role(process)
        return [other for other in self.processes if other != process and known_role(other) is role]

    def states_in(self, process: str, since: float, until: float) -> list[tuple[float, str, int]]:
        """Return (time, state, pid) of [since, until]."""
        states = self.states.get(process, [])
        first = bisect_left(states, since, key=lambda state: state[0])
        return states[first : bisect_right(states, until, key=lambda state: state[0])]

    def beats_in(self, process: str, since: float, until: float) -> list[float]:
        """Return the times of its heartbeats in [since, until]."""
        beats = self.beats.get(process, [])
        first = bisect_left(beats, since, key=lambda beat: beat.time)
        return [beat.time for beat in beats[first : bisect_right(beats, until, key=lambda beat: beat.time)]]

    def host(self, process: str) -> str:
        return self.host_of.get(process, "")

    def age_s(self, process: str, time: float) -> float:
        """Return the age of a process at a time; infinite if its start was not recorded."""
        births = [born for born, _ in self.births.get(process, ()) if born <= time]
        return time - births[-1] if births else float("inf")

    def phase_at(self, time: float) -> PhaseSpan | None:
        index = bisect_right(self.phases, time, key=lambda phase: phase.time)
        return self.phases[index - 1] if index else None

    def is_over(self, time: float) -> bool:
        """Return whether the run was ending or had ended then; a resumed run continues in the same folder."""
        phase = self.phase_at(time)
        return phase is not None and phase.name in OVER

    def over_since(self) -> float:
        """Return since when the run is over; infinity while it is running."""
        since = math.inf
        for phase in reversed(self.phases):
            if phase.name not in OVER:
                break
            since = phase.time
        return since

    def forget_before(self, time: float) -> None:
        """Drop older evidence."""
        for tracks in (*self.processes.values(), *self.hosts.values(), *self.links.values()):
            for track in tracks.values():
                track.forget_before(time)
        for states in self.states.values():
            del states[: bisect_left(states, time, key=lambda state: state[0])]
        for beats in self.beats.values():
            del beats[: bisect_left(beats, time, key=lambda beat: beat.time)]
        self.faults = [each for each in self.faults if each.time >= time]
        self.alerts = [each for each in self.alerts if each.time >= time]
        self.notes = [each for each in self.notes if each.time >= time]
        self.news = [each for each in self.news if each.time >= time]
        self.ends = [each for each in self.ends if each.time >= time]
        # The last steps and phases are kept: fewer are not enough for a usual duration.
        self.steps = [each for each in self.steps[:-LEAST_STEPS] if each.time >= time] + self.steps[
            -LEAST_STEPS:
        ]
        self.phases = [each for each in self.phases[:-LEAST_PHASES] if each.time >= time] + self.phases[
            -LEAST_PHASES:
        ]
        for births in self.births.values():
            # The last start before is that of the current process, or of the predecessor of the next one.
            del births[: max(0, bisect_left(births, time, key=lambda birth: birth[0]) - 1)]
        for process, goodbyes in self.goodbyes.items():
            self.goodbyes[process] = [each for each in goodbyes if each >= time]
        for clocks in self.clocks.values():
            clocks.forget_before(time)
        for key in [key for key, tracks in self.links.items() if not tracks["rtt_s"].times]:
            del self.links[key]
        self._totals = {key: total for key, total in self._totals.items() if total[0] >= time}

    def sort(self) -> None:
        """Sort evidence of several files by time."""
        self.faults.sort(key=lambda each: each.time)
        self.alerts.sort(key=lambda each: each.time)
        self.notes.sort(key=lambda each: each.time)
        self.ends.sort(key=lambda each: each.time)
        for births in self.births.values():
            births.sort()
        self.steps.sort(key=lambda each: each.time)
        self.phases.sort(key=lambda each: each.time)


@lru_cache(maxsize=4096)
def known_role(process: str) -> Role | None:
    """Return the role of a process; None for other names: the watcher, an address."""
    try:
        return role_of(process)
    except ValueError:
        return None


def awaited_processes(wait: Wait) -> list[str]:
    """Return the processes of the run that a wait names; it may be for a disk or a thread.

    >>> awaited_processes(Wait("model-0, model-1", "all-reduce", 0.0, 1.0))
    ['model-0', 'model-1']
    """
    return [name for name in wait.whom.split(", ") if known_role(name) is not None]


PROGRESS_COUNTERS: dict[Role | None, str] = {
    Role.MODEL: "micro_batches",
    Role.SERVER: "steps",
    Role.ROLLOUT: "completions",
}
"""Role → counter of its progress."""
_PROCESS_RATES = {
    "throttled_s": "throttled",
    "io_delay_s": "io_delay",
    "read_bytes": "read",
    "write_bytes": "written",
}
_HOST_LEVELS = ("fsync_s", "fsync_pending_s", "disk_free_bytes", "resolve_s")
_HOST_RATES = {
    "cpu_busy_s": "busy",
    "cpu_steal_s": "steal",
    "disk_busy_s": "disk_busy",
    "tcp_checksum_errors": "checksum_errors",
    "disk_write_bytes": "disk_written",
    "fsync_errors": "fsync_errors",
    "resolve_errors": "resolve_errors",
}
_NO_ERRORS = {"fsync_errors": 0.0, "resolve_errors": 0.0, "tcp_checksum_errors": 0.0}
_LINK_TOTALS = ("out_bytes", "retransmits", "needless")
