"""Computation of a rollout worker: completions of the engine, scored by the rewards of the recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kintsugi.config.schema import Config
from kintsugi.errors import UserError
from kintsugi.generation.engine.factory import build_engine
from kintsugi.generation.engine.requests import GenerationOutput, GenerationRequest
from kintsugi.generation.engine.rng import stream_key
from kintsugi.lab.fragile.messages import Prompt, RolledOut
from kintsugi.model.plan import plan_model
from kintsugi.rollout.rewards.spec import arguments, checked, combined, load_rewards, rewards_of, total
from kintsugi.rollout.trajectory import describe, int32, sampled_trajectory
from kintsugi.types import Completion, FinishReason, SampleMeta, SamplingParams, Trajectory

CPU = torch.device("cpu")


class Sampler:
    """One engine and the reward functions."""

    def __init__(self, config: Config, *, process: str) -> None:
        torch.set_num_threads(1)
        self._config, self._process = config, process
        architecture, self._tokenizer = plan_model(config)
        self._dtype: torch.dtype = getattr(torch, config.actor.dtype)
        self._engine = build_engine(
            architecture,
            self._tokenizer,
            slots=config.generation.slots,
            max_length=config.generation.max_length,
            dtype=self._dtype,
            device=CPU,
            deterministic=config.deterministic,
            kv_cache_gib=config.generation.kv_cache_gib,
        )
        self._names = rewards_of(config)
        self._rewards = load_rewards(config.algorithm.reward)
        if any(reward.is_async for reward in self._rewards):
            raise UserError("`algorithm.reward`: the fragile profile calls ordinary functions only")

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def load(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self._engine.load(version, self._engine.stage(tensors))

    def roll_out(self, prompts: Sequence[Prompt], *, temperature: float | None = None) -> RolledOut:
        """Generate and score all samples of these prompts, at the temperature of the recipe if none is given."""
        sampling = SamplingParams(
            temperature=self._config.sampling.temperature if temperature is None else temperature,
            max_new_tokens=self._config.sampling.max_new_tokens,
            seed=self._config.seed,
        )
        self._engine.submit(
            GenerationRequest(
                (number, sample),
                prompt=np.array(prompt.tokens, np.int32),
                rng_key=stream_key(prompt.ticket.id, seed=sampling.seed, sample=sample, turn=0),
                sampling=sampling,
            )
            for number, prompt in enumerate(prompts)
            for sample in range(prompt.ticket.num_samples)
        )
        outputs: dict[int, list[GenerationOutput]] = {number: [] for number in range(len(prompts))}
        while not self._engine.idle:
            for output in self._engine.step():
                outputs[output.request.id[0]].append(output)
        metas: list[SampleMeta] = []
        trajectories: list[Trajectory] = []
        for number, prompt in enumerate(prompts):
            for meta, trajectory in self._score(prompt, outputs[number]):
                metas.append(meta)
                trajectories.append(trajectory)
        return RolledOut(tuple(metas), tuple(trajectories))

    def _score(
        self, prompt: Prompt, outputs: Sequence[GenerationOutput]
    ) -> list[tuple[SampleMeta, Trajectory]]:
        outputs = sorted(outputs, key=lambda output: output.request.id[1])
        texts = [
            self._tokenizer.text_of_completion(
                output.tokens.ids.tolist(), ended=output.finish is FinishReason.EOS
            )
            for output in outputs
        ]
        given = arguments(prompt.row.prompt, texts, prompt.row.columns)
        values = {
            reward.name: checked(reward.name, reward.function(**given), count=len(texts))
            for reward in self._rewards
        }
        components, _ = combined(values, count=len(texts))
        scored = []
        for output, parts in zip(outputs, components, strict=True):
            trajectory = sampled_trajectory(prompt.ticket.id, int32(prompt.tokens), _completion(output))
            meta = describe(
                trajectory,
                ticket=prompt.ticket.id,
                holder=self._process,
                components=parts,
                reward=total(parts, self._names),
            )
            scored.append((meta, trajectory))
        return scored


def _completion(output: GenerationOutput) -> Completion:
    tokens = output.tokens
    return Completion(
        output.request.id[1],
        tokens.ids.astype("<i4").tobytes(),
        tokens.logprobs.astype("<f4").tobytes(),
        tokens.versions.astype("<i4").tobytes(),
        output.finish,
    )
