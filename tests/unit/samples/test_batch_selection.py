"""The rule that bounds staleness."""

from __future__ import annotations

import doctest

import pytest

from kintsugi.samples import batch_selection
from kintsugi.samples.admission import admissible


def test_the_docstring_examples_hold() -> None:
    assert doctest.testmod(batch_selection).failed == 0


def test_a_synchronous_run_issues_one_batch_and_then_waits_for_its_step() -> None:
    def count(num_issued: int, version: int) -> int:
        return admissible(
            num_issued=num_issued, num_dropped=0, version=version, batch_size=4, max_staleness=0
        )[0]

    assert [count(0, 0), count(4, 0), count(4, 1), count(8, 1)] == [4, 0, 4, 0]


def test_after_a_rollback_the_youngest_wait_until_the_steps_are_made_up_for() -> None:
    counts = [
        admissible(num_issued=40, num_dropped=0, version=version, batch_size=4, max_staleness=0)[0]
        for version in (5, 8, 9, 10)
    ]
    assert counts == [-16, -4, 0, 4]


def test_a_dropped_ticket_is_replaced() -> None:
    count, reason = admissible(num_issued=8, num_dropped=3, version=1, batch_size=4, max_staleness=0)
    assert (count, reason) == (3, "5 of 8 tickets issued for step 2")


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_no_ticket_trains_later_than_the_bound_allows(max_staleness: int) -> None:
    batch_size, version, issued_at = 3, 0, list[int]()
    while version < 12:
        count, _ = admissible(
            num_issued=len(issued_at),
            num_dropped=0,
            version=version,
            batch_size=batch_size,
            max_staleness=max_staleness,
        )
        issued_at += [version] * count
        version += 1
        batch = issued_at[(version - 1) * batch_size : version * batch_size]
        assert len(batch) == batch_size
        assert all((version - 1) - issued <= max_staleness for issued in batch)
