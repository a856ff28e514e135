"""Whether a fault did anything: a case in which nobody felt it has nothing to diagnose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kintsugi.lab import baselines, measuring
from kintsugi.lab.injection import Ability, Injected
from kintsugi.observe.figures import figures_in

BASELINE_S = 20.0
"""Before the fault: what is usual."""
SLOWER = 1.3
"""A step is held up when it leaves mean ± 2σ, and takes so many times as long as the mean."""
CHANGED = 2.0
"""A figure is a symptom when it leaves mean ± 2σ, is so many times what it was, and as large as it has to be."""
SYMPTOMS: dict[Ability, dict[str, float]] = {
    Ability.CPU: {"throttled_s": 0.2, "run_delay_s": 0.5},
    Ability.NETWORK_DELAY: {"rtt_s": 0.02},
    Ability.NETWORK_LOSS: {"retransmits": 1.0},
    Ability.NETWORK_CUT: {"retransmits": 0.5, "send_queue_bytes": 1.0},
    Ability.DISK_LOAD: {"fsync_s": 0.02, "fsync_pending_s": 0.5},
    Ability.DNS: {"resolve_s": 0.2, "resolve_pending_s": 1.0, "resolve_errors": 0.25},
    Ability.DISK_ERROR: {"fsync_errors": 0.25},
}
"""Of abilities that can be felt before they hold a step up: figure of who was hit → from when on it is one."""


def impact_of(
    run_dir: Path,
    injected: Sequence[Injected],
    *,
    start: float,
    end: float,
    beyond: baselines.LogSizes | None = None,
) -> dict[str, Any]:
    """What the run felt: steps that were held up, errors, or the symptom that the fault is made to have. What the logs
    held before is not read (`beyond`)."""
    steps = measuring.steps_of(run_dir).get(measuring.STEP, [])
    spread = measuring.spreads({"step": steps}, since=start - BASELINE_S, until=start).get("step")
    slowest_s = 0.0
    if spread is not None:
        last = max((t for t, _ in steps if t <= end), default=start)
        slowest_s = max([took_s for t, took_s in steps if start < t <= end] + [end - last])
    held_up = spread is not None and slowest_s > max(spread.mean + 2 * spread.sigma, SLOWER * spread.mean)
    errors = baselines.errors_in(run_dir, since=start, until=end, beyond=beyond)
    samples = figures_in(run_dir, since=start - BASELINE_S) if injected else []
    symptoms: dict[str, float] = {}
    for each in injected:
        figures = measuring.figures_of(samples, process=each.process)
        symptoms |= symptoms_in(figures, each.injection.ability, start=start)
    return {
        "step_ratio": round(slowest_s / spread.mean, 2) if spread is not None else None,
        "errors": len(errors),
        "figures": {name: round(value, 4) for name, value in symptoms.items()},
        "real": held_up or bool(errors) or bool(symptoms),
    }


def symptoms_in(figures: measuring.Series, ability: Ability, *, start: float) -> dict[str, float]:
    """The figures in which a fault of this kind shows, with the largest value of each."""
    usual = measuring.spreads(figures, since=start - BASELINE_S, until=start)
    found = {}
    for name, points in figures.items():
        least = SYMPTOMS.get(ability, {}).get(name.rsplit(" ", 1)[1])
        largest = max((value for t, value in points if t > start), default=0.0)
        # A figure that was not there before, as that of a limit, was nothing.
        before = usual[name].mean + 2 * usual[name].sigma if name in usual else 0.0
        if least is not None and largest >= least and largest > CHANGED * before:
            found[name] = largest
    return found
