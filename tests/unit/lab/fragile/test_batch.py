from __future__ import annotations

import pytest

from kintsugi.lab.fragile.batch import BatchSizeMismatch, DistributedBatchMemory
from kintsugi.lab.fragile.messages import RolledOut
from kintsugi.rollout.trajectory import demonstrated_trajectory, describe


def rolled_out(ticket: str) -> RolledOut:
    trajectory = demonstrated_trajectory(ticket, [1, 2], [3, 4])
    meta = describe(trajectory, ticket=ticket, holder="rollout-0", components={}, reward=0.0)
    return RolledOut((meta,), (trajectory,))


def test_a_whole_batch_is_taken() -> None:
    batch = DistributedBatchMemory([rolled_out("a"), rolled_out("b")])
    batch.check(size=2)
    assert set(batch.trajectories) == {"a/0", "b/0"}


def test_a_worker_that_gave_nothing_is_found_out_when_the_batch_is_split() -> None:
    with pytest.raises(BatchSizeMismatch, match="Batch size mismatch: expected 2, got 1"):
        DistributedBatchMemory([rolled_out("a")]).check(size=2)
