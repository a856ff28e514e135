"""Admission of new tickets: the one rule that bounds staleness, for synchronous and asynchronous runs. A pure function.

A ticket that is issued now trains at the latest when everything issued before it has trained. If no more than
(version + max_staleness + 1) × batch_size tickets that were not dropped have ever been issued, where `version` is that
of the servers' weights, then the last of them trains at most `max_staleness` steps after the weights that it began
with. With 0 the run is synchronous: the next batch is issued when the servers have the weights of the previous one.
"""

from __future__ import annotations


def admissible(
    *,
    num_issued: int,
    num_dropped: int,
    version: int,
    batch_size: int,
    max_staleness: int,
    num_steps: int = 1 << 62,
) -> tuple[int, str]:
    """Return how many tickets may be issued now, and the reason for the limit. All numbers are those of the stage.

    `num_issued` and `num_dropped` are tickets ever issued and ended untrained (a dropped one is replaced); `version` is
    that of the servers' weights, counted in steps of the stage. After a rollback the result may be negative: this many
    of the youngest issued tickets must wait, or they would be sampled from weights too old for their step. Nothing is
    issued for steps beyond the stage's `num_steps`.

    >>> admissible(num_issued=32, num_dropped=0, version=0, batch_size=32, max_staleness=0)
    (0, '32 of 32 tickets issued for step 1')
    >>> admissible(num_issued=32, num_dropped=2, version=0, batch_size=32, max_staleness=0)
    (2, '30 of 32 tickets issued for step 1')
    >>> admissible(num_issued=32, num_dropped=0, version=1, batch_size=32, max_staleness=2)
    (96, '32 of 128 tickets issued for steps up to 4')
    >>> admissible(num_issued=32, num_dropped=0, version=1, batch_size=32, max_staleness=2, num_steps=3)
    (64, '32 of 96 tickets issued for steps up to 3')
    >>> admissible(num_issued=64, num_dropped=0, version=0, batch_size=32, max_staleness=0)
    (-32, '64 of 32 tickets issued for step 1')
    """
    last = min(version + max_staleness + 1, num_steps)
    limit = last * batch_size
    kept = num_issued - num_dropped
    steps = f"step {last}" if max_staleness == 0 else f"steps up to {last}"
    return limit - kept, f"{kept} of {limit} tickets issued for {steps}"
