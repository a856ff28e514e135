"""Figures of a run of `real_model.py`, from its run folder and from the samples beside it, as JSON and as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.real_model_watch import STEP_PHASES, Fault, HostReading, Monitor, peaks
from kintsugi.diagnosis.format import earlier
from kintsugi.run_folder import reader
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import Alert, FaultHandled, ProcessGone, Record, Span, Transition, read_events
from kintsugi.telemetry.jsonl_log import lines_in, paths_of
from kintsugi.telemetry.store.tracing import MASTER_PHASES

SKIPPED = 2
"""First steps that medians leave out: kernels are compiled and allocators grow."""
SHOWN_FETCHES = 12
PARTS = ("train", "generate", "weights", "commit", "reward")


class Phase(msgspec.Struct, frozen=True):
    name: str
    since: float
    until: float


def phases(records: Sequence[Record]) -> list[Phase]:
    """The master's phases in order, by wall clock."""
    moves = [
        (record.stamp.time, record.event.after)
        for record in records
        if isinstance(record.event, Transition) and (record.event.machine, record.event.key) == MASTER_PHASES
    ]
    return [Phase(name, since, until) for (since, name), (until, _) in pairwise(moves)]


def steps(run_dir: Path) -> list[dict[str, float]]:
    """Seconds and parts of each committed step, and when it was committed."""
    lines, _ = reader.read_metrics(run_dir)
    return [
        {
            "step": line["step"] or 0,
            "time": line["time"] or 0,
            "seconds": round(line["timing/step"] or 0, 3),
            **{part: round(line.get(f"timing/{part}") or 0, 3) for part in PARTS},
            "tokens": line.get("tokens") or 0,
            "mean_length": round(line.get("completions/mean_length") or 0, 1),
            "mean_reward": round(line.get("reward/mean") or 0, 4),
        }
        for line in lines
        if "timing/step" in line
    ]


def typical(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians over the steps after the first ones."""
    warm = found[SKIPPED:] or found
    names = ("seconds", *PARTS, "tokens", "mean_length")
    return {name: round(statistics.median(step[name] for step in warm), 3) for name in names} if warm else {}


def first_prompt(run_dir: Path, *, started_monotonic: float) -> float | None:
    """Seconds from the start of the command to the first request for a completion."""
    starts = [
        record.event.start
        for record in read_events(run_dir)
        if isinstance(record.event, Span) and record.event.name in ("request", "actor_generate")
    ]
    return round(min(starts) - started_monotonic, 2) if starts else None


def busy_share(monitor: Monitor, found: Sequence[Phase]) -> dict[str, float]:
    """Mean use of the GPU over the steps and by phase; nothing without NVML."""
    by_phase: dict[str, list[float]] = {}
    during_steps: list[float] = []
    for at, share in monitor.busy:
        name = next((phase.name for phase in found if phase.since <= at < phase.until), None)
        if name is not None:
            by_phase.setdefault(name, []).append(share)
            if name in STEP_PHASES:
                during_steps.append(share)
    if not during_steps:
        return {}
    means = {name: round(statistics.fmean(shares), 3) for name, shares in sorted(by_phase.items())}
    return {"steps": round(statistics.fmean(during_steps), 3), **means}


class _Beat(msgspec.Struct, frozen=True):
    time: float
    incarnation: str
    kind: str


def heartbeat_gaps(run_dir: Path) -> dict[str, float]:
    """Longest time between two heartbeats of the same incarnation of each process, as the process recorded them."""
    folder = RunFolder(run_dir).readings_folder
    gaps: dict[str, float] = {}
    for path in sorted(folder.glob("*.jsonl")):
        times: dict[str, list[float]] = {}
        for line in (line for each in paths_of(path) for line in lines_in(each.read_bytes())):
            if b'"Beat"' in line:
                beat = msgspec.json.decode(line, type=_Beat)
                times.setdefault(beat.incarnation, []).append(beat.time)
        longest = [
            after - before for each in times.values() for before, after in pairwise(sorted(each)) if each
        ]
        if longest:
            gaps[path.stem] = round(max(longest), 2)
    return gaps


def silence_heard(readings: Sequence[HostReading]) -> dict[str, float]:
    """Longest silence of each process as the master reported it."""
    longest: dict[str, float] = {}
    for reading in readings:
        for name, silent_s in reading.silent_s_of.items():
            longest[name] = max(longest.get(name, 0.0), silent_s)
    return {name: round(seconds, 2) for name, seconds in sorted(longest.items())}


def saves(
    records: Sequence[Record], readings: Sequence[HostReading], found: Sequence[Phase]
) -> dict[str, Any]:
    spans = [
        {
            "step": record.event.attributes.get("step"),
            "seconds": round(record.event.duration_s, 3),
            "stalled_s": _number(record.event.attributes.get("stalled_s")),
        }
        for record in records
        if isinstance(record.event, Span) and record.event.name == "save"
    ]
    return {
        "saves": spans,
        "standing_still_s": [each["stalled_s"] for each in spans],
        "waited_for_the_last_s": round(
            sum(phase.until - phase.since for phase in found if phase.name == "saving"), 3
        ),
        "seen_on_disk_s": round(_saving_seconds(readings), 1),
    }


def differences(readings: Sequence[HostReading]) -> dict[str, list[int]]:
    """Bytes of each version that an agent fetched as a difference, in order; between two readings the mean."""
    found: dict[str, list[int]] = {}
    last: dict[str, tuple[int, int]] = {}
    for reading in readings:
        for name, (count, size) in reading.differences_of.items():
            count_before, size_before = last.get(name, (0, 0))
            if new := count - count_before:
                found.setdefault(name, []).extend([(size - size_before) // new] * new)
            last[name] = (count, size)
    return found


def weight_fetches(records: Sequence[Record]) -> dict[str, list[float]]:
    """Seconds in which each server fetched and verified a version, in order."""
    found: dict[str, list[float]] = {}
    for record in sorted(records, key=lambda record: record.stamp.time):
        if isinstance(record.event, Span) and record.event.name == "weights_fetch":
            found.setdefault(record.stamp.process, []).append(round(record.event.duration_s, 3))
    return found


def _number(text: str | None) -> float | None:
    return None if text is None else float(text)


def _saving_seconds(readings: Sequence[HostReading]) -> float:
    return sum(after.time - before.time for before, after in pairwise(readings) if before.saving)


def verdicts(run_dir: Path, *, since: float = 0.0) -> list[dict[str, Any]]:
    """Causes that the diagnosis named, in the order in which it named them."""
    named = [
        {
            "after_s": round(at - since, 1) if since else None,
            "process": cause.process,
            "kind": cause.kind.value,
            "confidence": round(cause.confidence, 2),
            "summary": cause.summary,
            "at": at,
        }
        for at, cause in earlier(run_dir, before=float("inf"))
        if at >= since
    ]
    return sorted(named, key=lambda each: each["at"])


def alerts(records: Sequence[Record]) -> list[str]:
    """Alerts that are not the answer to a fault of their own."""
    return [
        f"{record.stamp.process}: {record.event.message}"
        for record in records
        if isinstance(record.event, Alert) and not isinstance(record.event, FaultHandled)
    ]


def fault_report(
    fault: Fault, fired: dict[str, Any], *, run_dir: Path, records: Sequence[Record], found: Sequence[Phase]
) -> dict[str, Any]:
    """Effect of the fault: proof that it happened, seconds to the next committed step, and what was diagnosed."""
    at = fired["time"]
    gone = [
        record.event
        for record in records
        if isinstance(record.event, ProcessGone) and record.event.pid == fired["pid"]
    ]
    committed = steps(run_dir)
    before = [step for step in committed if step["time"] <= at]
    after = [step for step in committed if step["time"] > at]
    next_s = round(after[0]["time"] - at, 2) if after else None
    in_a_step = fired["phase"] in STEP_PHASES
    begun = max(
        (phase.since for phase in found if phase.name == "collecting" and phase.since <= at), default=at
    )
    usual = typical(before).get("seconds")
    left = None if usual is None else round(max(0.0, usual - (at - begun if in_a_step else 0.0)), 2)
    named = verdicts(run_dir, since=at)
    incidents = reader.read_incidents(run_dir).incidents
    return {
        **fired,
        "how_it_ended": gone[0].how if gone else "its end was not recorded",
        "next_step_s": next_s,
        "undisturbed_rest_of_step_s": left,
        "late_s": None if next_s is None or left is None else round(next_s - left, 2),
        "incidents": [
            {
                "cause": f"{each.cause.process}: {each.cause.kind}",
                "strategy": each.strategy,
                "seconds": each.seconds,
                "timing": each.timing,
                "steps_undone": each.steps_undone,
            }
            for each in incidents
        ],
        "verdicts": named,
        "diagnosed_right": bool(named)
        and named[0]["process"] == fault.process
        and named[0]["kind"] in fault.kinds,
    }


def report(
    name: str,
    fault: Fault | None,
    fired: dict[str, Any] | None,
    *,
    run_dir: Path,
    monitor: Monitor,
    started_monotonic: float,
) -> dict[str, Any]:
    records = read_events(run_dir)
    found = phases(records)
    summary = reader.read_summary(run_dir)
    committed = steps(run_dir)
    seconds_in: dict[str, float] = {}
    for phase in found:
        seconds_in[phase.name] = seconds_in.get(phase.name, 0.0) + phase.until - phase.since
    readings = monitor.readings
    result: dict[str, Any] = {
        "fault": name,
        "outcome": None if summary is None else summary.outcome,
        "weights_sha256": None if summary is None else summary.weights_sha256,
        "first_prompt_s": first_prompt(run_dir, started_monotonic=started_monotonic),
        "typical": typical(committed),
        "steps": committed,
        "phases_s": {phase: round(seconds, 2) for phase, seconds in seconds_in.items()},
        "gpu_busy": busy_share(monitor, found) or monitor.device.why_absent,
        "device_gb": peaks(readings, "device_bytes_of"),
        "device_gb_all_peak": max((each.device_bytes or 0 for each in readings), default=0) / 1e9,
        "device_gb_unnamed_last": [
            size / 1e9 for size in (readings[-1].device_bytes_unnamed if readings else [])
        ],
        "host_gb": peaks(readings, "rss_bytes_of"),
        "shared_memory_gb_peak": max((each.shared_memory_bytes for each in readings), default=0) / 1e9,
        "heartbeat_gap_s": heartbeat_gaps(run_dir),
        "silence_heard_s": silence_heard(readings),
        **saves(records, readings, found),
        "weight_fetches_s": weight_fetches(records),
        "differences_bytes": differences(readings),
        "alerts": alerts(records),
        "verdicts": verdicts(run_dir),
        "summary": {} if summary is None else _memory_of(msgspec.to_builtins(summary)),
    }
    if fault is not None:
        result["effect"] = (
            "the fault was not sent: its moment did not come"
            if fired is None
            else fault_report(fault, fired, run_dir=run_dir, records=records, found=found)
        )
    return result


def _memory_of(summary: dict[str, Any]) -> dict[str, Any]:
    """Fields of the summary about memory, whatever they are called."""
    return {name: value for name, value in summary.items() if "memory" in name or "peak" in name}


def table(result: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"== {result['fault']}: {result['outcome']}, weights {str(result['weights_sha256'])[:16]}"]

    def add(label: str, value: object) -> None:
        lines.append(f"  {label:<26} {value}")

    add("first prompt after", f"{result['first_prompt_s']} s")
    parts = result["typical"]
    if parts:
        add("typical step", "  ".join(f"{name} {parts[name]}" for name in ("seconds", *PARTS)))
        add("tokens a step", f"{parts['tokens']:.0f}, completions of {parts['mean_length']} tokens")
    add("each step", " ".join(f"{step['seconds']}" for step in result["steps"]))
    add("seconds by phase", _pairs(result["phases_s"]))
    add("GPU busy", result["gpu_busy"] if isinstance(result["gpu_busy"], str) else _pairs(result["gpu_busy"]))
    for label, values in (("device GB", result["device_gb"]), ("host GB", result["host_gb"])):
        for name, each in values.items():
            add(f"{label}, {name}", f"first {each['first']}  last {each['last']}  peak {each['peak']}")
    add("device GB, all, peak", round(result["device_gb_all_peak"], 2))
    if result["device_gb_unnamed_last"]:
        add("device GB, other pids", " ".join(f"{size:.2f}" for size in result["device_gb_unnamed_last"]))
    add("longest heartbeat gap, s", _pairs(result["heartbeat_gap_s"]))
    add("longest silence heard, s", _pairs(result["silence_heard_s"]))
    add("saves", " ".join(f"step {each['step']}: {each['seconds']} s" for each in result["saves"]))
    add("standing still for saves", f"{result['standing_still_s']} s; on disk {result['seen_on_disk_s']} s")
    add("waited for the last save", f"{result['waited_for_the_last_s']} s")
    for name, seconds in result["weight_fetches_s"].items():
        add(f"weights fetched, {name}", f"{' '.join(map(str, seconds[-SHOWN_FETCHES:]))} s")
    for name, sizes in result["differences_bytes"].items():
        add(f"differences, {name}", " ".join(f"{size / 1e6:.1f}" for size in sizes) + " MB")
    add("left in /dev/shm", result.get("left_in_shared_memory"))
    for text in result["alerts"]:
        add("alert", text)
    lines += _effect_lines(result)
    return "\n".join(lines)


def _effect_lines(result: dict[str, Any]) -> list[str]:
    effect = result.get("effect")
    if effect is None:
        return [
            f"  {'named without a fault':<26} {each['kind']} {each['process']}: {each['summary']}"
            for each in result["verdicts"]
        ]
    if isinstance(effect, str):
        return [f"  {'effect':<26} {effect}"]
    moment = effect["detail"] or f"pass {effect['passes_before'] + 1}"
    lines = [
        f"  {effect['signal']} of {effect['process']} in {effect['phase']}, {moment}: {effect['how_it_ended']}"
    ]
    lines.append(
        f"  {'next committed step':<26} {effect['next_step_s']} s; the step itself still needed "
        f"{effect['undisturbed_rest_of_step_s']} s, so it is {effect['late_s']} s late"
    )
    lines += [f"  {'incident':<26} {each}" for each in effect["incidents"]]
    lines += [
        f"  {'verdict':<26} after {each['after_s']} s: {each['kind']} {each['process']} "
        f"({each['confidence']:.0%}): {each['summary']}"
        for each in effect["verdicts"]
    ]
    lines.append(f"  {'first verdict is right':<26} {effect['diagnosed_right']}")
    if "weights_equal" in result:
        lines.append(f"  {'weights equal undisturbed':<26} {result['weights_equal']}")
    return lines


def _pairs(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {value}" for name, value in values.items())
