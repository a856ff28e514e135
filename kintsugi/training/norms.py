"""Euclidean norm of a gradient that lies on several ranks: the same bits for every cut and every order of its elements.

    rank:   largest |g| ──► all-gather ──► e: |g| < 2^e everywhere
    rank:   sum of floor(g² · 2^(50 − 2e)), an integer ──► all-gather ──► sum, one square root

A maximum does not depend on an order, and integers are added exactly, so neither does the result. Each square is
rounded down to a multiple of 2^(2e − 50). The sum of squares is at least 2^(2e − 2), so the norm of n elements is too
small by at most the part n · 2^-49 of itself: less than 1e-6 for n up to 5e8 even if all but one of the elements are
tiny. For a gradient whose largest element is r times the root of the mean square it is at most the part r² · 2^-49.

The square of a float32 has 48 bits, so float64 holds it exactly, scaled by a power of two or not. Elements of 4,096
squares at a time are added as int64 (12 + 50 bits), the sums of these as Python's integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kintsugi.model.arrays import Array, is_on_accelerator, is_tensor, namespace, zeros
from kintsugi.training.group import Group

FRACTION_BITS = 50
"""Part of the definition: a square is less than 2 to this power."""
CHUNK_ELEMENTS = 1 << 12
"""Squares whose sum fits in an int64. Not part of the definition, like the sizes of the pieces."""
CPU_PIECE_ELEMENTS, PIECE_ELEMENTS = 1 << 17, 16 << 20
"""Elements that are squared at once: what the caches of a CPU hold, and few enough for an accelerator's memory."""
WORD_BITS = 62
"""Bits of a sum in each of the two words in which it is sent."""


def gradient_norm(
    parts: Sequence[Array], *, group: Group | None = None, counted: Sequence[int] = (), timeout_s: float = 0.0
) -> float:
    """Norm of all elements of these float32 arrays and, within a group, of those of the ranks `counted`; not finite if
    any element is not. With a group it is a collective, and the result is equal on all of its ranks."""
    highest = max_of([largest(part) for part in parts])
    if group is not None:
        highest = _highest_of(group, highest, like=parts[0], timeout_s=timeout_s)
    if highest == 0 or not math.isfinite(highest):
        return highest
    exponent = exponent_of(highest)
    total = sum(sum_of_squares(part, exponent=exponent) for part in parts)
    if group is not None:
        total = _total_of(group, total, counted=counted, like=parts[0], timeout_s=timeout_s)
    return norm_of(total, exponent=exponent)


def largest(array: Array) -> float:
    """Largest magnitude of an array; infinite or not a number if an element is."""
    if len(array) == 0:
        return 0.0
    xp = namespace(array)
    # One pass over the memory instead of two.
    low, high = xp.aminmax(array) if is_tensor(array) else (xp.amin(array), xp.amax(array))
    return max_of([float(high), -float(low)])


def max_of(values: Sequence[float]) -> float:
    """Largest of some magnitudes; not a number if one is not.

    >>> max_of([1.0, float("nan"), 2.0])
    nan
    """
    return math.nan if any(math.isnan(value) for value in values) else max(values, default=0.0)


def exponent_of(highest: float) -> int:
    """Smallest e for which this positive number is less than 2^e.

    >>> exponent_of(0.75), exponent_of(1.0)
    (0, 1)
    """
    return math.frexp(highest)[1]


def sum_of_squares(array: Array, *, exponent: int) -> int:
    """Sum of the squares in units of 2^(2 · exponent − 50), each rounded down. Every magnitude is below 2^exponent."""
    if len(array) == 0:
        return 0
    scale = math.ldexp(1.0, FRACTION_BITS - 2 * exponent)
    most = min(len(array), PIECE_ELEMENTS if is_on_accelerator(array) else CPU_PIECE_ELEMENTS)
    squares, rounded = _empty(most, "float64", like=array), _empty(most, "int64", like=array)
    sums = []
    for first in range(0, len(array), most):
        piece = array[first : first + most]
        count = len(piece)
        squares[:count] = piece
        squares[:count] *= squares[:count]
        squares[:count] *= scale
        rounded[:count] = squares[:count]
        sums += _chunk_sums(rounded[:count])
    total = namespace(array).concatenate(sums)
    # In two halves, whose sums fit in an int64 as well.
    high, low = (int(half.sum()) for half in (total // (1 << 32), total % (1 << 32)))
    return (high << 32) + low


def norm_of(total: int, *, exponent: int) -> float:
    """Norm from the sum of all squares, in the units of `sum_of_squares`."""
    return math.ldexp(math.sqrt(total), exponent - FRACTION_BITS // 2)


def words_of(total: int) -> tuple[int, int]:
    """A sum as two int64 words, which are sent and added up separately: low, high."""
    return total & ((1 << WORD_BITS) - 1), total >> WORD_BITS


def total_of(words: Sequence[Sequence[int]]) -> int:
    """Sum of sums that were sent as words."""
    return sum(low + (high << WORD_BITS) for low, high in words)


def _chunk_sums(integers: Any) -> list[Any]:
    """Sums of chunks that together are the array."""
    whole = len(integers) - len(integers) % CHUNK_ELEMENTS
    return [integers[:whole].reshape(-1, CHUNK_ELEMENTS).sum(1), integers[whole:].sum(0).reshape(1)]


def _empty(count: int, dtype: str, *, like: Any) -> Any:
    """Memory of the kind and device of another array."""
    xp = namespace(like)
    return (
        like.new_empty(count, dtype=getattr(xp, dtype)) if is_tensor(like) else xp.empty(count, dtype=dtype)
    )


def _highest_of(group: Group, highest: float, *, like: Array, timeout_s: float) -> float:
    mine = zeros(1, like=like)
    mine[0] = highest
    return max_of(group.all_gather(mine, timeout_s=timeout_s).reshape(-1).tolist())


def _total_of(group: Group, total: int, *, counted: Sequence[int], like: Any, timeout_s: float) -> int:
    mine = _empty(2, "int64", like=like)
    mine[0], mine[1] = words_of(total)
    gathered = group.all_gather(mine, timeout_s=timeout_s).tolist()
    return total_of([gathered[rank] for rank in counted])
