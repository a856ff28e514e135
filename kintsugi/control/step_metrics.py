"""Metrics that are recorded with a step. Pure functions of configuration and state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kintsugi.config.stages import Stage
from kintsugi.control.protocol import Raise
from kintsugi.graph.advantages import has_equal_rewards
from kintsugi.journal.facts import FilterReason
from kintsugi.protocol.training import CallDone
from kintsugi.samples.ledger import Ledger
from kintsugi.telemetry.events import UpdateSkipped
from kintsugi.types import SampleMeta, ticket_of

Values = Mapping[str, Mapping[str, float]]
"""Sample → values that the master knows of it after the calls of the step."""

STALENESS = "staleness/"
RATIO_TOLERANCE = 1e-3
"""Before the first update of a synchronous step the policy is the one that sampled, so the mean ratio must be 1."""


def with_final_rewards(stage: Stage, batch: Sequence[SampleMeta], values: Values) -> tuple[SampleMeta, ...]:
    """Return the batch with the final rewards of its samples: shaped, with the score of the reward model, less the KL
    where it is subtracted from the reward. Each part is a component of its own."""
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
    """Return how many groups of the step are uninformative because all rewards are equal, and how many were replaced by
    the next prompt: for that reason (dynamic sampling), or because they could not be trained."""
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
    """Return how many samples are how many steps older than the weights that they train; rows of the data have no age.

    `staleness/K` counts the samples with an oldest token of K steps.
    """
    ages = [version - meta.version for meta in batch if meta.version >= 0]
    if not ages:
        return {}
    counts = {f"{STALENESS}{age}": float(ages.count(age)) for age in sorted(set(ages))}
    return {"staleness_mean": sum(ages) / len(ages), "staleness_max": float(max(ages)), **counts}


def end_metrics(ledger: Ledger) -> dict[str, float]:
    """Return length and reward of samples by their outcome, over the whole run: they show whether dropped samples
    differ from trained ones."""
    return {
        f"ended/{end}/{name}": value
        for end, means in ledger.ends.means().items()
        for name, value in means.items()
    }


def commit_record(
    batch: Sequence[SampleMeta], metrics: Mapping[str, float], timing: Mapping[str, float]
) -> dict[str, float]:
    """Return the metrics that `StepCommitted` keeps: those of the trainer, totals of the batch, and times."""
    totals = {
        "samples": float(len(batch)),
        "tokens_trained": float(sum(meta.num_tokens for meta in batch)),
        "tokens_generated": float(sum(meta.num_loss_tokens for meta in batch if meta.version >= 0)),
    }
    if any(meta.reward_components for meta in batch):
        totals["reward_mean"] = sum(meta.reward for meta in batch) / len(batch)
    return {**metrics, **totals, **{f"timing/{name}": seconds for name, seconds in timing.items()}}


def slowest(calls: Iterable[Mapping[str, CallDone]]) -> dict[str, float]:
    """Return seconds per part of the step's calls: the slowest rank of each call, summed over the calls."""
    seconds: dict[str, float] = {}
    for answers in calls:
        for name in sorted({name for answer in answers.values() for name in answer.timing}):
            longest = max(answer.timing.get(name, 0.0) for answer in answers.values())
            seconds[f"train_{name}"] = seconds.get(f"train_{name}", 0.0) + longest
    return seconds


def alerts(metrics: Mapping[str, float], *, off_policy: bool = False) -> list[Raise]:
    """Return alerts for suspicious metrics of a step. With `off_policy` (samples are replayed or may be stale) no ratio
    is expected."""
    found = []
    ratio = 1.0 if off_policy else metrics.get("ratio_mean", 1.0)
    if not abs(ratio - 1.0) <= RATIO_TOLERANCE:  # NaN counts too.
        found.append(Raise("the mean ratio before the first update is not 1", {"ratio_mean": ratio}))
    if metrics.get("skipped", 0.0) > 0:
        message = "an update was skipped: its gradient was not finite"
        found.append(Raise.of(UpdateSkipped(message, {"skipped": metrics["skipped"]})))
    return found
