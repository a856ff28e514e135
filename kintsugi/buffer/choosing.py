"""Which groups make the next batch. Pure: groups in the order of issue go in, the batch and what is too old come out.

First finished would favour short answers, so a batch takes the oldest groups. Up to `overtake` of them may be passed
over while they are not complete; they stay the oldest and are looked at first for the next batches. Nobody is passed
over who would be too old by its turn, so nothing grows stale by waiting, and the bound holds in every batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Candidate(NamedTuple):
    """A group that is in no batch."""

    ticket: str
    is_ready: bool
    version: int
    """No token of it is older than these weights; -1 where nothing of it was sampled by this run."""


class Choice(NamedTuple):
    """What becomes of the candidates."""

    batch: tuple[str, ...]
    """Empty until there are enough of them."""
    complete: tuple[str, ...]
    """Those that it has so far."""
    expired: dict[str, str]
    """Ticket → why it can not be trained any more."""
    overtaken: int
    """Groups that the batch passes over."""
    reason: str


def choose_batch(
    candidates: Iterable[Candidate], *, size: int, version: int = 0, max_staleness: int = 0, overtake: int = 0
) -> Choice:
    """The batch that trains the weights of `version`, if it can be filled now.

    >>> ready, running = Candidate("a", True, 4), Candidate("b", False, 4)
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
            return Choice((), tuple(batch), expired, 0, f"{len(batch)} of {size} groups are complete; {why}")
        if len(batch) == size:
            reason = f"passed over {len(passed)}" if passed else ""
            return Choice(tuple(batch), tuple(batch), expired, len(passed), reason)
    reason = f"{len(batch)} of {size} groups are complete; no more are issued"
    return Choice((), tuple(batch), expired, 0, reason)
