"""How many new tickets may be issued: the one rule that bounds staleness, for synchronous and asynchronous runs.

A ticket that is issued now trains at the latest when everything issued before it has trained. If no more than
(committed steps + max_staleness + 1) × batch_size tickets that were not dropped have ever been issued, then the last
of them trains at most `max_staleness` steps after the version that it began with. With 0 this is synchronous: the
next batch is issued when the previous one is committed.
"""

from __future__ import annotations


def admissible(
    *, num_issued: int, num_dropped: int, version: int, batch_size: int, max_staleness: int
) -> tuple[int, str]:
    """How many tickets may be issued now, and why not more. All figures are the stage's own.

    `num_issued` and `num_dropped` are tickets ever issued and ended untrained (a dropped one is replaced); `version`
    is the number of committed steps, which a rollback lowers. Then the number is negative: so many of the tickets that
    are issued already, the youngest, must wait, or they would be sampled from weights too old for their step.

    >>> admissible(num_issued=32, num_dropped=0, version=0, batch_size=32, max_staleness=0)
    (0, '32 of 32 tickets issued for step 1')
    >>> admissible(num_issued=32, num_dropped=2, version=0, batch_size=32, max_staleness=0)
    (2, '30 of 32 tickets issued for step 1')
    >>> admissible(num_issued=32, num_dropped=0, version=1, batch_size=32, max_staleness=2)
    (96, '32 of 128 tickets issued for steps up to 4')
    >>> admissible(num_issued=64, num_dropped=0, version=0, batch_size=32, max_staleness=0)
    (-32, '64 of 32 tickets issued for step 1')
    """
    limit = (version + max_staleness + 1) * batch_size
    kept = num_issued - num_dropped
    last = version + max_staleness + 1
    steps = f"step {last}" if max_staleness == 0 else f"steps up to {last}"
    return limit - kept, f"{kept} of {limit} tickets issued for {steps}"
