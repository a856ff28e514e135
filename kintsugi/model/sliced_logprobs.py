"""Log-probabilities and entropies of chosen tokens, with the vocabulary cut into logical tensor slices.

Each slice computes its own normalizer, entropy and log-probabilities as if it were the vocabulary (`logprobs`), in
chunks of tokens. Three numbers per token and slice are exchanged. With n the normalizers and H the entropies of the
slices, the whole has

    normalizer N = logsumexp(n),   share of a slice p = exp(n - N),   entropy = sum of p (H + N - n),

and a token's log-probability is that in its slice plus n - N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kintsugi.model.logprobs import (
    chunk_size_of,
    chunks_of,
    gradient_of_logits,
    plus_product,
    project_to_vocabulary,
    summarize,
)
from kintsugi.model.tensor_group import TensorGroup, ordered_sum


def sliced_token_logprobs(
    hidden: Tensor,
    *,
    weights: Sequence[Tensor],
    vocab_size: int,
    targets: Tensor,
    group: TensorGroup,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `logprobs.token_logprobs`; `weights` are the rows of the output projection of this rank's slices."""
    assert temperature > 0, f"log-probabilities need a positive temperature, got {temperature}"
    settings = _Settings(group, vocab_size, temperature, chunk_size)
    result: tuple[Tensor, Tensor] = _SlicedLogprobs.apply(settings, hidden, targets, *weights)
    return result


def token_bounds(vocab_size: int, num_slices: int) -> list[int]:
    """First token of each slice, and the end: as `tensor_slices.extent` cuts rows.

    >>> token_bounds(7, 2)
    [0, 3, 7]
    """
    return [vocab_size * index // num_slices for index in range(num_slices + 1)]


class _Settings:
    """Arguments of one call that are not tensors."""

    def __init__(
        self, group: TensorGroup, vocab_size: int, temperature: float, chunk_size: int | None
    ) -> None:
        self.group = group
        self.temperature = temperature
        self._chunk_size = chunk_size
        self.bounds = token_bounds(vocab_size, group.num_slices)

    def chunks(self, hidden: Tensor, weight: Tensor) -> list[slice]:
        return list(chunks_of(hidden.shape[0], self._chunk_size or chunk_size_of(weight)))

    def within(self, targets: Tensor, index: int) -> Tensor:
        """Targets counted from the first token of a slice; -1 for those of other slices."""
        first, stop = self.bounds[index : index + 2]
        is_own = (targets >= first) & (targets < stop)
        return torch.where(is_own, targets - first, -1)

    def owners(self, targets: Tensor) -> Tensor:
        """Slice of each target."""
        bounds = torch.tensor(self.bounds[1:-1], device=targets.device)
        return torch.bucketize(targets, bounds, right=True)


class _SlicedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, settings: _Settings, hidden: Tensor, targets: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        group = settings.group
        found = hidden.new_empty((len(weights), 3, hidden.shape[0]), dtype=torch.float32)
        for index, weight, numbers in zip(group.slices, weights, found, strict=True):
            own = settings.within(targets, index).clamp(min=0)
            for chunk in settings.chunks(hidden, weight):
                summarize(
                    project_to_vocabulary(hidden[chunk], weight),
                    targets=own[chunk],
                    temperature=settings.temperature,
                    logprobs=numbers[0, chunk],
                    entropy=numbers[1, chunk],
                    normalizer=numbers[2, chunk],
                )
        of_slice, entropies, normalizers = group.all_gather(found).flatten(0, 1).unbind(1)
        normalizer = normalizers.logsumexp(dim=0)
        rest = normalizer - normalizers
        entropy = (rest.neg().exp() * (entropies + rest)).sum(dim=0)
        logprobs = (of_slice - rest).gather(0, settings.owners(targets)[None]).squeeze(0)
        ctx.save_for_backward(hidden, targets, normalizer, entropy, *weights)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, logprob_gradient: Tensor | None, entropy_gradient: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, targets, normalizer, entropy, *weights = ctx.saved_tensors
        settings: _Settings = ctx.settings
        _, wants_hidden, _, *wanted = ctx.needs_input_grad
        hidden_parts: list[Tensor] = []
        weight_gradients: list[Tensor | None] = []
        for index, weight, wants_weight in zip(settings.group.slices, weights, wanted, strict=True):
            own = settings.within(targets, index)
            part = hidden.new_empty(hidden.shape, dtype=torch.float32)
            total = None
            for chunk in settings.chunks(hidden, weight):
                gradient = gradient_of_logits(
                    project_to_vocabulary(hidden[chunk], weight),
                    targets=own[chunk],
                    temperature=settings.temperature,
                    normalizer=normalizer[chunk],
                    entropy=entropy[chunk],
                    logprob_gradient=None if logprob_gradient is None else logprob_gradient[chunk],
                    entropy_gradient=None if entropy_gradient is None else entropy_gradient[chunk],
                    dtype=hidden.dtype,
                )
                if wants_hidden:
                    part[chunk] = project_to_vocabulary(gradient, weight.t())
                if wants_weight:
                    total = plus_product(total, gradient.t(), hidden[chunk])
            hidden_parts.append(part)
            weight_gradients.append(_weight_gradient(total, weight) if wants_weight else None)
        hidden_gradient = None
        if wants_hidden:
            hidden_gradient = ordered_sum(hidden_parts, settings.group).to(hidden.dtype)
        return None, hidden_gradient, None, *weight_gradients


def _weight_gradient(total: Tensor | None, weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if total is None else total.to(weight.dtype)
