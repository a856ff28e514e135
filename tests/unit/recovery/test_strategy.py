from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kintsugi.errors import Fault, FaultClass, classify
from kintsugi.recovery.strategy import (
    MAX_ATTEMPTS,
    MAX_DEATHS,
    MAX_FAULTS,
    FaultSituation,
    RecoveryOption,
    Strategy,
    impact,
    plan,
    unrecoverable_reason,
)

LADDER = [Strategy.RETRY, Strategy.RECOVER, Strategy.ELASTIC, Strategy.DUMP, Strategy.EXIT]


def fault(kind: str = "RuntimeError", *, process: str = "model-0") -> Fault:
    return Fault("f", kind, process, f"{process} broke", 0.0)


def situation(**changes: Any) -> FaultSituation:
    """Two ranks live, one of which reported a fault, and nothing else is wrong, but for the changes."""
    usual = FaultSituation(
        faults=(fault(),),
        num_faults=1,
        unrecoverable="",
        lost=(),
        missing=(),
        living=("model-0", "model-1"),
        attempts=0,
        most_deaths=0,
        replacements_fail=False,
        start_s=2.0,
        step_s=1.0,
    )
    return msgspec.structs.replace(usual, **changes)


def option(of: FaultSituation, strategy: Strategy) -> RecoveryOption:
    return next(option for option in plan(of).options if option.strategy is strategy)


LOST = {"missing": ("model-1",), "living": ("model-0",)}


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        (situation(), Strategy.RETRY),
        (situation(**LOST), Strategy.RECOVER),
        (situation(missing=("model-0", "model-1"), living=()), Strategy.RECOVER),
        (situation(**LOST, replacements_fail=True), Strategy.ELASTIC),
        (situation(missing=("model-0",), living=(), replacements_fail=True), Strategy.EXIT),
        (situation(attempts=MAX_ATTEMPTS), Strategy.DUMP),
        (situation(attempts=MAX_ATTEMPTS, living=()), Strategy.EXIT),
    ],
)
def test_the_first_strategy_of_the_ladder_that_can_help_is_chosen(
    given: FaultSituation, chosen: Strategy
) -> None:
    assert plan(given).strategy is chosen


def test_a_plan_names_every_strategy_in_the_order_of_the_ladder() -> None:
    for given in (situation(), situation(**LOST), situation(attempts=MAX_ATTEMPTS)):
        assert [option.strategy for option in plan(given).options] == LADDER


@pytest.mark.parametrize(
    ("given", "refused", "why"),
    [
        (situation(**LOST), Strategy.RETRY, "model-1 lost"),
        (situation(faults=(fault("DeviceError"),)), Strategy.RETRY, "a device fault stays with its process"),
        (situation(**LOST, replacements_fail=True), Strategy.RECOVER, "no replacement comes"),
        (situation(missing=("model-0",), living=()), Strategy.ELASTIC, "no rank lives"),
        (situation(missing=("model-0",), living=()), Strategy.DUMP, "no rank lives"),
        (
            situation(attempts=MAX_ATTEMPTS),
            Strategy.RECOVER,
            f"{MAX_ATTEMPTS} recoveries of this incident failed",
        ),
    ],
)
def test_a_strategy_that_can_not_help_says_why(given: FaultSituation, refused: Strategy, why: str) -> None:
    assert option(given, refused).impossible == why


def test_the_reason_of_a_plan_says_why_it_was_chosen_and_why_the_ones_before_were_not() -> None:
    chosen, *refused = plan(situation(**LOST, replacements_fail=True)).reason.split("; ")
    assert "continue without model-1" in chosen
    assert [reason.partition(":")[0] for reason in refused] == ["retry", "recover"]
    assert "model-1 lost" in refused[0] and "no replacement comes" in refused[1]


def test_costs_are_the_step_that_is_repeated_the_start_that_is_waited_for_and_the_share_that_is_missing() -> (
    None
):
    given = situation(**LOST, start_s=3.0, step_s=2.0)
    costs = {option.strategy: option.cost_s for option in plan(given).options}
    assert costs[Strategy.RETRY] == 2.0
    assert costs[Strategy.RECOVER] == 5.0
    assert costs[Strategy.ELASTIC] == 2.0
    assert costs[Strategy.DUMP] == costs[Strategy.EXIT] == 0.0


@pytest.mark.parametrize("kind", ["UserError", "ConfigError", "DataError", "ModelError"])
def test_a_mistake_of_the_user_is_not_repeated_at_all(kind: str) -> None:
    given = situation(faults=(fault("ProcessDied"), fault(kind)))
    assert plan(given).strategy in (Strategy.DUMP, Strategy.EXIT)
    assert "the user's mistake" in unrecoverable_reason(given)


@pytest.mark.parametrize(
    ("bound", "below", "at"),
    [
        ("attempts", {"attempts": MAX_ATTEMPTS - 1}, {"attempts": MAX_ATTEMPTS}),
        ("deaths", {"most_deaths": MAX_DEATHS - 1}, {"most_deaths": MAX_DEATHS}),
        ("faults", {"num_faults": MAX_FAULTS - 1}, {"num_faults": MAX_FAULTS}),
    ],
)
def test_what_breaks_again_and_again_is_not_mended_for_ever(
    bound: str, below: dict[str, Any], at: dict[str, Any]
) -> None:
    assert unrecoverable_reason(situation(**below)) == ""
    assert unrecoverable_reason(situation(**at)) != "", bound
    assert plan(situation(**at)).strategy is Strategy.DUMP


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ProcessDied", FaultClass.SOFTWARE),
        ("SomethingNew", FaultClass.SOFTWARE),
        ("GroupBroken", FaultClass.CONSEQUENCE),
        ("DeadlineExceeded", FaultClass.LINK),
        ("HostLost", FaultClass.NODE),
        ("DeviceOutOfMemory", FaultClass.DEVICE),
        ("StorageFull", FaultClass.STORAGE),
        ("DataError", FaultClass.USER),
    ],
)
def test_a_fault_is_classified_by_its_kind(kind: str, expected: FaultClass) -> None:
    assert classify(fault(kind)) is expected


def test_the_impact_of_a_loss_is_one_sentence_per_role() -> None:
    said = impact(["model-0", "model-1", "manager-0"])
    assert said.count("training stops") == said.count("generation waits") == 1
    assert said.index("model") < said.index("manager")


def test_what_is_known_to_be_beyond_help_is_neither_repeated_nor_replaced() -> None:
    fault = Fault("a", "ProcessDied", "model-0", "killed", 0.0)
    lost = situation(faults=(fault,), unrecoverable="no state is left")
    assert unrecoverable_reason(lost) == "no state is left"
    assert plan(lost).strategy is Strategy.DUMP


def test_the_reason_of_a_recovery_names_whoever_is_replaced_once() -> None:
    given = situation(lost=("model-0", "model-1"), missing=("model-1",), living=("model-0",))
    assert plan(given).reason.startswith("model-0, model-1 replaced")
