"""Token losses in MindSpore, and their statistics in numpy: the definitions of `training.losses`.

Losses are differentiable functions of the policy's log-probabilities; everything else is a constant. Statistics are
taken afterwards, from the log-probabilities that the pass has returned. Notation as in `training.losses`: π the policy,
μ the policy that sampled, prox the policy that updates must stay close to, ref the reference model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from mindspore import Tensor, mint, ops
from numpy.typing import NDArray

from kintsugi.config.schema import Algorithm
from kintsugi.training.mindspore.device import DeviceRuntime

MAX_LOG_RATIO = 20.0
"""Ratios are limited to e^20, in value and gradient, as in `training.losses`."""

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class PolicyBatch:
    """Constants of one micro-batch; one entry per loss token, sequence by sequence."""

    sampler_logprobs: Floats
    advantages: Floats
    staleness: Floats
    sequence_index: NDArray[np.int64]
    num_sequences: int
    weights: Floats
    """Weight of each token in the mean loss of the batch."""
    reference_logprobs: Floats | None = None
    proximal_logprobs: Floats | None = None
    """Cached log-probabilities of prox; None where they follow from π and μ."""


class PolicyLoss:
    """PPO's clipped policy gradient with optional KL and entropy, of one micro-batch."""

    def __init__(
        self, batch: PolicyBatch, algorithm: Algorithm, *, stays_close: bool, runtime: DeviceRuntime
    ) -> None:
        """`stays_close`: prox is π itself before its first update, where no log-probabilities of it are cached."""
        self._batch = batch
        self._algorithm = algorithm
        self._stays_close = stays_close
        self._sampler = runtime.to_device(batch.sampler_logprobs)
        self._advantages = runtime.to_device(batch.advantages)
        self._weights = runtime.to_device(batch.weights)
        self._sequence_index = runtime.to_device(batch.sequence_index.astype(np.int32))
        stale = batch.staleness / (batch.staleness + 1)
        self._stale = runtime.to_device(stale.astype(np.float32))
        self._reference, self._proximal = (
            None if array is None else runtime.to_device(array)
            for array in (batch.reference_logprobs, batch.proximal_logprobs)
        )

    def __call__(self, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """Weighted sum of the token losses."""
        algorithm, cap = self._algorithm, self._algorithm.importance_cap
        proximal = self._proximal_of(ops.stop_gradient(logprobs))
        compared = self._compared(logprobs - proximal)
        weight = self._compared(proximal - self._sampler)
        capped = mint.clamp(weight, max=cap)
        clipped = mint.clamp(compared, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
        losses = -mint.minimum(capped * compared * self._advantages, capped * clipped * self._advantages)
        if algorithm.beta > 0 and algorithm.kl_in == "loss":
            of_token = mint.clamp(_exp(proximal - self._sampler), max=cap) * _exp(logprobs - proximal)
            losses = losses + algorithm.beta * self._kl_loss(logprobs, ops.stop_gradient(of_token))
        if algorithm.entropy_weight > 0:
            losses = losses - algorithm.entropy_weight * entropy
        weights = self._weights
        if algorithm.importance == "mask":
            weights = weights * (weight <= cap).astype(weights.dtype)
        return mint.sum(losses * weights)

    def _proximal_of(self, constant: Tensor) -> Tensor:
        if self._algorithm.proximal == "approximate":
            return self._sampler + (constant - self._sampler) * self._stale
        if self._proximal is not None:
            return self._proximal
        return constant if self._stays_close else self._sampler

    def _compared(self, log_ratio: Tensor) -> Tensor:
        """Ratio at each token: its own, or that of its sequence."""
        if self._algorithm.ratio == "token":
            return _exp(log_ratio)
        of_sequence = ops.unsorted_segment_sum(log_ratio, self._sequence_index, self._batch.num_sequences)
        if self._algorithm.ratio == "sequence_mean":
            counts = np.bincount(self._batch.sequence_index, minlength=self._batch.num_sequences)
            of_sequence = of_sequence / Tensor(np.maximum(counts, 1).astype(np.float32))
        return _exp(ops.gather(of_sequence, self._sequence_index, 0))

    def _kl_loss(self, logprobs: Tensor, weight: Tensor) -> Tensor:
        """KL to the reference as a loss per token: its value is the estimate, its gradient that of the KL itself."""
        assert self._reference is not None, "a KL in the loss needs a reference"
        constant = ops.stop_gradient(logprobs)
        log_ratio = constant - self._reference
        match self._algorithm.kl:
            case "k1":
                estimate = log_ratio
            case "k2":
                estimate = log_ratio * log_ratio / 2
            case "k3":
                estimate = mint.expm1(mint.clamp(-log_ratio, max=MAX_LOG_RATIO)) + log_ratio
        return weight * estimate + weight * log_ratio * (logprobs - constant)

    def statistics(self, logprobs: Floats) -> tuple[dict[str, float], dict[str, float]]:
        """Sums and maxima, in float64, from the log-probabilities under π."""
        batch, algorithm = self._batch, self._algorithm
        proximal = self._proximal_of(Tensor(logprobs)).asnumpy()
        sampler, cap = batch.sampler_logprobs, algorithm.importance_cap
        compared, weight, ratio = (
            self._compared(Tensor(each)).asnumpy()
            for each in (logprobs - proximal, proximal - sampler, logprobs - sampler)
        )
        learned = weight <= cap if algorithm.importance == "mask" else np.ones_like(weight, dtype=bool)
        below = (compared < 1 - algorithm.clip_low) & (batch.advantages < 0)
        above = (compared > 1 + algorithm.clip_high) & (batch.advantages > 0)
        behaviour_kl = kl_estimate(sampler, logprobs, estimator="k3")
        kl = behaviour_kl
        if batch.reference_logprobs is not None:
            kl = kl_estimate(logprobs, batch.reference_logprobs, estimator=algorithm.kl)
        difference = np.abs(logprobs - sampler)
        sums: Mapping[str, NDArray[np.generic]] = {
            "kl": kl,
            "behaviour_kl": behaviour_kl,
            "logprob_abs_diff": difference,
            "clip_ratio": (below | above) & learned,
            "ratio": ratio,
            "importance_weight": np.minimum(weight, cap) * learned,
            "importance_capped": weight > cap,
            "staleness": batch.staleness,
        }
        maxima = {"logprob_abs_diff": difference, "importance_weight": weight}
        return (
            {name: exact_sum(values) for name, values in sums.items()},
            {name: float(values.max()) for name, values in maxima.items()},
        )


def kl_estimate(logprobs: Floats, anchor: Floats, *, estimator: str) -> Floats:
    """Estimates, per sampled token, of KL(π‖anchor), as `training.losses.kl_estimate`."""
    log_ratio = logprobs - anchor
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return np.square(log_ratio) / np.float32(2)
    return np.expm1(np.minimum(-log_ratio, np.float32(MAX_LOG_RATIO))) + log_ratio


def token_weights(
    sequence_index: NDArray[np.int64],
    *,
    num_sequences: int,
    totals: Mapping[str, float],
    denominator: str,
    sequence_weights: Floats,
) -> Floats:
    """Weight of each loss token in the mean loss of the batch, as `training.losses.token_weights`, times the weight of
    its sequence."""
    total = totals[denominator]
    if total == 0:
        return np.zeros(len(sequence_index), dtype=np.float32)
    weights = np.full(len(sequence_index), 1.0 / total, dtype=np.float32)
    if denominator == "sequences":
        counts = np.bincount(sequence_index, minlength=num_sequences)
        weights /= np.maximum(counts, 1).astype(np.float32)[sequence_index]
    return weights * sequence_weights[sequence_index]


def exact_sum(values: NDArray[np.generic]) -> float:
    return float(values.astype(np.float64).sum())


def _exp(log_ratio: Tensor) -> Tensor:
    return mint.exp(mint.clamp(log_ratio, max=MAX_LOG_RATIO))
