import pytest

from kintsugi.runtime.deadlines import (
    FACTOR,
    FLOOR_S,
    HALF_LIFE_S,
    ONCE_FACTOR,
    SLOWEST_TOKENS_PER_S,
    AdaptiveDeadline,
)


def test_before_the_first_answer_the_start_up_time_and_the_tokens_count() -> None:
    patience = AdaptiveDeadline(first_s=120.0)
    assert patience.deadline_s("RunCall") == 120.0
    assert patience.deadline_s("RunCall", num_tokens=1000) == 120.0 + 1000 / SLOWEST_TOKENS_PER_S


def test_afterwards_it_is_ten_times_the_longest_answer_seen() -> None:
    patience = AdaptiveDeadline(first_s=120.0)
    for duration_s in (2.0, 9.0, 1.0):
        patience.observed("RunCall", duration_s, now=0.0)
    assert patience.deadline_s("RunCall") == patience.deadline_s("RunCall", num_tokens=10**6) == 90.0


def test_it_never_falls_below_the_floor() -> None:
    patience = AdaptiveDeadline(first_s=5.0)
    patience.observed("Ping", 0.001, now=0.0)
    assert patience.deadline_s("Ping") == FLOOR_S


def test_kinds_are_measured_apart() -> None:
    patience = AdaptiveDeadline(first_s=120.0)
    patience.observed("Ping", 50.0, now=0.0)
    assert (patience.deadline_s("Ping"), patience.deadline_s("Save")) == (500.0, 120.0)


def test_where_silence_is_part_of_the_trouble_the_floor_is_lower_but_not_before_the_first_answer() -> None:
    patience = AdaptiveDeadline(first_s=120.0)
    assert patience.deadline_s("PreLock", floor_s=10.0) == 120.0
    patience.observed("PreLock", 0.01, now=0.0)
    assert patience.deadline_s("PreLock", floor_s=10.0) == 10.0
    patience.observed("PreLock", 4.0, now=0.0)
    assert patience.deadline_s("PreLock", floor_s=10.0) == 40.0


def test_the_longest_answer_is_told_and_unknown_before_the_first() -> None:
    patience = AdaptiveDeadline(first_s=120.0)
    assert patience.longest_s("RunCall") is None
    for duration_s in (2.0, 9.0, 1.0):
        patience.observed("RunCall", duration_s, now=0.0)
    assert patience.longest_s("RunCall") == 9.0


def test_an_answer_that_took_absurdly_long_is_forgotten_by_and_by() -> None:
    patience = AdaptiveDeadline(first_s=5.0)
    patience.observed("RunCall", 1200.0, now=0.0)
    longest_s = []
    for number in range(1, 11):
        patience.observed("RunCall", 4.0, now=number * HALF_LIFE_S)
        longest_s.append(patience.longest_s("RunCall") or 0.0)
    assert longest_s[:3] == [300.0, 150.0, 75.0]
    assert all(2.0 <= value <= 4.0 for value in longest_s[-2:])


def test_one_step_of_twenty_minutes_does_not_hide_a_hung_rank_for_hours() -> None:
    patience = AdaptiveDeadline(first_s=5.0)
    now = 0.0
    for _ in range(10):
        now += 60.0
        for rank in range(8):
            patience.observed("RunCall", 50.0 + rank, now=now)
    assert patience.deadline_s("RunCall") == pytest.approx(FACTOR * 57.0, rel=0.1)
    now += 1200.0
    for _ in range(8):
        patience.observed("RunCall", 1200.0, now=now)
    for _ in range(8):
        patience.observed("RunCall", 55.0, now=now + 60.0)
    deadline_s, longest_s = patience.deadline_s("RunCall"), patience.longest_s("RunCall")
    assert 1200.0 < deadline_s < ONCE_FACTOR * 1200.0
    assert longest_s is not None and longest_s < 601.0


def test_a_duration_that_occurs_twice_counts_in_full() -> None:
    patience = AdaptiveDeadline(first_s=5.0)
    for now in (100.0, 400.0, 700.0):
        patience.observed("Save", 90.0, now=now)
        patience.observed("Save", 10.0, now=now + 20.0)
    assert patience.deadline_s("Save") == pytest.approx(FACTOR * 90.0, rel=0.4)
    assert patience.deadline_s("Save") > 5 * 90.0


def test_however_many_processes_answer_a_long_duration_is_remembered_for_the_same_time() -> None:
    few, many = AdaptiveDeadline(first_s=5.0), AdaptiveDeadline(first_s=5.0)
    for patience, num_answers in ((few, 1), (many, 64)):
        patience.observed("RunCall", 1000.0, now=0.0)
        for number in range(1, num_answers + 1):
            patience.observed("RunCall", 1.0, now=number / num_answers * HALF_LIFE_S)
    assert few.longest_s("RunCall") == pytest.approx(many.longest_s("RunCall")) == pytest.approx(250.0)


def test_time_without_answers_shortens_no_deadline() -> None:
    patience = AdaptiveDeadline(first_s=5.0)
    patience.observed("Save", 100.0, now=0.0)
    assert patience.deadline_s("Save") == 1000.0
    for hour in range(1, 5):
        patience.observed("Save", 90.0, now=hour * 3600.0)
        assert patience.deadline_s("Save") >= 5 * 90.0
