"""Model function calls of a rank on MindSpore: a table from interface to method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from mindspore import Tensor, mint

from kintsugi.config.schema import COMPARE_SAMPLES
from kintsugi.errors import DeviceError, Miscomputed
from kintsugi.protocol.training import RunCall
from kintsugi.runtime.counters import COUNTERS
from kintsugi.training.calls import COMMON_SUMS, CallResult, Shards, TrainingCalls
from kintsugi.training.group import Groups
from kintsugi.training.mindspore.losses import Floats, kl_estimate
from kintsugi.training.mindspore.passes import MicroBatch, PolicyGradient, Supervised, logprobs_of
from kintsugi.training.mindspore.state import MindSporeState
from kintsugi.training.objective_metrics import Objective
from kintsugi.training.packing import BatchSample, Kept, blocks_of
from kintsugi.training.reduction import Contribution
from kintsugi.training.step_cache import PROXIMAL_LOGPROBS, REFERENCE_LOGPROBS

KNOWN_ROWS = 48


class MindSporeCalls(TrainingCalls):
    """Runs calls on one rank's state."""

    def __init__(
        self,
        state: MindSporeState,
        *,
        deterministic: bool,
        check: Callable[[], None] = lambda: None,
        store: Callable[[RunCall], None] = lambda call: None,
    ) -> None:
        super().__init__(state, deterministic=deterministic, check=check, store=store)
        self._state = state
        self._known_answer = _known_answer()
        self._interfaces |= {
            "sft_train": self.trained_by(Supervised(state, self._step_cache)),
            "policy_train": self.trained_by(PolicyGradient(state, self._step_cache)),
            "reference_inference": self._reference_inference,
            "proximal_inference": self._proximal_inference,
        }

    def _micro_batches(self, samples: Sequence[BatchSample], *, kept: Kept) -> list[MicroBatch]:
        settings = self._state.stage.actor
        max_tokens = settings.block_tokens(deterministic=self._deterministic, is_cpu=True)
        blocks = blocks_of(samples, in_order=self._deterministic, max_tokens=max_tokens, kept=kept)
        return [MicroBatch.of(block, self._state) for block in blocks]

    def _contributions(
        self,
        batches: Mapping[int, Sequence[MicroBatch]],
        *,
        call: RunCall,
        objective: Objective,
        groups: Groups,
        learns: bool,
    ) -> Callable[[Sequence[MicroBatch]], Contribution]:
        return partial(self._contribution, call=call, objective=objective, learns=learns)

    def _contribution(
        self, batches: Sequence[MicroBatch], *, call: RunCall, objective: Objective, learns: bool
    ) -> Contribution:
        assert isinstance(objective, Supervised | PolicyGradient)
        state = self._state
        state.zero_gradient()
        gradient = state.gradient_of(objective.part) if learns else state.gradient[:0]
        names = (*COMMON_SUMS, *objective.sums)
        sums, maxima = np.zeros(len(names)), np.zeros(len(objective.maxima))
        for batch in batches:
            self._check()
            found = objective.loss(batch, call, learns=learns)
            if learns:
                state.add_gradients(found.gradients)
            named = {
                "loss": found.loss,
                "tokens": float(len(batch.arrays.tokens)),
                "loss_tokens": float(len(batch.arrays.targets)),
                **found.sums,
            }
            sums += [named[name] for name in names]
            if objective.maxima:
                maxima = np.maximum(maxima, [found.maxima[name] for name in objective.maxima])
            COUNTERS.add("micro_batches")
        return Contribution(gradient, sums, maxima)

    def _check_device(self) -> None:
        found = _known_answer()
        if not np.array_equal(found, self._known_answer):
            wrong = int((found != self._known_answer).sum())
            raise DeviceError(
                f"the {self._state.runtime.name} of this process does not compute any more what it did: {wrong} of "
                f"{found.size} numbers of a known answer differ",
                detail=Miscomputed("known answer"),
            )

    def _reference_inference(self, call: RunCall, shards: Shards, groups: Groups) -> CallResult:
        """Compute and cache the reference's log-probabilities. If the KL is subtracted from the reward of whole
        samples, return the sum of each sample's KL estimates."""
        stage = self._state.stage
        algorithm, temperature = stage.algorithm, call.arguments["temperature"]
        parameters = self._state.reference_parameters
        by_sample = stage.takes_kl_off_reward and algorithm.name in COMPARE_SAMPLES
        divergences = {sample.key: 0.0 for samples in shards.values() for sample in samples}

        def look(batch: MicroBatch) -> None:
            logprobs = logprobs_of(parameters, batch, self._state, temperature=temperature)
            self._step_cache.put(REFERENCE_LOGPROBS, batch.arrays.keys, _by_sequence(logprobs, batch))
            if by_sample:
                estimates = kl_estimate(batch.arrays.sampler_logprobs, logprobs, estimator=algorithm.kl)
                summed = np.bincount(
                    batch.arrays.sequence_index,
                    weights=estimates.astype(np.float64),
                    minlength=len(batch.arrays.keys),
                )
                divergences.update(zip(batch.arrays.keys, summed.tolist(), strict=True))

        result = self._infer(shards, look)
        if by_sample:
            result.outputs = {"reference_kl": divergences}
        return result

    def _proximal_inference(self, call: RunCall, shards: Shards, groups: Groups) -> CallResult:
        """Compute and cache the log-probabilities under the weights before the first update of the step."""
        parameters, temperature = self._state.parameters, call.arguments["temperature"]

        def look(batch: MicroBatch) -> None:
            logprobs = logprobs_of(parameters, batch, self._state, temperature=temperature)
            self._step_cache.put(PROXIMAL_LOGPROBS, batch.arrays.keys, _by_sequence(logprobs, batch))

        return self._infer(shards, look)


def _by_sequence(values: Floats, batch: MicroBatch) -> list[Floats]:
    return np.split(values, np.cumsum(batch.arrays.loss_lengths)[:-1])


def _known_answer() -> Floats:
    """The operations of a model on fixed numbers: products, sums of them, exponentials, square roots."""
    numbers = np.remainder(np.arange(1, KNOWN_ROWS * KNOWN_ROWS + 1), 97) / 89.0
    question = Tensor(numbers.reshape(KNOWN_ROWS, KNOWN_ROWS).astype(np.float32))
    products = mint.matmul(question, question.swapaxes(0, 1))
    answer = mint.matmul(mint.nn.functional.softmax(products, dim=-1), mint.rsqrt(products))
    found: Floats = answer.asnumpy()
    return found
