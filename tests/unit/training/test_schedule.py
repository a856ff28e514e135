from __future__ import annotations

import pytest

from kintsugi.config.schema import ActorSection
from kintsugi.training.rank_state import learning_rate


def rates(actor: ActorSection, *, num_updates: int) -> list[float]:
    return [learning_rate(actor, update=update, num_updates=num_updates) for update in range(num_updates)]


def test_a_constant_rate_stays() -> None:
    assert rates(ActorSection(learning_rate=0.5), num_updates=3) == [0.5, 0.5, 0.5]


def test_warm_up_rises_to_the_full_rate_and_never_starts_at_zero() -> None:
    actor = ActorSection(learning_rate=1.0, warmup_steps=4)
    assert rates(actor, num_updates=6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_would_reach_zero_just_after_the_last_update() -> None:
    actor = ActorSection(learning_rate=1.0, schedule="linear")
    assert rates(actor, num_updates=4) == [1.0, 0.75, 0.5, 0.25]


def test_cosine_decay_is_half_way_down_in_the_middle() -> None:
    actor = ActorSection(learning_rate=1.0, schedule="cosine", warmup_steps=2)
    assert learning_rate(actor, update=2, num_updates=12) == 1.0
    assert learning_rate(actor, update=7, num_updates=12) == pytest.approx(0.5)
    assert learning_rate(actor, update=12, num_updates=12) == pytest.approx(0.0)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_stage_that_is_all_warm_up_divides_by_nothing(schedule: str) -> None:
    actor = ActorSection(learning_rate=1.0, schedule=schedule, warmup_steps=5)  # type: ignore[arg-type]
    assert rates(actor, num_updates=3) == pytest.approx([0.2, 0.4, 0.6])
    assert 0.0 <= learning_rate(actor, update=5, num_updates=3) <= 1.0
