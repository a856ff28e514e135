import pytest
from hypothesis import given
from hypothesis import strategies as st

from kintsugi.generation.engine.scheduler import (
    PrefillPart,
    PrefillSpan,
    admit,
    must_preempt,
    num_steps_of_iteration,
    plan_chunks,
)


def test_alone_a_request_may_take_every_page() -> None:
    assert admit(num_free_slots=1, num_needed=8, num_available=8, num_admitted=0).admitted


def test_a_page_is_left_for_each_that_runs() -> None:
    assert admit(num_free_slots=1, num_needed=6, num_available=8, num_admitted=2).admitted
    refused = admit(num_free_slots=1, num_needed=7, num_available=8, num_admitted=2)
    assert refused == (False, "needs 7 pages and 2 to spare, 8 are available")


def test_nobody_is_admitted_without_a_slot() -> None:
    assert admit(num_free_slots=0, num_needed=0, num_available=8, num_admitted=4) == (
        False,
        "all slots are taken",
    )


def test_chunks_begin_at_multiples_of_their_size_and_say_what_is_known() -> None:
    assert plan_chunks(
        [PrefillPart(0, 19), PrefillPart(20, 21), PrefillPart(7, 7)], chunk_size=8, max_chunks=9
    ) == [
        PrefillSpan(0, 0, 8, 0),
        PrefillSpan(0, 8, 16, 0),
        PrefillSpan(0, 16, 19, 0),
        PrefillSpan(1, 16, 21, 4),
    ]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6),
    st.integers(1, 8),
    st.integers(1, 5),
)
def test_calls_of_a_few_chunks_prefill_everything_once_and_the_oldest_first(
    ranges: list[tuple[int, int]], chunk_size: int, max_chunks: int
) -> None:
    parts = [PrefillPart(min(pair), max(pair)) for pair in ranges]
    computed: list[list[int]] = [list(range(part.num_filled)) for part in parts]
    while spans := plan_chunks(parts, chunk_size=chunk_size, max_chunks=max_chunks):
        assert len(spans) <= max_chunks and [span.part for span in spans] == sorted(
            span.part for span in spans
        )
        for index, start, end, num_known in spans:
            assert start % chunk_size == 0 and start + num_known < end <= start + chunk_size
            computed[index] += range(start + num_known, end)
            parts[index] = PrefillPart(end, parts[index].length)
        unfinished = [index for index, part in enumerate(parts) if part.num_filled < part.length]
        assert not unfinished or spans[-1].part <= unfinished[0]
    assert computed == [list(range(part.length)) for part in parts]


def test_a_visit_takes_as_many_steps_as_any_row_can_use_and_one_while_prompts_are_prefilled() -> None:
    assert num_steps_of_iteration(steps_per_iteration=8, num_left=100, is_prefill_left=False) == 8
    assert num_steps_of_iteration(steps_per_iteration=8, num_left=3, is_prefill_left=False) == 3
    assert num_steps_of_iteration(steps_per_iteration=8, num_left=100, is_prefill_left=True) == 1


def test_somebody_gives_way_only_when_pages_are_missing() -> None:
    assert not must_preempt(num_needed=3, num_available=3, num_admitted=2).is_needed
    assert must_preempt(num_needed=3, num_available=2, num_admitted=2) == (
        True,
        "3 pages needed to continue, 2 are available",
    )


def test_the_last_one_never_has_to_give_way() -> None:
    with pytest.raises(AssertionError, match="alone does not fit"):
        must_preempt(num_needed=3, num_available=2, num_admitted=1)
