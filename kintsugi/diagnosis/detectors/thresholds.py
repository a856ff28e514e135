"""Readings of a process or a host that are abnormally high. Pure.

A reading is abnormal if it is far above its own past, above a harmless level and, where other processes have the same
reading, far above theirs at the same time. When all rise together the load has risen, and no single process is at
fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import msgspec

from kintsugi.diagnosis.baseline import Baselines
from kintsugi.diagnosis.detectors.memory import DEVICE_READINGS
from kintsugi.diagnosis.evidence import MASTER, EvidenceBundle, known_role
from kintsugi.diagnosis.findings import Finding, intervals
from kintsugi.diagnosis.process_activity import Activity, ProcessActivities
from kintsugi.diagnosis.timeseries import TimeSeries
from kintsugi.diagnosis.verdict import Evidence, FaultKind
from kintsugi.run_folder.layout import RELATIVE
from kintsugi.types import Role

GAP_S = 3.2
"""Abnormal samples this close to each other are one finding; samples come once a second and may be late."""
TRIES_S = 6.2
"""The same for failing attempts, each of which may take a few seconds."""


class Threshold(msgspec.Struct, frozen=True):
    """Bounds of a reading that is abnormal when it is high."""

    reading: str
    kind: FaultKind
    least: float
    """Level below which the reading is harmless, however unusual."""
    factor: float
    """Factor above its own past."""
    peers: float
    """Factor above the others at the same time; 0: they are not compared."""
    moments: int
    """Number of abnormal samples that make a finding."""
    strength: float
    text: str
    """Description; `{value}`, `{usual}`, `{others}` are filled in."""
    gap_s: float = GAP_S


PROCESS_LEVELS = (
    Threshold("throttled", FaultKind.CPU, 0.08, 4.0, 4.0, 2, 0.9,
          "was throttled by its CPU quota for {value:.0%} of the time, usually {usual:.0%}"),
    Threshold("io_delay", FaultKind.DISK_SLOW, 0.4, 5.0, 3.0, 2, 0.6,
          "waited for the disk for {value:.0%} of the time, usually {usual:.0%}, others {others:.0%}"),
    Threshold("awaited_s", FaultKind.SLOW, 0.9, 6.0, 3.0, 2, 0.6,
          "keeps others waiting for {value:.1f} s, usually {usual:.2f} s"),
    Threshold("user_code_s", FaultKind.USER_CODE, 2.0, 6.0, 3.0, 3, 0.75,
          "has waited {value:.1f} s for its process that runs the user's code, usually {usual:.2f} s"),
    Threshold("memory_share", FaultKind.MEMORY, 0.93, 1.15, 1.1, 1, 0.85,
          "uses {value:.0%} of its memory limit, usually {usual:.0%}"),
    Threshold("descriptor_share", FaultKind.DESCRIPTORS, 0.98, 1.15, 1.1, 2, 0.85,
          "has {value:.0%} of its allowed descriptors open, usually {usual:.0%}"),
)  # fmt: skip
HOST_LEVELS = (
    Threshold("fsync_s", FaultKind.DISK_SLOW, 0.25, 8.0, 0.0, 2, 0.75,
          "a small write takes {value:.2f} s to reach the disk of its host, usually {usual:.3f} s"),
    Threshold("fsync_pending_s", FaultKind.DISK_SLOW, 1.5, 8.0, 0.0, 1, 0.8,
          "a small write to the disk of its host is under way for {value:.1f} s"),
    Threshold("steal", FaultKind.CPU, 0.35, 4.0, 2.0, 3, 0.6,
          "its host lost {value:.0%} of its CPU time to other virtual machines, usually {usual:.0%}"),
    Threshold("resolve_s", FaultKind.DNS, 0.7, 8.0, 0.0, 1, 0.85,
          "resolving the master's name takes {value:.1f} s, usually {usual:.3f} s"),
    Threshold("resolve_pending_s", FaultKind.DNS, 1.5, 8.0, 0.0, 2, 0.85,
          "the master's name is not resolved after {value:.1f} s", TRIES_S),
    Threshold("resolve_errors", FaultKind.DNS, 0.25, 8.0, 0.0, 2, 0.85,
          "the master's name can not be resolved: {value:.1f} tries a second fail", TRIES_S),
    Threshold("fsync_errors", FaultKind.DISK_ERROR, 0.25, 8.0, 0.0, 2, 0.8,
          "the disk of its host refuses a small write: {value:.1f} tries a second fail", TRIES_S),
)  # fmt: skip

SPACINGS = 2.5
"""The same in sample intervals, where samples come less often."""
ABOVE_OFTEN = 1.25
"""Factor above a level that the reading reaches regularly."""
SMOOTH_S = 2.6
"""Window over which rates are averaged: single seconds on a busy host vary too much."""

SLOWDOWN_FACTOR = 3.0
"""Factor of the slowdown by waiting for a CPU, against its own past and against the others at the same time."""
LEAST_SLOWDOWN = 4.0
"""Slowdown that is normal on a busy host."""
LEAST_RAN = 0.01
LEAST_DELAY = 0.3
"""Seconds per second that a process waits for a CPU."""
MOST_WAKING = 0.7
"""The same for a process that only wakes up now and then, on a busy host."""
CROWDED = 2.0
"""Slowdown of the others from which a host is crowded: its scheduler lets one process wait for a second or two."""
LEAST_WANTED, ALL_BUSY = 0.3, 0.95
"""CPU time a second that the others must want to be compared with, where this share of the host's CPUs is busy."""
FREE_SHARE = 0.004
FREE_BYTES = 48e6
"""Free space of a disk: below both, or below a tenth of `FREE_BYTES`, the next write may fail."""
BUSY, BUSY_FACTOR, BUSY_MOMENTS = 0.22, 8.0, 4
"""Busy share of a disk, factor above the usual one, and number of samples that count, …"""
FOREIGN = 0.6
"""… and the share of writes that are not of this run."""
EFFORT_FACTOR = 5.0
LEAST_EFFORT_S = 0.004
SLOW_FACTOR = 2.0
"""Factor of the time per unit of work on an accelerator above that of nearly all units before, …"""
SLOW_ABOVE, SLOW_COMPARED = 0.9, 10
"""… the share of those that it is compared with, and their least number; …"""
SLOW_WINDOW_S, SLOW_MOMENTS, SLOW_SHARE = 25.0, 4, 0.8
"""… the time that is looked at, and the number and share of the slow units in it."""
STILL, STILL_OF = 3, 5
"""Samples, of how many, at which a process was in state D."""
AFFECTED = 0.2
"""Share of the time that a process waits for the disk by which it is affected."""
OWN_WRITES_S, OWN_WRITES_BYTES = 15.0, 256e6
"""A run that has written this much in this time keeps its disk busy itself, as in a save."""
WRITE_BACK_S = 40.0
OF_ACTIVITIES = frozenset({"io_delay", "awaited_s", "user_code_s"})
"""Readings that are not compared while a process starts, saves or is repaired."""
WAITS = frozenset({"awaited_s", "user_code_s"})
WAITED_STEPS = 0.5
"""Part of a step that others may wait for a process, however short the waits usually are."""
WHILE_EVALUATING = 4.0
"""Factor of the bounds of waits while held-out problems are answered: all of them at once."""


def deviations(
    bundle: EvidenceBundle,
    baselines: Baselines,
    activities: ProcessActivities,
    *,
    since: float,
    at: float,
) -> list[Finding]:
    """Return the findings of abnormal readings in [since, at]."""
    begin = max(since, baselines.compared_from)
    detector = _Detector(bundle, baselines, activities, begin, at)
    found: list[Finding] = []
    for process in list(bundle.processes):
        found += detector.process_levels(process)
        found += detector.starvation(process)
        found += detector.effort(process)
        found += detector.slow_device(process)
        found += detector.standstills(process)
    for host in list(bundle.hosts):
        found += detector.host_levels(host)
        found += detector.disk_space(host)
        found += detector.foreign_writes(host)
    return found


class _Detector:
    """Applies all rules to one window of time."""

    def __init__(
        self,
        bundle: EvidenceBundle,
        baselines: Baselines,
        activities: ProcessActivities,
        since: float,
        at: float,
    ) -> None:
        self._bundle, self._baselines, self._activities = bundle, baselines, activities
        self._since, self._at = since, at

    # Processes.

    def process_levels(self, process: str) -> Iterator[Finding]:
        tracks = self._bundle.processes[process]
        for level in PROCESS_LEVELS:
            if level.reading not in tracks:
                continue
            others = [
                self._bundle.processes[other][level.reading]
                for other in self._bundle.processes
                if other != process and level.reading in self._bundle.processes[other]
            ]
            yield from self._level(
                level,
                tracks[level.reading],
                others,
                process=process,
                allowed=partial(self._allowed, level, process),
            )

    def _allowed(self, level: Threshold, process: str, time: float) -> float:
        """Return the level that a reading may have at a time, however unusual: without bound in an activity in which a
        process waits for its disk and lets others wait."""
        if level.reading not in OF_ACTIVITIES:
            return 0.0
        if not self._activities.is_settled(process, time):
            return math.inf
        if level.reading not in WAITS:
            return 0.0
        allowed = max(level.least, WAITED_STEPS * self._baselines.step_s)
        is_evaluating = self._activities.is_in(process, time, Activity.EVALUATING)
        return WHILE_EVALUATING * allowed if is_evaluating else allowed

    def starvation(self, process: str) -> Iterator[Finding]:
        """Yield times in which a process waits for a CPU: more than usual, and more than the others at the same
        time."""
        tracks = self._bundle.processes[process]
        if "run_delay" not in tracks:
            return
        usual = self._baselines.named(tracks, "slowdown")
        bad: list[tuple[float, float]] = []
        compared: dict[float, float] = {}
        before = usual.middle if usual else 1.0
        for time in _times(tracks["run_delay"], self._since, self._at):
            slowdown, delay = _slowdown(tracks["cpu"], tracks["run_delay"], time)
            if slowdown < max(LEAST_SLOWDOWN, SLOWDOWN_FACTOR * before) or delay < LEAST_DELAY:
                continue
            if not self._activities.is_settled(process, time):
                continue
            others = self._others_slowdown(process, time)
            if slowdown >= SLOWDOWN_FACTOR * others and not self._is_busy_host(process, time):
                bad.append((time, slowdown))
                compared[time] = others
        for group in intervals(bad, gap_s=_gap_s(tracks["run_delay"])):
            # A process that hardly runs needs more samples; one that wakes often for a moment often waits for a moment.
            hardly_runs = max(_mean(tracks["cpu"], time) for time, _ in group) < 3 * LEAST_RAN
            waited = max(_mean(tracks["run_delay"], time) for time, _ in group)
            is_crowded = min(compared[time] for time, _ in group) >= CROWDED
            if len(group) < (4 if hardly_runs or is_crowded else 2) or (hardly_runs and waited < MOST_WAKING):
                continue
            slowdown = max(value for _, value in group)
            others = compared[next(time for time, value in group if value == slowdown)]
            yield self._finding(
                process,
                FaultKind.CPU,
                group,
                strength=min(0.85, 0.5 + 0.05 * slowdown / max(others, before)),
                what=(
                    f"got a CPU for {1 / slowdown:.0%} of the time in which it wanted one, "
                    f"usually {1 / before:.0%}, the others {1 / others:.0%}"
                ),
                rules_out=("a busy host: the others there get CPU time",),
            )

    def _others_slowdown(self, process: str, time: float) -> float:
        """Return the slowdown of all other processes together, weighted by their CPU time."""
        cpu = delay = 0.0
        for other, tracks in self._bundle.processes.items():
            if other != process and "run_delay" in tracks:
                cpu += _mean(tracks["cpu"], time)
                delay += _mean(tracks["run_delay"], time)
        return (cpu + delay) / cpu if cpu > 0.05 else 1.0

    def _is_busy_host(self, process: str, time: float) -> bool:
        """Return whether all CPUs of its host are busy while the others of the run want hardly any: then nothing shows
        that the process is starved more than other programs are."""
        wanted = sum(
            _mean(tracks["cpu"], time) + _mean(tracks["run_delay"], time)
            for other, tracks in self._bundle.processes.items()
            if other != process and "run_delay" in tracks
        )
        host = self._bundle.hosts[self._bundle.host(process)]
        return wanted < LEAST_WANTED and "busy" in host and _mean(host["busy"], time) >= ALL_BUSY

    def effort(self, process: str) -> Iterator[Finding]:
        """Yield times in which the same work takes far longer than before, and than at peers of the same role."""
        tracks = self._bundle.processes[process]
        usual = self._baselines.named(tracks, "effort_s")
        peers = [self._bundle.processes[other] for other in self._bundle.role_peers(process)]
        if usual is None or not peers:
            return
        track, bad = tracks["effort_s"], []
        theirs = 0.0
        for time in _times(track, self._since, self._at):
            value = _median(track, time)
            if not usual.is_far(value, factor=EFFORT_FACTOR, least=LEAST_EFFORT_S):
                continue
            theirs = max(
                (_median(peer["effort_s"], time) for peer in peers if "effort_s" in peer), default=0.0
            )
            if self._activities.is_settled(process, time) and value > EFFORT_FACTOR / 1.5 * theirs > 0:
                bad.append((time, value))
        for group in intervals(bad, gap_s=GAP_S):
            if len(group) < 5:
                continue
            value = median(value for _, value in group)
            yield self._finding(
                process,
                self._slow_kind(process),
                group,
                strength=0.55,
                what=(
                    f"needs {value * 1000:.0f} ms for what usually takes it {usual.middle * 1000:.0f} ms, "
                    f"and its peers {theirs * 1000:.0f} ms"
                ),
            )

    def slow_device(self, process: str) -> Iterator[Finding]:
        """Yield a time, up to now, in which nearly everything that a process does on its accelerator takes far longer
        than it nearly ever did: a single rank or server has no peer to compare it with."""
        tracks = self._bundle.processes[process]
        if "effort_s" not in tracks or not any(name in tracks for name in DEVICE_READINGS):
            return
        track = tracks["effort_s"]
        before = sorted(
            value
            for part in self._activities.settled_parts(
                process, track, self._baselines.settled, self._at - SLOW_WINDOW_S
            )
            for _, value in part
        )
        if len(before) < SLOW_COMPARED:
            return
        high = before[int(SLOW_ABOVE * len(before))]
        parts = self._activities.settled_parts(
            process, track, max(self._since, self._at - SLOW_WINDOW_S), self._at
        )
        points = parts[-1] if parts else []
        bad = [point for point in points if point[1] >= max(SLOW_FACTOR * high, high + LEAST_EFFORT_S)]
        since_then = [point for point in points if bad and point[0] >= bad[0][0]]
        if len(bad) < SLOW_MOMENTS or len(bad) < SLOW_SHARE * len(since_then):
            return
        value = median(value for _, value in bad)
        yield self._finding(
            process,
            FaultKind.DEVICE,
            bad,
            strength=0.66,
            what=(
                f"needs {value * 1000:.0f} ms on its accelerator for what took it at most {high * 1000:.0f} ms before"
            ),
            rules_out=("more work: the time is per unit of work",),
        )

    def standstills(self, process: str) -> Iterator[Finding]:
        """Yield times in which a process is in state D repeatedly without waiting for a disk: its device blocks it.

        State D is that of a process in a driver call that does not return, and of one whose control group is frozen for
        moments.
        """
        seen = [
            each
            for each in self._bundle.states_in(process, self._since, self._at)
            if self._activities.is_settled(process, each[0])
        ]
        bad: list[tuple[float, float]] = []
        for index in range(STILL_OF - 1, len(seen)):
            window = seen[index - STILL_OF + 1 : index + 1]
            still = [time for time, state, _ in window if state == "D"]
            if len(still) >= STILL and not self._waits_for_a_disk(process, still):
                bad += [(time, 1.0) for time in still if not bad or time > bad[-1][0]]
        for group in intervals(bad, gap_s=GAP_S + 1.0):
            share = len(group) / max(1.0, group[-1][0] - group[0][0] + 1.0)
            yield self._finding(
                process,
                self._slow_kind(process),
                group,
                strength=0.72,
                what=f"did not run in {share:.0%} of its samples, and waited for neither a disk nor another process",
            )

    def _waits_for_a_disk(self, process: str, times: list[float]) -> bool:
        tracks = self._bundle.processes[process]
        moved = [near for time in times if (near := tracks["io_delay"].at(time)) is not None]
        host = self._bundle.hosts[self._bundle.host(process)]
        busy = [near for time in times if (near := host["disk_busy"].at(time)) is not None]
        return (bool(moved) and median(moved) > 0.2) or (bool(busy) and median(busy) > 0.3)

    @staticmethod
    def _slow_kind(process: str) -> FaultKind:
        """Return DEVICE for a process that computes on a device, where nothing else explains it; otherwise SLOW."""
        return FaultKind.DEVICE if known_role(process) in (Role.MODEL, Role.SERVER) else FaultKind.SLOW

    # Hosts.

    def host_levels(self, host: str) -> Iterator[Finding]:
        tracks = self._bundle.hosts[host]
        for level in HOST_LEVELS:
            if level.reading not in tracks:
                continue
            others = [
                self._bundle.hosts[other][level.reading]
                for other in self._bundle.hosts
                if other != host and level.reading in self._bundle.hosts[other]
            ]
            yield from self._level(
                level,
                tracks[level.reading],
                others,
                process=self._representative(host, level.kind),
                allowed=partial(self._allowed_of_host, level, host),
            )

    def _allowed_of_host(self, level: Threshold, host: str, time: float) -> float:
        """Return the level that a reading of a host may have: a run that has just written much, as in a save, makes
        its disk slow itself."""
        if level.kind is not FaultKind.DISK_SLOW:
            return 0.0
        return math.inf if self._writes_much(host, time) else 0.0

    def _writes_much(self, host: str, time: float) -> bool:
        """Return whether the run itself keeps the disk of a host busy: by its writes, where the kernel counts them, or
        by a save."""
        return self._own_writes(host, time, OWN_WRITES_S) >= OWN_WRITES_BYTES or any(
            self._bundle.host(process) == host and self._activities.is_usual_save(process, time)
            for process in self._bundle.processes
        )

    def _own_writes(self, host: str, time: float, seconds: float) -> float:
        """Return the bytes that the processes of a host have written in the seconds before a time."""
        total = 0.0
        for process, tracks in self._bundle.processes.items():
            if self._bundle.host(process) == host and "written" in tracks:
                rates = tracks["written"].between(time - seconds, time + 0.5)
                total += sum(rates) * max(1.0, tracks["written"].spacing_s())
        return total

    def disk_space(self, host: str) -> Iterator[Finding]:
        tracks = self._bundle.hosts[host]
        if "disk_free" not in tracks:
            return
        shares, free = tracks["disk_free"], tracks["disk_free_bytes"]
        usual = median(shares.values) if shares.values else 0.0
        bad = [
            (time, value)
            for time, share, value in zip(shares.times, shares.values, free.values, strict=True)
            if self._since <= time <= self._at
            and ((share < FREE_SHARE and value < FREE_BYTES) or value < FREE_BYTES / 10)
        ]
        for group in intervals(bad, gap_s=GAP_S):
            value = min(value for _, value in group)
            yield self._finding(
                self._representative(host, FaultKind.DISK_FULL),
                FaultKind.DISK_FULL,
                group,
                strength=0.85,
                what=f"the disk of its host has {value / 1e6:.1f} MB left (usually {usual:.0%} of it)",
                is_fact=True,
            )

    def foreign_writes(self, host: str) -> Iterator[Finding]:
        """Yield times in which the disk is busy with writes of other programs than this run."""
        tracks = self._bundle.hosts[host]
        usual = self._baselines.named(tracks, "disk_busy")
        middle = usual.middle if usual else 0.0
        bad: list[tuple[float, float]] = []
        for time, value in tracks["disk_busy"].points(self._since, self._at):
            if value < max(BUSY, BUSY_FACTOR * middle) or self._writes_much(host, time):
                continue
            written = tracks["disk_written"].at(time) or 0.0
            # The kernel writes pages to the disk up to half a minute after a process has changed them.
            lately = sum(tracks["disk_written"].between(time - WRITE_BACK_S, time + 0.5))
            own = sum(self._own_writes(each, time, WRITE_BACK_S) for each in self._bundle.hosts)
            if lately * max(1.0, tracks["disk_written"].spacing_s()) - own > FOREIGN * written > 0:
                bad.append((time, value))
        for group in intervals(bad, gap_s=GAP_S):
            if len(group) < BUSY_MOMENTS:
                continue
            value = max(value for _, value in group)
            yield self._finding(
                self._representative(host, FaultKind.DISK_SLOW),
                FaultKind.DISK_SLOW,
                group,
                strength=0.66,
                what=f"other programs keep its host's disk busy {value:.0%} of the time, usually {middle:.0%}",
            )

    def _representative(self, host: str, kind: FaultKind) -> str:
        """Return the process that stands for a host: the one that is affected most."""
        here = [process for process, where in self._bundle.host_of.items() if where == host]
        reading = _AFFECTED.get(kind)
        if reading is not None:
            affected = [
                (_recent(self._bundle.processes[process][reading], self._at), process)
                for process in here
                if reading in self._bundle.processes[process]
            ]
            if affected and max(affected)[0] > AFFECTED:
                return max(affected)[1]
        if MASTER in here:
            return MASTER
        agents = [process for process in here if known_role(process) is Role.AGENT]
        return next(iter(agents), next(iter(here), self._bundle.observer_of.get(host, MASTER)))

    # Both.

    def _level(
        self,
        level: Threshold,
        track: TimeSeries,
        others: list[TimeSeries],
        *,
        process: str,
        allowed: Callable[[float], float],
    ) -> Iterator[Finding]:
        usual = self._baselines.of(track)
        middle = usual.middle if usual else 0.0
        bad: list[tuple[float, float]] = []
        elsewhere = 0.0
        bound = max(level.least, level.factor * middle)
        for time, value in track.points(self._since, self._at):
            if value < bound or value < allowed(time):
                continue
            if usual is not None and (
                value - middle < 4 * usual.spread or usual.is_as_often(value, factor=ABOVE_OFTEN)
            ):
                continue
            if level.peers and others:
                theirs = [near for other in others if (near := other.at(time)) is not None]
                elsewhere = median(theirs) if theirs else 0.0
                if value < level.peers * elsewhere:
                    continue
            bad.append((time, value))
        for group in intervals(bad, gap_s=_gap_s(track, level.gap_s)):
            if len(group) < level.moments:
                continue
            value = max(value for _, value in group)
            what = level.text.format(value=value, usual=middle, others=elsewhere)
            kind = self._slow_kind(process) if level.kind is FaultKind.SLOW else level.kind
            yield self._finding(process, kind, group, strength=level.strength, what=what)

    def _finding(
        self,
        process: str,
        kind: FaultKind,
        group: list[tuple[float, float]],
        *,
        strength: float,
        what: str,
        is_fact: bool = False,
        rules_out: tuple[str, ...] = (),
    ) -> Finding:
        first, last = group[0][0], group[-1][0]
        observer = self._bundle.observer_of.get(self._bundle.host(process), "agent-0")
        return Finding(
            process=process,
            kind=kind,
            # The rate of a sample covers the time since the one before.
            onset=first - 1.0,
            until=last,
            strength=strength,
            what=what,
            evidence=(Evidence(str(RELATIVE.readings_file(observer)), last, f"{process}: {what}"),),
            is_fact=is_fact,
            rules_out=rules_out,
        )


_AFFECTED = {FaultKind.DISK_SLOW: "io_delay"}
"""Reading of a process that shows how much a fault of its host affects it."""


def _gap_s(track: TimeSeries, gap_s: float = GAP_S) -> float:
    """Return the gap between findings; wider where samples come rarely, as on a busy host."""
    return max(gap_s, SPACINGS * track.spacing_s())


def _times(track: TimeSeries, since: float, at: float) -> list[float]:
    return [time for time in track.times if since <= time <= at]


def _mean(track: TimeSeries, time: float) -> float:
    values = track.between(time - SMOOTH_S, time + 0.6)
    return sum(values) / len(values) if values else 0.0


def _median(track: TimeSeries, time: float) -> float:
    values = track.between(time - SMOOTH_S, time + 0.6)
    return median(values) if values else 0.0


def _recent(track: TimeSeries, at: float) -> float:
    values = track.between(at - 5.0, at)
    return max(values) if values else 0.0


def _slowdown(cpu: TimeSeries, delay: TimeSeries, time: float) -> tuple[float, float]:
    """Return the slowdown by waiting for a CPU, and the seconds of that waiting per second."""
    ran, waited = _mean(cpu, time), _mean(delay, time)
    # CPU time is counted in ticks of 10 ms, so less than one tick counts as one.
    return (ran + waited) / max(ran, LEAST_RAN), waited
