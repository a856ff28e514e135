from __future__ import annotations

from kintsugi.lab.rewards import odd_digits


def test_the_reward_is_the_share_of_odd_digits() -> None:
    assert odd_digits(["13", "12", "", "+="]) == [1.0, 0.5, 0.0, 0.0]
