"""The stages of a run: what `config.py` says, part by part, with nothing left open."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kintsugi.config import (
    LEARN_ROWS,
    LEARN_SAMPLES,
    ActorSection,
    Algorithm,
    AlgorithmSection,
    AsynchronySection,
    Config,
    CriticSection,
    ReferenceSection,
    RewardModelSection,
    resolved,
)


class Stage(msgspec.Struct, frozen=True):
    """One part of a run that has its own algorithm, optimizer and data order: the warm-up, or the main part."""

    name: str
    """Also the prefix of its ticket ids: "warmup", "grpo", "sft"."""
    first_step: int
    algorithm: Algorithm
    actor: ActorSection
    seed: int
    """Of the order of its rows."""
    critic: CriticSection = CriticSection()
    reference: ReferenceSection = ReferenceSection()
    reward_model: RewardModelSection | None = None
    asynchrony: AsynchronySection = AsynchronySection()

    @property
    def samples_completions(self) -> bool:
        """Whether it learns from completions that the model samples and that earn a reward, and not from rows."""
        return self.algorithm.name not in LEARN_ROWS

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained beside the actor."""
        return self.algorithm.name == "ppo"

    @property
    def has_reference(self) -> bool:
        """Whether anything is measured against a reference model; it is kept nowhere else."""
        name, beta = self.algorithm.name, self.algorithm.beta
        return name == "dpo" or (beta > 0 and name not in ("sft", "reward_model"))

    @property
    def takes_kl_off_reward(self) -> bool:
        """Whether the distance to the reference costs reward, instead of adding to the loss."""
        return self.has_reference and self.algorithm.kl_in == "reward"

    @property
    def asks_proximal(self) -> bool:
        """Whether the proximal policy's log-probabilities take a pass of their own: with one update a step, those of
        the update itself are the same."""
        return self.algorithm.proximal == "recompute" and self.algorithm.updates_per_step > 1

    @property
    def weighs_samples(self) -> bool:
        """Whether anything makes up for another policy having sampled, beside the ratio that is clipped."""
        return self.algorithm.proximal != "sampler" or self.algorithm.importance == "truncate"

    @property
    def moves_reference(self) -> bool:
        """Whether the reference follows the actor, which makes it a part of every step's state."""
        return self.has_reference and (self.reference.copy_every > 0 or self.reference.moving_average > 0)

    @property
    def num_updates(self) -> int:
        """Optimizer updates that the actor makes, which waits while a critic warms up."""
        waiting = self.critic.warmup_steps if self.has_critic else 0
        return (self.algorithm.steps - waiting) * self.algorithm.updates_per_step

    @property
    def last_step(self) -> int:
        """Global number of its last step; steps count from 1 over the whole run."""
        return self.first_step + self.algorithm.steps - 1

    def total_reward(self, values: Mapping[str, float]) -> float:
        """What a sample earned: its own reward and, with a reward model, that model's weighted score."""
        if self.reward_model is None:
            return values["reward"]
        return values["reward"] + self.reward_model.weight * values["score"]


def stages(config: Config) -> tuple[Stage, ...]:
    """The run's stages in order: an optional SFT warm-up, then the main algorithm, its values filled in."""
    main = resolved(_with_proximal(config))
    first_step = 1 if config.warmup is None else 1 + config.warmup.steps
    main_stage = Stage(
        main.name,
        first_step,
        main,
        config.actor,
        config.seed,
        config.critic,
        config.reference,
        config.reward_model,
        config.asynchrony,
    )
    if config.warmup is None:
        return (main_stage,)
    warmup = config.warmup
    sft = resolved(
        AlgorithmSection(
            name="sft",
            steps=warmup.steps,
            batch_size=warmup.batch_size,
            reward=main.reward,
        )
    )
    actor = msgspec.structs.replace(
        config.actor,
        learning_rate=warmup.learning_rate,
        schedule=warmup.schedule,
        warmup_steps=warmup.warmup_steps,
    )
    return (Stage("warmup", 1, sft, actor, warmup.seed), main_stage)


def _with_proximal(config: Config) -> AlgorithmSection:
    """The main algorithm with its proximal policy: one that lags behind is none to stay close to."""
    section = config.algorithm
    if section.proximal is not None or section.name not in LEARN_SAMPLES:
        return section
    is_sampler = config.asynchrony.max_staleness == 0 or section.importance == "truncate"
    return msgspec.structs.replace(section, proximal="sampler" if is_sampler else "recompute")


def has_servers(config: Config) -> bool:
    """Whether anything is ever sampled: a reward model learns from pairs and is judged by how it ranks pairs."""
    return config.algorithm.name != "reward_model"


def next_stage(config: Config, *, step: int) -> Stage:
    """The stage that the step after `step` belongs to; the last one when all steps are done."""
    every = stages(config)
    return next((stage for stage in every if step < stage.last_step), every[-1])
