"""Who runs, what is prefilled and who gives way: pure functions that return their reason.

First come, first served, by arrival: a request that was put back keeps its place. The oldest is never put back, and
alone it fits into the pool whatever it does, so something always advances:

    admit          the oldest waiting one, if its prompt and its first steps fit beside a page for each running one
    plan_chunks    prompts in order of arrival, one call of the runner per visit: decoding goes on between
    must_give_way  the youngest is put back, when pages run out in the middle
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Admission(NamedTuple):
    admitted: bool
    reason: str


def admit(*, num_free_slots: int, num_needed: int, num_available: int, num_admitted: int) -> Admission:
    """Whether the oldest waiting request starts; it takes `num_needed` of the pages that are available.

    One page is left for each request that was admitted before, because each will need one soon: to admit a request
    only to put another back costs more than it gives. With nobody there, nothing is left back, and everything fits.
    """
    if num_free_slots == 0:
        return Admission(False, "all slots are taken")
    if num_needed + num_admitted > num_available:
        return Admission(
            False, f"needs {num_needed} pages and {num_admitted} to spare, {num_available} are available"
        )
    return Admission(True, f"{num_needed} of {num_available} pages")


class Part(NamedTuple):
    """What of a prompt is in pages, or promised to be, and how much has to be."""

    num_filled: int
    length: int


class Span(NamedTuple):
    """Positions `start` up to `end` of a part are computed together; the first `num_known` are there already."""

    part: int
    start: int
    end: int
    num_known: int


def plan_chunks(parts: Sequence[Part], *, chunk_size: int, max_chunks: int) -> list[Span]:
    """The next chunks, of the oldest first. Chunks begin at multiples of their size, whatever is known of them: the
    same token is then computed in the same place of the same shape every time."""
    spans: list[Span] = []
    for index, part in enumerate(parts):
        filled = part.num_filled
        while filled < part.length:
            if len(spans) == max_chunks:
                return spans
            start = filled - filled % chunk_size
            end = min(start + chunk_size, part.length)
            spans.append(Span(index, start, end, filled - start))
            filled = end
    return spans


def num_steps_of_visit(*, steps_per_visit: int, num_left: int, is_prefill_left: bool) -> int:
    """How often every row is fed before the host looks again.

    `num_left` is the most that any row has to be fed. While prompts are yet to be prefilled, running rows take one step
    between two calls: they do not stand still, and new rows join as soon as they can.
    """
    return min(1 if is_prefill_left else steps_per_visit, num_left)


class GivingWay(NamedTuple):
    is_needed: bool
    reason: str


def must_give_way(*, num_needed: int, num_available: int, num_admitted: int) -> GivingWay:
    """Whether the youngest of those that were admitted is put back, because the others need more pages than there are.

    Asked again after each: what a request gives back depends on what it shares, and with whom.
    """
    if num_needed <= num_available:
        return GivingWay(False, f"{num_needed} of {num_available} pages")
    assert num_admitted > 1, "a request alone does not fit, but it was accepted"
    return GivingWay(True, f"{num_needed} pages needed to go on, {num_available} are available")
