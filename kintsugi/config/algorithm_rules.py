"""Rules for combinations of algorithm settings. Pure; `config/validation.py` raises the problems as errors.

A setting that would have no effect is refused too.
"""

from __future__ import annotations

from collections.abc import Iterator

from kintsugi.config.schema import (
    COMPARE_SAMPLES,
    LEARN_PAIRS,
    LEARN_ROWS,
    LEARN_SAMPLES,
    AlgorithmSection,
    Config,
    CriticSection,
    ReferenceSection,
)
from kintsugi.config.stages import Stage

Problem = tuple[str, str]
"""A field and the expected value."""

_PER_TOKEN: frozenset[str] = frozenset({"ppo", "reinforce_pp"})

USED_BY: dict[str, frozenset[str]] = {
    "clip_low": LEARN_SAMPLES,
    "clip_high": LEARN_SAMPLES,
    "ratio": LEARN_SAMPLES,
    "proximal": LEARN_SAMPLES,
    "importance": LEARN_SAMPLES,
    "importance_cap": LEARN_SAMPLES,
    "beta": LEARN_SAMPLES | {"dpo"},
    "kl": LEARN_SAMPLES,
    "kl_in": LEARN_SAMPLES,
    "entropy_weight": LEARN_SAMPLES,
    "denominator": LEARN_SAMPLES | {"sft"},
    "scale_by_std": COMPARE_SAMPLES,
    "gamma": _PER_TOKEN,
    "gae_lambda": frozenset({"ppo"}),
    "mask_truncated": LEARN_SAMPLES,
    "resampling_rounds": COMPARE_SAMPLES,
    "overlong_buffer": LEARN_SAMPLES,
    "overlong_penalty": LEARN_SAMPLES,
}
"""Settings that only some algorithms use, with these algorithms."""


def algorithm_problems(config: Config, stage: Stage) -> Iterator[Problem]:
    """Yield the problems of the main stage's algorithm and of its critic, reference and reward model, worst first."""
    yield from _group_size(stage)
    yield from _unused(config.algorithm)
    yield from _off_policy(config, stage)
    yield from _divergence(config.algorithm, stage)
    yield from _shaping(config, stage)
    yield from _companions(config, stage)


def _group_size(stage: Stage) -> Iterator[Problem]:
    name, size = stage.algorithm.name, stage.algorithm.group_size
    if name in COMPARE_SAMPLES and size < 2:
        yield (
            "algorithm.group_size",
            f"at least 2 with {name} (the other samples of the group are the baseline)",
        )
    if name in LEARN_PAIRS and size != 2:
        yield "algorithm.group_size", f"2 with {name} (the chosen and the rejected completion), or nothing"
    if name == "sft" and size != 1:
        yield "algorithm.group_size", "1 with SFT (a row is learned once per epoch), or nothing"


def _unused(section: AlgorithmSection) -> Iterator[Problem]:
    neutral = AlgorithmSection(name=section.name)
    for field, users in USED_BY.items():
        if section.name not in users and getattr(section, field) not in (None, getattr(neutral, field)):
            used = ", ".join(sorted(users))
            yield f"algorithm.{field}", f"nothing: {section.name} does not use it ({used} do)"


def _off_policy(config: Config, stage: Stage) -> Iterator[Problem]:
    """Check the correction for off-policy samples."""
    section, algorithm, asynchrony = config.algorithm, stage.algorithm, config.asynchrony
    if asynchrony.max_staleness == 0 and asynchrony.decay != 1:
        yield "asynchrony.decay", "1 while `asynchrony.max_staleness` is 0: nothing is stale"
    if algorithm.name not in LEARN_SAMPLES:
        return
    if algorithm.proximal == "approximate" and asynchrony.max_staleness == 0:
        yield (
            "algorithm.proximal",
            "sampler or recompute while `asynchrony.max_staleness` is 0: what is not stale is estimated as the sampler",
        )
    if algorithm.proximal != "sampler" and algorithm.importance == "truncate":
        yield (
            "algorithm.importance",
            f"cap or mask with `algorithm.proximal`={algorithm.proximal} (truncate is for sampler)",
        )
    if not stage.weighs_samples:
        why = "nothing with `algorithm.proximal`=sampler: all weights are 1 unless `algorithm.importance`=truncate"
        for field in ("importance", "importance_cap"):
            if getattr(section, field) is not None:
                yield f"algorithm.{field}", why
    yield from _clipping(section, stage)


def _clipping(section: AlgorithmSection, stage: Stage) -> Iterator[Problem]:
    """Refuse clipping bounds where the ratio is always 1 or not clipped."""
    algorithm = stage.algorithm
    if algorithm.importance == "truncate":
        why = "with `algorithm.importance`=truncate, which does not clip"
    elif algorithm.proximal == "recompute" and not stage.asks_proximal:
        why = (
            "with one update per step and `algorithm.proximal`=recompute (its default where samples may be stale): "
            "the update begins at the proximal policy, only a second one could be clipped"
        )
    else:
        return
    for field in ("clip_low", "clip_high"):
        if getattr(section, field) is not None:
            yield f"algorithm.{field}", f"nothing {why}"


def _divergence(section: AlgorithmSection, stage: Stage) -> Iterator[Problem]:
    """Check the coefficient and the estimator of the KL divergence."""
    algorithm = stage.algorithm
    if algorithm.name == "dpo" and algorithm.beta == 0:
        yield "algorithm.beta", "a positive number with dpo (its inverse temperature, 0.1 is usual)"
    if algorithm.name not in LEARN_SAMPLES:
        return
    if algorithm.beta == 0:
        for field in ("kl", "kl_in"):
            if getattr(section, field) is not None:
                yield f"algorithm.{field}", "nothing while `algorithm.beta` is 0: there is no KL to take"


def _shaping(config: Config, stage: Stage) -> Iterator[Problem]:
    """Check reward shaping and resampling."""
    algorithm, limit = stage.algorithm, config.sampling.max_new_tokens
    if algorithm.overlong_buffer >= limit:
        yield "algorithm.overlong_buffer", f"less than `sampling.max_new_tokens`={limit}"
    if not algorithm.overlong_buffer and algorithm.overlong_penalty != AlgorithmSection().overlong_penalty:
        yield "algorithm.overlong_penalty", "nothing while `algorithm.overlong_buffer` is 0"
    if algorithm.resampling_rounds and stage.reward_model is not None:
        yield (
            "algorithm.resampling_rounds",
            "0 with a reward model: its scores come when the batch is formed, and are hardly ever equal",
        )


def _companions(config: Config, stage: Stage) -> Iterator[Problem]:
    """Check critic, reference and reward model; settings of unused models are refused."""
    name = stage.algorithm.name
    if not stage.has_critic:
        for field in CriticSection.__struct_fields__:
            if getattr(config.critic, field) != getattr(CriticSection(), field):
                yield f"critic.{field}", f"nothing: {name} has no critic (ppo has)"
    if not stage.has_reference:
        why = (
            "needs no reference model"
            if name in LEARN_ROWS
            else "needs one only with `algorithm.beta` above 0"
        )
        for field in ReferenceSection.__struct_fields__:
            if getattr(config.reference, field) != getattr(ReferenceSection(), field):
                yield f"reference.{field}", f"nothing: {name} {why}"
    if stage.reference.copy_every and stage.reference.moving_average:
        yield (
            "reference.moving_average",
            f"0 with `reference.copy_every`={stage.reference.copy_every}: one of the two",
        )
    if stage.reward_model is not None and name not in LEARN_SAMPLES:
        yield "reward_model.path", f"nothing (`reward_model=null`): {name} asks no model for scores"
    if stage.has_critic and stage.critic.warmup_steps >= stage.algorithm.steps:
        yield (
            "critic.warmup_steps",
            f"fewer than the stage's {stage.algorithm.steps} steps, or the actor never learns",
        )
