"""Values of a GGUF file's blocks as bfloat16, without torch: the kinds that most files use.

A value is computed in float32 by the operations of the library `gguf`, in their order, and rounded to nearest even:
the bits are those of `gguf.dequantize(…)` converted by torch. The library works on 16 rows at a time; here an operation
goes over all blocks of a piece, holds the interpreter's lock only to begin, and writes into memory that the thread
keeps. Kinds that are not here are left to the library.

A block is described by GGML (`ggml-common.h`): `d` and `dmin` are float16, `q` are unsigned integers of a few bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Bits = NDArray[np.uint16]
"""Bit patterns of bfloat16 numbers."""

ELEMENTS = 256
"""Elements of a block of the K-quants."""
_EXPONENT = 0x7F80
"""Exponent of a bfloat16 number: all ones if the number is not finite."""


class Scratch:
    """Memory in which one thread dequantises pieces of up to `elements` values, one after the other."""

    def __init__(self, elements: int) -> None:
        self.quants = np.empty(elements, np.uint8)
        self.values = np.empty(elements, np.float32)
        self.rounding = np.empty(elements, np.uint32)
        self.result = np.empty(elements, np.uint16)

    def spare(self, count: int) -> Bytes:
        """Bytes that are used until values are rounded."""
        return self.rounding.view(np.uint8)[:count]


class Place(NamedTuple):
    """Parts of a scratch for the blocks of a piece."""

    quants: Bytes
    spare: Bytes
    values: Floats


def _half(raw: Bytes, start: int) -> Floats:
    """A float16 of every block, as float32 [blocks, 1]."""
    return raw[:, start : start + 2].view(np.float16).astype(np.float32)


def _fields(packed: Bytes, *, width: int, count: int, to: Bytes) -> Bytes:
    """`count` fields of `width` bits of every byte: [blocks, groups, bytes] → [blocks, groups, count, bytes]."""
    blocks, groups, size = packed.shape
    found = to.reshape(blocks, groups, count, size)
    mask = np.uint8((1 << width) - 1)
    for index in range(count):
        field = found[:, :, index]
        if index == 0:
            np.bitwise_and(packed, mask, out=field)
            continue
        np.right_shift(packed, np.uint8(width * index), out=field)
        if width * (index + 1) < 8:
            field &= mask
    return to


def _high_bits(packed: Bytes, *, width: int, count: int, place: Place) -> None:
    """Add the fields of `packed` to the quants, above their four low bits."""
    high = _fields(packed, width=width, count=count, to=place.spare)
    np.left_shift(high, np.uint8(4), out=high)
    np.bitwise_or(place.quants, high, out=place.quants)


def _scales_and_minimums(raw: Bytes) -> tuple[Floats, Floats]:
    """Unpack the 6-bit numbers of Q4_K and Q5_K: two times [blocks, 8]."""
    low, middle, high = raw[:, :4], raw[:, 4:8], raw[:, 8:12]
    scales = np.concatenate([low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)], axis=1)
    minimums = np.concatenate([middle & 0x3F, (high >> 4) | ((middle >> 2) & 0x30)], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _q4_0(raw: Bytes, place: Place) -> None:
    quants = _fields(raw[:, None, 2:], width=4, count=2, to=place.quants)
    values = place.values.reshape(len(raw), 32)
    np.copyto(values, quants.reshape(values.shape))
    values -= np.float32(8.0)
    values *= _half(raw, 0)


def _q4_1(raw: Bytes, place: Place) -> None:
    quants = _fields(raw[:, None, 4:], width=4, count=2, to=place.quants)
    values = place.values.reshape(len(raw), 32)
    np.copyto(values, quants.reshape(values.shape))
    values *= _half(raw, 0)
    values += _half(raw, 2)


def _q8_0(raw: Bytes, place: Place) -> None:
    values = place.values.reshape(len(raw), 32)
    np.copyto(values, raw[:, 2:].view(np.int8))
    values *= _half(raw, 0)


def _with_minimums(raw: Bytes, place: Place) -> None:
    """Q4_K and Q5_K: d · scale · q - dmin · minimum, for 8 groups of 32."""
    scales, minimums = _scales_and_minimums(raw[:, 4:16])
    values = place.values.reshape(len(raw), 8, 32)
    np.copyto(values, place.quants.reshape(values.shape))
    values *= (_half(raw, 0) * scales)[:, :, None]
    values -= (_half(raw, 2) * minimums)[:, :, None]


def _q4_k(raw: Bytes, place: Place) -> None:
    _fields(raw[:, 16:].reshape(len(raw), 4, 32), width=4, count=2, to=place.quants)
    _with_minimums(raw, place)


def _q5_k(raw: Bytes, place: Place) -> None:
    _fields(raw[:, 48:].reshape(len(raw), 4, 32), width=4, count=2, to=place.quants)
    _high_bits(raw[:, None, 16:48], width=1, count=8, place=place)
    _with_minimums(raw, place)


def _q6_k(raw: Bytes, place: Place) -> None:
    _fields(raw[:, :128].reshape(len(raw), 2, 64), width=4, count=2, to=place.quants)
    _high_bits(raw[:, 128:192].reshape(len(raw), 2, 32), width=2, count=4, place=place)
    scales = _half(raw, 208) * raw[:, 192:208].view(np.int8).astype(np.float32)
    values = place.values.reshape(len(raw), 16, 16)
    np.copyto(values, place.quants.reshape(values.shape))
    values -= np.float32(32.0)
    values *= scales[:, :, None]


class Kind(NamedTuple):
    """How the blocks of a kind are read."""

    elements: int
    size: int
    """Bytes of a block."""
    read: Callable[[Bytes, Place], None]


def _f32(raw: Bytes, place: Place) -> None:
    np.copyto(place.values, raw.reshape(-1).view(np.float32))


KINDS = {
    "F32": Kind(1, 4, _f32),
    "Q4_0": Kind(32, 18, _q4_0),
    "Q4_1": Kind(32, 20, _q4_1),
    "Q8_0": Kind(32, 34, _q8_0),
    "Q4_K": Kind(ELEMENTS, 144, _q4_k),
    "Q5_K": Kind(ELEMENTS, 176, _q5_k),
    "Q6_K": Kind(ELEMENTS, 210, _q6_k),
}
"""Name of GGML → how its blocks are read."""
FLOAT16, BFLOAT16 = "F16", "BF16"
"""Kinds of two bytes per element, which are looked up and copied."""
NUMBERS = {
    0: "F32",
    1: FLOAT16,
    2: "Q4_0",
    3: "Q4_1",
    8: "Q8_0",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    30: BFLOAT16,
}
"""Number of GGML → name, of the kinds that are read here."""
BLOCK_SIZES = {
    number: (KINDS[name].elements, KINDS[name].size) if name in KINDS else (1, 2)
    for number, name in NUMBERS.items()
}
"""Number of GGML → elements and bytes of a block."""


def bfloat16_of(raw: Bytes, kind: str, *, scratch: Scratch) -> Bits | None:
    """Values of the blocks that `raw` consists of; None if one of them is not finite.

    The result is valid until the scratch is used again.
    """
    if kind in (FLOAT16, BFLOAT16):
        bits: Bits = raw.view(np.uint16)
        if kind == FLOAT16:
            bits = np.take(_from_float16(), bits, out=scratch.result[: len(bits)], mode="clip")
        exponents = scratch.rounding.view(np.uint16)[: len(bits)]
        np.bitwise_and(bits, np.uint16(_EXPONENT), out=exponents)
        return None if exponents.max(initial=0) == _EXPONENT else bits
    elements, size, read = KINDS[kind]
    count = len(raw) // size * elements
    place = Place(scratch.quants[:count], scratch.spare(count), scratch.values[:count])
    with np.errstate(invalid="ignore", over="ignore"):  # Found by `rounded`.
        read(raw.reshape(-1, size), place)
    return rounded(place.values, scratch=scratch)


def rounded(values: Floats, *, scratch: Scratch) -> Bits | None:
    """Round float32 values to nearest even; None if one of them is not finite."""
    count = len(values)
    is_finite = scratch.quants[:count].view(np.bool_)
    np.isfinite(values, out=is_finite)
    if not is_finite.all():
        return None
    bits, rounding = values.view(np.uint32), scratch.rounding[:count]
    np.right_shift(bits, np.uint32(16), out=rounding)
    rounding &= np.uint32(1)
    rounding += bits
    rounding += np.uint32(0x7FFF)
    result: Bits = np.right_shift(rounding, np.uint32(16), out=scratch.result[:count], casting="unsafe")
    return result


@cache
def _from_float16() -> Bits:
    """The bfloat16 number of every float16 number; one that is not finite stays so."""
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    is_finite = np.isfinite(values)
    found = rounded(np.where(is_finite, values, np.float32(0.0)), scratch=Scratch(len(values)))
    assert found is not None
    return np.where(is_finite, found, np.uint16(_EXPONENT))
