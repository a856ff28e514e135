"""Random numbers that depend only on what is sampled, not on time, place or the rest of the batch.

A sampled token needs one uniform number, which is a pure function of (seed, ticket, sample, turn, position). A request
that is sent again, moved to another server or resumed draws the same numbers; the same prompt under a new ticket draws
fresh ones. The first four make a 64-bit key once per request; the position is the counter.

The generator is SplitMix64 with random access (Steele, Lea, Flood 2014; it passes BigCrush): number n of a stream is
the mixed value of `key + (n + 1) × golden ratio`. Two streams are sections of one cycle of 2⁶⁴ numbers, starting at
their keys. A million requests of a thousand tokens overlap with a probability of 1 in 20,000, and then merely share
random numbers.
"""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

GOLDEN_RATIO = 0x9E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB
UNIFORM_BITS = 52


def _signed(value: int) -> int:
    """The int64 with the same 64 bits; torch multiplies int64 modulo 2⁶⁴, which is all that SplitMix64 needs."""
    return value - (1 << 64) if value >> 63 else value


def stream_key(ticket: str, *, seed: int, sample: int, turn: int) -> int:
    """Key (64 bits as int64) of the random numbers of one sample in one turn.

    >>> stream_key("grpo:0:17:0", seed=0, sample=3, turn=0) == stream_key("grpo:0:17:0", seed=0, sample=3, turn=0)
    True
    """
    return _signed(xxhash.xxh3_64_intdigest(f"{seed}/{ticket}/{sample}/{turn}".encode()))


def uniforms(keys: Tensor, *, counters: Tensor) -> Tensor:
    """One float64 in [0, 1) per (key, counter) pair of int64, a multiple of 2⁻⁵².

    52 bits and not 53, so that `uniform × total` rounds to less than `total` for every float64 `total`.
    """
    mixed = keys + (counters + 1) * _signed(GOLDEN_RATIO)
    _fold(mixed, by=30).mul_(_signed(FIRST_FACTOR))
    _fold(mixed, by=27).mul_(_signed(SECOND_FACTOR))
    _fold(mixed, by=31)
    return _shifted(mixed, by=64 - UNIFORM_BITS).to(torch.float64).mul_(2.0**-UNIFORM_BITS)


def _shifted(values: Tensor, *, by: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift of int64 repeats the sign."""
    return (values >> by).bitwise_and_((1 << (64 - by)) - 1)


def _fold(values: Tensor, *, by: int) -> Tensor:
    return values.bitwise_xor_(_shifted(values, by=by))
