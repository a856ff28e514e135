"""Objectives of the training calls on MindSpore: loss, gradient and statistics of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mindspore
import numpy as np
from mindspore import Tensor, mint
from numpy.typing import NDArray

from kintsugi.protocol.training import RunCall
from kintsugi.training.mindspore.losses import (
    Floats,
    PolicyBatch,
    PolicyLoss,
    exact_sum,
    token_weights,
)
from kintsugi.training.mindspore.network import PackedPass, Parameters, packed_pass, token_logprobs
from kintsugi.training.mindspore.state import MindSporeState
from kintsugi.training.objective_metrics import ObjectiveMetrics, PolicyMetrics, SupervisedMetrics
from kintsugi.training.packing import BatchSample, PackedArrays, pack_arrays
from kintsugi.training.step_cache import PROXIMAL_LOGPROBS, REFERENCE_LOGPROBS, StepCache

LossOfTokens = Callable[[Tensor, Tensor], Tensor]
"""(log-probabilities, entropies) → weighted sum of the token losses."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Packed sequences of one pass, in host memory and on the device."""

    arrays: PackedArrays
    shared: PackedPass

    @classmethod
    def of(cls, samples: list[BatchSample], state: MindSporeState) -> MicroBatch:
        arrays = pack_arrays(samples)
        return cls(arrays, packed_pass(arrays, state.config, runtime=state.runtime))


@dataclass(frozen=True, eq=False)
class PassResult:
    """A micro-batch's part of the mean loss of the batch, its gradient by parameter, and its statistics."""

    loss: float
    gradients: Mapping[str, NDArray[np.float32]]
    """Empty in a pass that learns nothing."""
    sums: Mapping[str, float]
    maxima: Mapping[str, float]


def logprobs_of(
    parameters: Parameters, batch: MicroBatch, state: MindSporeState, *, temperature: float
) -> Floats:
    """Log-probabilities at the loss tokens, without gradient."""
    found, _ = token_logprobs(parameters, batch.shared, state.config, temperature=temperature)
    return found.asnumpy()


class _Shared(ObjectiveMetrics):
    """Common part of the objectives: the pass, and the weights of tokens."""

    def __init__(self, state: MindSporeState, step_cache: StepCache) -> None:
        super().__init__(state)
        self._state = state
        self._step_cache = step_cache

    def _token_weights(self, batch: MicroBatch, call: RunCall) -> Floats:
        arrays, stage = batch.arrays, self._state.stage
        decay = np.float32(stage.asynchrony.decay)
        return token_weights(
            arrays.sequence_index,
            num_sequences=len(arrays.keys),
            totals=call.totals,
            denominator=stage.algorithm.denominator,
            sequence_weights=(decay**arrays.staleness).astype(np.float32),
        )

    def _pass(
        self, batch: MicroBatch, loss_of: LossOfTokens, *, temperature: float, learns: bool
    ) -> tuple[float, dict[str, NDArray[np.float32]], Floats, Floats]:
        """Loss, gradients, log-probabilities and entropies of one forward and, to learn, backward pass."""
        parameters = self._state.parameters
        names = list(parameters)

        def forward(*weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            named = dict(zip(names, weights, strict=True))
            logprobs, entropy = token_logprobs(
                named, batch.shared, self._state.config, temperature=temperature
            )
            return loss_of(logprobs, entropy), logprobs, entropy

        if not learns:
            loss, logprobs, entropy = forward(*parameters.values())
            return float(loss.asnumpy()), {}, logprobs.asnumpy(), entropy.asnumpy()
        differentiated = mindspore.value_and_grad(forward, tuple(range(len(names))), has_aux=True)
        (loss, logprobs, entropy), gradients = differentiated(*parameters.values())
        found = {name: gradient.asnumpy() for name, gradient in zip(names, gradients, strict=True)}
        return float(loss.asnumpy()), found, logprobs.asnumpy(), entropy.asnumpy()


class Supervised(_Shared, SupervisedMetrics):
    """`sft_train`: maximise the likelihood of the completions."""

    def loss(self, batch: MicroBatch, call: RunCall, *, learns: bool = True) -> PassResult:
        weights = self._state.runtime.to_device(self._token_weights(batch, call))
        loss, gradients, _, entropy = self._pass(
            batch, lambda logprobs, _: -mint.sum(logprobs * weights), temperature=1.0, learns=learns
        )
        return PassResult(loss, gradients, {"entropy": exact_sum(entropy)}, {})


class PolicyGradient(_Shared, PolicyMetrics):
    """`policy_train`: policy gradient of the algorithms that compare the samples of a prompt."""

    def loss(self, batch: MicroBatch, call: RunCall, *, learns: bool = True) -> PassResult:
        policy_loss = self.policy_loss(batch, call)
        loss, gradients, logprobs, entropy = self._pass(
            batch, policy_loss, temperature=call.arguments["temperature"], learns=learns
        )
        sums, maxima = policy_loss.statistics(logprobs)
        return PassResult(loss, gradients, {"entropy": exact_sum(entropy), **sums}, maxima)

    def policy_loss(self, batch: MicroBatch, call: RunCall) -> PolicyLoss:
        """The loss of this micro-batch as a function of its log-probabilities."""
        arrays, stage = batch.arrays, self._state.stage
        assert arrays.advantages is not None, "the algorithms of this adapter have one advantage per sample"
        age = np.maximum(call.step - 1 - arrays.versions, 0)
        policy_batch = PolicyBatch(
            sampler_logprobs=arrays.sampler_logprobs,
            advantages=arrays.advantages,
            staleness=np.where(arrays.versions < 0, 0, age).astype(np.float32),
            sequence_index=arrays.sequence_index,
            num_sequences=len(arrays.keys),
            weights=self._token_weights(batch, call),
            reference_logprobs=self._cached(REFERENCE_LOGPROBS, batch) if stage.has_reference else None,
            proximal_logprobs=self._cached(PROXIMAL_LOGPROBS, batch) if stage.asks_proximal else None,
        )
        algorithm = stage.algorithm
        stays_close = algorithm.proximal == "recompute" or algorithm.importance == "truncate"
        return PolicyLoss(policy_batch, algorithm, stays_close=stays_close, runtime=self._state.runtime)

    def _cached(self, name: str, batch: MicroBatch) -> Floats:
        found: Floats = self._step_cache.joined(name, batch.arrays.keys)
        return found
