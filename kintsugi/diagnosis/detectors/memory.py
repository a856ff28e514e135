"""Growing memory, of processes, hosts and accelerators. Pure.

A process that starts, loads, saves or is repaired grows, and keeps some of it: only readings of a settled process
count, against every size that it or its predecessors have had before. There are two patterns:

    rise     it grows in every sample, for several steps or until the memory of its host would soon be exhausted
    stairs   its least size of a step is larger in one step after the other, by about as much each time

Memory of an accelerator is that of the process whose own allocations have grown. If none has grown and the device is
full, a program outside the run has taken it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from kintsugi.diagnosis.baseline import Baselines
from kintsugi.diagnosis.evidence import MASTER, EvidenceBundle, known_role
from kintsugi.diagnosis.findings import Finding, intervals
from kintsugi.diagnosis.process_activity import ProcessActivities
from kintsugi.diagnosis.timeseries import TimeSeries
from kintsugi.diagnosis.verdict import Evidence, FaultKind
from kintsugi.run_folder.layout import RELATIVE
from kintsugi.types import Role

GAP_S = 3.2
GROWTH_BYTES = 128e6
"""Least growth that counts, …"""
GROWTH_SHARE = 0.5
"""… as a share of the usual size, …"""
GROWTH_RATE = 8e6
"""… in bytes a second, …"""
AS_BEFORE = 1.1
"""… factor above the largest size before, …"""
RISING = 0.98
"""… and growth by at least this factor in every sample."""
RISE_STEPS = 2
"""Steps that a rise lasts, …"""
SOON_S = 60.0
"""… unless it would exhaust the memory of its host, or accelerator, within this time."""
STAIRS = 4
"""Number of steps in a row that each need more than the one before."""
STAIR_SHARE = 0.02
"""Least growth of one stair, as a share of the size before, …"""
STAIRS_SHARE = 0.25
"""… of all, …"""
EVEN = 0.5
"""… and of the last one, as a share of their mean: caches fill more and more slowly."""
STAIR_S = 2.0
"""Least time that counts as one step: samples come once a second."""
HOST_FREE = 0.03
FULL, FULL_FACTOR, FULL_MOMENTS = 0.97, 1.15, 3
"""Share of an accelerator's memory that is full, factor above the usual share, and number of samples."""
EXPLAINED = 0.5
"""Share of the additional memory in use that the growth of one process explains."""
BEFORE_S = 30.0
"""Time before the memory was exhausted in which the growth that led to it began."""
DEVICE_READINGS = ("device_memory_bytes", "device_reserved_bytes")
"""Memory of an accelerator by process: as its driver reports it, otherwise as the process does."""


class MemoryDetector:
    """Applies the rules to one window of time."""

    def __init__(
        self,
        bundle: EvidenceBundle,
        baselines: Baselines,
        activities: ProcessActivities,
        *,
        since: float,
        at: float,
    ) -> None:
        self._bundle, self._baselines, self._activities = bundle, baselines, activities
        self._since, self._at = since, at

    def findings(self) -> list[Finding]:
        found: list[Finding] = []
        for process in list(self._bundle.processes):
            found += self._of_process(process)
        for host in list(self._bundle.hosts):
            found += self._host_memory(host)
            found += self._device_memory(host)
        return found

    # Processes.

    def _of_process(self, process: str) -> Iterator[Finding]:
        own = self._rise(process, "rss_bytes") or self._stairs(process, "rss_bytes")
        if own is None:
            own = self._rise(process, "memory_bytes")
            # Where others grow alike, the reading is of a common control group: the process that grew is not known.
            own = None if own is None or self._is_shared(process, own) else own
        if own is not None:
            yield self._growth(process, FaultKind.MEMORY, own, what="of memory")
        reading = self._device_reading(process)
        grown = None if reading is None else self._rise(process, reading) or self._stairs(process, reading)
        if grown is not None:
            users = tuple(other for other in self._device_users(process) if other != process)
            yield self._growth(
                process, FaultKind.DEVICE_MEMORY, grown, what="of its accelerator's memory", others=users
            )

    def _growth(
        self, process: str, kind: FaultKind, grown: Growth, *, what: str, others: tuple[str, ...] = ()
    ) -> Finding:
        text = (
            f"grew from {grown.low / 1e6:,.0f} to {grown.high / 1e6:,.0f} MB {what} in "
            f"{grown.until - grown.began:.0f} s"
        )
        if grown.stairs:
            text += f", by about as much in each of {grown.stairs} steps"
        return self._finding(
            process, kind, onset=grown.began, until=grown.until, strength=0.78, what=text, others=others
        )

    def _born(self, process: str) -> float:
        births = (time for time, _ in self._bundle.births.get(process, ()) if time <= self._at)
        return max(births, default=0.0)

    def _rise(self, process: str, reading: str) -> Growth | None:
        """Return the last steady rise of a settled process, if it is fast and goes far above all earlier sizes of the
        process and its predecessors."""
        tracks = self._bundle.processes[process]
        if reading not in tracks:
            return None
        track, usual = tracks[reading], self._baselines.named(tracks, reading)
        begin = max(self._since, self._born(process))
        for points in reversed(self._activities.settled_parts(process, track, begin, self._at)):
            values = [value for _, value in points]
            high = max(values)
            last = first = values.index(high)
            while first and values[first - 1] < RISING * values[first]:
                first -= 1
            grown = Growth(points[first][0], points[last][0], values[first], high)
            if last - first < 2 or grown.until <= grown.began:
                continue
            least = GROWTH_SHARE * (usual.middle if usual else grown.low)
            had = max(track.between(0.0, grown.began), default=0.0)
            if (
                grown.size >= max(GROWTH_BYTES, least)
                and high > AS_BEFORE * had
                and self._lasts(process, grown, reading)
            ):
                return grown
        return None

    def _lasts(self, process: str, grown: Growth, reading: str) -> bool:
        """Return whether a rise is fast, and lasts for several steps or would soon exhaust the memory that is left."""
        seconds = grown.until - grown.began
        rate = grown.size / seconds
        if rate < GROWTH_RATE:
            return False
        free_of = "device_memory_free_bytes" if reading in DEVICE_READINGS else "memory_free_bytes"
        free = self._bundle.hosts[self._bundle.host(process)][free_of].at(grown.until, within_s=5.0)
        is_urgent = free is not None and free / rate < SOON_S
        return is_urgent or seconds >= min(SOON_S, RISE_STEPS * self._baselines.step_s)

    def _stairs(self, process: str, reading: str) -> Growth | None:
        """Return a growth of the least size per step, in several steps in a row up to now."""
        tracks = self._bundle.processes[process]
        if reading not in tracks:
            return None
        floors = self._floors(process, tracks[reading])
        first = len(floors) - 1
        while first > 0 and floors[first].size >= (1 + STAIR_SHARE) * floors[first - 1].size:
            first -= 1
        rising = floors[first:] if first >= 0 else []
        if len(rising) <= STAIRS or rising[-1].until < self._since:
            return None
        grown = Growth(rising[0].until, rising[-1].until, rising[0].size, rising[-1].size, len(rising) - 1)
        heights = [after.size - before.size for before, after in pairwise(rising)]
        had = max((floor.size for floor in floors[:first]), default=0.0)
        is_large = grown.size >= max(GROWTH_BYTES, STAIRS_SHARE * grown.low) and grown.high > AS_BEFORE * had
        is_even = heights[-1] >= EVEN * sum(heights) / len(heights)
        return grown if is_large and is_even else None

    def _floors(self, process: str, track: TimeSeries) -> list[Floor]:
        """Return the least size of each step in which the process was settled; short steps are put together."""
        begin = max(self._baselines.settled, self._born(process))
        floors: list[Floor] = []
        for step in self._bundle.steps:
            if not begin + STAIR_S <= step.time <= self._at:
                continue
            since = max(begin, step.time - step.duration_s, floors[-1].until if floors else 0.0)
            if step.time - since < STAIR_S:
                since = max(begin, floors[-1].until if floors else begin)
            values = track.between(since, step.time)
            if step.time - since < STAIR_S or not values:
                continue
            if not self._activities.has_transient(process, since, step.time):
                floors.append(Floor(step.time, min(values)))
        return floors

    def _is_shared(self, process: str, grown: Growth) -> bool:
        """Return whether others of its host have grown as much meanwhile."""
        for other, tracks in self._bundle.processes.items():
            if other == process or self._bundle.host(other) != self._bundle.host(process):
                continue
            before, after = tracks["memory_bytes"].at(grown.began), tracks["memory_bytes"].at(grown.until)
            if before is not None and after is not None and after - before >= 0.5 * grown.size:
                return True
        return False

    # Hosts.

    def _host_memory(self, host: str) -> Iterator[Finding]:
        """Yield times in which the memory of the host is exhausted, at the process that has grown most; where none
        has, at the one that uses most."""
        track = self._bundle.hosts[host]["memory_free"]
        usual = self._baselines.of(track)
        bad = [(time, value) for time, value in track.points(self._since, self._at) if value < HOST_FREE]
        if usual is not None and usual.middle < 2 * HOST_FREE:
            return
        for group in intervals(bad, gap_s=GAP_S):
            if len(group) < 2:
                continue
            here = [process for process, where in self._bundle.host_of.items() if where == host]
            process, _ = self._grown_most(here, ("memory_bytes",), at=group[0][0])
            yield self._finding(
                process or self._largest(here, ("memory_bytes",)) or MASTER,
                FaultKind.MEMORY,
                onset=group[0][0] - 1.0,
                until=group[-1][0],
                strength=0.6,
                what=f"its host has {min(value for _, value in group):.1%} of its memory left",
            )

    def _device_memory(self, host: str) -> Iterator[Finding]:
        """Yield times in which an accelerator is full, unlike usual."""
        tracks = self._bundle.hosts[host]
        if "device_memory_share" not in tracks:
            return
        track = tracks["device_memory_share"]
        usual = self._baselines.of(track)
        middle = usual.middle if usual else 0.0
        here = [process for process, where in self._bundle.host_of.items() if where == host]
        users = [process for process in here if self._device_reading(process) is not None]
        bad = [
            (time, value)
            for time, value in track.points(self._since, self._at)
            if value >= max(FULL, FULL_FACTOR * middle)
            and all(self._activities.is_settled(user, time) for user in users)
        ]
        for group in intervals(bad, gap_s=GAP_S):
            if len(group) < FULL_MOMENTS:
                continue
            yield self._full_device(host, group, users=users or here, usual=middle)

    def _full_device(
        self, host: str, group: list[tuple[float, float]], *, users: list[str], usual: float
    ) -> Finding:
        value, began = max(value for _, value in group), group[0][0]
        total = self._bundle.hosts[host]["device_memory_total_bytes"].at(began, within_s=5.0) or 0.0
        process, grown = self._grown_most(users, DEVICE_READINGS, at=group[-1][0])
        what = f"an accelerator of its host has {value:.0%} of its memory in use, usually {usual:.0%}"
        rules_out: tuple[str, ...] = ()
        is_known = grown >= 0
        if process and grown >= EXPLAINED * (value - usual) * total:
            what = f"has taken {grown / 1e6:,.0f} MB more than before: {what}"
            others = tuple(other for other in users if other != process)
        else:
            process = self._largest(users, DEVICE_READINGS) or self._computing(users)
            others = ()
            rules_out = ("a process of this run: none has grown",) if is_known else ()
        return self._finding(
            process,
            FaultKind.DEVICE_MEMORY,
            onset=began - 1.0,
            until=group[-1][0],
            strength=0.7 if is_known else 0.6,
            what=what,
            others=others,
            rules_out=rules_out,
        )

    def _grown_most(self, processes: list[str], readings: tuple[str, ...], *, at: float) -> tuple[str, float]:
        """Return the process that has grown most above its earlier sizes, and by how many bytes; -1 where no process
        has such a reading."""
        best = ("", -1.0)
        for process in processes:
            for reading in readings:
                track = self._bundle.processes[process].get(reading)
                now = track.at(at, within_s=5.0) if track is not None else None
                if track is None or now is None:
                    continue
                had = track.between(self._baselines.settled, at - BEFORE_S)
                grown = now - (median(had) if had else now)
                if grown > best[1]:
                    best = (process if grown >= GROWTH_BYTES else "", max(grown, 0.0))
                break
        return best

    def _largest(self, processes: list[str], readings: tuple[str, ...]) -> str:
        sizes = [
            (max(values), process)
            for process in processes
            for reading in readings
            if reading in self._bundle.processes[process]
            and (values := self._bundle.processes[process][reading].between(self._at - 5.0, self._at))
        ]
        return max(sizes)[1] if sizes else ""

    def _computing(self, processes: list[str]) -> str:
        """Return a process that uses an accelerator, by its role: a rank, otherwise a server."""
        by_role = sorted(
            (_ORDER.index(role), process) for process in processes if (role := known_role(process)) in _ORDER
        )
        return by_role[0][1] if by_role else MASTER

    def _device_reading(self, process: str) -> str | None:
        return next((name for name in DEVICE_READINGS if name in self._bundle.processes[process]), None)

    def _device_users(self, process: str) -> list[str]:
        host = self._bundle.host(process)
        return [
            other
            for other in self._bundle.processes
            if self._bundle.host(other) == host and self._device_reading(other) is not None
        ]

    def _finding(
        self,
        process: str,
        kind: FaultKind,
        *,
        onset: float,
        until: float,
        strength: float,
        what: str,
        others: tuple[str, ...] = (),
        rules_out: tuple[str, ...] = (),
    ) -> Finding:
        observer = self._bundle.observer_of.get(self._bundle.host(process), "agent-0")
        return Finding(
            process=process,
            kind=kind,
            onset=onset,
            until=until,
            strength=strength,
            what=what,
            evidence=(Evidence(str(RELATIVE.readings_file(observer)), until, f"{process}: {what}"),),
            others=others,
            rules_out=rules_out,
        )


class Growth(NamedTuple):
    """Size of a process over a time in which it grew."""

    began: float
    until: float
    low: float
    high: float
    stairs: int = 0
    """Number of steps in which it grew; 0: it grew all the time."""

    @property
    def size(self) -> float:
        return self.high - self.low


class Floor(NamedTuple):
    """Least size in a step."""

    until: float
    size: float


_ORDER = (Role.MODEL, Role.SERVER)
