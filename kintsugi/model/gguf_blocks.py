"""Values of the quantised blocks of a GGUF file, in float32: the kinds that most files use.

The results are those of the library `gguf`, bit by bit: the same operations in the same order. The library works on 16
rows at a time, which costs more in calls than in arithmetic; here an operation goes over all blocks of a piece, and
holds the interpreter's lock only to begin. Kinds that are not here are left to the library.

A block is described by GGML (`ggml-common.h`): `d` and `dmin` are float16, `q` are unsigned integers of a few bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ELEMENTS = 256
"""Elements of a block of the K-quants."""


def _half(raw: Tensor, start: int) -> Tensor:
    """A float16 of every block, as float32 [blocks, 1]."""
    return raw[:, start : start + 2].view(torch.float16).float()


def _shifted(bits: Tensor, *, width: int, count: int) -> Tensor:
    """`count` fields of `width` bits of every byte: [blocks, groups, bytes] → [blocks, groups, count, bytes]."""
    mask = (1 << width) - 1
    found = torch.empty(*bits.shape[:2], count, bits.shape[2], dtype=torch.uint8)
    for index in range(count):
        field = found[:, :, index]
        torch.bitwise_right_shift(bits, width * index, out=field)
        if width * (index + 1) < 8:
            field &= mask
    return found


def _scales_and_minimums(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the 6-bit numbers of Q4_K and Q5_K: two times [blocks, 8]."""
    low, middle, high = raw[:, :4], raw[:, 4:8], raw[:, 8:12]
    scales = torch.cat([low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)], dim=1)
    minimums = torch.cat([middle & 0x3F, (high >> 4) | ((middle >> 2) & 0x30)], dim=1)
    return scales.float(), minimums.float()


def _q4_0(raw: Tensor) -> Tensor:
    quants = _shifted(raw[:, 2:].unsqueeze(1), width=4, count=2).view(len(raw), 32).float()
    return quants.sub_(8.0).mul_(_half(raw, 0))


def _q4_1(raw: Tensor) -> Tensor:
    quants = _shifted(raw[:, 4:].unsqueeze(1), width=4, count=2).view(len(raw), 32).float()
    return quants.mul_(_half(raw, 0)).add_(_half(raw, 2))


def _q8_0(raw: Tensor) -> Tensor:
    return raw[:, 2:].view(torch.int8).float().mul_(_half(raw, 0))


def _with_minimums(raw: Tensor, quants: Tensor) -> Tensor:
    """Q4_K and Q5_K: d · scale · q - dmin · minimum, for 8 groups of 32."""
    scales, minimums = _scales_and_minimums(raw[:, 4:16])
    values = quants.float()
    values.mul_((_half(raw, 0) * scales).unsqueeze(2)).sub_((_half(raw, 2) * minimums).unsqueeze(2))
    return values.view(len(raw), ELEMENTS)


def _q4_k(raw: Tensor) -> Tensor:
    low = _shifted(raw[:, 16:].view(len(raw), 4, 32), width=4, count=2)
    return _with_minimums(raw, low.view(len(raw), 8, 32))


def _q5_k(raw: Tensor) -> Tensor:
    low = _shifted(raw[:, 48:].view(len(raw), 4, 32), width=4, count=2).view(len(raw), 8, 32)
    high = _shifted(raw[:, 16:48].unsqueeze(1), width=1, count=8).view(len(raw), 8, 32)
    return _with_minimums(raw, low.bitwise_or_(high << 4))


def _q6_k(raw: Tensor) -> Tensor:
    low = _shifted(raw[:, :128].view(len(raw), 2, 64), width=4, count=2).view(len(raw), 16, 16)
    high = _shifted(raw[:, 128:192].view(len(raw), 2, 32), width=2, count=4).view(len(raw), 16, 16)
    scales = _half(raw, 208) * raw[:, 192:208].view(torch.int8).float()
    values = low.bitwise_or_(high << 4).float()
    return values.sub_(32.0).mul_(scales.unsqueeze(2)).view(len(raw), ELEMENTS)


DEQUANTISE: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""Kind → bytes of blocks [blocks, bytes] → values [blocks, elements]."""
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Kinds whose bytes are the values."""


def values_of(raw: Tensor, kind: str, *, block_bytes: int) -> Tensor | None:
    """Values of bytes [rows, bytes], in any floating type that holds them; None for a kind that is not here."""
    if kind in FLOATS:
        return raw.view(FLOATS[kind])
    if kind not in DEQUANTISE:
        return None
    return DEQUANTISE[kind](raw.view(-1, block_bytes)).view(len(raw), -1)
