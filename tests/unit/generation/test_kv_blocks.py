from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kintsugi.generation.engine.kv_blocks import KvBlockPool, PlacedBlocks, PrefixMatch, page_keys

_PAGE_SIZE = 4


def _keys(tokens: Sequence[int]) -> list[bytes]:
    return page_keys(np.array(tokens, np.int32), page_size=_PAGE_SIZE)


def _place(
    pool: KvBlockPool, tokens: Sequence[int], *, num_ahead: int = 0
) -> tuple[PrefixMatch, PlacedBlocks]:
    found = pool.look_up(_keys(tokens), num_tokens=len(tokens), num_ahead=num_ahead)
    placed = pool.place(found, keys=_keys(tokens), num_tokens=len(tokens), num_ahead=num_ahead)
    return found, placed


def _filled(pool: KvBlockPool, tokens: Sequence[int]) -> list[int]:
    """Pages of one that has computed its tokens."""
    _, placed = _place(pool, tokens)
    pool.fill(placed.pages)
    return placed.pages


@given(st.lists(st.integers(0, 9), max_size=20), st.lists(st.integers(0, 9), max_size=20))
def test_pages_have_the_same_key_exactly_if_all_tokens_up_to_their_end_are_the_same(
    first: list[int], second: list[int]
) -> None:
    for index, (key, other) in enumerate(zip(_keys(first), _keys(second), strict=False)):
        end = (index + 1) * _PAGE_SIZE
        assert (key == other) == (first[:end] == second[:end])


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(0, 7))
def test_keys_go_on_from_known_ones(tokens: list[int], num_known: int) -> None:
    keys = _keys(tokens)
    known = keys[: min(num_known, len(tokens) // _PAGE_SIZE)]
    assert page_keys(np.array(tokens, np.int32), page_size=_PAGE_SIZE, known=known) == keys


def test_the_full_pages_of_a_beginning_are_shared_and_its_partial_page_is_copied() -> None:
    pool = KvBlockPool(8, page_size=_PAGE_SIZE)
    first = _filled(pool, range(10))
    found, placed = _place(pool, range(10), num_ahead=3)
    assert (found.full, found.last, found.num_needed) == (first[:2], first[2], 2)
    assert placed.pages[:2] == first[:2] and placed.pages[2] != first[2] and len(placed.pages) == 4
    assert placed.copy == (first[2], placed.pages[2]) and placed.num_known == 10


def test_a_partial_page_that_nobody_uses_is_taken_without_a_copy() -> None:
    pool = KvBlockPool(3, page_size=_PAGE_SIZE)
    first = _filled(pool, range(10))
    pool.release(first)
    _, placed = _place(pool, range(10))
    assert placed == PlacedBlocks(first, 10, None)


def test_a_page_that_is_taken_over_is_not_found_by_what_stood_behind_the_prompt() -> None:
    pool = KvBlockPool(4, page_size=_PAGE_SIZE)
    first = _filled(pool, range(6))
    pool.enter(first[1], _keys(range(8))[1])
    pool.release(first)
    _place(pool, range(6))
    assert pool.look_up(_keys(range(8)), num_tokens=8, num_ahead=0).full == first[:1]
    pool.check()


def test_a_page_of_another_length_is_not_a_partial_page() -> None:
    pool = KvBlockPool(8, page_size=_PAGE_SIZE)
    _filled(pool, range(10))
    found, placed = _place(pool, range(9))
    assert found.last is None and placed.num_known == 8 and placed.copy is None


def test_pages_are_promised_until_they_are_filled() -> None:
    pool = KvBlockPool(8, page_size=_PAGE_SIZE)
    _, leader = _place(pool, range(8))
    found, follower = _place(pool, range(8))
    assert found.full == leader.pages == follower.pages
    assert not pool.are_filled(follower.pages)
    pool.fill(leader.pages)
    assert pool.are_filled(follower.pages)


def test_a_promise_that_nobody_keeps_is_forgotten() -> None:
    pool = KvBlockPool(8, page_size=_PAGE_SIZE)
    _, leader = _place(pool, range(8))
    pool.release(leader.pages)
    assert pool.num_free == 8 and pool.look_up(_keys(range(8)), num_tokens=8, num_ahead=0).full == []
    pool.check()


def test_cached_pages_give_way_the_longest_unused_first_and_the_end_of_a_prompt_before_its_beginning() -> (
    None
):
    pool = KvBlockPool(6, page_size=_PAGE_SIZE)
    old, new = _filled(pool, range(12)), _filled(pool, range(50, 62))
    pool.release(old)
    pool.release(new)
    assert set(pool.allocate(2)) == set(old[1:])
    assert pool.look_up(_keys(range(12)), num_tokens=12, num_ahead=0).full == old[:1]
    assert pool.look_up(_keys(range(50, 62)), num_tokens=12, num_ahead=0).full == new


def test_nothing_is_found_after_new_weights_and_pages_in_use_stay_with_their_owners() -> None:
    pool = KvBlockPool(6, page_size=_PAGE_SIZE)
    used, cached = _filled(pool, range(8)), _filled(pool, range(20, 28))
    pool.release(cached)
    pool.forget_all()
    for tokens in (range(8), range(20, 28)):
        assert pool.look_up(_keys(tokens), num_tokens=8, num_ahead=0).full == []
    assert (pool.num_used, pool.num_cached, pool.num_free) == (2, 0, 4)
    pool.release(used)
    assert pool.num_free == 6
    pool.check()


def test_spoiled_pages_are_not_found_and_are_like_others_once_their_last_user_has_left() -> None:
    pool = KvBlockPool(6, page_size=_PAGE_SIZE)
    first = _filled(pool, range(8))
    _, second = _place(pool, range(8))
    pool.spoil(first)
    assert pool.look_up(_keys(range(8)), num_tokens=8, num_ahead=0).full == []
    assert not pool.enter(first[0], _keys(range(8))[0])
    pool.release(first)
    pool.check()
    assert not pool.enter(first[0], _keys(range(8))[0])
    pool.release(second.pages)
    pool.check()
    assert pool.num_free == 6
    assert pool.enter(pool.allocate(6)[0], _keys(range(8))[0])


def test_giving_back_twice_and_taking_too_much_are_noticed() -> None:
    pool = KvBlockPool(2, page_size=_PAGE_SIZE)
    pages = pool.allocate(2)
    with pytest.raises(AssertionError, match="available"):
        pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(pages[:1])


class PoolMachine(RuleBasedStateMachine):
    """Requests of few tokens that differ late, so that they share; each is checked against what it was promised."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KvBlockPool(12, page_size=_PAGE_SIZE)
        self.held: list[tuple[list[int], PlacedBlocks]] = []

    @rule(length=st.integers(0, 14), last=st.integers(0, 1), num_ahead=st.integers(0, 5))
    def take(self, length: int, last: int, num_ahead: int) -> None:
        tokens = [*range(length), last]
        found = self.pool.look_up(_keys(tokens), num_tokens=len(tokens), num_ahead=num_ahead)
        before = self.pool.num_available
        if found.num_needed > before:
            return
        placed = self.pool.place(found, keys=_keys(tokens), num_tokens=len(tokens), num_ahead=num_ahead)
        assert before - self.pool.num_available == found.num_needed
        assert len(set(placed.pages)) == len(placed.pages) == -(-(len(tokens) + num_ahead) // _PAGE_SIZE)
        self.pool.fill(placed.pages)
        if placed.copy is not None:
            self.pool.release(placed.copy[:1])
        self.held.append((tokens, placed))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), spoils=st.booleans())
    def give_back(self, data: st.DataObject, spoils: bool) -> None:
        _, placed = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if spoils:
            self.pool.spoil(placed.pages)
        self.pool.release(placed.pages)

    @rule()
    def forget(self) -> None:
        self.pool.forget_all()

    @invariant()
    def is_consistent(self) -> None:
        self.pool.check()
        counts = np.bincount([page for _, placed in self.held for page in placed.pages], minlength=12)
        assert counts.tolist() == [self.pool.num_references(page) for page in range(12)]

    def teardown(self) -> None:
        for _, placed in self.held:
            self.pool.release(placed.pages)
        assert self.pool.num_used == 0 and self.pool.num_available == 12


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
