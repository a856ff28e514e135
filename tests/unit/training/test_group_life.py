"""Members and end of a group, which all implementations share."""

from __future__ import annotations

import pytest

from kintsugi.errors import GroupBroken
from kintsugi.training.group import GroupLife, Interruption


def group(*, interruption: Interruption = lambda: None, name: str = "") -> GroupLife:
    return GroupLife(group_id=3, ranks=["a", "b", "c"], rank=1, interruption=interruption, name=name)


def test_a_group_names_the_ranks_that_its_collectives_wait_for() -> None:
    assert (group().size, group().others) == (3, "a, c")


def test_a_group_ends_once_for_the_first_reason() -> None:
    ended = group(name="data-0")
    ended.check("all-reduce")
    ended.end("b was lost")
    ended.end("the group was closed")
    with pytest.raises(GroupBroken, match=r"all-reduce: generation 3 \(data-0\) is over: b was lost"):
        ended.check("all-reduce")


def test_an_interruption_ends_a_group_for_good() -> None:
    reasons = iter(["a new group is made", None])
    interrupted = group(interruption=lambda: next(reasons))
    for _ in range(2):
        with pytest.raises(GroupBroken, match="generation 3 is over: a new group is made"):
            interrupted.check("all-gather")
