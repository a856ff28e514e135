"""What holds a healthy run up the most: compute, communication, storage or system, with its figure and a suggestion.

The time of the last steps is cut up by the master's phases, and each phase by what was done meanwhile:

    collecting, evaluating   at each moment the first that holds:
                             a server generates: compute; as far as it waited for a processor: system
                             a reward function judges, an environment plays, a row is read: compute
                             nobody does any of it: system, the requests and answers between them
    training                 ranks compute; as far as they waited for each other or for samples: communication;
                             as far as they waited for a processor: system
    publishing               communication
    committing, saving       storage
    everything else          system: starts, recoveries

Time is that of the run, counted once, however many processes were at the same.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from statistics import fmean, median

import msgspec

from kintsugi.diagnosis.evidence import MASTER, Bundle, known_role
from kintsugi.diagnosis.intervals import Intervals, common, seconds, seconds_within, union, without
from kintsugi.diagnosis.reading import Reader, last_recorded
from kintsugi.diagnosis.stations import Stations, add_open, anyone, read_stations
from kintsugi.diagnosis.tracks import Track
from kintsugi.errors import UserError
from kintsugi.types import Role

PAST_S, NUM_STEPS = 600.0, 20
"""So much of the past is looked at, or so many steps, whichever is longer."""
LOOK_S = 1.0
"""How far two looks of an agent are apart."""
LEAST_BESIDE = 0.05
"""From this share on, what goes on beside is worth a word."""
LEAST_WAIT = 0.25
"""From this share on, processes that wait for a processor explain why requests are slow."""
COMPUTE, COMMUNICATION, STORAGE, SYSTEM = "compute", "communication", "storage", "system"

_NOT_COUNTED = frozenset({"ended", "gone"})
_WRITTEN = ("committing", "saving")
_MORE_PROCESSORS = "More processors, or fewer processes: "
_BESIDE_TRAINING = "samples that are collected beside training (`asynchrony.max_staleness`)"
_SUGGESTIONS = {
    COMPUTE: {
        "sampling": "More generation servers (`kintsugi scale`) where processors or accelerators are free, more slots, "
        "or shorter completions.",
        "evaluation": "Evaluate less often (`eval.every`), or fewer problems and samples (`data.num_eval`, "
        "`eval.num_samples`).",
        "reward": "A faster reward; if it waits for something, an `async def` one, which judges many groups at once; "
        f"more rollout workers (`rollout.workers`); or {_BESIDE_TRAINING}.",
        "environment": "Faster tools, and sandboxes that are ready before they are needed; more rollout workers "
        f"(`rollout.workers`); or {_BESIDE_TRAINING}.",
        "data": "Rows that take less work to read, or more rollout workers (`rollout.workers`).",
        "training": "More ranks, larger micro-batches, or a smaller batch; an accelerator if there is none.",
    },
    COMMUNICATION: {
        "training": "Fewer ranks with more work each, or hosts that are closer to each other.",
        "publishing": "Shared memory or a collective for the weights; with staleness they go beside.",
    },
    STORAGE: {"storage": "A faster disk for the run folder, or checkpoints less often (`checkpoint.every`)."},
    SYSTEM: {
        "sampling": _MORE_PROCESSORS + "what could decode waits for its turn.",
        "evaluation": _MORE_PROCESSORS + "what could decode waits for its turn.",
        "training": _MORE_PROCESSORS + "ranks wait for their turn.",
        "coordination": f"Larger batches, so that less is to be arranged for each sample; or {_BESIDE_TRAINING}.",
        "other": "Look at `kintsugi incidents`: starts and recoveries take this time.",
    },
}


class Part(msgspec.Struct, frozen=True):
    """Seconds of a run that went into one thing."""

    kind: str
    """compute, communication, storage or system."""
    where: str
    seconds: float
    share: float
    """Of all that was looked at."""
    figure: str
    """What was measured, in words."""
    suggestion: str


class Bottleneck(msgspec.Struct, frozen=True):
    """`parts` sum up to the time that was looked at; the largest first."""

    run: str
    seconds: float
    steps: int
    dominant: str
    figure: str
    suggestion: str
    shares: dict[str, float]
    """Kind → share of the time."""
    parts: tuple[Part, ...]


class _Slice(msgspec.Struct, frozen=True):
    """A part before it is known what all of it is."""

    kind: str
    where: str
    seconds: float
    figure: str
    suggestion: str = ""
    """Where it depends on more than kind and place."""


def find_bottleneck(run_dir: str | Path, *, at: float | None = None) -> Bottleneck:
    """Of a run, dead or alive, up to a moment. Raises UserError where there is no run, or none that did anything."""
    path = Path(run_dir)
    since = (at if at is not None else last_recorded(path)) - PAST_S
    bundle = _read(path, since=since, at=at)
    first = _first_step_began(bundle)
    if first < since:
        since, bundle = first, _read(path, since=first, at=at)
    stations = read_stations(path, bundle, since=since, until=bundle.at)
    if bundle.phases and bundle.phases[-1].name not in _NOT_COUNTED:
        add_open(stations, bundle, since=bundle.phases[-1].time)
    return bottleneck_of(bundle, stations, since=max(since, stations.since))


def _read(run_dir: Path, *, since: float, at: float | None) -> Bundle:
    reader = Reader(run_dir, since=since)
    try:
        return reader.read(until=at if at is not None else float("inf"))
    finally:
        reader.close()


def _first_step_began(bundle: Bundle) -> float:
    """Of the last steps. Of a run with fewer than that, all of it is looked at that the master has told."""
    if len(bundle.steps) >= NUM_STEPS:
        step = bundle.steps[-NUM_STEPS]
        return step.time - step.duration_s
    return min((phase.time for phase in bundle.phases), default=float("inf"))


def bottleneck_of(
    bundle: Bundle, stations: Stations | None = None, *, since: float = float("-inf")
) -> Bottleneck:
    """The same of what was gathered, from a moment on. Pure."""
    phases = _phases(bundle, since=since)
    stations = stations or Stations()
    slices = [each for each in _slices(bundle, stations, phases) if each.seconds > 0]
    total = sum(each.seconds for each in slices)
    if not total:
        raise UserError(f"{bundle.run} has recorded no phase of its work: nothing can be said of its time")
    parts = [
        Part(
            each.kind,
            each.where,
            round(each.seconds, 3),
            round(each.seconds / total, 4),
            each.figure,
            each.suggestion or _SUGGESTIONS[each.kind][each.where],
        )
        for each in sorted(slices, key=lambda each: -each.seconds)
    ]
    shares = {
        kind: round(sum(part.share for part in parts if part.kind == kind), 4)
        for kind in (COMPUTE, COMMUNICATION, STORAGE, SYSTEM)
    }
    dominant = max(shares, key=lambda kind: shares[kind])
    first = next(part for part in parts if part.kind == dominant)
    return Bottleneck(
        run=bundle.run,
        seconds=round(total, 3),
        steps=sum(step.time > since for step in bundle.steps),
        dominant=dominant,
        figure=f"{shares[dominant]:.0%} of the time, mostly {first.where} ({first.share:.0%}): {first.figure}",
        suggestion=first.suggestion,
        shares=shares,
        parts=tuple(parts),
    )


# Phases.


def _phases(bundle: Bundle, *, since: float) -> dict[str, Intervals]:
    """When the master was in which; the last one goes on up to the last thing that was recorded."""
    changes = sorted([*((phase.time, phase.name) for phase in bundle.phases), *_rebirths(bundle)])
    found: dict[str, Intervals] = defaultdict(list)
    for (begin, name), (end, _) in itertools.pairwise([*changes, (bundle.at, "")]):
        if max(begin, since) < end and name not in _NOT_COUNTED:
            found[name].append((max(begin, since), end))
    return found


def _rebirths(bundle: Bundle) -> Iterator[tuple[float, str]]:
    """A master that was killed has left no phase: its last one ends with its last heartbeat, and another one starts."""
    beats = [beat.time for beat in bundle.beats.get(MASTER, ())]
    for born, _ in bundle.births.get(MASTER, ()):
        before = bundle.phase_at(born)
        if before is not None and before.time < born:
            yield max([before.time, *(time for time in beats if time < born)]), "gone"
            yield born, "starting"


def _slices(bundle: Bundle, stations: Stations, phases: dict[str, Intervals]) -> Iterator[_Slice]:
    yield from _collected(bundle, stations, phases)
    yield from _trained(bundle, stations, phases.get("training", []))
    publishing = seconds(phases.get("publishing", []))
    yield _Slice(COMMUNICATION, "publishing", publishing, "new weights on their way to the servers")
    written = union(interval for name in _WRITTEN for interval in phases.get(name, ()))
    yield _Slice(STORAGE, "storage", seconds(written), _disk_figure(bundle))
    known = {*_WRITTEN, "collecting", "evaluating", "training", "publishing"}
    rest = {name: seconds(intervals) for name, intervals in phases.items() if name not in known}
    words = ", ".join(f"{name} {time:.1f} s" for name, time in rest.items())
    yield _Slice(SYSTEM, "other", sum(rest.values()), words)


# Collecting and evaluating.


def _collected(bundle: Bundle, stations: Stations, phases: dict[str, Intervals]) -> Iterator[_Slice]:
    """Cut by who was at work. The order is that of the ways out: what is done while servers generate delays nobody."""
    collecting, evaluating = phases.get("collecting", []), phases.get("evaluating", [])
    both = union([*collecting, *evaluating])
    if not stations.is_known:
        figure = f"who did what was not recorded; {_busy_figure(bundle, both)}"
        yield _Slice(COMPUTE, "sampling", seconds(both), figure)
        return
    generating = anyone(stations.generating)
    yield from _generated(bundle, stations, "sampling", common(collecting, generating))
    yield from _generated(bundle, stations, "evaluation", common(evaluating, generating))
    rest = without(both, generating)
    for where, at_work, words in (
        ("reward", stations.judging, _judged_words(stations)),
        ("environment", stations.playing, "environments play"),
        ("data", stations.handing_out, "rollout workers read rows"),
    ):
        mine = common(rest, anyone(at_work))
        rest = without(rest, mine)
        to_evaluate = seconds(common(mine, evaluating))
        also = f"; {to_evaluate:.1f} s of it to evaluate" if to_evaluate >= 0.05 else ""
        figure = f"nobody generates, {words}{also}; {_busy_figure(bundle, mine)}"
        yield _Slice(COMPUTE, where, seconds(mine), figure)
    yield _coordinated(bundle, stations, rest)


def _generated(bundle: Bundle, stations: Stations, where: str, intervals: Intervals) -> Iterator[_Slice]:
    at_work = {process: common(intervals, mine) for process, mine in stations.generating.items()}
    share = _share_waiting_for_a_turn(bundle, at_work)
    waited = seconds(intervals) * share
    yield _Slice(SYSTEM, where, waited, f"servers that generate wait {share:.0%} of it for a processor")
    figure = f"servers generate; {_busy_figure(bundle, intervals)}"
    yield _Slice(COMPUTE, where, seconds(intervals) - waited, figure)


def _judged_words(stations: Stations) -> str:
    each_s = stations.reward_s
    if each_s is None:
        return "rewards judge"
    words = f"{each_s:.1f} s" if each_s >= 1 else f"{each_s * 1000:.0f} ms"
    return f"rewards judge, a worker takes {words} for a group"


def _coordinated(bundle: Bundle, stations: Stations, intervals: Intervals) -> _Slice:
    total = seconds(intervals)
    asked = seconds(common(intervals, anyone(stations.asking))) / total if total else 0.0
    roles = (Role.MASTER, Role.MANAGER, Role.ROLLOUT)
    waits = {
        process: _share_waiting_for_a_turn(bundle, {process: intervals})
        for process in list(bundle.processes)
        if known_role(process) in roles
    }
    figure = "nobody generates or judges"
    if asked >= LEAST_BESIDE:
        figure += f"; in {asked:.0%} of it a request is on its way"
    most = max(waits, key=lambda process: waits[process], default=None)
    if most is None or waits[most] < LEAST_WAIT:
        return _Slice(SYSTEM, "coordination", total, figure)
    figure += f"; {most} waits {waits[most]:.0%} of it for a processor"
    return _Slice(
        SYSTEM, "coordination", total, figure, _MORE_PROCESSORS + "requests wait until somebody has a turn."
    )


# Training.


def _trained(bundle: Bundle, stations: Stations, intervals: Intervals) -> Iterator[_Slice]:
    """Ranks compute, wait for others, or wait for a processor."""
    ranks = [process for process in list(bundle.processes) if known_role(process) is Role.MODEL]
    others = _share_waiting_for_others(bundle, ranks, intervals)
    turns = min(_share_waiting_for_a_turn(bundle, dict.fromkeys(ranks, intervals)), 1 - others)
    total, beside = seconds(intervals), _beside(stations, intervals)
    figure = f"ranks wait {turns:.0%} of it for a processor{beside}"
    yield _Slice(SYSTEM, "training", total * turns, figure)
    figure = f"ranks wait {others:.0%} of it for each other and for samples"
    yield _Slice(COMMUNICATION, "training", total * others, figure)
    figure = f"ranks compute; {_busy_figure(bundle, intervals)}{beside}"
    yield _Slice(COMPUTE, "training", total * (1 - turns - others), figure)


def _beside(stations: Stations, training: Intervals) -> str:
    """Where samples are collected beside training: as collecting only that counts for which training had to wait."""
    share = seconds(common(anyone(stations.generating), training)) / seconds(training) if training else 0.0
    return f"; servers generate beside {share:.0%} of it" if share >= LEAST_BESIDE else ""


def _share_waiting_for_others(bundle: Bundle, ranks: list[str], intervals: Intervals) -> float:
    """Of the heartbeats of ranks that trained, those in which they waited for somebody by name."""
    training = waiting = 0
    for rank in ranks:
        for beat in bundle.beats.get(rank, ()):
            if seconds_within(intervals, beat.time - 1e-3, beat.time):
                training += 1
                waiting += any(wait.whom[:1].isalpha() and "-" in wait.whom for wait in beat.waits)
    return waiting / training if training else 0.0


# Figures.


def _share_waiting_for_a_turn(bundle: Bundle, at_work: Mapping[str, Intervals]) -> float:
    """Of the time in which these processes were at work, how much they waited for a processor.

    They are looked at once a second, and wait mostly while they are at work. So all that a process waited in a second
    is taken to lie in the part of it in which it worked, or in all of the time in which it wanted to run, if that is
    more: that of several threads, or of one that was woken beside its work.
    """
    worked = waited = 0.0
    for process, intervals in at_work.items():
        tracks = bundle.processes.get(process)
        if tracks is None or not intervals:
            continue
        for (begin, end), ran, delay in zip(
            _looks(tracks["cpu"]), tracks["cpu"].values, tracks["run_delay"].values, strict=True
        ):
            part = seconds_within(intervals, begin, end)
            if part and delay:
                waited += part * delay * (end - begin) / max(part, (ran + delay) * (end - begin))
            worked += part
    return waited / worked if worked else 0.0


def _looks(track: Track) -> Iterator[tuple[float, float]]:
    """The stretch of time that each of its values is of."""
    before = None
    for time in track.times:
        yield (time - LOOK_S if before is None else before), time
        before = time


def _mean_within(track: Track, intervals: Intervals) -> float | None:
    """Of a figure in these stretches of time; None where nobody looked."""
    weights = [seconds_within(intervals, begin, end) for begin, end in _looks(track)]
    return fmean(track.values, weights=weights) if sum(weights) else None


def _busy_figure(bundle: Bundle, intervals: Intervals) -> str:
    """Of the busiest accelerator where there are any, and of the busiest host's processors."""
    devices = {name for tracks in bundle.hosts.values() for name in tracks if name.endswith("_utilization")}
    used = _most(bundle, devices, intervals)
    busy = _most(bundle, {"busy"}, intervals)
    words = [] if busy is None else [f"processors are busy {busy:.0%} of it"]
    if used is not None:
        full = _most(bundle, {"device_memory_share"}, intervals)
        memory = "" if full is None else f", its memory is {full:.0%} full"
        words.insert(0, f"the busiest accelerator is used {used:.0%} of it{memory}")
    return ", ".join(words) or "how busy was not recorded"


def _most(bundle: Bundle, names: Collection[str], intervals: Intervals) -> float | None:
    means = (
        _mean_within(tracks[name], intervals)
        for tracks in bundle.hosts.values()
        for name in names
        if name in tracks
    )
    # Looks are not exactly as far apart as their stamps say.
    return max((min(1.0, mean) for mean in means if mean is not None), default=None)


def _disk_figure(bundle: Bundle) -> str:
    times = [value for tracks in bundle.hosts.values() for value in tracks["fsync_s"].values]
    return f"a small write takes {median(times) * 1000:.1f} ms to reach the disk" if times else "writing"


def tell(report: Bottleneck) -> str:
    """For a terminal."""
    lines = [
        f"{report.run}: {report.steps} steps in {report.seconds:.1f} s",
        f"held up most by {report.dominant}: {report.figure}",
        f"suggestion: {report.suggestion}",
        "",
    ]
    lines += [
        f"  {part.share:>6.1%}  {part.seconds:>8.1f} s  {part.kind:<14} {part.where:<13} {part.figure}"
        for part in report.parts
        if part.share >= 0.001
    ]
    return "\n".join(lines)
