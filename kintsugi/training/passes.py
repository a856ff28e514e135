"""A pass over the whole batch: every rank computes its shards, and all of them get the same sum."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from kintsugi.messages import RunCall
from kintsugi.training.group import ProcessGroup
from kintsugi.training.reduction import Contribution, finish_tree, sum_any_order, sum_owned

T = TypeVar("T")

APART_S = 30.0
"""How long ranks that are equally fast may be apart."""
SLOWER_RANK_FACTOR = 10.0
"""Shards are balanced by tokens, so a rank that takes ten times as long as this one is stuck rather than slow."""


@dataclass
class CallResult:
    """Metrics, seconds per part of the work, and scalars per sample by output key."""

    metrics: dict[str, float] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)
    outputs: dict[str, dict[str, float]] = field(default_factory=dict)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add what passes inside to `timing[part]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timing[part] = self.timing.get(part, 0.0) + time.perf_counter() - start


def whole_batch(
    call: RunCall,
    parts: Mapping[int, Sequence[T]],
    *,
    contribution: Callable[[Sequence[T]], Contribution],
    group: ProcessGroup,
    deterministic: bool,
    result: CallResult,
    work: str,
) -> Contribution:
    """The sum of all shards' contributions, equal on all ranks; `work` is what computing one of them is timed as.

    `parts` are this rank's by shard. In deterministic mode the sum is a tree over shards; otherwise the parts of all
    of them are one contribution.
    """
    start = time.perf_counter()
    with result.timed(work):
        if deterministic:
            owned = sum_owned(
                call.num_shards,
                owned=range(min(parts), max(parts) + 1),
                of_shard=lambda index: contribution(parts[index]),
            )
        else:
            everything = contribution([part for index in sorted(parts) for part in parts[index]])
    timeout_s = APART_S + SLOWER_RANK_FACTOR * (time.perf_counter() - start)
    with result.timed("reduce"):
        if deterministic:
            return finish_tree(
                group, num_shards=call.num_shards, owned=owned, timeout_s=timeout_s, blocks=call.blocks
            )
        return sum_any_order(group, owned=everything, timeout_s=timeout_s)
