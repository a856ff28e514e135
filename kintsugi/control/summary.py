"""`summary.json`: what a run came to, computed from the master's state."""

from __future__ import annotations

from typing import Any

from kintsugi.config import Config, stages
from kintsugi.control.state import MasterState
from kintsugi.errors import Fault

TIMING_NAMES = {
    "starting": "start",
    "preparing": "start",
    "training": "train",
    "committing": "commit",
    "publishing": "weights",
    "evaluating": "evaluate",
    "saving": "save",
}
"""Phase → stage of the step, as people call it; COLLECTING is divided by what the workers did in it."""
EPISODE_NAMES = {"demonstrate": "data", "actor_generate": "generate", "reward": "reward"}
"""Call of a rollout worker → stage of the step."""


def stage_seconds(timing: dict[str, float]) -> dict[str, float]:
    """Seconds per stage from a step's recorded phase times.

    The calls of rollout workers overlap across groups, so the collecting time is divided in proportion to what the
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
    wall_s: float,
    processes: dict[str, list[int]],
    rest: dict[str, float],
    faults: tuple[Fault, ...],
) -> dict[str, Any]:
    """`rest` are the phase times since the last committed step."""
    main = stages(config)[-1]
    commits = state.commits
    of_main = [commits[step] for step in sorted(commits) if step >= main.first_step]
    timing: dict[str, float] = {}
    for phases in (*map(_phase_seconds, commits.values()), rest):
        for name, seconds in stage_seconds(phases).items():
            timing[name] = timing.get(name, 0.0) + seconds
    rewards = [metrics["reward_mean"] for metrics in of_main if main.algorithm.name != "sft"]
    accuracy = [done.metrics["eval/accuracy"] for done in state.evaluations]
    differences = [m["logprob_abs_diff_mean"] for m in of_main if "logprob_abs_diff_mean" in m]
    return {
        "name": config.name,
        "seed": config.seed,
        "outcome": state.outcome,
        "run_dir": run_dir,
        "steps": state.step,
        "wall_s": wall_s,
        "samples_trained": int(sum(m["samples"] for m in commits.values())),
        "tokens_generated": int(sum(m["tokens_generated"] for m in commits.values())),
        "tokens_trained": int(sum(m["tokens_trained"] for m in commits.values())),
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "eval_accuracy_before": accuracy[0] if accuracy else None,
        "eval_accuracy_after": accuracy[-1] if accuracy else None,
        "evaluations": [
            {"step": done.step, "version": done.version, **done.metrics} for done in state.evaluations
        ],
        "weights_sha256": state.weights_sha256,
        "weight_version": state.version,
        "processes": processes,
        "timing": timing,
        "logprob_abs_diff_mean": sum(differences) / len(differences) if differences else None,
        "faults": [{"kind": f.kind, "process": f.process, "message": f.message} for f in faults],
    }


def _phase_seconds(metrics: dict[str, float]) -> dict[str, float]:
    prefix = "timing/"
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
