"""Which groups make a batch: the order of issue, what may be passed over, and what is too old."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kintsugi.samples.batch_selection import CandidateGroup, choose_batch

CANDIDATES = st.lists(st.tuples(st.booleans(), st.integers(-1, 6)), max_size=12).map(
    lambda drawn: [CandidateGroup(f"t{i}", ready, version) for i, (ready, version) in enumerate(drawn)]
)


@given(CANDIDATES, st.integers(1, 4), st.integers(0, 6), st.integers(0, 3), st.integers(0, 3))
def test_a_batch_has_complete_groups_within_the_bound_in_the_order_of_issue(
    candidates: list[CandidateGroup], size: int, version: int, max_staleness: int, overtake: int
) -> None:
    choice = choose_batch(
        candidates, size=size, version=version, max_staleness=max_staleness, overtake=overtake
    )
    chosen = [candidate for candidate in candidates if candidate.ticket in choice.batch]
    assert tuple(candidate.ticket for candidate in chosen) == choice.batch and len(chosen) in (0, size)
    for candidate in chosen:
        assert candidate.is_ready and (candidate.version < 0 or version - candidate.version <= max_staleness)
    for candidate in candidates:
        if candidate.ticket in choice.expired:
            assert candidate.is_ready and version - candidate.version > max_staleness
    if chosen:
        last = candidates.index(chosen[-1])
        passed = [one for one in candidates[:last] if not one.is_ready]
        assert len(passed) == choice.overtaken <= overtake
        assert all(one.version < 0 or version + 1 - one.version <= max_staleness for one in passed)


def test_rows_of_the_data_are_never_too_old() -> None:
    assert choose_batch([CandidateGroup("a", True, -1)], size=1, version=99).batch == ("a",)


def test_nothing_is_passed_over_in_a_synchronous_run() -> None:
    candidates = [CandidateGroup("a", False, 3), CandidateGroup("b", True, 3)]
    assert choose_batch(candidates, size=1, version=3, overtake=5).batch == ()


def test_of_more_groups_than_a_batch_has_none_is_passed_over_until_it_is_too_old() -> None:
    """Three groups of version 0 are slow: each is complete when it is waited for. The others are so at once."""
    slow = ["a", "b", "c"]
    ready: set[str] = set()
    trained: list[str] = []
    for step in range(6):
        choice = None
        while choice is None or not choice.batch:
            groups = [CandidateGroup(name, name in ready, 0) for name in slow if name not in trained]
            fresh = CandidateGroup(f"step {step}", True, step)
            choice = choose_batch([*groups, fresh], size=1, version=step, max_staleness=3, overtake=3)
            assert not choice.expired
            ready |= {name for name in slow if f"waiting for {name}" in choice.reason}
        trained += choice.batch
    assert set(slow) < set(trained)
