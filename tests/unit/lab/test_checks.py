from __future__ import annotations

from typing import Any

import pytest

from kintsugi.errors import UserError
from kintsugi.lab.injector.checks import check_injection, supported_parameters_of
from kintsugi.lab.injector.injection import Ability, Injection, Trigger


def test_every_word_has_bounds() -> None:
    for ability in Ability:
        for word in supported_parameters_of(ability):
            with pytest.raises(UserError, match=rf"amount\.{word}: expected"):
                check_injection(Injection(ability=ability, target="x", amount={word: float("inf")}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"duration_s": float("nan")}, "duration_s: expected seconds above 0, at most 3600, got nan"),
        ({"ramp_s": float("inf")}, "ramp_s: expected seconds not below 0, at most 3600, got inf"),
        ({"port": 70000}, "port: expected 1 to 65535, got 70000"),
        ({"peer": "model-0"}, "peer: expected another process than the target, got 'model-0'"),
        ({"trigger": Trigger(timeout_s=float("inf"))}, r"trigger\.timeout_s: expected seconds above 0"),
        ({"amount": {"percent": 1.0}}, "amount: network_delay knows delay_s, jitter_s, got percent"),
        ({"amount": {"delay_s": 0.1, "jitter_s": 0.3}}, "jitter_s: expected at most delay_s, which is 0.1"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_field_its_value_and_what_was_expected(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        check_injection(Injection(ability=Ability.NETWORK_DELAY, target="model-0", **changes))


def test_a_fault_that_makes_sense_is_let_through() -> None:
    aim = {"peer": "agent-0", "port": 8080, "interface": "eth0"}
    amount = {"delay_s": 1.0, "jitter_s": 0.5}
    injection = Injection(ability=Ability.NETWORK_DELAY, target="model-0", amount=amount, **aim)  # type: ignore[arg-type]
    check_injection(injection)
