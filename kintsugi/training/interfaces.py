"""What a model function call does on a rank: `sft_train`, `grpo_train`, `reference_inference`.

A training call makes the stage's updates on the whole batch, each from a gradient summed over all ranks, and leaves
the rank prepared. Its metrics are sums over all shards of all ranks, so every rank reports the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.messages import RunCall
from kintsugi.model.transformer import Transformer
from kintsugi.runtime import COUNTERS
from kintsugi.training import losses
from kintsugi.training.batch import MicroBatch, Sample, cut
from kintsugi.training.group import ProcessGroup
from kintsugi.training.losses import TokenLosses
from kintsugi.training.reduction import Contribution, finish_tree, sum_any_order, sum_owned
from kintsugi.training.state import TrainingState, Update

SLOWER_RANK_FACTOR = 10.0
"""Shards are balanced by tokens, so a rank that takes ten times as long as this one is stuck rather than slow."""

SUMS = ("loss", "tokens", "loss_tokens", "entropy", "clip_ratio", "kl", "ratio", "logprob_abs_diff")
MAXIMA = ("logprob_abs_diff",)
POLICY_METRICS = ("kl", "clip_ratio", "ratio_mean", "logprob_abs_diff_mean", "logprob_abs_diff_max")
"""Compare with the policy that sampled, which supervised learning does not have."""

LossFunction = Callable[[MicroBatch, Tensor], TokenLosses]
"""From a micro-batch and the policy's log-probabilities of its loss tokens."""


@dataclass
class CallResult:
    """Metrics, seconds per part of the work, and scalars per sample by output key."""

    metrics: dict[str, float] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)
    outputs: dict[str, dict[str, float]] = field(default_factory=dict)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add what passes inside to `timing[part]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timing[part] = self.timing.get(part, 0.0) + time.perf_counter() - start


class ModelCalls:
    """Carries out calls on one rank's state; remembers the reference's log-probabilities within a step."""

    def __init__(
        self, state: TrainingState, *, deterministic: bool, check: Callable[[], None] = lambda: None
    ) -> None:
        """`check` is called between micro-batches and raises when the call is to be given up."""
        self._state = state
        self._deterministic = deterministic
        self._check = check
        self._reference_logprobs: dict[str, Tensor] = {}

    def forget(self) -> None:
        """Drop what was kept for the current step."""
        self._reference_logprobs = {}

    def run(
        self, call: RunCall, shards: Mapping[int, Sequence[Sample]], *, group: ProcessGroup
    ) -> CallResult:
        """Carry out a call on this rank's shards (index → samples)."""
        match call.interface:
            case "sft_train":
                return self._train(call, shards, group=group, loss=_sft_loss, temperature=1.0)
            case "grpo_train":
                temperature = call.arguments["temperature"]
                return self._train(call, shards, group=group, loss=self._grpo_loss, temperature=temperature)
            case "reference_inference":
                return self._reference_inference(call, shards)
            case unknown:
                raise RefusedError(f"{call.call}: this worker has no interface {unknown!r}")

    def _train(
        self,
        call: RunCall,
        shards: Mapping[int, Sequence[Sample]],
        *,
        group: ProcessGroup,
        loss: LossFunction,
        temperature: float,
    ) -> CallResult:
        """Make the step's updates; the gradient buffer is free again afterwards."""
        result = CallResult()
        state, algorithm = self._state, self._state.stage.algorithm
        with result.timed("forward_backward"):
            batches = self._cut(shards)
        totals: list[Contribution] = []
        updates: list[Update] = []
        for index in range(algorithm.updates_per_step):
            total = self._batch_gradient(
                call, batches, group=group, loss=loss, temperature=temperature, result=result
            )
            if index == 0:
                _check_whole(total, call)
                state.begin_update()
            with result.timed("optimizer"):
                updates.append(state.update(total.gradient))
            totals.append(total)
        state.end_update(call.step)
        result.metrics = {
            name: value
            for name, value in _metrics(totals, updates).items()
            if name not in POLICY_METRICS or call.interface == "grpo_train"
        }
        COUNTERS.add("steps")
        COUNTERS.add("tokens_trained", sum(len(s.tokens) for samples in shards.values() for s in samples))
        return result

    def _batch_gradient(
        self,
        call: RunCall,
        batches: Mapping[int, Sequence[MicroBatch]],
        *,
        group: ProcessGroup,
        loss: LossFunction,
        temperature: float,
        result: CallResult,
    ) -> Contribution:
        """The whole batch's gradient and statistics, equal on all ranks."""

        def contribution(micro_batches: Sequence[MicroBatch]) -> Contribution:
            return self._contribution(micro_batches, call=call, loss=loss, temperature=temperature)

        start = time.perf_counter()
        with result.timed("forward_backward"):
            if self._deterministic:
                owned = sum_owned(
                    call.num_shards,
                    owned=range(min(batches), max(batches) + 1),
                    of_shard=lambda index: contribution(batches[index]),
                )
            else:
                everything = contribution([batch for index in sorted(batches) for batch in batches[index]])
        timeout_s = group.timeout_s + SLOWER_RANK_FACTOR * (time.perf_counter() - start)
        with result.timed("reduce"):
            if self._deterministic:
                return finish_tree(group, num_shards=call.num_shards, owned=owned, timeout_s=timeout_s)
            return sum_any_order(group, owned=everything, timeout_s=timeout_s)

    def _contribution(
        self,
        batches: Sequence[MicroBatch],
        *,
        call: RunCall,
        loss: LossFunction,
        temperature: float,
    ) -> Contribution:
        """Gradient and statistics of some micro-batches, added up in their order."""
        state = self._state
        device = state.gradient.device
        state.zero_gradient()
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        maxima = torch.zeros(len(MAXIMA), dtype=torch.float64, device=device)
        zero = sums.new_zeros(())
        for batch in batches:
            self._check()
            logprobs, entropy = _logprobs(state.model, batch, temperature=temperature)
            token_losses = loss(batch, logprobs)
            weights = losses.token_weights(
                torch.ones_like(logprobs),
                sequence_index=batch.sequence_index,
                num_sequences=len(batch.keys),
                totals=call.totals,
                denominator=state.stage.algorithm.denominator,
            )
            batch_loss = (token_losses.losses * weights).sum()
            batch_loss.backward()
            state.collect_gradient()
            named = {
                "loss": batch_loss.detach().double(),
                "tokens": zero + batch.tokens.numel(),
                "loss_tokens": zero + batch.targets.numel(),
                "entropy": entropy.detach().double().sum(),
                **token_losses.sums,
            }
            sums += torch.stack([named.get(name, zero) for name in SUMS])
            maxima = torch.maximum(
                maxima, torch.stack([token_losses.maxima.get(name, zero) for name in MAXIMA])
            )
            COUNTERS.add("micro_batches")
        return Contribution(state.gradient.clone(), sums, maxima)

    def _cut(self, shards: Mapping[int, Sequence[Sample]]) -> dict[int, list[MicroBatch]]:
        """Micro-batches by shard; in the mode that does not care for order, all of them under the first shard."""
        max_tokens, device = self._state.stage.actor.micro_batch_tokens, self._state.gradient.device
        if not self._deterministic:
            together = [sample for index in sorted(shards) for sample in shards[index]]
            shards = {min(shards, default=0): together}
        return {
            index: cut(samples, deterministic=self._deterministic, max_tokens=max_tokens, device=device)
            for index, samples in shards.items()
        }

    def _grpo_loss(self, batch: MicroBatch, logprobs: Tensor) -> TokenLosses:
        algorithm = self._state.stage.algorithm
        return losses.grpo_loss(
            logprobs,
            batch.sampler_logprobs,
            batch.advantages,
            torch.ones_like(logprobs),
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            ref_logprobs=self._kept_reference(batch) if algorithm.beta > 0 else None,
            beta=algorithm.beta,
        )

    def _kept_reference(self, batch: MicroBatch) -> Tensor:
        missing = [key for key in batch.keys if key not in self._reference_logprobs]
        if missing:
            raise RefusedError(f"`reference_inference` of this step has not covered sample {missing[0]}")
        return torch.cat([self._reference_logprobs[key] for key in batch.keys])

    @torch.no_grad()
    def _reference_inference(self, call: RunCall, shards: Mapping[int, Sequence[Sample]]) -> CallResult:
        """Log-probabilities of the stage's initial weights; they stay here for this step's training call."""
        result = CallResult()
        model, temperature = self._state.reference_model, call.arguments["temperature"]
        with result.timed("forward"):
            for micro_batches in self._cut(shards).values():
                for batch in micro_batches:
                    self._check()
                    logprobs, _ = _logprobs(model, batch, temperature=temperature)
                    parts = logprobs.split(list(batch.loss_lengths))
                    self._reference_logprobs.update(zip(batch.keys, parts, strict=True))
                    COUNTERS.add("micro_batches")
        return result


def _sft_loss(batch: MicroBatch, logprobs: Tensor) -> TokenLosses:
    return losses.sft_loss(logprobs, torch.ones_like(logprobs))


def _logprobs(model: Transformer, batch: MicroBatch, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy at every loss token of a micro-batch, and nowhere else."""
    hidden = model.forward_packed(batch.tokens, batch.layout.positions, batch.layout)
    return model.token_logprobs(hidden.index_select(0, batch.sources), batch.targets, temperature=temperature)


def _check_whole(total: Contribution, call: RunCall) -> None:
    """The denominators were taken over the batch that was actually summed."""
    found = float(total.sums[SUMS.index("loss_tokens")])
    if found != call.totals["tokens"]:
        raise IntegrityError(
            f"step {call.step}: expected {call.totals['tokens']:.0f} loss tokens over all ranks, got {found:.0f}"
        )


def _metrics(totals: Sequence[Contribution], updates: Sequence[Update]) -> dict[str, float]:
    """Means over the batch's loss tokens and, where an update changes them, over the step's updates.

    How far sampler and trainer agree is taken before the first update; afterwards they differ by intent.
    """
    by_update = [dict(zip(SUMS, total.sums.tolist(), strict=True)) for total in totals]
    first = by_update[0]
    num_tokens = max(first["loss_tokens"], 1.0)
    return {
        "loss": _mean([sums["loss"] for sums in by_update]),
        "grad_norm": _mean([update.grad_norm for update in updates]),
        "learning_rate": updates[-1].learning_rate,
        "skipped": float(sum(not update.applied for update in updates)),
        "tokens": first["tokens"],
        "loss_tokens": first["loss_tokens"],
        "entropy": first["entropy"] / num_tokens,
        "kl": _mean([sums["kl"] for sums in by_update]) / num_tokens,
        "clip_ratio": _mean([sums["clip_ratio"] for sums in by_update]) / num_tokens,
        "ratio_mean": first["ratio"] / num_tokens,
        "logprob_abs_diff_mean": first["logprob_abs_diff"] / num_tokens,
        "logprob_abs_diff_max": float(totals[0].maxima[MAXIMA.index("logprob_abs_diff")]),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
