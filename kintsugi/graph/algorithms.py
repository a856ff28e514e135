"""The algorithms, one function each: a step as a graph of model calls.

To add one, write a function that returns a `Graph`, name it in `ALGORITHMS`, and give the trainer its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt

from kintsugi.config import Algorithm, Stage
from kintsugi.graph.dfg import Graph
from kintsugi.graph.mfc import Call, Key, Per
from kintsugi.types import Role, SampleMeta

PROMPT = Key("prompt", "text")
COLUMNS = Key("columns", "text")
TOKENS = Key("tokens", "int32", ("tokens",))
LOSS_MASK = Key("loss_mask", "uint8", ("tokens",))
LOGPROBS = Key("logprobs", "float32", ("tokens",))
REFERENCE_LOGPROBS = Key("reference_logprobs", "float32", ("tokens",))
REWARD = Key("reward", "float32")
ADVANTAGE = Key("advantage", "float32")
UPDATE = Key("update", "float32", ("state",))
"""The new state itself; ranks vouch for it by its digest, which the executor compares."""

STD_EPSILON = 1e-4
"""Added to the group's standard deviation, as TRL does."""


def sft(algorithm: Algorithm) -> Graph:
    """Supervised fine-tuning: rows become tokens, the actor learns to write their completions."""
    return Graph(
        [
            Call(
                "demonstrate", Role.ROLLOUT, Per.GROUP, "demonstrate", (PROMPT, COLUMNS), (TOKENS, LOSS_MASK)
            ),
            Call(
                "actor_train",
                Role.MODEL,
                Per.BATCH,
                "sft_train",
                (TOKENS, LOSS_MASK),
                (UPDATE,),
                flops_per_token=6,
            ),
        ],
        sources=(PROMPT, COLUMNS),
        wanted=("update",),
    )


def grpo(algorithm: Algorithm) -> Graph:
    """Group relative policy optimisation: the group's mean reward is the baseline, no critic.

    advantage = (reward − mean) / (std + 1e-4) over the group's valid samples, std with n − 1 in the denominator;
    the same advantage for every token of the sample; PPO's clipped ratio; an optional KL to the reference model.
    """
    group = [
        Call(
            "actor_generate",
            Role.ROLLOUT,
            Per.GROUP,
            "generate",
            (PROMPT,),
            (TOKENS, LOSS_MASK, LOGPROBS),
            flops_per_token=2,
        ),
        Call("reward", Role.ROLLOUT, Per.GROUP, "reward", (TOKENS, COLUMNS), (REWARD,)),
        Call("advantage", Role.MASTER, Per.BATCH, "group_advantages", (REWARD,), (ADVANTAGE,)),
    ]
    train_inputs: tuple[Key, ...] = (TOKENS, LOSS_MASK, LOGPROBS, ADVANTAGE)
    if algorithm.beta > 0:
        group.append(
            Call(
                "ref_inference",
                Role.MODEL,
                Per.BATCH,
                "reference_inference",
                (TOKENS, LOSS_MASK),
                (REFERENCE_LOGPROBS,),
                flops_per_token=2,
            )
        )
        train_inputs += (REFERENCE_LOGPROBS,)
    train = Call(
        "actor_train", Role.MODEL, Per.BATCH, "grpo_train", train_inputs, (UPDATE,), flops_per_token=6
    )
    return Graph([*group, train], sources=(PROMPT, COLUMNS), wanted=("update",))


ALGORITHMS: Mapping[str, Callable[[Algorithm], Graph]] = {"sft": sft, "grpo": grpo}


def build_graph(stage: Stage) -> Graph:
    """The graph of one stage of the run."""
    return ALGORITHMS[stage.algorithm.name](stage.algorithm)


def group_advantages(rewards: Sequence[float], *, scale_by_std: bool) -> list[float]:
    """Each reward relative to its group.

    >>> group_advantages([1.0, 0.0], scale_by_std=False)
    [0.5, -0.5]
    """
    count = len(rewards)
    mean = sum(rewards) / count
    centred = [reward - mean for reward in rewards]
    if not scale_by_std:
        return centred
    std = sqrt(sum(value * value for value in centred) / (count - 1)) if count > 1 else 0.0
    return [value / (std + STD_EPSILON) for value in centred]


def sample_values(stage: Stage, metas: Sequence[SampleMeta]) -> dict[str, dict[str, float]]:
    """What the master computes for each sample of a batch; groups are told apart by ticket, never by text."""
    if stage.algorithm.name == "sft":
        return {meta.key: {} for meta in metas}
    groups: dict[str, list[SampleMeta]] = {}
    for meta in metas:
        groups.setdefault(meta.ticket, []).append(meta)
    values: dict[str, dict[str, float]] = {}
    for group in groups.values():
        rewards = [meta.reward for meta in group]
        for meta, advantage in zip(
            group, group_advantages(rewards, scale_by_std=stage.algorithm.scale_by_std), strict=True
        ):
            values[meta.key] = {"advantage": advantage}
    return values


def batch_totals(stage: Stage, metas: Sequence[SampleMeta], *, max_new_tokens: int) -> dict[str, float]:
    """Denominators over the whole optimizer batch, before it is cut."""
    sequences = sum(meta.num_loss_tokens > 0 for meta in metas)
    return {
        "tokens": float(sum(meta.num_loss_tokens for meta in metas)),
        "sequences": float(sequences),
        "constant": float(sequences * max_new_tokens),
    }
