"""Log-probabilities and entropies of chosen tokens, without logits of all tokens at once.

[tokens, vocabulary] in fp32 is the largest tensor of training by far. Here it exists for one chunk of tokens at a
time, forward and backward; the backward pass recomputes a chunk's logits and writes the gradient down directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd.function import once_differentiable

DEFAULT_CHUNK_SIZE = 1024


def project_to_vocabulary(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits in fp32, also from bf16 operands: logits rounded to bf16 are the main difference between a sampler's
    and a trainer's log-probabilities."""
    if hidden.dtype == torch.float32 and weight.dtype == torch.float32:
        return functional.linear(hidden, weight)
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return functional.linear(hidden.float(), weight.float())


def token_logprobs(
    hidden: Tensor,
    *,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, both [tokens] in fp32 and differentiable.

    `temperature` divides the logits before either is formed, as it did when the tokens were sampled.
    """
    assert temperature > 0, f"log-probabilities need a positive temperature, got {temperature}"
    assert hidden.shape[:1] == targets.shape, (
        f"{hidden.shape[0]} hidden states for {tuple(targets.shape)} targets"
    )
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(hidden, weight, targets, temperature, chunk_size)
    return result


def _chunks(num_tokens: int, chunk_size: int) -> Iterator[slice]:
    """Chunks of nearly equal size: a short last chunk would take another matrix kernel and give other bits."""
    num_chunks = -(-num_tokens // chunk_size)
    for index in range(num_chunks):
        yield slice(num_tokens * index // num_chunks, num_tokens * (index + 1) // num_chunks)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_size: int
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden.shape[0]
        logprobs, entropy, normalizer = hidden.new_empty((3, num_tokens), dtype=torch.float32).unbind()
        summarize = _summarize_on_device if hidden.is_cuda else _summarize
        for chunk in _chunks(num_tokens, chunk_size):
            summarize(
                project_to_vocabulary(hidden[chunk], weight),
                targets=targets[chunk],
                temperature=temperature,
                logprobs=logprobs[chunk],
                entropy=entropy[chunk],
                normalizer=normalizer[chunk],
            )
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.temperature = temperature
        ctx.chunk_size = chunk_size
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, logprob_gradient: Tensor | None, entropy_gradient: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        gradient_of_logits = _gradient_on_device if hidden.is_cuda else _gradient_of_logits
        for chunk in _chunks(hidden.shape[0], ctx.chunk_size):
            gradient = gradient_of_logits(
                project_to_vocabulary(hidden[chunk], weight),
                targets=targets[chunk],
                temperature=ctx.temperature,
                normalizer=normalizer[chunk],
                entropy=entropy[chunk],
                logprob_gradient=None if logprob_gradient is None else logprob_gradient[chunk],
                entropy_gradient=None if entropy_gradient is None else entropy_gradient[chunk],
                dtype=hidden.dtype,
            )
            if hidden_gradient is not None:
                hidden_gradient[chunk] = gradient @ weight
            if weight_gradient is not None:
                _add_product(weight_gradient, gradient.t(), hidden[chunk])
        return (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None,
            None,
            None,
        )


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total`, in fp32, += left @ right; on an accelerator no product is rounded before it is added."""
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


def _summarize(
    logits: Tensor,
    *,
    targets: Tensor,
    temperature: float,
    logprobs: Tensor,
    entropy: Tensor,
    normalizer: Tensor,
) -> None:
    """Fill in the last three; the logits are used up."""
    normalizer[...] = logits.div_(temperature).logsumexp(dim=-1)
    log_distribution = logits.sub_(normalizer[:, None])
    logprobs[...] = log_distribution.gather(-1, targets[:, None]).squeeze(-1)
    entropy[...] = torch.linalg.vecdot(log_distribution.exp(), log_distribution).neg_()


def _gradient_of_logits(
    logits: Tensor,
    *,
    targets: Tensor,
    temperature: float,
    normalizer: Tensor,
    entropy: Tensor,
    logprob_gradient: Tensor | None,
    entropy_gradient: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """With p the distribution, z the scaled logits and H the entropy: d logprob / dz = onehot - p, and
    dH / dz = -p (log p + H). The logits are used up."""
    log_distribution = logits.div_(temperature).sub_(normalizer[:, None])
    distribution = log_distribution.exp()
    gradient = torch.zeros_like(distribution)
    if entropy_gradient is not None:
        gradient = log_distribution.add_(entropy[:, None]).mul_(-entropy_gradient[:, None])
        gradient.mul_(distribution)
    if logprob_gradient is not None:
        upstream = logprob_gradient[:, None]
        gradient.addcmul_(distribution, upstream, value=-1.0).scatter_add_(-1, targets[:, None], upstream)
    return gradient.div_(temperature).to(dtype)


def _summarize_on_device(logits: Tensor, **arguments: Any) -> None:
    from kintsugi.model import logprob_kernels

    logprob_kernels.summarize(logits, **arguments)


def _gradient_on_device(logits: Tensor, **arguments: Any) -> Tensor:
    from kintsugi.model import logprob_kernels

    return logprob_kernels.gradient_of_logits(logits, **arguments)
