from __future__ import annotations

import random

from kintsugi.observe.clocks import NUM_KEPT, ClockEstimate, Reading, reading


def test_an_answer_is_taken_for_the_middle_of_its_round_trip() -> None:
    assert reading(asked_at=100.0, round_trip_s=0.02, told=99.91) == Reading(0.1, 0.01)


def test_the_quickest_of_the_last_answers_counts() -> None:
    estimate = ClockEstimate()
    estimate.add(Reading(0.13, 0.05))
    estimate.add(Reading(0.1, 0.001))
    assert estimate.add(Reading(0.12, 0.04)) == Reading(0.1, 0.001)


def test_an_old_answer_is_forgotten() -> None:
    estimate = ClockEstimate()
    estimate.add(Reading(0.1, 0.001))
    for _ in range(NUM_KEPT):
        best = estimate.add(Reading(0.11, 0.02))
    assert best == Reading(0.11, 0.02)


def test_a_clock_that_was_set_is_followed_at_once() -> None:
    estimate = ClockEstimate()
    estimate.add(Reading(0.1, 0.001))
    assert estimate.add(Reading(-3.0, 0.01)) == Reading(-3.0, 0.01)


def test_the_truth_is_within_the_error_whatever_the_delays_are() -> None:
    draw, offset_s = random.Random(7), 2.5
    estimate = ClockEstimate()
    for number in range(200):
        asked_at = 1000.0 + number + offset_s
        there_s, back_s = draw.expovariate(200), draw.expovariate(50)
        told = asked_at - offset_s + there_s
        best = estimate.add(reading(asked_at=asked_at, round_trip_s=there_s + back_s, told=told))
        assert abs(best.offset_s - offset_s) <= best.error_s + 1e-9
    assert best.error_s < 0.01
