"""Triton kernels of `logprobs`, each one pass over a chunk's logits.

With torch's operations it would be ten passes forward and fifteen backward, which at a vocabulary of 150,000 takes
longer than the products that compute the logits.
"""

# Triton infers the types of a kernel's arguments at each launch; it rejects annotations of them.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_SIZE = 4096
"""Entries of a row that are processed together."""
NUM_WARPS = 8


@triton.jit
def _forward(
    logits, targets, logprobs, entropy, normalizer, vocabulary, temperature, block_size: tl.constexpr
):
    """One row per program. The sums are relative to the largest entry so far, so that no exponential overflows."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * vocabulary
    offsets = tl.arange(0, block_size)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for first in range(0, vocabulary, block_size):
        inside = first + offsets < vocabulary
        entries = tl.load(start + first + offsets, mask=inside, other=float("-inf")) / temperature
        new = tl.maximum(largest, tl.max(entries, axis=0))
        shrink = tl.exp(largest - new)
        powers = tl.exp(entries - new)
        total = total * shrink + tl.sum(powers, axis=0)
        weighted = weighted * shrink + tl.sum(tl.where(inside, powers * entries, 0.0), axis=0)
        largest = new
    normal = largest + tl.log(total)
    chosen = tl.load(start + tl.load(targets + row)) / temperature
    tl.store(normalizer + row, normal)
    tl.store(logprobs + row, chosen - normal)
    tl.store(entropy + row, normal - weighted / total)


@triton.jit
def _backward(
    logits,
    targets,
    normalizer,
    entropy,
    logprob_gradient,
    entropy_gradient,
    gradient,
    vocabulary,
    temperature,
    has_logprob: tl.constexpr,
    has_entropy: tl.constexpr,
    block_size: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block_size + tl.arange(0, block_size)
    inside = columns < vocabulary
    logits_of_row = logits + row * vocabulary
    log_share = tl.load(logits_of_row + columns, mask=inside, other=0.0) / temperature - tl.load(
        normalizer + row
    )
    share = tl.exp(log_share)
    found = tl.zeros((block_size,), tl.float32)
    if has_entropy:
        found -= tl.load(entropy_gradient + row) * share * (log_share + tl.load(entropy + row))
    if has_logprob:
        hit = tl.where(columns == tl.load(targets + row), 1.0, 0.0)
        found += tl.load(logprob_gradient + row) * (hit - share)
    tl.store(gradient + row * vocabulary + columns, found / temperature, mask=inside)


def summarize(
    logits: Tensor,
    *,
    targets: Tensor,
    temperature: float,
    logprobs: Tensor,
    entropy: Tensor,
    normalizer: Tensor,
) -> None:
    """Compute the last three arguments from logits [rows, vocabulary] in fp32."""
    rows, vocabulary = logits.shape
    with torch.cuda.device_of(logits):
        _forward[(rows,)](
            logits,
            targets,
            logprobs,
            entropy,
            normalizer,
            vocabulary,
            temperature,
            block_size=BLOCK_SIZE,
            num_warps=NUM_WARPS,
        )


def gradient_of_logits(
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
    """[rows, vocabulary] in `dtype`; the formulas are those of `logprobs`."""
    rows, vocabulary = logits.shape
    gradient = torch.empty_like(logits, dtype=dtype)
    with torch.cuda.device_of(logits):
        _backward[(rows, triton.cdiv(vocabulary, BLOCK_SIZE))](
            logits,
            targets,
            normalizer,
            entropy,
            normalizer if logprob_gradient is None else logprob_gradient.contiguous(),
            normalizer if entropy_gradient is None else entropy_gradient.contiguous(),
            gradient,
            vocabulary,
            temperature,
            has_logprob=logprob_gradient is not None,
            has_entropy=entropy_gradient is not None,
            block_size=BLOCK_SIZE,
            num_warps=NUM_WARPS,
        )
    return gradient
