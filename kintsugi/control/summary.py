"""`summary.json`: the results of a run, computed from the state of the master."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from kintsugi.config.schema import Config
from kintsugi.config.stages import stages
from kintsugi.control.membership import WorkerRecord
from kintsugi.control.state import MasterState
from kintsugi.control.step_metrics import STALENESS
from kintsugi.errors import Fault
from kintsugi.run_folder.incidents import IncidentHistory, headline
from kintsugi.runtime.peak_memory import PARAMETERS, PEAK_ALLOCATED, PEAK_RESERVED, PEAK_RSS, PEAK_UPDATE
from kintsugi.samples.lifecycle import LIVE, SampleState
from kintsugi.types import Role

TIMING_NAMES = {
    "starting": "start",
    "preparing": "start",
    "training": "train",
    "committing": "commit",
    "publishing": "weights",
    "evaluating": "evaluate",
    "saving": "save",
    "recovering": "recover",
}
"""Phase → stage of the step, under the name that users see; COLLECTING is divided by the calls of the workers."""
EPISODE_NAMES = {"demonstrate": "data", "actor_generate": "generate", "reward": "reward"}
"""Call of a rollout worker → stage of the step."""
PEAK_NAMES = {
    PEAK_RSS: "host_bytes",
    PEAK_ALLOCATED: "device_allocated_bytes",
    PEAK_RESERVED: "device_reserved_bytes",
    PEAK_UPDATE: "device_update_bytes",
}
"""Gauge of a process → name of its peak in the summary."""
QUANTILES = {"p50": 0.5, "p99": 0.99}
REASONS_SHOWN = 20
"""Number of the most common reasons that are shown; messages of user code may all differ."""
OTHER_REASONS = "other reasons"


def stage_seconds(timing: dict[str, float]) -> dict[str, float]:
    """Return seconds per stage from the recorded phase times of a step.

    The calls of rollout workers overlap across groups, so the time of COLLECTING is divided in proportion to what the
    workers spent on each.
    """
    seconds: dict[str, float] = {}
    for phase, name in TIMING_NAMES.items():
        seconds[name] = seconds.get(name, 0.0) + timing.get(phase, 0.0)
    spent = {name: timing.get(f"episode_{call}", 0.0) for call, name in EPISODE_NAMES.items()}
    total = sum(spent.values())
    for name, part in spent.items():
        seconds[name] = timing.get("collecting", 0.0) * part / total if total > 0 else 0.0
    return {name: value for name, value in seconds.items() if value > 0}


def summarize_run(
    config: Config,
    state: MasterState,
    *,
    run_dir: str,
    processes: dict[str, list[int]],
    rest: dict[str, float],
    faults: tuple[Fault, ...],
) -> dict[str, Any]:
    """Return the summary. `rest`: phase times since the last committed step."""
    main = stages(config)[-1]
    totals = [tally.totals() for tally in state.tallies.values()]
    timing: dict[str, float] = {}
    for phases in (*(_phase_seconds(sums) for sums, _ in totals), rest):
        for name, seconds in stage_seconds(phases).items():
            timing[name] = timing.get(name, 0.0) + seconds
    rewarded = state.tallies.get(main.name) if main.samples_completions else None
    first, last = (rewarded.first, rewarded.last) if rewarded is not None else (None, None)
    taught = state.tallies.get(main.name) if not main.samples_completions else None
    sums, counts = rewarded.totals() if rewarded is not None else ({}, {})
    accuracy = [done.metrics["eval/accuracy"] for done in state.evaluations]
    agreement = "logprob_abs_diff_mean"
    report = state.incidents.report()
    incidents, earlier = report.incidents, report.earlier
    return {
        "name": config.name,
        "algorithm": main.algorithm.custom or main.algorithm.name,
        "seed": config.seed,
        "outcome": state.outcome,
        "run_dir": run_dir,
        "steps": state.step,
        # A session that did not end regularly has no duration; its steps are in the time of the phases.
        "wall_s": max(state.wall_s, sum(timing.values())),
        "samples": _sample_counts(state, trained=int(sum(sums.get("samples", 0.0) for sums, _ in totals))),
        "samples_by_end": state.ledger.ends.means(),
        "staleness": _staleness(sums),
        "samples_trained": int(sum(sums.get("samples", 0.0) for sums, _ in totals)),
        "samples_filtered": _commonest(state.ledger.reasons(SampleState.FILTERED)),
        "samples_expired": _commonest(state.ledger.reasons(SampleState.EXPIRED)),
        "samples_quarantined": _commonest(state.ledger.reasons(SampleState.QUARANTINED)),
        "tokens_generated": int(sum(sums.get("tokens_generated", 0.0) for sums, _ in totals)),
        "tokens_discarded": state.ledger.ends.tokens_discarded,
        "tokens_trained": int(sum(sums.get("tokens_trained", 0.0) for sums, _ in totals)),
        "reward_first": first.get("reward_mean") if first else None,
        "reward_last": last.get("reward_mean") if last else None,
        "loss_first": _loss(taught.first) if taught is not None else None,
        "loss_last": _loss(taught.last) if taught is not None else None,
        "eval_accuracy_before": accuracy[0] if accuracy else None,
        "eval_accuracy_after": accuracy[-1] if accuracy else None,
        "evaluations": [
            {"step": done.step, "version": done.version, **done.metrics} for done in state.evaluations
        ],
        "weights_sha256": state.weights_sha256,
        "weight_version": state.version,
        "weight_update_pause_ms": _quantiles(state.pauses_ms),
        "idle_share": _idle_share(state.members.members.values()),
        "memory": _memory(state.members.peaks),
        "processes": processes,
        "timing": timing,
        "logprob_abs_diff_mean": sums[agreement] / counts[agreement] if agreement in counts else None,
        "faults": [{"kind": f.kind, "process": f.process, "message": f.message} for f in faults],
        "incidents": [_incident_line(incident) for incident in incidents],
        "incidents_open": sum(incident.mended_step is None for incident in incidents)
        + (earlier.count - earlier.recovered),
        "incidents_earlier": earlier.count,
        "incidents_earlier_s": round(earlier.seconds, 4),
    }


def _loss(metrics: Mapping[str, float] | None) -> float | None:
    return None if metrics is None else metrics.get("loss")


def _sample_counts(state: MasterState, *, trained: int) -> dict[str, int]:
    """Return the number of samples by outcome. `trained` counts those of all committed steps; the ledger knows each
    sample once.

    In a finished run every issued sample has an outcome; any other is lost.
    """
    counts = state.ledger.counts()
    ended = {each.value: counts[each] for each in SampleState if each not in LIVE}
    unfinished = sum(counts[each] for each in LIVE)
    return {
        "issued": sum(counts.values()),
        **ended,
        "duplicated": trained - counts[SampleState.TRAINED],
        "lost": unfinished if state.outcome == "finished" else 0,
        "unfinished": unfinished,
    }


def _staleness(sums: Mapping[str, float]) -> dict[str, Any]:
    """Return the staleness of the samples that the main stage trained, as counts by age in steps."""
    ages = {
        int(name.removeprefix(STALENESS)): int(n) for name, n in sums.items() if name.startswith(STALENESS)
    }
    total = sum(ages.values())
    return {
        "max": max(ages, default=0),
        "mean": sum(age * count for age, count in ages.items()) / total if total else 0.0,
        "histogram": {str(age): ages[age] for age in sorted(ages)},
    }


def _quantiles(values: Iterable[float]) -> dict[str, float | int]:
    """Return median and 99th percentile (nearest rank)."""
    ordered = sorted(values)
    at = {name: ordered[math.ceil(share * len(ordered)) - 1] for name, share in QUANTILES.items() if ordered}
    return {**at, "count": len(ordered)}


def _idle_share(members: Iterable[WorkerRecord]) -> dict[str, float]:
    """Return role → share of their lifetime in which its processes, those live at the end, were idle."""
    seconds: dict[str, tuple[float, float]] = {}
    for member in members:
        if member.role in (Role.MODEL, Role.SERVER, Role.ROLLOUT) and "alive_s" in member.gauges:
            idle_s, alive_s = seconds.get(member.role.value, (0.0, 0.0))
            told = member.gauges
            seconds[member.role.value] = idle_s + told["idle_s"], alive_s + told["alive_s"]
    return {role: idle_s / alive_s for role, (idle_s, alive_s) in sorted(seconds.items()) if alive_s > 0}


def _memory(peaks: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the peaks of memory by process, and of a rank per trained parameter: of the whole step, and of the update
    alone, when there are no activations."""
    found: dict[str, dict[str, float]] = {}
    for process, reported in sorted(peaks.items()):
        named = {name: int(reported[gauge]) for gauge, name in PEAK_NAMES.items() if gauge in reported}
        each: dict[str, float] = {**named}
        if parameters := reported.get(PARAMETERS, 0.0):
            per = {"bytes_per_parameter": PEAK_ALLOCATED, "update_bytes_per_parameter": PEAK_UPDATE}
            each |= {
                n: round(reported[gauge] / parameters, 2) for n, gauge in per.items() if gauge in reported
            }
        if each:
            found[process] = each
    return found


def _commonest(reasons: dict[str, int]) -> dict[str, int]:
    """Return reason → number of samples, the most common first."""
    lines: dict[str, int] = {}
    for reason, count in reasons.items():
        line = headline(reason)
        line = line if line in lines or len(lines) < REASONS_SHOWN else OTHER_REASONS
        lines[line] = lines.get(line, 0) + count
    return lines


def _incident_line(incident: IncidentHistory) -> dict[str, Any]:
    return {
        "incident": incident.incident,
        "cause": headline(incident.cause.message),
        "process": incident.cause.process,
        "strategy": incident.strategy,
        "step": incident.step,
        "processes": list(dict.fromkeys(loss.process for loss in incident.losses)),
        "seconds": incident.seconds,
    }


def _phase_seconds(metrics: dict[str, float]) -> dict[str, float]:
    prefix = "timing/"
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
