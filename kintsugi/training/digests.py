"""The digest of a state: one function of its bytes, computed where they are.

    bytes ──► slices of 32 KiB ──► xxh3-64 of each ──► xxh3-64 of prefix and all of these

One xxh3 over everything runs at the speed of one core, which for gigabytes is longer than the rest of a step. Slices
are independent of each other, so an accelerator does all of them at once, in plain integer arithmetic, and gives what
the library gives on the processor.
"""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from torch import Tensor

SLICE_BYTES = 32 << 10
"""Part of the definition: other slices give other digests."""
ON_DEVICE_BYTES = 64 << 20
"""Less is fetched and hashed by the processor faster than the device is told what to do."""
GROUP_SLICES = 128 << 10
"""Hashed at once on a device, which needs 3 KiB of memory for each; fewer keep it busy with being told what to do."""

# What follows is named as in the specification of XXH3.
_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5, _PRIME_MX1 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5, 0x165667919E3779F9
_LANES = 8
_STRIPES = 16
_BLOCK_BYTES = 8 * _LANES * _STRIPES
_NUM_BLOCKS = SLICE_BYTES // _BLOCK_BYTES
_LOW = 0xFFFFFFFF
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def digest(prefix: bytes, tensor: Tensor) -> str:
    """Of `prefix` and a contiguous tensor's bytes, on whatever device they are."""
    content = tensor.detach().reshape(-1).view(torch.uint8)
    whole = 0
    together = xxhash.xxh3_64(prefix)
    if content.is_cuda and content.nbytes >= ON_DEVICE_BYTES:
        whole = content.nbytes - content.nbytes % SLICE_BYTES
        together.update(device_slices(content[:whole]).cpu().numpy().astype("<i8").tobytes())
    together.update(_host_slices(content[whole:].cpu()))
    return together.hexdigest()


def _host_slices(content: Tensor) -> bytes:
    data = memoryview(content.numpy().data)
    digests = [
        xxhash.xxh3_64_intdigest(data[start : start + SLICE_BYTES])
        for start in range(0, len(data), SLICE_BYTES)
    ]
    return np.array(digests, dtype="<u8").tobytes()


def device_slices(content: Tensor) -> Tensor:
    """xxh3-64 of every slice of a whole number of them, as the bits of int64; computed by the content's device."""
    blocks = content.view(torch.int64).view(-1, _NUM_BLOCKS, _STRIPES, _LANES)
    return torch.cat([_group_digests(group) for group in blocks.split(GROUP_SLICES)])


def _group_digests(slices: Tensor) -> Tensor:
    """XXH3's loop for long inputs with slices side by side: add up a block, scramble, next; the last one is different
    because its last stripe has a key of its own and nothing is scrambled after it."""
    device = slices.device
    usual = _words([8 * stripe for stripe in range(_STRIPES)], device=device)
    last = _words([*(8 * stripe for stripe in range(_STRIPES - 1)), len(_SECRET) - 64 - 7], device=device)
    scrambling = _words([len(_SECRET) - 64], device=device)[0]
    start = (
        _PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1,
    )  # fmt: skip
    sums = torch.tensor([_signed(word) for word in start], device=device).expand(len(slices), _LANES)
    for index in range(_NUM_BLOCKS):
        is_last = index == _NUM_BLOCKS - 1
        sums = sums + _block_sums(slices[:, index], keys=last if is_last else usual)
        if not is_last:
            sums = ((sums ^ _shifted(sums, 47)) ^ scrambling) * _PRIME32_1
    return _merged(sums)


def _block_sums(block: Tensor, *, keys: Tensor) -> Tensor:
    """What a block adds to each lane: products of its own keyed words' halves, and its neighbour's words."""
    halves = (block ^ keys).view(torch.uint32)
    products = halves[..., 0::2].to(torch.int64).mul_(halves[..., 1::2].to(torch.int64))
    swapped = block.sum(1).view(-1, _LANES // 2, 2).flip(-1).view(-1, _LANES)
    return products.sum(1) + swapped


def _merged(sums: Tensor) -> Tensor:
    """A slice's lanes to its digest."""
    keys = _words([11], device=sums.device)[0]
    pairs = (sums ^ keys).view(-1, _LANES // 2, 2)
    folded = _folded_product(pairs[..., 0], pairs[..., 1]).sum(1) + _signed(SLICE_BYTES * _PRIME64_1)
    mixed = (folded ^ _shifted(folded, 37)) * _PRIME_MX1
    return mixed ^ _shifted(mixed, 32)


def _folded_product(left: Tensor, right: Tensor) -> Tensor:
    """The two halves of the product's 128 bits, one upon the other."""
    left_low, left_high = left & _LOW, _shifted(left, 32)
    right_low, right_high = right & _LOW, _shifted(right, 32)
    low, middle = left_low * right_low, left_high * right_low
    cross = _shifted(low, 32) + (middle & _LOW) + left_low * right_high
    upper = _shifted(middle, 32) + _shifted(cross, 32) + left_high * right_high
    return upper ^ ((cross << 32) | (low & _LOW))


def _shifted(words: Tensor, count: int) -> Tensor:
    """Right by `count` bits; torch's own shift would copy the sign."""
    return (words >> count).bitwise_and_((1 << (64 - count)) - 1)


def _words(offsets: list[int], *, device: torch.device) -> Tensor:
    """Eight words of the secret from each offset on."""
    rows = [np.frombuffer(_SECRET, dtype="<i8", count=_LANES, offset=offset) for offset in offsets]
    return torch.from_numpy(np.stack(rows)).to(device)


def _signed(word: int) -> int:
    """The int64 that has the low 64 bits of a number."""
    return ((word & 0xFFFFFFFFFFFFFFFF) ^ (1 << 63)) - (1 << 63)
