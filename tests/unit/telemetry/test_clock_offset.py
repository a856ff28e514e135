from __future__ import annotations

import random

from kintsugi.telemetry.collect.clock_offset import NUM_KEPT, ClockEstimate, ClockReading, reading


def test_an_answer_is_taken_for_the_middle_of_its_round_trip() -> None:
    assert reading(sent_at=100.0, round_trip_s=0.02, remote_time=99.91) == ClockReading(0.1, 0.01)


def test_the_quickest_of_the_last_answers_counts() -> None:
    estimate = ClockEstimate()
    estimate.add(ClockReading(0.13, 0.05))
    estimate.add(ClockReading(0.1, 0.001))
    assert estimate.add(ClockReading(0.12, 0.04)) == ClockReading(0.1, 0.001)


def test_an_old_answer_is_forgotten() -> None:
    estimate = ClockEstimate()
    estimate.add(ClockReading(0.1, 0.001))
    for _ in range(NUM_KEPT):
        best = estimate.add(ClockReading(0.11, 0.02))
    assert best == ClockReading(0.11, 0.02)


def test_a_clock_that_was_set_is_followed_at_once() -> None:
    estimate = ClockEstimate()
    estimate.add(ClockReading(0.1, 0.001))
    assert estimate.add(ClockReading(-3.0, 0.01)) == ClockReading(-3.0, 0.01)


def test_the_truth_is_within_the_error_whatever_the_delays_are() -> None:
    draw, offset_s = random.Random(7), 2.5
    estimate = ClockEstimate()
    for number in range(200):
        asked_at = 1000.0 + number + offset_s
        there_s, back_s = draw.expovariate(200), draw.expovariate(50)
        told = asked_at - offset_s + there_s
        best = estimate.add(reading(sent_at=asked_at, round_trip_s=there_s + back_s, remote_time=told))
        assert abs(best.offset_s - offset_s) <= best.error_s + 1e-9
    assert best.error_s < 0.01
