"""Stages of a run, derived from its configuration with all values resolved."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kintsugi.config.schema import (
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
    """One stage of a run with its own algorithm, optimizer and row order: the warm-up, or the main stage."""

    name: str
    """Name, and prefix of the ticket ids: "warmup", "grpo", "sft"."""
    first_step: int
    algorithm: Algorithm
    actor: ActorSection
    seed: int
    """Seed of the row order."""
    critic: CriticSection = CriticSection()
    reference: ReferenceSection = ReferenceSection()
    reward_model: RewardModelSection | None = None
    asynchrony: AsynchronySection = AsynchronySection()

    @property
    def samples_completions(self) -> bool:
        """Whether it trains on sampled completions with rewards, not on rows of the data set."""
        return self.algorithm.name not in LEARN_ROWS

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained together with the actor."""
        return self.algorithm.name == "ppo"

    @property
    def has_reference(self) -> bool:
        """Whether a reference model is needed; otherwise none is loaded."""
        name, beta = self.algorithm.name, self.algorithm.beta
        return name == "dpo" or (beta > 0 and name not in ("sft", "reward_model"))

    @property
    def begins_as_actor(self) -> bool:
        """Whether its reference or its critic begins with the weights of the actor."""
        from_actor = self.has_reference and self.reference.path is None
        return from_actor or (self.has_critic and self.critic.path is None)

    @property
    def takes_kl_off_reward(self) -> bool:
        """Whether the KL divergence to the reference is subtracted from the reward instead of added to the loss."""
        return self.has_reference and self.algorithm.kl_in == "reward"

    @property
    def asks_proximal(self) -> bool:
        """Whether the log-probabilities of the proximal policy need a separate forward pass. With one update per step
        they equal those of the update."""
        return self.algorithm.proximal == "recompute" and self.algorithm.updates_per_step > 1

    @property
    def weighs_samples(self) -> bool:
        """Whether samples have importance weights in addition to the clipped ratio."""
        return self.algorithm.proximal != "sampler" or self.algorithm.importance == "truncate"

    @property
    def moves_reference(self) -> bool:
        """Whether the reference is updated from the actor, and thus part of the state of every step."""
        return self.has_reference and (self.reference.copy_every > 0 or self.reference.moving_average > 0)

    @property
    def num_updates(self) -> int:
        """Number of optimizer updates of the actor, without the warm-up of a critic."""
        critic_only = self.critic.warmup_steps if self.has_critic else 0
        return (self.algorithm.steps - critic_only) * self.algorithm.updates_per_step

    @property
    def last_step(self) -> int:
        """Number of its last step; steps are numbered from 1 over the whole run."""
        return self.first_step + self.algorithm.steps - 1

    def total_reward(self, values: Mapping[str, float]) -> float:
        """Total reward of a sample: its reward plus the weighted score of the reward model, if there is one."""
        if self.reward_model is None:
            return values["reward"]
        return values["reward"] + self.reward_model.weight * values["score"]


def stages(config: Config) -> tuple[Stage, ...]:
    """Stages of the run in order: an optional SFT warm-up, then the main algorithm with resolved values."""
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
    """Resolve the proximal policy of the main algorithm: a stale sampler is not a good one."""
    section = config.algorithm
    if section.proximal is not None or section.name not in LEARN_SAMPLES:
        return section
    is_sampler = config.asynchrony.max_staleness == 0 or section.importance == "truncate"
    return msgspec.structs.replace(section, proximal="sampler" if is_sampler else "recompute")


def num_processes(config: Config) -> int:
    """Return how many processes a run starts with: an agent per host, the master, its manager, and the workers."""
    sampling = config.generation.servers + 1 if has_servers(config) else 0
    return config.cluster.hosts + 1 + config.actor.workers + config.rollout.workers + sampling


def has_servers(config: Config) -> bool:
    """Whether anything is sampled. A reward model is trained and evaluated on pairs without sampling."""
    return config.algorithm.name != "reward_model"


def next_stage(config: Config, *, step: int) -> Stage:
    """Stage of the step after `step`; the last stage after the last step."""
    every = stages(config)
    return next((stage for stage in every if step < stage.last_step), every[-1])
