"""Scheduling decisions: admission, prefill and preemption, as pure functions that return their reason.

First come, first served, by arrival: a preempted request keeps its position. The oldest request is never preempted, and
alone it always fits into the pool, so some request always advances:

    admit          the oldest waiting request, if its prompt and first steps fit next to one page per running request
    plan_chunks    prompts in order of arrival, one call of the runner per iteration, alternating with decode steps
    must_preempt   the youngest request, when pages run out during decoding
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class AdmissionDecision(NamedTuple):
    admitted: bool
    reason: str


def admit(
    *, num_free_slots: int, num_needed: int, num_available: int, num_admitted: int
) -> AdmissionDecision:
    """Decide whether the oldest waiting request starts; it takes `num_needed` of the available pages.

    One page is kept for each admitted request, because each will need one soon: admitting a request at the price of a
    preemption costs more than it gains. Without other requests nothing is kept back, and every request fits.
    """
    if num_free_slots == 0:
        return AdmissionDecision(False, "all slots are taken")
    if num_needed + num_admitted > num_available:
        return AdmissionDecision(
            False, f"needs {num_needed} pages and {num_admitted} to spare, {num_available} are available"
        )
    return AdmissionDecision(True, f"{num_needed} of {num_available} pages")


class PrefillPart(NamedTuple):
    """Prefill progress of a prompt: tokens in the KV cache or promised to be, and tokens that have to be."""

    num_filled: int
    length: int


class PrefillSpan(NamedTuple):
    """Positions `start` up to `end` of a prompt that are computed together; the first `num_known` are already
    computed."""

    part: int
    start: int
    end: int
    num_known: int


def plan_chunks(parts: Sequence[PrefillPart], *, chunk_size: int, max_chunks: int) -> list[PrefillSpan]:
    """Choose the next chunks, oldest prompts first. Chunks begin at multiples of their size, also where part of a chunk
    is known: a token is then always computed at the same place of the same shape."""
    spans: list[PrefillSpan] = []
    for index, part in enumerate(parts):
        filled = part.num_filled
        while filled < part.length:
            if len(spans) == max_chunks:
                return spans
            start = filled - filled % chunk_size
            end = min(start + chunk_size, part.length)
            spans.append(PrefillSpan(index, start, end, filled - start))
            filled = end
    return spans


def num_steps_of_iteration(*, steps_per_iteration: int, num_left: int, is_prefill_left: bool) -> int:
    """Number of decode steps before the host reads results.

    `num_left` is the largest number of steps that a sequence has left. While prompts remain to be prefilled, running
    sequences take one step between two prefill calls: they do not stall, and new sequences join as soon as possible.
    """
    return min(1 if is_prefill_left else steps_per_iteration, num_left)


class Preemption(NamedTuple):
    is_needed: bool
    reason: str


def must_preempt(*, num_needed: int, num_available: int, num_admitted: int) -> Preemption:
    """Decide whether the youngest admitted request is preempted because the others need more pages than are available.

    Called again after each preemption: the number of freed pages depends on what the request shares with others.
    """
    if num_needed <= num_available:
        return Preemption(False, f"{num_needed} of {num_available} pages")
    assert num_admitted > 1, "a request alone does not fit, but it was accepted"
    return Preemption(True, f"{num_needed} pages needed to continue, {num_available} are available")
