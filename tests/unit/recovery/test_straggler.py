"""Far slower than peers and past, and nothing less, is an anomaly."""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from kintsugi.recovery.liveness import Suspicion, SuspicionKind
from kintsugi.recovery.straggler import IN_A_ROW, MAX_HISTORY, MIN_HISTORY, StragglerDetector


class Drive:
    """Peers that are observed in turn, each once a round."""

    def __init__(self, *, num_peers: int = 4) -> None:
        self.detector = StragglerDetector()
        self.names = [f"model-{index}" for index in range(num_peers)]
        self.now = 0.0

    def run(self, rounds: int, value_of: Callable[[str], float]) -> list[Suspicion]:
        told = []
        for _ in range(rounds):
            for name in self.names:
                self.now += 0.1
                told.append(
                    self.detector.observe(
                        name, "1", peers_key="model", measure="RunCall", value=value_of(name), now=self.now
                    )
                )
        return [suspicion for suspicion in told if suspicion is not None]


def slow(who: str, value: float, other: float = 0.2) -> Callable[[str], float]:
    return lambda name: value if name == who else other


def test_a_process_far_slower_than_peers_and_past_is_suspected_once_with_both_figures() -> None:
    drive = Drive()
    assert drive.run(MIN_HISTORY, lambda name: 0.2) == []
    assert drive.run(IN_A_ROW - 1, slow("model-2", 2.0)) == []
    (suspicion,) = drive.run(30, slow("model-2", 2.0))
    assert (suspicion.process, suspicion.kind) == ("model-2", SuspicionKind.SLOW)
    assert "2.00 s" in suspicion.evidence and suspicion.evidence.count("0.20 s") == 2
    assert drive.detector.suspected() == (suspicion,)


def test_without_history_nothing_is_an_anomaly() -> None:
    drive = Drive()
    drive.run(MIN_HISTORY - 1, lambda name: 0.2)
    drive.detector.forget("model-2")
    assert drive.run(MIN_HISTORY, slow("model-2", 2.0)) == []


def test_what_was_always_slower_than_its_peers_is_no_anomaly() -> None:
    assert Drive().run(100, slow("model-2", 2.0)) == []


def test_all_peers_slow_at_the_same_time_is_no_anomaly() -> None:
    drive = Drive()
    drive.run(30, lambda name: 0.2)
    assert drive.run(100, lambda name: 5.0) == []


def test_less_than_the_margin_is_no_anomaly_however_many_times_slower() -> None:
    drive = Drive()
    drive.run(30, lambda name: 0.001)
    assert drive.run(30, slow("model-2", 0.4, other=0.001)) == []


def test_less_than_the_factor_is_no_anomaly_however_many_seconds_slower() -> None:
    drive = Drive()
    drive.run(30, lambda name: 10.0)
    assert drive.run(30, slow("model-2", 45.0, other=10.0)) == []


def test_a_few_slow_answers_with_a_quick_one_in_between_are_no_anomaly() -> None:
    drive = Drive()
    drive.run(30, lambda name: 0.2)
    for _ in range(10):
        assert drive.run(IN_A_ROW - 1, slow("model-2", 3.0)) == []
        assert drive.run(1, lambda name: 0.2) == []


def test_without_peers_there_is_nothing_to_compare_with() -> None:
    drive = Drive(num_peers=1)
    drive.run(30, lambda name: 0.2)
    assert drive.run(30, lambda name: 5.0) == []


def test_the_suspicion_ends_when_it_is_quick_five_times_in_a_row_and_can_arise_again() -> None:
    drive = Drive()
    drive.run(30, lambda name: 0.2)
    assert len(drive.run(10, slow("model-2", 2.0))) == 1
    drive.run(IN_A_ROW - 1, slow("model-2", 0.3))
    assert len(drive.detector.suspected()) == 1
    drive.run(1, slow("model-2", 0.3))
    assert drive.detector.suspected() == ()
    assert len(drive.run(10, slow("model-2", 2.0))) == 1


def test_a_slow_answer_in_between_keeps_the_suspicion_alive() -> None:
    drive = Drive()
    drive.run(30, lambda name: 0.2)
    drive.run(IN_A_ROW, slow("model-2", 2.0))
    for _ in range(5):
        drive.run(IN_A_ROW - 1, lambda name: 0.2)
        drive.run(1, slow("model-2", 2.0))
    assert len(drive.detector.suspected()) == 1


def test_the_suspicion_ends_when_the_peers_have_become_as_slow() -> None:
    drive = Drive()
    drive.run(30, lambda name: 0.2)
    drive.run(IN_A_ROW, slow("model-2", 2.0))
    drive.run(IN_A_ROW + 1, lambda name: 2.0)
    assert drive.detector.suspected() == ()


def test_peers_that_have_not_answered_meanwhile_are_not_compared_with() -> None:
    drive = Drive()
    drive.run(30, lambda name: 0.2)
    everyone, drive.names = drive.names, ["model-2"]
    assert drive.run(20, lambda name: 5.0) == []
    drive.names = everyone
    assert drive.run(20, lambda name: 5.0) == []


def test_a_peer_that_answers_no_more_does_not_hide_the_others() -> None:
    drive = Drive()
    drive.run(30, lambda name: 0.2)
    drive.names = drive.names[:-1]
    assert len(drive.run(10, slow("model-2", 2.0))) == 1


def test_its_own_past_is_the_recent_one() -> None:
    drive = Drive()
    drive.run(MAX_HISTORY, lambda name: 0.2)
    drive.run(MAX_HISTORY, slow("model-2", 0.6))
    assert drive.run(20, slow("model-2", 2.0)) == []


def test_a_replacement_starts_with_a_clean_record() -> None:
    drive = Drive()
    drive.run(30, lambda name: 0.2)
    drive.run(10, slow("model-2", 2.0))
    drive.detector.observe("model-2", "2", peers_key="model", measure="RunCall", value=9.0, now=drive.now)
    assert drive.detector.suspected() == ()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), num_peers=st.integers(2, 8))
def test_a_noisy_machine_gives_no_alarm(seed: int, num_peers: int) -> None:
    """Durations with a long tail, and bursts in which everything is twenty times slower."""
    chance = random.Random(seed)
    drive = Drive(num_peers=num_peers)
    for _ in range(10):
        drive.run(20, lambda name: chance.lognormvariate(-1.0, 0.5))
        assert drive.run(chance.randint(1, 15), lambda name: 20 * chance.lognormvariate(-1.0, 0.5)) == []
