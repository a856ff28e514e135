"""Adaptive pacing of rollout: how far it runs ahead of training, and how many groups run at once. Pure functions.

Running ahead hides the time of generation; more than that only makes samples older. The bound is lowered while complete
batches accumulate, and raised, up to the configured one, when the ranks wait for samples. Groups beyond what the
servers can decode only queue there, where they cannot be moved; too few leave slots empty.
"""

from __future__ import annotations

LONG_WAIT = 0.05
"""Share of a step that the ranks may wait for samples; above it rollout runs further ahead."""
NO_WAIT = 0.01
SPARE_BATCHES = 1.5
"""Complete batches beyond the next one; above this they only grow stale."""
LONG_QUEUE = 2.0
"""Samples that wait at the servers, per sample that is decoded; above this fewer groups run."""
SHORT_QUEUE = 0.25


def next_ahead(
    ahead: int, *, max_staleness: int, waited_share: float, spare_batches: float
) -> tuple[int, str]:
    """How many steps rollout may run ahead from now on, and why; the reason is empty where nothing changes.

    >>> next_ahead(1, max_staleness=4, waited_share=0.2, spare_batches=0.0)
    (2, 'ranks waited for samples 20 % of the step')
    >>> next_ahead(2, max_staleness=4, waited_share=0.0, spare_batches=2.0)
    (1, '2.0 complete batches wait for the ranks and grow old')
    >>> next_ahead(4, max_staleness=4, waited_share=0.2, spare_batches=0.0)
    (4, '')
    """
    if waited_share > LONG_WAIT and ahead < max_staleness:
        return ahead + 1, f"ranks waited for samples {waited_share:.0%} of the step".replace("%", " %")
    if waited_share < NO_WAIT and spare_batches >= SPARE_BATCHES and ahead > 1:
        return ahead - 1, f"{spare_batches:.1f} complete batches wait for the ranks and grow old"
    return ahead, ""


def next_groups(groups: int, *, queue: float, waiting: int, least: int, most: int) -> tuple[int, str]:
    """How many groups may run at once from now on, and why. `waiting` groups are not handed out yet.

    >>> next_groups(64, queue=3.0, waiting=10, least=8, most=128)
    (48, '3.0 samples queue at the servers for each that is decoded')
    >>> next_groups(48, queue=0.0, waiting=10, least=8, most=128)
    (73, '10 groups wait though the servers have room')
    >>> next_groups(48, queue=0.0, waiting=0, least=8, most=128)
    (48, '')
    """
    if queue > LONG_QUEUE and groups > least:
        lower = max(least, groups * 3 // 4)
        return lower, f"{queue:.1f} samples queue at the servers for each that is decoded"
    if queue < SHORT_QUEUE and waiting and groups < most:
        return min(most, groups * 3 // 2 + 1), f"{waiting} groups wait though the servers have room"
    return groups, ""
