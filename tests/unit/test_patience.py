from kintsugi.patience import FLOOR_S, REMEMBERED, SLOWEST_TOKENS_PER_S, Patience


def test_before_the_first_answer_the_start_up_time_and_the_tokens_count() -> None:
    patience = Patience(first_s=120.0)
    assert patience.deadline_s("RunCall") == 120.0
    assert patience.deadline_s("RunCall", num_tokens=1000) == 120.0 + 1000 / SLOWEST_TOKENS_PER_S


def test_afterwards_it_is_ten_times_the_longest_answer_seen() -> None:
    patience = Patience(first_s=120.0)
    for duration_s in (2.0, 9.0, 1.0):
        patience.observed("RunCall", duration_s)
    assert patience.deadline_s("RunCall") == patience.deadline_s("RunCall", num_tokens=10**6) == 90.0


def test_it_never_falls_below_half_a_minute() -> None:
    patience = Patience(first_s=5.0)
    patience.observed("Ping", 0.001)
    assert patience.deadline_s("Ping") == FLOOR_S


def test_kinds_are_measured_apart() -> None:
    patience = Patience(first_s=120.0)
    patience.observed("Ping", 50.0)
    assert (patience.deadline_s("Ping"), patience.deadline_s("Save")) == (500.0, 120.0)


def test_where_silence_is_part_of_the_trouble_the_floor_is_lower_but_not_before_the_first_answer() -> None:
    patience = Patience(first_s=120.0)
    assert patience.deadline_s("PreLock", floor_s=10.0) == 120.0
    patience.observed("PreLock", 0.01)
    assert patience.deadline_s("PreLock", floor_s=10.0) == 10.0
    patience.observed("PreLock", 4.0)
    assert patience.deadline_s("PreLock", floor_s=10.0) == 40.0


def test_the_longest_answer_is_told_and_unknown_before_the_first() -> None:
    patience = Patience(first_s=120.0)
    assert patience.longest_s("RunCall") is None
    for duration_s in (2.0, 9.0, 1.0):
        patience.observed("RunCall", duration_s)
    assert patience.longest_s("RunCall") == 9.0


def test_an_answer_that_took_absurdly_long_is_forgotten_in_the_end() -> None:
    patience = Patience(first_s=5.0)
    patience.observed("RunCall", 1000.0)
    for _ in range(REMEMBERED - 1):
        patience.observed("RunCall", 4.0)
    assert patience.longest_s("RunCall") == 1000.0
    patience.observed("RunCall", 4.0)
    assert (patience.longest_s("RunCall"), patience.deadline_s("RunCall")) == (4.0, 40.0)
