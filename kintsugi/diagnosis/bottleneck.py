"""Bottleneck of a healthy run: compute, communication, storage or system, with a measurement and a suggestion.

The time of the last steps is divided by the phases of the master, and each phase by the work that was done meanwhile:

    collecting, evaluating   at each moment the first that holds:
                             a server generates: compute; its share of waiting for a CPU: system
                             a reward function scores, an environment runs, a row is read: compute
                             none of these: system, the requests and replies between them
    training                 ranks compute; their share of waiting for each other or for samples: communication;
                             their share of waiting for a CPU: system
    publishing               communication
    committing, saving       storage
    everything else          system: starts, recoveries

Time is wall-clock time of the run, counted once, however many processes work at the same time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from statistics import fmean, median

import msgspec

from kintsugi.diagnosis.activity import ActivityTable, add_open, any_active, read_activity
from kintsugi.diagnosis.evidence import MASTER, EvidenceBundle, awaited_processes, known_role
from kintsugi.diagnosis.reader import EvidenceReader, last_recorded
from kintsugi.diagnosis.timeseries import (
    Intervals,
    TimeSeries,
    common,
    seconds,
    seconds_within,
    union,
    without,
)
from kintsugi.errors import UserError
from kintsugi.types import Role

PAST_S, NUM_STEPS = 600.0, 20
"""Analysed past: this many seconds or steps, whichever is longer."""
SAMPLE_S = 1.0
"""Time between two samples of an agent."""
LEAST_CONCURRENT = 0.05
"""Least share of concurrent work that is mentioned."""
LEAST_WAIT = 0.25
"""Least share of waiting for a CPU that explains slow requests."""
COMPUTE, COMMUNICATION, STORAGE, SYSTEM = "compute", "communication", "storage", "system"

_NOT_COUNTED = frozenset({"ended", "gone"})
_WRITTEN = ("committing", "saving")
_MORE_PROCESSORS = "More CPUs, or fewer processes: "
_DURING_TRAINING = "samples that are collected during training (`asynchrony.max_staleness`)"
_SUGGESTIONS = {
    COMPUTE: {
        "sampling": "More generation servers (`kintsugi scale`) where CPUs or accelerators are free, more slots, "
        "or shorter completions.",
        "evaluation": "Evaluate less often (`eval.every`), or fewer problems and samples (`data.num_eval`, "
        "`eval.num_samples`).",
        "reward": "A faster reward; if it waits for something, an `async def` one, which scores many groups "
        f"concurrently; more rollout workers (`rollout.workers`); or {_DURING_TRAINING}.",
        "environment": "Faster tools, and sandboxes that are ready before they are needed; more rollout workers "
        f"(`rollout.workers`); or {_DURING_TRAINING}.",
        "data": "Rows that take less work to read, or more rollout workers (`rollout.workers`).",
        "training": "More ranks, larger micro-batches, or a smaller batch; an accelerator if there is none.",
    },
    COMMUNICATION: {
        "training": "Fewer ranks with more work each, or hosts that are closer to each other.",
        "publishing": "Shared memory or a collective for the weights; with staleness they are sent during training.",
    },
    STORAGE: {"storage": "A faster disk for the run folder, or checkpoints less often (`checkpoint.every`)."},
    SYSTEM: {
        "sampling": _MORE_PROCESSORS + "servers that could decode wait for a CPU.",
        "evaluation": _MORE_PROCESSORS + "servers that could decode wait for a CPU.",
        "training": _MORE_PROCESSORS + "ranks wait for a CPU.",
        "coordination": f"Larger batches, so that there is less coordination for each sample; or {_DURING_TRAINING}.",
        "other": "Look at `kintsugi incidents`: starts and recoveries take this time.",
    },
}


class BottleneckPart(msgspec.Struct, frozen=True):
    """Seconds of a run that were spent on one kind of work."""

    kind: str
    """compute, communication, storage or system."""
    where: str
    seconds: float
    share: float
    """Share of the analysed time."""
    figure: str
    """Measurement, as text."""
    suggestion: str


class Bottleneck(msgspec.Struct, frozen=True):
    """`parts` add up to the analysed time; the largest first."""

    run: str
    seconds: float
    steps: int
    dominant: str
    figure: str
    suggestion: str
    shares: dict[str, float]
    """Kind → share of the time."""
    parts: tuple[BottleneckPart, ...]


class _Slice(msgspec.Struct, frozen=True):
    """A part before the total is known."""

    kind: str
    where: str
    seconds: float
    figure: str
    suggestion: str = ""
    """Suggestion where it depends on more than kind and place."""


def find_bottleneck(run_dir: str | Path, *, at: float | None = None) -> Bottleneck:
    """Analyse a run, ended or running, up to a moment. Raises UserError if there is no run, or no work in it."""
    path = Path(run_dir)
    since = (at if at is not None else last_recorded(path)) - PAST_S
    bundle = _read(path, since=since, at=at)
    first = _first_step_began(bundle)
    if first < since:
        since, bundle = first, _read(path, since=first, at=at)
    activity = read_activity(path, bundle, since=since, until=bundle.at)
    if bundle.phases and bundle.phases[-1].name not in _NOT_COUNTED:
        add_open(activity, bundle, since=bundle.phases[-1].time)
    return bottleneck_of(bundle, activity, since=max(since, activity.since))


def _read(run_dir: Path, *, since: float, at: float | None) -> EvidenceBundle:
    reader = EvidenceReader(run_dir, since=since)
    try:
        return reader.read(until=at if at is not None else float("inf"))
    finally:
        reader.close()


def _first_step_began(bundle: EvidenceBundle) -> float:
    """Return the begin of the last steps; with fewer steps, the begin of the first recorded phase."""
    if len(bundle.steps) >= NUM_STEPS:
        step = bundle.steps[-NUM_STEPS]
        return step.time - step.duration_s
    return min((phase.time for phase in bundle.phases), default=float("inf"))


def bottleneck_of(
    bundle: EvidenceBundle, activity: ActivityTable | None = None, *, since: float = float("-inf")
) -> Bottleneck:
    """Analyse gathered evidence, from a moment on. Pure."""
    phases = _phases(bundle, since=since)
    activity = activity or ActivityTable()
    slices = [each for each in _slices(bundle, activity, phases) if each.seconds > 0]
    total = sum(each.seconds for each in slices)
    if not total:
        raise UserError(f"{bundle.run} has recorded no phase of its work: nothing can be said of its time")
    parts = [
        BottleneckPart(
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


def _phases(bundle: EvidenceBundle, *, since: float) -> dict[str, Intervals]:
    """Return phase → intervals; the last phase lasts up to the last record."""
    changes = sorted([*((phase.time, phase.name) for phase in bundle.phases), *_rebirths(bundle)])
    found: dict[str, Intervals] = defaultdict(list)
    for (begin, name), (end, _) in itertools.pairwise([*changes, (bundle.at, "")]):
        if max(begin, since) < end and name not in _NOT_COUNTED:
            found[name].append((max(begin, since), end))
    return found


def _rebirths(bundle: EvidenceBundle) -> Iterator[tuple[float, str]]:
    """Yield phase changes of killed masters: the last phase ends with the last heartbeat, and a start follows."""
    beats = [beat.time for beat in bundle.beats.get(MASTER, ())]
    for born, _ in bundle.births.get(MASTER, ()):
        before = bundle.phase_at(born)
        if before is not None and before.time < born:
            yield max([before.time, *(time for time in beats if time < born)]), "gone"
            yield born, "starting"


def _slices(
    bundle: EvidenceBundle, activity: ActivityTable, phases: dict[str, Intervals]
) -> Iterator[_Slice]:
    yield from _collected(bundle, activity, phases)
    yield from _trained(bundle, activity, phases.get("training", []))
    publishing = seconds(phases.get("publishing", []))
    yield _Slice(COMMUNICATION, "publishing", publishing, "new weights on their way to the servers")
    written = union(interval for name in _WRITTEN for interval in phases.get(name, ()))
    yield _Slice(STORAGE, "storage", seconds(written), _disk_text(bundle))
    known = {*_WRITTEN, "collecting", "evaluating", "training", "publishing"}
    rest = {name: seconds(intervals) for name, intervals in phases.items() if name not in known}
    words = ", ".join(f"{name} {time:.1f} s" for name, time in rest.items())
    yield _Slice(SYSTEM, "other", sum(rest.values()), words)


# Collecting and evaluating.


def _collected(
    bundle: EvidenceBundle, activity: ActivityTable, phases: dict[str, Intervals]
) -> Iterator[_Slice]:
    """Divide the time by active processes. Generation comes first: work that overlaps with it causes no delay."""
    collecting, evaluating = phases.get("collecting", []), phases.get("evaluating", [])
    both = union([*collecting, *evaluating])
    if not activity.is_known:
        figure = f"the activity of processes was not recorded; {_busy_text(bundle, both)}"
        yield _Slice(COMPUTE, "sampling", seconds(both), figure)
        return
    generating = any_active(activity.generating)
    yield from _generated(bundle, activity, "sampling", common(collecting, generating))
    yield from _generated(bundle, activity, "evaluation", common(evaluating, generating))
    rest = without(both, generating)
    for where, at_work, words in (
        ("reward", activity.judging, _reward_text(activity)),
        ("environment", activity.playing, "environments run"),
        ("data", activity.handing_out, "rollout workers read rows"),
    ):
        mine = common(rest, any_active(at_work))
        rest = without(rest, mine)
        to_evaluate = seconds(common(mine, evaluating))
        also = f"; {to_evaluate:.1f} s of it for evaluation" if to_evaluate >= 0.05 else ""
        figure = f"no server generates, {words}{also}; {_busy_text(bundle, mine)}"
        yield _Slice(COMPUTE, where, seconds(mine), figure)
    yield _coordinated(bundle, activity, rest)


def _generated(
    bundle: EvidenceBundle, activity: ActivityTable, where: str, intervals: Intervals
) -> Iterator[_Slice]:
    at_work = {process: common(intervals, mine) for process, mine in activity.generating.items()}
    share = _share_waiting_for_a_turn(bundle, at_work)
    waited = seconds(intervals) * share
    yield _Slice(SYSTEM, where, waited, f"servers that generate wait {share:.0%} of it for a CPU")
    figure = f"servers generate; {_busy_text(bundle, intervals)}"
    yield _Slice(COMPUTE, where, seconds(intervals) - waited, figure)


def _reward_text(activity: ActivityTable) -> str:
    each_s = activity.reward_s
    if each_s is None:
        return "rewards are computed"
    words = f"{each_s:.1f} s" if each_s >= 1 else f"{each_s * 1000:.0f} ms"
    return f"rewards are computed, a worker takes {words} for a group"


def _coordinated(bundle: EvidenceBundle, activity: ActivityTable, intervals: Intervals) -> _Slice:
    total = seconds(intervals)
    asked = seconds(common(intervals, any_active(activity.asking))) / total if total else 0.0
    roles = (Role.MASTER, Role.MANAGER, Role.ROLLOUT)
    waits = {
        process: _share_waiting_for_a_turn(bundle, {process: intervals})
        for process in list(bundle.processes)
        if known_role(process) in roles
    }
    figure = "no server generates and no reward is computed"
    if asked >= LEAST_CONCURRENT:
        figure += f"; in {asked:.0%} of it a request is in flight"
    most = max(waits, key=lambda process: waits[process], default=None)
    if most is None or waits[most] < LEAST_WAIT:
        return _Slice(SYSTEM, "coordination", total, figure)
    figure += f"; {most} waits {waits[most]:.0%} of it for a CPU"
    return _Slice(
        SYSTEM, "coordination", total, figure, _MORE_PROCESSORS + "requests wait for processes without a CPU."
    )


# Training.


def _trained(bundle: EvidenceBundle, activity: ActivityTable, intervals: Intervals) -> Iterator[_Slice]:
    """Divide training: ranks compute, wait for others, or wait for a CPU."""
    ranks = [process for process in list(bundle.processes) if known_role(process) is Role.MODEL]
    others = _share_waiting_for_others(bundle, ranks, intervals)
    turns = min(_share_waiting_for_a_turn(bundle, dict.fromkeys(ranks, intervals)), 1 - others)
    total, concurrent = seconds(intervals), _concurrent(activity, intervals)
    figure = f"ranks wait {turns:.0%} of it for a CPU{concurrent}"
    yield _Slice(SYSTEM, "training", total * turns, figure)
    figure = f"ranks wait {others:.0%} of it for each other and for samples"
    yield _Slice(COMMUNICATION, "training", total * others, figure)
    figure = f"ranks compute; {_busy_text(bundle, intervals)}{concurrent}"
    yield _Slice(COMPUTE, "training", total * (1 - turns - others), figure)


def _concurrent(activity: ActivityTable, training: Intervals) -> str:
    """Return a remark if samples are collected during training; only time that training waited for counts as
    collecting."""
    share = (
        seconds(common(any_active(activity.generating), training)) / seconds(training) if training else 0.0
    )
    return f"; servers generate during {share:.0%} of it" if share >= LEAST_CONCURRENT else ""


def _share_waiting_for_others(bundle: EvidenceBundle, ranks: list[str], intervals: Intervals) -> float:
    """Return the share of heartbeats of training ranks in which they waited for named processes."""
    training = waiting = 0
    for rank in ranks:
        for beat in bundle.beats.get(rank, ()):
            if seconds_within(intervals, beat.time - 1e-3, beat.time):
                training += 1
                waiting += any(map(awaited_processes, beat.waits))
    return waiting / training if training else 0.0


# Measurements.


def _share_waiting_for_a_turn(bundle: EvidenceBundle, at_work: Mapping[str, Intervals]) -> float:
    """Return the share of their working time in which these processes waited for a CPU.

    Processes are sampled once a second and wait mostly while they work. So all waiting of a second is attributed to
    the part in which the process worked, or to all of its runnable time if that is longer, as with several threads.
    """
    worked = waited = 0.0
    for process, intervals in at_work.items():
        tracks = bundle.processes.get(process)
        if tracks is None or not intervals:
            continue
        for (begin, end), ran, delay in zip(
            _sample_intervals(tracks["cpu"]), tracks["cpu"].values, tracks["run_delay"].values, strict=True
        ):
            part = seconds_within(intervals, begin, end)
            if part and delay:
                waited += part * delay * (end - begin) / max(part, (ran + delay) * (end - begin))
            worked += part
    return waited / worked if worked else 0.0


def _sample_intervals(track: TimeSeries) -> Iterator[tuple[float, float]]:
    """Yield the interval that each value covers."""
    before = None
    for time in track.times:
        yield (time - SAMPLE_S if before is None else before), time
        before = time


def _mean_within(track: TimeSeries, intervals: Intervals) -> float | None:
    """Return the mean of a reading in these intervals; None where there are no samples."""
    weights = [seconds_within(intervals, begin, end) for begin, end in _sample_intervals(track)]
    return fmean(track.values, weights=weights) if sum(weights) else None


def _busy_text(bundle: EvidenceBundle, intervals: Intervals) -> str:
    """Return the use of the busiest accelerator, if there are any, and of the CPUs of the busiest host."""
    devices = {name for tracks in bundle.hosts.values() for name in tracks if name.endswith("_utilization")}
    used = _most(bundle, devices, intervals)
    busy = _most(bundle, {"busy"}, intervals)
    words = [] if busy is None else [f"CPUs are busy {busy:.0%} of it"]
    if used is not None:
        full = _most(bundle, {"device_memory_share"}, intervals)
        memory = "" if full is None else f", its memory is {full:.0%} full"
        words.insert(0, f"the busiest accelerator is used {used:.0%} of it{memory}")
    return ", ".join(words) or "the load was not recorded"


def _most(bundle: EvidenceBundle, names: Collection[str], intervals: Intervals) -> float | None:
    means = (
        _mean_within(tracks[name], intervals)
        for tracks in bundle.hosts.values()
        for name in names
        if name in tracks
    )
    # The times between samples are not exactly those of their stamps.
    return max((min(1.0, mean) for mean in means if mean is not None), default=None)


def _disk_text(bundle: EvidenceBundle) -> str:
    times = [value for tracks in bundle.hosts.values() for value in tracks["fsync_s"].values]
    return f"a small write takes {median(times) * 1000:.1f} ms to reach the disk" if times else "writing"


def format_bottleneck(report: Bottleneck) -> str:
    """Format the analysis for a terminal."""
    lines = [
        f"{report.run}: {report.steps} steps in {report.seconds:.1f} s",
        f"bottleneck {report.dominant}: {report.figure}",
        f"suggestion: {report.suggestion}",
        "",
    ]
    lines += [
        f"  {part.share:>6.1%}  {part.seconds:>8.1f} s  {part.kind:<14} {part.where:<13} {part.figure}"
        for part in report.parts
        if part.share >= 0.001
    ]
    return "\n".join(lines)
