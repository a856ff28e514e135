"""What holds a healthy run up the most: compute, communication, storage or system, with its figure and a suggestion.

A step's time is cut up by the master's phases, and each phase by what the processes that it waits for did meanwhile:

    collecting, evaluating   servers decode: compute; as far as they waited for a processor: system
    training                 ranks compute; as far as they waited for each other or for samples: communication;
                             as far as they waited for a processor: system
    publishing               communication
    committing, saving       storage
    everything else          system: starts, recoveries
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import msgspec

from kintsugi.diagnosis.evidence import Bundle
from kintsugi.diagnosis.reading import Reader
from kintsugi.errors import UserError
from kintsugi.types import Role

PAST_S = 600.0
COMPUTE, COMMUNICATION, STORAGE, SYSTEM = "compute", "communication", "storage", "system"

_SAMPLED = ("collecting", "evaluating")
_WRITTEN = ("committing", "saving")
_SUGGESTIONS = {
    (COMPUTE, "sampling"): "More generation servers (`kintsugi scale`), more slots, or shorter completions.",
    (
        COMPUTE,
        "training",
    ): "More ranks, larger micro-batches, or a smaller batch; an accelerator if there is none.",
    (COMMUNICATION, "training"): "Fewer ranks with more work each, or hosts that are closer to each other.",
    (
        COMMUNICATION,
        "publishing",
    ): "Shared memory or a collective for the weights; with staleness they go beside.",
    (STORAGE, "storage"): "A faster disk for the run folder, or checkpoints less often (`checkpoint.every`).",
    (SYSTEM, "sampling"): "More processors, or fewer processes: what could decode waits for its turn.",
    (SYSTEM, "training"): "More processors, or fewer processes: ranks wait for their turn.",
    (SYSTEM, "other"): "Look at `kintsugi incidents`: starts and recoveries take this time.",
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


def find_bottleneck(run_dir: str | Path, *, at: float | None = None) -> Bottleneck:
    """Of a run, dead or alive, up to a moment. Raises UserError where there is no run, or none that did anything."""
    path = Path(run_dir)
    until = at if at is not None else float("inf")
    newest = max((file.stat().st_mtime for file in (path / "events").glob("*.jsonl")), default=0.0)
    reader = Reader(path, since=(at if at is not None else newest) - PAST_S)
    try:
        return bottleneck_of(reader.read(until=until))
    finally:
        reader.close()


def bottleneck_of(bundle: Bundle) -> Bottleneck:
    """The same of what was gathered. Pure."""
    phases = _seconds_by_phase(bundle)
    parts = [
        *_computed(bundle, "sampling", Role.SERVER, sum(phases.get(name, 0.0) for name in _SAMPLED)),
        *_computed(bundle, "training", Role.MODEL, phases.get("training", 0.0)),
        (
            COMMUNICATION,
            "publishing",
            phases.get("publishing", 0.0),
            "new weights on their way to the servers",
        ),
        (STORAGE, "storage", sum(phases.get(name, 0.0) for name in _WRITTEN), _disk_figure(bundle)),
    ]
    known = {*_SAMPLED, *_WRITTEN, "training", "publishing"}
    rest = {name: seconds for name, seconds in phases.items() if name not in known and name != "ended"}
    words = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in rest.items()) or "nothing"
    parts.append((SYSTEM, "other", sum(rest.values()), words))
    total = sum(part[2] for part in parts)
    if not total:
        raise UserError(f"{bundle.run} has recorded no phase of its work: nothing can be said of its time")
    told = sorted(
        (
            Part(kind, where, round(seconds, 3), round(seconds / total, 4), figure)
            for kind, where, seconds, figure in parts
        ),
        key=lambda part: -part.seconds,
    )
    shares = {
        kind: round(sum(part.share for part in told if part.kind == kind), 4)
        for kind in (COMPUTE, COMMUNICATION, STORAGE, SYSTEM)
    }
    dominant = max(shares, key=lambda kind: shares[kind])
    first = next(part for part in told if part.kind == dominant)
    return Bottleneck(
        run=bundle.run,
        seconds=round(total, 3),
        steps=len(bundle.steps),
        dominant=dominant,
        figure=f"{shares[dominant]:.0%} of the time, mostly {first.where}: {first.figure}",
        suggestion=_SUGGESTIONS[dominant, first.where],
        shares=shares,
        parts=tuple(told),
    )


def _seconds_by_phase(bundle: Bundle) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for phase, following in zip(bundle.phases, bundle.phases[1:], strict=False):
        seconds[phase.name] = seconds.get(phase.name, 0.0) + following.time - phase.time
    return seconds


def _computed(bundle: Bundle, where: str, role: Role, seconds: float) -> list[tuple[str, str, float, str]]:
    """Cut the time of a phase into computing, waiting for others and waiting for a processor."""
    workers = [process for process in bundle.processes if process.startswith(f"{role.value}-")]
    turns = _share_waiting_for_a_turn(bundle, workers)
    others = _share_waiting_for_others(bundle, workers) if role is Role.MODEL else 0.0
    system = seconds * turns * (1 - others)
    communication = seconds * others
    return [
        (SYSTEM, where, system, f"{role.value} processes wait {turns:.0%} of their time for a processor"),
        (
            COMMUNICATION,
            where,
            communication,
            f"ranks wait {others:.0%} of it for each other and for samples",
        ),
        (COMPUTE, where, seconds - system - communication, _busy_figure(bundle)),
    ]


def _share_waiting_for_a_turn(bundle: Bundle, workers: list[str]) -> float:
    ran = waited = 0.0
    for process in workers:
        tracks = bundle.processes[process]
        ran += sum(tracks["cpu"].values)
        waited += sum(tracks["run_delay"].values)
    return waited / (ran + waited) if ran + waited > 0 else 0.0


def _share_waiting_for_others(bundle: Bundle, workers: list[str]) -> float:
    """Of the heartbeats of ranks that worked, those in which they waited for somebody by name."""
    working = waiting = 0
    for process in workers:
        for beat in bundle.beats.get(process, ()):
            phase = bundle.phase_at(beat.time)
            if phase is not None and phase.name == "training":
                working += 1
                waiting += any(wait.whom[:1].isalpha() and "-" in wait.whom for wait in beat.waits)
    return waiting / working if working else 0.0


def _busy_figure(bundle: Bundle) -> str:
    used = [
        (name, median(track.values))
        for tracks in bundle.hosts.values()
        for name, track in tracks.items()
        if name.startswith("device_") and name.endswith("utilization") and track.values
    ]
    if used:
        return f"accelerators are used {max(value for _, value in used):.0%} of the time"
    busy = [median(tracks["busy"].values) for tracks in bundle.hosts.values() if tracks["busy"].values]
    return f"processors are busy {max(busy):.0%} of the time" if busy else "computing"


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
        f"  {part.share:>6.1%}  {part.seconds:>8.1f} s  {part.kind:<14} {part.where:<10} {part.figure}"
        for part in report.parts
        if part.share >= 0.001
    ]
    return "\n".join(lines)
