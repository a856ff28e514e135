"""Triton kernel that computes the xxh3-64 of many slices of memory at once.

XXH3 reads a long input in blocks of 1,024 bytes, that is 16 stripes of 8 lanes of 8 bytes. Within a block every lane
is a plain sum over the stripes; between blocks the sums are scrambled. So blocks of a slice are processed in order, and
slices, lanes and the loads of a block in parallel. A thread holds an even lane and the odd one after it, because each
adds its words to the other's sum: nothing is exchanged between threads until the lanes are merged.
"""

# Triton infers the types of a kernel's arguments at each launch; it rejects annotations of them.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_BYTES = 1024
UNIT_BYTES = 16
"""Unit of addresses, and of what a thread loads at once: one even and one odd lane."""
_SLICES = 8
"""Slices of a program, which is one warp: four threads for each slice."""

# What follows is named as in the specification of XXH3.
_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5, _PRIME_MX1 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5, 0x165667919E3779F9
_STRIPES, _LANES = 16, 8
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_USUAL, _LAST, _SCRAMBLE, _MERGE, _START = (
    tl.constexpr(0),
    tl.constexpr(_STRIPES),
    tl.constexpr(2 * _STRIPES),
    tl.constexpr(2 * _STRIPES + 1),
    tl.constexpr(2 * _STRIPES + 2),
)
"""First rows of the table of keys: of a block, of a slice's last block, and of the rest."""
_BLOCK_WORDS, _STRIPE_WORDS = tl.constexpr(_STRIPES * _LANES), tl.constexpr(_LANES)
_NUM_STRIPES = tl.constexpr(_STRIPES)
_SCRAMBLE_FACTOR, _LENGTH_FACTOR = tl.constexpr(_PRIME32_1), tl.constexpr(_PRIME64_1)
_AVALANCHE_FACTOR = tl.constexpr(_PRIME_MX1)
_LOW_HALF = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _even_and_odd(words):
    """Load pairs of adjacent words and separate them."""
    even, odd = tl.split(tl.load(words))
    return even.to(tl.uint64, bitcast=True), odd.to(tl.uint64, bitcast=True)


@triton.jit
def _key(keys, row, words):
    even, odd = _even_and_odd(keys + row * _STRIPE_WORDS + words)
    return even[None, :], odd[None, :]


@triton.jit
def _product_of_halves(word):
    return (word & _LOW_HALF) * (word >> 32)


@triton.jit
def _add_block(even_sums, odd_sums, block, keys, first_key, words):
    for stripe in tl.static_range(_NUM_STRIPES):
        even, odd = _even_and_odd(block + stripe * _STRIPE_WORDS)
        even_key, odd_key = _key(keys, first_key + stripe, words)
        even_sums += _product_of_halves(even ^ even_key) + odd
        odd_sums += _product_of_halves(odd ^ odd_key) + even
    return even_sums, odd_sums


@triton.jit
def _scrambled(sums, key):
    return (sums ^ (sums >> 47) ^ key) * _SCRAMBLE_FACTOR


@triton.jit(do_not_specialize=["num_slices", "num_blocks"])
def _slice_digests(base, starts, keys, digests, num_slices, num_blocks, slices_per_program: tl.constexpr):
    """`starts` are distances from `base` in units of 16 bytes. One compilation serves slices of any size."""
    own = tl.program_id(0) * slices_per_program + tl.arange(0, slices_per_program)
    # Programs beyond the last slice compute it once more, and store nothing.
    start = tl.load(starts + tl.minimum(own, num_slices - 1))
    words = tl.arange(0, 4)[:, None] * 2 + tl.arange(0, 2)[None, :]
    content = base + (start * 2)[:, None, None] + words[None, :, :]
    even_scramble, odd_scramble = _key(keys, _SCRAMBLE, words)
    even_start, odd_start = _key(keys, _START, words)
    even_sums = tl.zeros((slices_per_program, 4), tl.uint64) + even_start
    odd_sums = tl.zeros((slices_per_program, 4), tl.uint64) + odd_start
    for _ in range(num_blocks - 1):
        even_sums, odd_sums = _add_block(even_sums, odd_sums, content, keys, _USUAL, words)
        even_sums = _scrambled(even_sums, even_scramble)
        odd_sums = _scrambled(odd_sums, odd_scramble)
        content += _BLOCK_WORDS
    even_sums, odd_sums = _add_block(even_sums, odd_sums, content, keys, _LAST, words)
    even_merge, odd_merge = _key(keys, _MERGE, words)
    even_sums, odd_sums = even_sums ^ even_merge, odd_sums ^ odd_merge
    folded = tl.umulhi(even_sums, odd_sums) ^ (even_sums * odd_sums)
    mixed = tl.sum(folded, axis=1) + (num_blocks * (_BLOCK_WORDS * 8)).to(tl.uint64) * _LENGTH_FACTOR
    mixed = (mixed ^ (mixed >> 37)) * _AVALANCHE_FACTOR
    mixed = mixed ^ (mixed >> 32)
    tl.store(digests + own, mixed.to(tl.int64, bitcast=True), mask=own < num_slices)


def hash_slices(base: Tensor, starts: Tensor, *, slice_bytes: int) -> Tensor:
    """xxh3-64 of slices of `slice_bytes` as the bits of int64. They begin at `base`, which is int64 and aligned to
    `UNIT_BYTES`, plus `starts` of these units; they may be in other allocations."""
    assert slice_bytes % BLOCK_BYTES == 0 and base.data_ptr() % UNIT_BYTES == 0
    digests = torch.empty_like(starts)
    num_slices = starts.numel()
    _slice_digests[(triton.cdiv(num_slices, _SLICES),)](
        base,
        starts,
        _keys(base.device),
        digests,
        num_slices,
        slice_bytes // BLOCK_BYTES,
        slices_per_program=_SLICES,
        num_warps=1,
    )
    return digests


@cache
def _keys(device: torch.device) -> Tensor:
    """Table of the words with which stripes and sums are combined; a row has one word per lane."""
    usual = [8 * stripe for stripe in range(_STRIPES)]
    offsets = [*usual, *usual[:-1], len(_SECRET) - 64 - 7, len(_SECRET) - 64, 11]
    rows = [np.frombuffer(_SECRET, dtype="<u8", count=_LANES, offset=offset) for offset in offsets]
    start = (_PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1)
    rows.append(np.array(start, dtype="<u8"))
    return torch.from_numpy(np.stack(rows).view(np.int64)).to(device)
