from __future__ import annotations

from kintsugi.runtime.backoff import (
    LONGEST_SHORTAGE_PAUSE_S,
    SHORTAGE_OVER_S,
    SHORTAGES_PER_FAILURE,
    ShortagePauses,
    growing_pause,
)


def test_a_pause_doubles_up_to_the_longest_and_never_overflows() -> None:
    assert [growing_pause(number, first_s=1.0, longest_s=5.0) for number in (0, 1, 2, 3, 4, 10**6)] == [
        1.0,
        1.0,
        2.0,
        4.0,
        5.0,
        5.0,
    ]


def test_shortages_in_a_row_have_growing_pauses_and_every_fifth_is_a_failure() -> None:
    shortages, pauses, failures = ShortagePauses(), [], []
    for number in range(10):
        shortages.count(float(number))
        pauses.append(shortages.pause_s)
        failures.append(shortages.is_failure)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0] + [LONGEST_SHORTAGE_PAUSE_S] * 4
    assert [number for number, failed in enumerate(failures, 1) if failed] == [
        SHORTAGES_PER_FAILURE,
        2 * SHORTAGES_PER_FAILURE,
    ]


def test_pauses_begin_from_the_first_after_a_long_time_and_after_another_end() -> None:
    shortages = ShortagePauses()
    for now in (0.0, 1.0, 2.0, 3.0 + SHORTAGE_OVER_S):
        shortages.count(now)
    assert (shortages.number, shortages.pause_s) == (1, 0.5)
    shortages.reset()
    assert not shortages.is_failure
    shortages.count(4.0 + SHORTAGE_OVER_S)
    assert shortages.number == 1
