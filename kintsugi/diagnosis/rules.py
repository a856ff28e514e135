"""What is wrong with a process or a host by its own figures. Pure.

A figure is wrong when it is far above its own past, above what hurts anybody at all, and, where others have the same
figure, far above theirs at the same time. When all suffer alike it is the load, and no fault of one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from kintsugi.diagnosis.baseline import WARM_S, Baselines
from kintsugi.diagnosis.evidence import MASTER, Bundle, known_role
from kintsugi.diagnosis.findings import Finding, intervals
from kintsugi.diagnosis.levels import GAP_S, HOST_LEVELS, PROCESS_LEVELS, Level
from kintsugi.diagnosis.tracks import Track
from kintsugi.diagnosis.verdict import Evidence, FaultKind
from kintsugi.types import Role

SPACINGS = 2.5
"""The same in samples, where they come less often."""
ABOVE_OFTEN = 1.25
"""So many times what it reaches again and again, and it is something else."""
SMOOTH_S = 2.6
"""Rates are looked at over so long: in one second on a busy host anything happens."""

SLOWDOWN_FACTOR = 3.0
"""So many times more slowed down by waiting for a processor than usual, and than the others at the same time."""
LEAST_SLOWDOWN = 4.0
"""A process that gets its turn every fourth time is on a busy host."""
LEAST_RAN = 0.01
LEAST_DELAY = 0.3
"""Seconds per second that it waits for a processor."""
MOST_WAKING = 0.7
"""The same of one who only wakes up now and then, on a busy host."""
GROWTH_BYTES = 128e6
"""More memory than this …"""
GROWTH_RATE = 8e6
"""… at this many bytes a second or more …"""
AS_BEFORE = 1.1
"""So many times what it had before."""
RISING = 0.98
"""… without a second in which it did not grow by this factor."""
FREE_SHARE = 0.004
FREE_BYTES = 48e6
"""Of a disk: below both or below a tenth of the second, the next write may fail."""
HOST_MEMORY_FREE = 0.03
BUSY, BUSY_FACTOR, BUSY_MOMENTS = 0.22, 8.0, 4
"""Of a disk: this share of the time, so many times what is usual, for so many looks …"""
FOREIGN = 0.6
"""… of which so much is written by others."""
EFFORT_FACTOR = 5.0
LEAST_EFFORT_S = 0.004
STILL, STILL_OF = 3, 5
"""Looks of so many at which a process stood still."""


def deviations(bundle: Bundle, baselines: Baselines, *, since: float, at: float) -> list[Finding]:
    """Everything whose own figures are wrong in [since, at]."""
    begin = max(since, baselines.settled)
    look = _Look(bundle, baselines, begin, at)
    found: list[Finding] = []
    for process in list(bundle.processes):
        found += look.process_levels(process)
        found += look.starvation(process)
        found += look.growth(process)
        found += look.effort(process)
        found += look.standstills(process)
    for host in list(bundle.hosts):
        found += look.host_levels(host)
        found += look.disk_space(host)
        found += look.foreign_writes(host)
        found += look.host_memory(host)
    return found


class _Look:
    def __init__(self, bundle: Bundle, baselines: Baselines, since: float, at: float) -> None:
        self._bundle, self._baselines, self._since, self._at = bundle, baselines, since, at

    # Processes.

    def process_levels(self, process: str) -> Iterator[Finding]:
        tracks = self._bundle.processes[process]
        for level in PROCESS_LEVELS:
            if level.figure not in tracks:
                continue
            others = [
                self._bundle.processes[other][level.figure]
                for other in self._bundle.processes
                if other != process and level.figure in self._bundle.processes[other]
            ]
            yield from self._level(level, tracks[level.figure], others, process=process)

    def starvation(self, process: str) -> Iterator[Finding]:
        """Wants to run and does not: more than usual, and more than the others do at the same time."""
        tracks = self._bundle.processes[process]
        if "run_delay" not in tracks:
            return
        usual = self._baselines.figure(tracks, "slowdown")
        bad: list[tuple[float, float]] = []
        said: dict[float, float] = {}
        before = usual.middle if usual else 1.0
        for time in _times(tracks["run_delay"], self._since, self._at):
            slowdown, delay = _slowdown(tracks["cpu"], tracks["run_delay"], time)
            if slowdown < max(LEAST_SLOWDOWN, SLOWDOWN_FACTOR * before) or delay < LEAST_DELAY:
                continue
            if self._bundle.age_s(process, time) < WARM_S:
                continue
            others = self._others_slowdown(process, time)
            if slowdown >= SLOWDOWN_FACTOR * others:
                bad.append((time, slowdown))
                said[time] = others
        for group in intervals(bad, gap_s=_gap_s(tracks["run_delay"])):
            # Of who hardly runs, little is known in a second; and who often wakes for a moment often waits for one.
            hardly_runs = max(_mean(tracks["cpu"], time) for time, _ in group) < 3 * LEAST_RAN
            waited = max(_mean(tracks["run_delay"], time) for time, _ in group)
            if len(group) < (4 if hardly_runs else 2) or (hardly_runs and waited < MOST_WAKING):
                continue
            slowdown = max(value for _, value in group)
            others = said[next(time for time, value in group if value == slowdown)]
            yield self._finding(
                process,
                FaultKind.CPU,
                group,
                strength=min(0.85, 0.5 + 0.05 * slowdown / max(others, before)),
                what=(
                    f"was given the processor for {1 / slowdown:.0%} of the time in which it wanted it, "
                    f"usually {1 / before:.0%}, the others {1 / others:.0%}"
                ),
                rules_out=("a busy host: the others there get their turn",),
            )

    def _others_slowdown(self, process: str, time: float) -> float:
        """Of all others together: who hardly runs hardly counts."""
        cpu = delay = 0.0
        for other, tracks in self._bundle.processes.items():
            if other != process and "run_delay" in tracks:
                cpu += _mean(tracks["cpu"], time)
                delay += _mean(tracks["run_delay"], time)
        return (cpu + delay) / cpu if cpu > 0.05 else 1.0

    def growth(self, process: str) -> Iterator[Finding]:
        """Memory that grows and grows, to a limit or not: its own, or that of a control group that is its alone."""
        own = self._rise(process, "rss_bytes")
        group = self._rise(process, "memory_bytes") if own is None else None
        if group is not None and self._is_shared(process, group):
            return
        if (rise := own or group) is not None:
            (began, low), (ended, high) = rise[0], rise[-1]
            yield self._finding(
                process,
                FaultKind.MEMORY,
                rise[1:],
                strength=0.78,
                what=f"grew from {low / 1e6:,.0f} to {high / 1e6:,.0f} MB of memory in {ended - began:.0f} s",
            )

    def _rise(self, process: str, figure: str) -> list[tuple[float, float]] | None:
        """The last rise without a pause, if it is one far above what this process ever had before, and fast."""
        tracks = self._bundle.processes[process]
        track, usual = tracks[figure], self._baselines.figure(tracks, figure)
        # A successor may be born larger than its predecessor.
        born = max(
            (time for time, _ in self._bundle.births.get(process, ()) if time <= self._at), default=0.0
        )
        points = list(track.points(max(self._since, born + WARM_S), self._at))
        if len(points) < 3:
            return None
        values = [value for _, value in points]
        high = max(values)
        last = first = values.index(high)
        while first and values[first - 1] < RISING * values[first]:
            first -= 1
        points = points[first : last + 1]
        grown, seconds = high - values[first], points[-1][0] - points[0][0]
        if seconds <= 0 or grown < max(GROWTH_BYTES, 0.5 * (usual.middle if usual else values[first])):
            return None
        # What it has had before, as in every save, it may have again.
        had = max(track.between(born + WARM_S, points[0][0]), default=0.0)
        return points if grown / seconds >= GROWTH_RATE and high > AS_BEFORE * had else None

    def _is_shared(self, process: str, rise: list[tuple[float, float]]) -> bool:
        """Whether others of its host are said to have grown as much meanwhile: then it is their group that did, and
        nobody knows who of them."""
        (began, low), (ended, high) = rise[0], rise[-1]
        for other, tracks in self._bundle.processes.items():
            if other == process or self._bundle.host(other) != self._bundle.host(process):
                continue
            before, after = tracks["memory_bytes"].at(began), tracks["memory_bytes"].at(ended)
            if before is not None and after is not None and after - before >= 0.5 * (high - low):
                return True
        return False

    def effort(self, process: str) -> Iterator[Finding]:
        """Needs far more time for the same work than before, and than those who do the same work."""
        tracks = self._bundle.processes[process]
        usual = self._baselines.figure(tracks, "effort_s")
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
            if self._bundle.age_s(process, time) > WARM_S and value > EFFORT_FACTOR / 1.5 * theirs > 0:
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

    def standstills(self, process: str) -> Iterator[Finding]:
        """Stands still again and again, neither stopped nor waiting for a disk: its device holds it up.

        Uninterruptible (D) is how a call into a driver that does not come back looks from outside, and how a process
        looks whose control group is frozen for moments.
        """
        seen = self._bundle.states_in(process, self._since, self._at)
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
                what=f"stood still in {share:.0%} of all looks at it, and neither waited for a disk nor for anybody",
            )

    def _waits_for_a_disk(self, process: str, times: list[float]) -> bool:
        tracks = self._bundle.processes[process]
        moved = [near for time in times if (near := tracks["io_delay"].at(time)) is not None]
        host = self._bundle.hosts[self._bundle.host(process)]
        busy = [near for time in times if (near := host["disk_busy"].at(time)) is not None]
        return (bool(moved) and median(moved) > 0.2) or (bool(busy) and median(busy) > 0.3)

    @staticmethod
    def _slow_kind(process: str) -> FaultKind:
        """Who computes on a device is slowed down by it, where nothing else is found."""
        return FaultKind.DEVICE if known_role(process) in (Role.MODEL, Role.SERVER) else FaultKind.SLOW

    # Hosts.

    def host_levels(self, host: str) -> Iterator[Finding]:
        tracks = self._bundle.hosts[host]
        for level in HOST_LEVELS:
            if level.figure not in tracks:
                continue
            others = [
                self._bundle.hosts[other][level.figure]
                for other in self._bundle.hosts
                if other != host and level.figure in self._bundle.hosts[other]
            ]
            yield from self._level(level, tracks[level.figure], others, process=self._voice(host, level.kind))

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
                self._voice(host, FaultKind.DISK_FULL),
                FaultKind.DISK_FULL,
                group,
                strength=0.85,
                what=f"the disk of its host has {value / 1e6:.1f} MB left (usually {usual:.0%} of it)",
                is_fact=True,
            )

    def foreign_writes(self, host: str) -> Iterator[Finding]:
        """A disk that is kept busy by others than this run, whose own writes are known."""
        tracks = self._bundle.hosts[host]
        usual = self._baselines.figure(tracks, "disk_busy")
        middle = usual.middle if usual else 0.0
        bad: list[tuple[float, float]] = []
        for time, value in tracks["disk_busy"].points(self._since, self._at):
            if value < max(BUSY, BUSY_FACTOR * middle):
                continue
            written = tracks["disk_written"].at(time) or 0.0
            own = sum(each["written"].at(time) or 0.0 for each in self._bundle.processes.values())
            if written - own > FOREIGN * written:
                bad.append((time, value))
        for group in intervals(bad, gap_s=GAP_S):
            if len(group) < BUSY_MOMENTS:
                continue
            value = max(value for _, value in group)
            yield self._finding(
                self._voice(host, FaultKind.DISK_SLOW),
                FaultKind.DISK_SLOW,
                group,
                strength=0.66,
                what=f"others than this run keep its host's disk busy {value:.0%} of the time, usually {middle:.0%}",
            )

    def host_memory(self, host: str) -> Iterator[Finding]:
        """Nothing left for anybody; whoever grew most is named."""
        tracks = self._bundle.hosts[host]
        track = tracks["memory_free"]
        usual = self._baselines.of(track)
        bad = [
            (time, value) for time, value in track.points(self._since, self._at) if value < HOST_MEMORY_FREE
        ]
        if usual is not None and usual.middle < 2 * HOST_MEMORY_FREE:
            return
        for group in intervals(bad, gap_s=GAP_S):
            if len(group) < 2:
                continue
            value = min(value for _, value in group)
            yield self._finding(
                self._voice(host, FaultKind.MEMORY),
                FaultKind.MEMORY,
                group,
                strength=0.6,
                what=f"its host has {value:.1%} of its memory left",
            )

    def _voice(self, host: str, kind: FaultKind) -> str:
        """The process that stands for a host: whoever suffers most from what is wrong there."""
        here = [process for process, where in self._bundle.host_of.items() if where == host]
        figure = _SUFFERED.get(kind)
        if figure is not None:
            suffers = [
                (_recent(self._bundle.processes[process][figure], self._at), process)
                for process in here
                if figure in self._bundle.processes[process]
            ]
            if suffers and max(suffers)[0] > (0.2 if figure == "io_delay" else 0.0):
                return max(suffers)[1]
        if MASTER in here:
            return MASTER
        agents = [process for process in here if known_role(process) is Role.AGENT]
        return next(iter(agents), next(iter(here), self._bundle.observer_of.get(host, MASTER)))

    # Both.

    def _level(self, level: Level, track: Track, others: list[Track], *, process: str) -> Iterator[Finding]:
        usual = self._baselines.of(track)
        middle = usual.middle if usual else 0.0
        bad: list[tuple[float, float]] = []
        elsewhere = 0.0
        bound = max(level.least, level.factor * middle)
        for time, value in track.points(self._since, self._at):
            if value < bound:
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
            what = level.words.format(value=value, usual=middle, others=elsewhere)
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
            # A rate of this sample is about the time since the one before.
            onset=first - 1.0,
            until=last,
            strength=strength,
            what=what,
            evidence=(Evidence(f"figures/{observer}.jsonl", last, f"{process}: {what}"),),
            is_fact=is_fact,
            rules_out=rules_out,
        )


_SUFFERED = {
    FaultKind.DISK_SLOW: "io_delay",
    FaultKind.MEMORY: "memory_bytes",
    FaultKind.DEVICE_MEMORY: "device_memory_bytes",
}
"""In which figure of a process it shows what is wrong with its host."""


def _gap_s(track: Track, gap_s: float = GAP_S) -> float:
    """Where samples come rarely, as on a host that is busy, what they say is one trouble all the same."""
    return max(gap_s, SPACINGS * track.spacing_s())


def _times(track: Track, since: float, at: float) -> list[float]:
    return [time for time in track.times if since <= time <= at]


def _mean(track: Track, time: float) -> float:
    values = track.between(time - SMOOTH_S, time + 0.6)
    return sum(values) / len(values) if values else 0.0


def _median(track: Track, time: float) -> float:
    values = track.between(time - SMOOTH_S, time + 0.6)
    return median(values) if values else 0.0


def _recent(track: Track, at: float) -> float:
    values = track.between(at - 5.0, at)
    return max(values) if values else 0.0


def _slowdown(cpu: Track, delay: Track, time: float) -> tuple[float, float]:
    """How many times longer its work takes because it waits for a processor, and seconds of that waiting per second."""
    ran, waited = _mean(cpu, time), _mean(delay, time)
    # Processor time is counted in ticks of 10 ms: who had less than one is taken to have had that.
    return (ran + waited) / max(ran, LEAST_RAN), waited
