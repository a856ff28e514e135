"""Measurement of a fault's effect: a fault without any effect can not be diagnosed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kintsugi.lab.campaign import log_readers
from kintsugi.lab.injector.injection import Ability, Injected
from kintsugi.lab.scenarios import measuring
from kintsugi.telemetry.readings import figures_in

BASELINE_S = 20.0
"""Time before the fault that serves as the baseline."""
SLOWER = 1.3
"""A step is delayed when it leaves mean ± 2σ and takes this many times the mean."""
CHANGED = 2.0
"""A metric is a symptom when it leaves mean ± 2σ, grows by this factor, and reaches its threshold."""
SYMPTOMS: dict[Ability, dict[str, float]] = {
    Ability.CPU: {"throttled_s": 0.2, "run_delay_s": 0.5},
    Ability.NETWORK_DELAY: {"rtt_s": 0.02},
    Ability.NETWORK_LOSS: {"retransmits": 1.0},
    Ability.NETWORK_CUT: {"retransmits": 0.5, "send_queue_bytes": 1.0},
    Ability.DISK_LOAD: {"fsync_s": 0.02, "fsync_pending_s": 0.5},
    Ability.DNS: {"resolve_s": 0.2, "resolve_pending_s": 1.0, "resolve_errors": 0.25},
    Ability.DISK_ERROR: {"fsync_errors": 0.25},
}
"""Fault types with an effect that shows before a step is delayed: metric of the target → threshold."""


def effect_of(
    run_dir: Path,
    injected: Sequence[Injected],
    *,
    start: float,
    end: float,
    beyond: log_readers.LogSizes | None = None,
) -> dict[str, Any]:
    """Return the effect on the run: delayed steps, errors, or the symptom of the fault type. Logs are read from
    `beyond` on."""
    steps = measuring.steps_of(run_dir).get(measuring.STEP, [])
    spread = measuring.spreads({"step": steps}, since=start - BASELINE_S, until=start).get("step")
    slowest_s = 0.0
    if spread is not None:
        last = max((t for t, _ in steps if t <= end), default=start)
        slowest_s = max([took_s for t, took_s in steps if start < t <= end] + [end - last])
    held_up = spread is not None and slowest_s > max(spread.mean + 2 * spread.sigma, SLOWER * spread.mean)
    errors = log_readers.errors_in(run_dir, since=start, until=end, beyond=beyond)
    samples = figures_in(run_dir, since=start - BASELINE_S) if injected else []
    symptoms: dict[str, float] = {}
    for each in injected:
        metrics = measuring.metrics_of(samples, process=each.process)
        symptoms |= symptoms_in(metrics, each.injection.ability, start=start)
    return {
        "step_ratio": round(slowest_s / spread.mean, 2) if spread is not None else None,
        "errors": len(errors),
        "figures": {name: round(value, 4) for name, value in symptoms.items()},
        "real": held_up or bool(errors) or bool(symptoms),
    }


def symptoms_in(metrics: measuring.Series, ability: Ability, *, start: float) -> dict[str, float]:
    """Return the metrics in which a fault of this type shows, with the largest value of each."""
    usual = measuring.spreads(metrics, since=start - BASELINE_S, until=start)
    found = {}
    for name, points in metrics.items():
        least = SYMPTOMS.get(ability, {}).get(name.rsplit(" ", 1)[1])
        largest = max((value for t, value in points if t > start), default=0.0)
        # A metric without a baseline value (for example of a limit) counts as zero before the fault.
        before = usual[name].mean + 2 * usual[name].sigma if name in usual else 0.0
        if least is not None and largest >= least and largest > CHANGED * before:
            found[name] = largest
    return found
