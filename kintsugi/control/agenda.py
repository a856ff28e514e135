"""What is due after a step, and what a step is recorded as. Pure functions of configuration and state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kintsugi.buffer.ledger import Ledger
from kintsugi.config import Config
from kintsugi.control.protocol import Raise
from kintsugi.control.state import MasterState
from kintsugi.facts import FilterReason
from kintsugi.graph.advantages import has_equal_rewards
from kintsugi.messages import CallDone
from kintsugi.stages import Stage, stages
from kintsugi.types import SampleMeta, ticket_of

Values = Mapping[str, Mapping[str, float]]
"""Sample → what the master knows of it after the step's calls."""

STALENESS = "staleness/"
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
    is_round = into % every == 0 if every > 0 else into == 0
    return step == main.last_step or (into >= 0 and is_round)


def steps_ahead(config: Config, state: MasterState) -> int:
    """How many steps rollout may now run ahead of training; never more than is configured."""
    most = config.asynchrony.max_staleness
    return most if state.pace is None else min(most, state.pace.ahead)


def needs_version(config: Config, state: MasterState, *, version: int, evaluates: bool) -> bool:
    """Whether nothing more can be done while the servers have no newer weights than `version`: the next batch could not
    be sampled within the staleness bound, or this step itself is to be judged, or is the last."""
    if version < 0 or version + steps_ahead(config, state) < state.step:
        return True
    due = evaluates and evaluation_is_due(config, state)
    return version < state.step and (due or is_last(config, step=state.step) or state.stop_reason is not None)


def save_is_due(config: Config, state: MasterState, *, stopping: bool) -> bool:
    """Every `checkpoint.every` steps, at the end and before a stop; a step whose save failed is not tried again."""
    step, every = state.step, config.checkpoint.every
    if step == 0 or step in state.saved_steps or step == state.failed_save_step:
        return False
    return stopping or is_last(config, step=step) or (every > 0 and step % every == 0)


def with_final_rewards(stage: Stage, batch: Sequence[SampleMeta], values: Values) -> tuple[SampleMeta, ...]:
    """The batch with what its samples earned in the end: shaped, with the reward model's score, less the KL where that
    is taken off the sample's reward; each part is a component of its own."""
    return tuple(_with_final_reward(stage, meta, values[meta.key]) for meta in batch)


def _with_final_reward(stage: Stage, meta: SampleMeta, values: Mapping[str, float]) -> SampleMeta:
    if not meta.reward_components:
        return meta
    parts: dict[str, float] = {}
    if stage.algorithm.overlong_buffer:
        parts["overlong"] = values["reward"] - meta.reward
    if stage.reward_model is not None:
        parts["reward_model"] = stage.total_reward(values) - values["reward"]
    if "reference_kl" in values:
        parts["kl"] = -stage.algorithm.beta * values["reference_kl"]
    reward = stage.total_reward(values) + parts.get("kl", 0.0)
    return msgspec.structs.replace(meta, reward=reward, reward_components={**meta.reward_components, **parts})


def group_counts(stage: Stage, values: Values, *, ledger: Ledger, step: int) -> dict[str, float]:
    """How many groups of the step say nothing because their rewards are all equal, and how many were replaced by the
    next prompt: for that reason (dynamic sampling), or because they could not be trained."""
    filtered = len(ledger.dropped_in(step, reason=FilterReason.EQUAL_REWARDS))
    counts = {"reissued_groups": float(len(ledger.dropped_in(step)) - filtered)}
    if not stage.samples_completions or stage.algorithm.group_size < 2:
        return counts
    groups: dict[str, list[float]] = {}
    for key, known in values.items():
        rewards = groups.setdefault(ticket_of(key), [])
        if known["mask"] > 0:
            rewards.append(stage.total_reward(known))
    equal = sum(has_equal_rewards(rewards) for rewards in groups.values())
    return {**counts, "equal_reward_groups": float(equal), "filtered_groups": float(filtered)}


def staleness_metrics(batch: Sequence[SampleMeta], *, version: int) -> dict[str, float]:
    """How many samples are how many steps older than the weights that they train; rows of the data have no age.

    `staleness/K` counts the samples whose oldest token is K steps old.
    """
    ages = [version - meta.version for meta in batch if meta.version >= 0]
    if not ages:
        return {}
    counts = {f"{STALENESS}{age}": float(ages.count(age)) for age in sorted(set(ages))}
    return {"staleness_mean": sum(ages) / len(ages), "staleness_max": float(max(ages)), **counts}


def end_metrics(ledger: Ledger) -> dict[str, float]:
    """Length and reward of samples by how they ended, over the whole run: whether what is dropped differs from what is
    trained."""
    return {
        f"ended/{end}/{name}": value
        for end, means in ledger.ends.means().items()
        for name, value in means.items()
    }


def commit_record(
    batch: Sequence[SampleMeta], metrics: Mapping[str, float], timing: Mapping[str, float]
) -> dict[str, float]:
    """What `StepCommitted` keeps: the trainer's metrics, the batch's totals, and where the time went."""
    totals = {
        "samples": float(len(batch)),
        "tokens_trained": float(sum(meta.num_tokens for meta in batch)),
        "tokens_generated": float(sum(meta.num_loss_tokens for meta in batch if meta.version >= 0)),
    }
    if any(meta.reward_components for meta in batch):
        totals["reward_mean"] = sum(meta.reward for meta in batch) / len(batch)
    return {**metrics, **totals, **{f"timing/{name}": seconds for name, seconds in timing.items()}}


def slowest(calls: Iterable[Mapping[str, CallDone]]) -> dict[str, float]:
    """Seconds per part of the step's calls, each of the rank that took longest, added up over the calls."""
    seconds: dict[str, float] = {}
    for answers in calls:
        for name in sorted({name for answer in answers.values() for name in answer.timing}):
            longest = max(answer.timing.get(name, 0.0) for answer in answers.values())
            seconds[f"train_{name}"] = seconds.get(f"train_{name}", 0.0) + longest
    return seconds


def alerts(metrics: Mapping[str, float], *, off_policy: bool = False) -> list[Raise]:
    """What people should look at in a step's metrics, though the run goes on. Of samples that another policy may have
    drawn (`off_policy`: they are replayed, or may be stale), no ratio is expected."""
    found = []
    ratio = 1.0 if off_policy else metrics.get("ratio_mean", 1.0)
    if not abs(ratio - 1.0) <= RATIO_TOLERANCE:  # Also when it is not a number.
        found.append(Raise("the mean ratio before the first update is not 1", {"ratio_mean": ratio}))
    if metrics.get("skipped", 0.0) > 0:
        found.append(
            Raise("an update was skipped: its gradient was not finite", {"skipped": metrics["skipped"]})
        )
    return found
