from __future__ import annotations

import random
from collections import Counter

from kintsugi.lab.faults import Aim, Deck, Kind, Moment, Target

NUM_PAIRS = len(Target) * len(Moment)


def drawn(deck: Deck, count: int) -> list[Aim]:
    """So many aims, all of which strike as meant."""
    aims = []
    for _ in range(count):
        aim = deck.draw()
        deck.hit(aim.target, aim.moment)
        aims.append(aim)
    return aims


def test_every_pair_is_hit_twice_before_any_is_hit_three_times() -> None:
    deck = Deck(random.Random(0))
    aims = drawn(deck, 2 * NUM_PAIRS)
    assert set(Counter((aim.target, aim.moment) for aim in aims).values()) == {2}
    assert deck.uncovered(at_least=2) == []
    assert len(deck.uncovered(at_least=3)) == NUM_PAIRS


def test_the_same_seed_draws_the_same_aims_and_another_seed_others() -> None:
    first, again, other = (drawn(Deck(random.Random(seed)), 30) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_both_kinds_of_fault_are_drawn() -> None:
    assert {aim.kind for aim in drawn(Deck(random.Random(3)), 40)} == set(Kind)


def test_a_missed_aim_is_drawn_again_and_does_not_count() -> None:
    deck = Deck(random.Random(0), targets=[Target.SERVER], moments=[Moment.SAVING])
    deck.missed(deck.draw())
    assert deck.uncovered(at_least=1) == [("server", "saving")]
    assert (deck.draw().target, deck.draw().moment) == (Target.SERVER, Moment.SAVING)


def test_a_pair_that_can_not_be_reached_does_not_keep_the_others_from_being_hit() -> None:
    deck = Deck(random.Random(0), targets=list(Target), moments=[Moment.COLLECTING, Moment.RECOVERING])
    for _ in range(200):
        aim = deck.draw()
        if aim.moment is Moment.RECOVERING:
            deck.missed(aim)
        else:
            deck.hit(aim.target, aim.moment)
    assert all(hits["collecting"] >= 5 and hits["recovering"] == 0 for hits in deck.coverage.values())


def test_a_hit_in_another_phase_than_was_aimed_at_counts_for_the_phase_it_hit() -> None:
    deck = Deck(random.Random(0), targets=[Target.MODEL])
    deck.hit(Target.MODEL, "publishing")
    deck.hit(Target.MODEL, "preparing")
    assert deck.coverage["model"]["publishing"] == 1
    assert sum(deck.coverage["model"].values()) == 1
