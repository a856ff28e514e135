"""What is due after a step, and what a step is recorded as. Pure functions of configuration and state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kintsugi.config import Config, Stage, stages
from kintsugi.control.protocol import Raise
from kintsugi.control.state import MasterState
from kintsugi.messages import CallDone
from kintsugi.types import SampleMeta

RATIO_TOLERANCE = 1e-3
"""Before the first update of a synchronous step the policy is the one that sampled: the mean ratio must be 1."""


def carried_stage(config: Config, *, step: int) -> Stage:
    """The stage whose optimizer a committed step carries; before the first step, the first stage."""
    every = stages(config)
    return next((stage for stage in every if step <= stage.last_step), every[-1])


def is_last(config: Config, *, step: int) -> bool:
    return step >= stages(config)[-1].last_step


def most_tokens(config: Config, *, num_eval_rows: int) -> int:
    """Tokens that one step or one evaluation has at most."""
    samples = [stage.algorithm.batch_size * stage.algorithm.group_size for stage in stages(config)]
    samples.append(num_eval_rows * (1 + config.eval.num_samples))
    return max(samples) * config.generation.max_length


def evaluation_is_due(config: Config, state: MasterState) -> bool:
    """Before and after the main stage, and every `eval.every` steps of it; once per step."""
    main, step, every = stages(config)[-1], state.step, config.eval.every
    if any(done.step == step for done in state.evaluations):
        return False
    into = step - main.first_step + 1
    return into == 0 or step == main.last_step or (every > 0 and into > 0 and into % every == 0)


def save_is_due(config: Config, state: MasterState, *, stopping: bool) -> bool:
    """Every `checkpoint.every` steps, at the end and before a stop; a step whose save failed is not tried again."""
    step, every = state.step, config.checkpoint.every
    if step == 0 or step in state.saved_steps or step == state.failed_save_step:
        return False
    return stopping or is_last(config, step=step) or (every > 0 and step % every == 0)


def commit_record(
    batch: Sequence[SampleMeta], answers: Mapping[str, CallDone], timing: Mapping[str, float]
) -> dict[str, float]:
    """What `StepCommitted` keeps: the trainer's metrics, the batch's totals, and where the time went."""
    first = next(iter(answers.values()))
    totals = {
        "samples": float(len(batch)),
        "tokens_trained": float(sum(meta.num_tokens for meta in batch)),
        "tokens_generated": float(sum(meta.num_loss_tokens for meta in batch if meta.version >= 0)),
        "reward_mean": sum(meta.reward for meta in batch) / len(batch),
    }
    return {**first.metrics, **totals, **{f"timing/{name}": seconds for name, seconds in timing.items()}}


def slowest(answers: Mapping[str, CallDone]) -> dict[str, float]:
    """Seconds per part of a training call, of the rank that took longest."""
    names = sorted({name for answer in answers.values() for name in answer.timing})
    return {f"train_{n}": max(answer.timing.get(n, 0.0) for answer in answers.values()) for n in names}


def alerts(metrics: Mapping[str, float]) -> list[Raise]:
    """What people should look at in a step's metrics, though the run goes on."""
    found = []
    ratio = metrics.get("ratio_mean", 1.0)
    if not abs(ratio - 1.0) <= RATIO_TOLERANCE:  # Also when it is not a number.
        found.append(Raise("the mean ratio before the first update is not 1", {"ratio_mean": ratio}))
    if metrics.get("skipped", 0.0) > 0:
        found.append(
            Raise("an update was skipped: its gradient was not finite", {"skipped": metrics["skipped"]})
        )
    return found
