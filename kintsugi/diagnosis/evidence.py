"""What a run recorded, aligned to the master's clock and turned into figures that can be compared: the evidence.

Running totals become rates as they arrive, so that a figure of this second can be held against the same figure of other
seconds and of other processes. Events are sorted into what they say: phases, steps, faults, ends, alerts.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from kintsugi.diagnosis.tracks import Clocks, Track, Tracks
from kintsugi.errors import Fault
from kintsugi.observe.events import Event
from kintsugi.observe.figures import Beat, ClockSample, HostSample, LinkSample, ProcessSample, Sample
from kintsugi.types import Role, Wait, process_id, role_of

MASTER = process_id(Role.MASTER, 0)
OVER = frozenset({"ending", "ended"})
"""Phases after which everybody ends because it was told to."""
LEAST_STEPS, LEAST_PHASES = 50, 400
"""So many of the last ones are remembered, whatever their age."""
USER_PROCESSES = frozenset({"reward process", "environment process"})
"""As rollout workers call those beside them."""
LEAST_WORK_S = 0.02
"""A process that neither ran nor wanted to run for so long in a second can not be starved."""


@dataclass(slots=True)
class Looked:
    """A beat: whom the process said it waits for, and since when (on the master's clock)."""

    time: float
    waits: tuple[Wait, ...]
    counters: dict[str, int]


@dataclass(slots=True)
class End:
    """How a process ended, as the one says who saw it."""

    time: float
    process: str
    pid: int
    status: int | None
    how: str
    oom: bool
    ordered: bool
    """Somebody of the run had asked for it."""
    source: str


@dataclass(slots=True)
class Said:
    """A fault or an alert, by whom, and where it stands."""

    time: float
    by: str
    message: str
    fault: Fault | None = None

    @property
    def source(self) -> str:
        return f"events/{self.by}.jsonl"


@dataclass(slots=True)
class News:
    """A fault, an alert or an end as its line says it, for who tells people of it."""

    time: float
    process: str
    event: Event


@dataclass(slots=True)
class Phase:
    time: float
    name: str
    reason: str


@dataclass(slots=True)
class Step:
    """A step that was committed."""

    time: float
    number: int
    duration_s: float


LinkKey = tuple[str, str, int]
"""(process, peer, port)."""


@dataclass(slots=True)
class Bundle:
    """All that is known of a run up to a moment; times are wall clock seconds of the master."""

    run: str = ""
    processes: dict[str, Tracks] = field(default_factory=lambda: defaultdict(Tracks))
    hosts: dict[str, Tracks] = field(default_factory=lambda: defaultdict(Tracks))
    links: dict[LinkKey, Tracks] = field(default_factory=lambda: defaultdict(Tracks))
    states: dict[str, list[tuple[float, str, int]]] = field(default_factory=lambda: defaultdict(list))
    """Process → (time, state as of /proc, pid)."""
    beats: dict[str, list[Looked]] = field(default_factory=lambda: defaultdict(list))
    incarnations: dict[str, str] = field(default_factory=dict)
    """Process → the one that spoke last."""
    births: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    """Process → (time, pid) of each of its beginnings."""
    goodbyes: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Process → when it said that it ends."""
    ends: list[End] = field(default_factory=list)
    faults: list[Said] = field(default_factory=list)
    alerts: list[Said] = field(default_factory=list)
    notes: list[Said] = field(default_factory=list)
    news: list[News] = field(default_factory=list)
    """In the order of reading; who tells of them takes them away."""
    phases: list[Phase] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    host_of: dict[str, str] = field(default_factory=dict)
    observer_of: dict[str, str] = field(default_factory=dict)
    """Host → the agent that looks at it."""
    looked_at: dict[str, float] = field(default_factory=dict)
    """Host → when that was last."""
    listeners: dict[int, str] = field(default_factory=dict)
    """Port → the process that others connect to there."""
    clocks: dict[str, Clocks] = field(default_factory=lambda: defaultdict(Clocks))
    """Host → how its clock stood to the master's."""
    began: float = 0.0
    at: float = 0.0
    """Time of the last thing that was recorded."""
    _totals: dict[object, tuple[float, int, dict[str, float]]] = field(default_factory=dict)

    # Time.

    def take_clock(self, time: float, recorder: str, sample: ClockSample) -> None:
        """`time` as the host's own clock says it."""
        self.host_of[recorder] = sample.host
        self.clocks[sample.host].add(time, offset_s=sample.offset_s, error_s=sample.error_s)

    def corrected(self, process: str, time: float) -> float:
        """On the master's clock, what was stamped by the clock of a process's host."""
        host = self.host_of.get(process, "")
        return time - self.clocks[host].correction_s(time) if host in self.clocks else time

    def moment_of(self, fault: Fault, *, by: str, told: float) -> float:
        """When a fault was seen: before it was told, by the clock of its process or of who told it. Nothing says which
        of the two noted it down, so it is the later one of those that are possible."""
        if not fault.time:
            return told
        possible = (self.corrected(process, fault.time) for process in (fault.process, by))
        return max((time for time in possible if time <= told), default=told)

    # Samples.

    def take(self, time: float, monotonic: float, recorder: str, sample: Sample) -> None:
        """One line of a figures file, at a time of the master's clock."""
        self.at = max(self.at, time)
        match sample:
            case Beat():
                self._beat(time, monotonic, recorder, sample)
            case ProcessSample():
                self._process(time, recorder, sample)
            case HostSample():
                self._host(time, recorder, sample)
            case LinkSample():
                self._link(time, sample)
            case ClockSample():
                pass  # Was taken by `take_clock` before all that it corrects.

    def _beat(self, time: float, monotonic: float, process: str, beat: Beat) -> None:
        on_the_wall = time - monotonic
        waits = tuple(
            Wait(wait.whom, wait.what, wait.since + on_the_wall, wait.until + on_the_wall)
            for wait in beat.waits
        )
        self.incarnations[process] = beat.incarnation
        self.processes.setdefault(process, Tracks())
        beats = self.beats[process]
        if beats:
            self._effort(time, process, beat)
        for wait in waits:
            self._awaited(time, process, wait)
        if known_role(process) is Role.ROLLOUT:
            waited = (time - wait.since for wait in waits if wait.whom in USER_PROCESSES)
            self.processes[process]["user_code_s"].add(time, max(waited, default=0.0))
        beats.append(Looked(time, waits, beat.counters))

    def _awaited(self, time: float, process: str, wait: Wait) -> None:
        """How long others stand still for a process; the master always waits for somebody."""
        seconds = time - wait.since
        if process != MASTER and seconds >= 0 and "-" in wait.whom:
            for whom in wait.whom.split(", "):
                if whom != process and known_role(whom) is not None:
                    self.processes[whom]["awaited_s"].add(time, seconds)

    def _effort(self, time: float, process: str, beat: Beat) -> None:
        """Busy seconds per unit of progress: what tells a process that has become slow from one that has more to do."""
        counter = _PROGRESS.get(known_role(process))
        gauges = beat.gauges
        if counter is None or "idle_s" not in gauges:
            return
        totals = {"busy": gauges["alive_s"] - gauges["idle_s"], "done": float(beat.counters.get(counter, 0))}
        changed = self._changes(("effort", process), time, 0, totals)
        if changed is not None and "busy" in changed and changed.get("done", 0.0) > 0:
            self.processes[process]["effort_s"].add(time, changed["busy"] / changed["done"])

    def _process(self, time: float, recorder: str, sample: ProcessSample) -> None:
        process, values = sample.of, sample.values
        if recorder in self.host_of:
            # Where it is now: one that is replaced may be started elsewhere.
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
            # Of a limit counts what is charged to it: who was put under one brings nothing along.
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
        for name, figure in _PROCESS_RATES.items():
            if name in rates:
                tracks[figure].add(time, rates[name])

    def _host(self, time: float, recorder: str, sample: HostSample) -> None:
        host, values = sample.host, sample.values
        self.host_of[recorder] = host
        self.observer_of.setdefault(host, recorder)
        self.looked_at[host] = max(time, self.looked_at.get(host, time))
        tracks = self.hosts[host]
        for name in _HOST_LEVELS:
            if name in values:
                tracks[name].add(time, values[name])
        if values.get("disk_total_bytes"):
            tracks["disk_free"].add(time, values["disk_free_bytes"] / values["disk_total_bytes"])
        if values.get("memory_total_bytes"):
            available = values.get("memory_available_bytes", 0.0)
            tracks["memory_free"].add(time, available / values["memory_total_bytes"])
        # No name that is being resolved is one that takes no time; a count that is not there yet is none.
        tracks["resolve_pending_s"].add(time, values.get("resolve_pending_s", 0.0))
        self._devices(time, tracks, values)
        rates = self._changes(("host", host), time, 0, _NO_ERRORS | values)
        if rates is None:
            return
        count = max(1.0, values.get("cpu_count", 1.0))
        for name, figure in _HOST_RATES.items():
            if name in rates:
                tracks[figure].add(time, rates[name] / (count if name.startswith("cpu_") else 1.0))

    def _devices(self, time: float, tracks: Tracks, values: dict[str, float]) -> None:
        """Of the accelerators of a host, the fullest one's memory and each one's use."""
        shares = []
        for name, value in values.items():
            if not name.startswith("device_"):
                continue
            if name.endswith("_utilization"):
                tracks[name].add(time, value)
            if name.endswith("_memory_total_bytes") and value:
                shares.append(values.get(name.replace("_total_", "_"), 0.0) / value)
        if shares:
            tracks["device_memory_share"].add(time, max(shares))

    def _link(self, time: float, sample: LinkSample) -> None:
        """Who connected from another host is known there only; where it connected to is known here."""
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
                # What had arrived was late, and not lost; the receiver may say so a while after.
                tracks["lost"].add(time, (changes["retransmits"] - changes["needless"]) / seconds)

    def _changes(
        self, key: object, time: float, identity: int, values: dict[str, float]
    ) -> dict[str, float] | None:
        """Change per second since the last sample of the same thing; None for its first, and after a new beginning."""
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

    # Asking.

    def tracks(self) -> Iterator[tuple[object, Track]]:
        """Every figure of every process, host and link, with what it is of."""
        for group in (self.processes, self.hosts, self.links):
            for of, tracks in group.items():
                for name, track in tracks.items():
                    yield (of, name), track

    def role_peers(self, process: str) -> list[str]:
        """Others of the same role."""
        role = known_role(process)
        return [other for other in self.processes if other != process and known_role(other) is role]

    def states_in(self, process: str, since: float, until: float) -> list[tuple[float, str, int]]:
        """(time, state, pid) of [since, until]."""
        states = self.states.get(process, [])
        first = bisect_left(states, since, key=lambda state: state[0])
        return states[first : bisect_right(states, until, key=lambda state: state[0])]

    def beats_in(self, process: str, since: float, until: float) -> list[float]:
        """When it spoke in [since, until]."""
        beats = self.beats.get(process, [])
        first = bisect_left(beats, since, key=lambda beat: beat.time)
        return [beat.time for beat in beats[first : bisect_right(beats, until, key=lambda beat: beat.time)]]

    def host(self, process: str) -> str:
        return self.host_of.get(process, "")

    def age_s(self, process: str, time: float) -> float:
        """How long it had been running then; a process whose beginning nobody noted is old."""
        births = [born for born, _ in self.births.get(process, ()) if born <= time]
        return time - births[-1] if births else float("inf")

    def phase_at(self, time: float) -> Phase | None:
        index = bisect_right(self.phases, time, key=lambda phase: phase.time)
        return self.phases[index - 1] if index else None

    def is_over(self, time: float) -> bool:
        """Whether the run was ending or had ended then; one that is resumed goes on in the same folder."""
        phase = self.phase_at(time)
        return phase is not None and phase.name in OVER

    def over_since(self) -> float:
        """Since when it is over; infinity while it goes on."""
        since = math.inf
        for phase in reversed(self.phases):
            if phase.name not in OVER:
                break
            since = phase.time
        return since

    def forget_before(self, time: float) -> None:
        """Keep a bounded past."""
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
        # However long they take: from fewer nobody knows how long is usual.
        self.steps = [each for each in self.steps[:-LEAST_STEPS] if each.time >= time] + self.steps[
            -LEAST_STEPS:
        ]
        self.phases = [each for each in self.phases[:-LEAST_PHASES] if each.time >= time] + self.phases[
            -LEAST_PHASES:
        ]
        for births in self.births.values():
            # The last one before is that of who still runs, or of whom the next one follows.
            del births[: max(0, bisect_left(births, time, key=lambda birth: birth[0]) - 1)]
        for process, goodbyes in self.goodbyes.items():
            self.goodbyes[process] = [each for each in goodbyes if each >= time]
        for clocks in self.clocks.values():
            clocks.forget_before(time)
        for key in [key for key, tracks in self.links.items() if not tracks["rtt_s"].times]:
            del self.links[key]
        self._totals = {key: total for key, total in self._totals.items() if total[0] >= time}

    def sort(self) -> None:
        """What came from several files is in the order of its times again."""
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
    """None of who is no process of the run: the watcher, an address, nobody."""
    try:
        return role_of(process)
    except ValueError:
        return None


_PROGRESS: dict[Role | None, str] = {
    Role.MODEL: "micro_batches",
    Role.SERVER: "steps",
    Role.ROLLOUT: "completions",
}
"""What a role's work is counted in."""
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
    "disk_write_bytes": "disk_written",
    "fsync_errors": "fsync_errors",
    "resolve_errors": "resolve_errors",
}
_NO_ERRORS = {"fsync_errors": 0.0, "resolve_errors": 0.0}
_LINK_TOTALS = ("out_bytes", "retransmits", "needless")
