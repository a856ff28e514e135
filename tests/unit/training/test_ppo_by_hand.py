"""Whole steps of PPO against a second implementation: one sequence at a time, plain loops and torch's own optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import xxhash
from msgspec import msgpack
from torch import Tensor

from kintsugi.config.schema import ActorSection, CriticSection, ReferenceSection
from kintsugi.config.stages import Stage
from kintsugi.model.architecture import value_config
from kintsugi.model.attention import PackedLayout
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.training.model_calls import ModelCalls
from kintsugi.training.process_group import join_group
from kintsugi.types import FinishReason, ShardItem, Trajectory
from tests.unit.training.world import CPU, TINY, Batch, calls_of, new_stage, new_state, run_call

NUM_STEPS = 3


def several_turns() -> Batch:
    """Samples whose actions stand between tokens of the environment, cut off by length or not, one of them masked."""
    random = np.random.default_rng(0)
    trajectories, items = {}, []
    for index in range(8):
        num_tokens = int(random.integers(6, 20))
        mask = (random.random(num_tokens) < 0.5).astype(np.uint8)
        mask[0], mask[2] = 0, 1
        key = f"ppo:0:{index // 2}:0/{index % 2}"
        logprobs = np.where(mask, -2.6 + 0.3 * random.normal(size=num_tokens), 0.0)
        sample = Trajectory(
            key=key,
            tokens=random.integers(0, TINY.vocab_size, num_tokens).astype("<i4").tobytes(),
            loss_mask=mask.tobytes(),
            logprobs=logprobs.astype("<f4").tobytes(),
            versions=np.zeros(num_tokens, "<i4").tobytes(),
            finish=FinishReason.EOS,
        )
        trajectories[key] = sample
        digest = xxhash.xxh3_64_hexdigest(msgpack.encode(sample))
        values = {
            "reward": float(random.normal()),
            "truncated": float(index % 3 == 0),
            "mask": float(index != 4),
        }
        items.append(ShardItem(key, "rollout-0", digest, num_tokens, int(mask.sum()), values))
    return Batch(trajectories, tuple(items))


@dataclass
class Experience:
    """One sequence as the step found it; all but `tokens` have an entry per action."""

    tokens: Tensor
    actions: Tensor
    sampled: Tensor
    reference: Tensor
    values: Tensor
    advantages: Tensor


class ByHand:
    """PPO as the papers have it."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.actor, self.reference = Transformer(TINY), Transformer(TINY)
        self.critic = Transformer(value_config(TINY), with_value_head=True)
        for model in (self.actor, self.reference, self.critic):
            initialize(model, seed=3)
        settings = stage.actor
        self.actor_optimizer, self.critic_optimizer = (
            torch.optim.AdamW(
                model.parameters(),
                betas=(settings.beta1, settings.beta2),
                eps=settings.epsilon,
                weight_decay=0.0,
            )
            for model in (self.actor, self.critic)
        )
        self.actor_updates = self.critic_updates = 0

    def step(self, batch: Batch, *, number: int) -> None:
        stage, algorithm = self.stage, self.stage.algorithm
        found = [self._experience(batch, item) for item in batch.items if item.values["mask"]]
        everything = torch.cat([each.advantages for each in found]).double()
        num_tokens, mean, deviation = len(everything), everything.mean(), (everything.var() + 1e-8).sqrt()
        waiting = stage.critic.warmup_steps
        for _ in range(algorithm.updates_per_step if number > waiting else 0):
            losses = [self._actor_loss(each, mean=mean, deviation=deviation) for each in found]
            rate = self._rate(stage.actor.learning_rate, self.actor_updates, steps=algorithm.steps - waiting)
            _apply(torch.stack(losses).sum() / num_tokens, self.actor, self.actor_optimizer, rate=rate)
            self.actor_updates += 1
        for _ in range(algorithm.updates_per_step):
            losses = [self._critic_loss(each) for each in found]
            rate = self._rate(stage.critic.learning_rate, self.critic_updates, steps=algorithm.steps)
            _apply(torch.stack(losses).sum() / num_tokens, self.critic, self.critic_optimizer, rate=rate)
            self.critic_updates += 1
        share = stage.reference.moving_average
        with torch.no_grad():
            for old, new in zip(self.reference.parameters(), self.actor.parameters(), strict=True):
                old.copy_(share * old + (1 - share) * new)

    def _rate(self, highest: float, update: int, *, steps: int) -> float:
        """Cosine after a linear rise."""
        rise, total = self.stage.actor.warmup_steps, steps * self.stage.algorithm.updates_per_step
        if update < rise:
            return highest * (update + 1) / rise
        return highest * 0.5 * (1 + math.cos(math.pi * (update - rise) / (total - rise)))

    @torch.no_grad()
    def _experience(self, batch: Batch, item: ShardItem) -> Experience:
        algorithm, sample = self.stage.algorithm, batch.trajectories[item.key]
        tokens = torch.tensor(np.frombuffer(sample.tokens, "<i4").astype(np.int64))
        actions = torch.tensor(np.flatnonzero(np.frombuffer(sample.loss_mask, np.uint8)))
        sampled = torch.tensor(np.frombuffer(sample.logprobs, "<f4"))[actions]
        reference = _distributions(self.reference, tokens)[actions - 1, tokens[actions]]
        all_values = self.critic.values(_hidden(self.critic, tokens))
        values = [*all_values[actions - 1].tolist(), float(all_values[-1]) * item.values["truncated"]]
        cost = algorithm.beta if algorithm.kl_in == "reward" else 0.0
        rewards = (-cost * (sampled - reference)).tolist()
        rewards[-1] += item.values["reward"]
        advantages, following = [0.0] * len(rewards), 0.0
        for t in reversed(range(len(rewards))):
            delta = rewards[t] + algorithm.gamma * values[t + 1] - values[t]
            following = delta + algorithm.gamma * algorithm.gae_lambda * following
            advantages[t] = following
        return Experience(
            tokens, actions, sampled, reference, torch.tensor(values[:-1]), torch.tensor(advantages)
        )

    def _actor_loss(self, each: Experience, *, mean: Tensor, deviation: Tensor) -> Tensor:
        algorithm = self.stage.algorithm
        distributions = _distributions(self.actor, each.tokens)[each.actions - 1]
        logprobs = distributions.gather(1, each.tokens[each.actions, None]).squeeze(1)
        ratio = (logprobs - each.sampled).exp()
        clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
        whitened = ((each.advantages - mean) / deviation).float()
        losses = -torch.minimum(ratio * whitened, clipped * whitened)
        losses += algorithm.entropy_weight * (distributions.exp() * distributions).sum(1)
        if algorithm.kl_in == "loss":
            log_ratio = logprobs - each.reference
            losses += algorithm.beta * ratio * ((-log_ratio).exp() - 1 + log_ratio)
        return losses.sum()

    def _critic_loss(self, each: Experience) -> Tensor:
        clip, returns = self.stage.critic.value_clip, each.advantages + each.values
        values = self.critic.values(_hidden(self.critic, each.tokens))[each.actions - 1]
        clipped = torch.clamp(values, each.values - clip, each.values + clip)
        return torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).sum() / 2


def _hidden(model: Transformer, tokens: Tensor) -> Tensor:
    layout = PackedLayout.from_lengths([len(tokens)])
    return model.forward_packed(tokens, layout.positions, layout)


def _distributions(model: Transformer, tokens: Tensor) -> Tensor:
    return (_hidden(model, tokens) @ model.output_weight.T).log_softmax(-1)


def _apply(loss: Tensor, model: Transformer, optimizer: torch.optim.Optimizer, *, rate: float) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


@pytest.mark.parametrize(("kl_in", "kl"), [("reward", "k1"), ("loss", "k3")])
def test_actor_critic_and_moving_reference_end_where_a_second_implementation_does(
    kl_in: str, kl: str
) -> None:
    stage = new_stage(
        name="ppo",
        steps=NUM_STEPS + 1,
        updates_per_step=2,
        beta=0.2,
        kl_in=kl_in,
        kl=kl,
        entropy_weight=0.05,
        gamma=0.97,
        gae_lambda=0.9,
        actor=ActorSection(schedule="cosine", warmup_steps=2, learning_rate=1e-2, epsilon=1e-4),
        critic=CriticSection(learning_rate=2e-2, value_clip=0.05, warmup_steps=1),
        reference=ReferenceSection(moving_average=0.5),
    )
    batch, by_hand, state = several_turns(), ByHand(stage), new_state(stage)
    calls = ModelCalls(state, deterministic=True)
    group = join_group(
        group_id=1,
        ranks=["model-0"],
        me="model-0",
        store_address="",
        keys=(b"", b""),
        device=CPU,
        timeout_s=1.0,
    )
    for step in range(1, NUM_STEPS + 1):
        for interface in calls_of(stage):
            call = batch.call(stage, step=step, rank=0, world_size=1, num_shards=3, interface=interface)
            run_call(batch, call, calls=calls, group=group)
        state.commit(step)
        calls.forget()
        by_hand.step(batch, number=step)
    found = state.tensors()
    for prefix, model in (
        ("weights/", by_hand.actor),
        ("weights/critic.", by_hand.critic),
        ("reference/", by_hand.reference),
    ):
        for name, expected in model.named_parameters():
            torch.testing.assert_close(found[f"{prefix}{name}"], expected.detach(), rtol=0, atol=1e-5)
