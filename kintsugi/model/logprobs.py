"""Log-probabilities and entropies of chosen tokens, without the logits of all tokens together.

[tokens, vocabulary] in fp32 is by far the largest tensor of training. Here it exists for one chunk of tokens at a time,
forward and backward; the backward pass recomputes a chunk's logits and computes the gradient directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_SIZE_ON_CPU = 1024
CHUNK_BYTES = 5 << 28
"""Memory for the logits of a chunk on an accelerator: 2,176 tokens of a vocabulary of 152,000. Each chunk reads the
whole output weight three times and adds to its gradient in fp32; the smaller the chunk, the more that counts."""


def chunk_size_of(weight: Tensor) -> int:
    """Tokens of which the logits exist at the same time."""
    if not weight.is_cuda:
        return CHUNK_SIZE_ON_CPU
    return max(128, CHUNK_BYTES // (4 * weight.shape[0]) // 128 * 128)


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
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, both [tokens] in fp32 and differentiable.

    `temperature` divides the logits before both are computed, as when the tokens were sampled.
    """
    assert temperature > 0, f"log-probabilities need a positive temperature, got {temperature}"
    assert hidden.shape[:1] == targets.shape, (
        f"{hidden.shape[0]} hidden states for {tuple(targets.shape)} targets"
    )
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(
        hidden, weight, targets, temperature, chunk_size or chunk_size_of(weight)
    )
    return result


def chunks_of(num_tokens: int, chunk_size: int) -> Iterator[slice]:
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
        for chunk in chunks_of(num_tokens, chunk_size):
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
        chunks = list(chunks_of(hidden.shape[0], ctx.chunk_size))
        weight_gradient = torch.zeros_like(weight) if wants_weight and not chunks else None
        for chunk in chunks:
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
                torch.mm(gradient, weight, out=hidden_gradient[chunk])
            if wants_weight and len(chunks) == 1:
                weight_gradient = torch.mm(gradient.t(), hidden)
            elif wants_weight:
                weight_gradient = plus_product(weight_gradient, gradient.t(), hidden[chunk])
            del gradient
        return (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None,
            None,
            None,
        )


def plus_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """`total`, in fp32, += left @ right; on an accelerator no product is rounded before it is added."""
    is_wide = left.is_cuda and left.dtype != torch.float32
    if total is None:
        return torch.mm(left, right, out_dtype=torch.float32) if is_wide else torch.mm(left, right).float()
    if is_wide:
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    return total.add_(left @ right)


def summarize(logits: Tensor, **arguments: Any) -> None:
    """Compute the numbers of each token from its logits; arguments are those of `_summarize`."""
    if logits.is_cuda:
        from kintsugi.model import logprob_kernels

        logprob_kernels.summarize(logits, **arguments)
    else:
        _summarize(logits, **arguments)


def gradient_of_logits(logits: Tensor, **arguments: Any) -> Tensor:
    """Gradient of a loss with respect to logits; arguments are those of `_gradient_of_logits`."""
    if logits.is_cuda:
        from kintsugi.model import logprob_kernels

        return logprob_kernels.gradient_of_logits(logits, **arguments)
    return _gradient_of_logits(logits, **arguments)


def _summarize(
    logits: Tensor,
    *,
    targets: Tensor,
    temperature: float,
    logprobs: Tensor,
    entropy: Tensor,
    normalizer: Tensor,
) -> None:
    """Compute the last three arguments; the logits are overwritten."""
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
    """With p the distribution, z the scaled logits and H the entropy: d logprob / dz = onehot - p, and dH / dz = -p
    (log p + H). A target of -1 is not among these logits. The logits are overwritten."""
    log_distribution = logits.div_(temperature).sub_(normalizer[:, None])
    distribution = log_distribution.exp()
    gradient = torch.zeros_like(distribution)
    if entropy_gradient is not None:
        gradient = log_distribution.add_(entropy[:, None]).mul_(-entropy_gradient[:, None])
        gradient.mul_(distribution)
    if logprob_gradient is not None:
        upstream, target = logprob_gradient[:, None], targets[:, None]
        hit = torch.where(target >= 0, upstream, 0.0)
        gradient.addcmul_(distribution, upstream, value=-1.0).scatter_add_(-1, target.clamp(min=0), hit)
    return gradient.div_(temperature).to(dtype)
