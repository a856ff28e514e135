"""Choice of the groups of the next batch. A pure function.

A batch takes the oldest groups, because taking the first finished ones would favour short answers. Up to `overtake`
groups that are not complete may be passed over; they stay the oldest and come first for the next batches. A group that
would be too old for a later batch is not passed over, so the bound on staleness (`admission.py`) holds in every batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class CandidateGroup(NamedTuple):
    """A group that belongs to no batch yet."""

    ticket: str
    is_ready: bool
    version: int
    """Version of its oldest token; -1 if none of its tokens was sampled in this run."""


class BatchChoice(NamedTuple):
    """Result of `choose_batch`."""

    batch: tuple[str, ...]
    """Tickets of the batch; empty until there are enough complete ones."""
    complete: tuple[str, ...]
    """Complete tickets so far."""
    expired: dict[str, str]
    """Ticket → why it cannot be trained any more."""
    overtaken: int
    """Number of groups that the batch passes over."""
    reason: str


def choose_batch(
    candidates: Iterable[CandidateGroup],
    *,
    size: int,
    version: int = 0,
    max_staleness: int = 0,
    overtake: int = 0,
) -> BatchChoice:
    """Choose the batch that trains the weights of `version`, if enough groups are complete.

    >>> ready, running = CandidateGroup("a", True, 4), CandidateGroup("b", False, 4)
    >>> choose_batch([running, ready], size=1, version=4).reason
    '0 of 1 groups are complete; waiting for b'
    >>> choose_batch([running, ready], size=1, version=4, max_staleness=1, overtake=1).batch
    ('a',)
    >>> choose_batch([running, ready], size=1, version=5, max_staleness=1, overtake=1).reason
    '0 of 1 groups are complete; waiting for b, which would be too old for a later batch'
    >>> choose_batch([ready], size=1, version=6, max_staleness=1).expired
    {'a': 'sampled from version 4, 2 steps before its own; asynchrony.max_staleness is 1'}
    """
    batch: list[str] = []
    expired: dict[str, str] = {}
    passed: list[str] = []
    for candidate in candidates:
        staleness = version - candidate.version if candidate.version >= 0 else 0
        if candidate.is_ready and staleness > max_staleness:
            expired[candidate.ticket] = (
                f"sampled from version {candidate.version}, {staleness} steps before its own; "
                f"asynchrony.max_staleness is {max_staleness}"
            )
        elif candidate.is_ready:
            batch.append(candidate.ticket)
        elif len(passed) < overtake and staleness + 1 + len(passed) // size <= max_staleness:
            passed.append(candidate.ticket)
        else:
            late = len(passed) < overtake
            why = f"waiting for {candidate.ticket}" + (", which would be too old for a later batch" * late)
            return BatchChoice(
                (), tuple(batch), expired, 0, f"{len(batch)} of {size} groups are complete; {why}"
            )
        if len(batch) == size:
            reason = f"passed over {len(passed)}" if passed else ""
            return BatchChoice(tuple(batch), tuple(batch), expired, len(passed), reason)
    reason = f"{len(batch)} of {size} groups are complete; no more are issued"
    return BatchChoice((), tuple(batch), expired, 0, reason)
