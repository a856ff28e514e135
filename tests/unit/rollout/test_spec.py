from typing import Any

import pytest

from kintsugi.errors import ConfigError
from kintsugi.rollout.rewards.spec import (
    RewardFailed,
    RewardName,
    arguments,
    checked,
    combined,
    failure,
    load_rewards,
    parse_rewards,
    total,
)


def test_a_path_may_be_followed_by_its_weight() -> None:
    assert parse_rewards(["a.b.right", " a.b.brevity*0.1 ", "my rewards.py:style * -2e-1"]) == (
        RewardName("a.b.right", "right", 1.0),
        RewardName("a.b.brevity", "brevity", 0.1),
        RewardName("my rewards.py:style", "style", -0.2),
    )


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("a.b.c * much", "with the weight 'much'"),
        ("a.b.c *", "with the weight ''"),
        ("a.b.c * nan", "with the weight 'nan'"),
        ("a.b.c * inf", "with the weight 'inf'"),
        ("0.1 * a.b.c", "with the weight 'a.b.c'"),
        ("a.b.c + 1", "expected dotted paths"),
        ("plain", "expected dotted paths"),
        ("a..b", "expected dotted paths"),
        ("", "expected dotted paths"),
    ],
)
def test_an_entry_that_is_no_path_with_a_weight_is_refused(entry: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.reward") as caught:
        parse_rewards([entry])
    assert expected in str(caught.value) and repr(entry) in str(caught.value)


def test_components_of_the_same_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected distinct names.*'right' twice"):
        parse_rewards(["a.right", "b.right * 2"])


def test_the_reward_is_the_weighted_sum_of_components_that_stay_unweighted() -> None:
    names = parse_rewards(["a.right", "a.brevity * 0.1", "a.watched * 0"])
    components = {"right": 1.0, "brevity": -5.0, "watched": 7.0}
    assert total(components, names) == 0.5
    assert total({}, names) == 0.0


def test_columns_are_repeated_and_can_not_hide_the_completions() -> None:
    given = arguments("1+1=", ["2", "3"], {"answer": "2", "completion": "2", "prompts": "no"})
    assert given == {"answer": ["2", "2"], "completions": ["2", "3"], "prompts": ["1+1=", "1+1="]}


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([1.0], "expected 2 numbers, got 1"),
        ([1.0, 2.0, 3.0], "expected 2 numbers, got 3"),
        (None, "expected a list of 2 numbers, got NoneType"),
        ("10", "expected a list of 2 numbers, got str"),
        (0.5, "expected a list of 2 numbers, got float"),
        ({"a": 1.0, "b": 2.0}, "expected a list of 2 numbers, got dict"),
    ],
)
def test_anything_but_one_value_per_completion_fails_the_group(returned: Any, expected: str) -> None:
    with pytest.raises(RewardFailed, match=expected):
        checked("mine", returned, count=2)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "expected a finite number, got None"),
        (float("nan"), "expected a finite number, got nan"),
        (float("-inf"), "expected a finite number, got -inf"),
        ("1", "expected a finite number, got '1'"),
        (10**400, f"expected a finite number, got {10**199}"),
        ([1.0], "expected a finite number, got [1.0]"),
        (ValueError("no unit"), "no unit"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_a_value_that_is_no_number_is_the_reason_of_its_own_sample(value: Any, reason: str) -> None:
    assert checked("mine", [value, True], count=2) == [f"reward 'mine': {reason}", 1.0]


def test_a_sample_counts_only_if_every_function_judged_it() -> None:
    values: dict[str, list[float | str]] = {
        "a": [1.0, 0.0, 1.0],
        "b": [2.0, "b: why", 0.5],
        "c": [0, "c: too", 1],
    }
    components, reasons = combined(values, count=3)
    assert components == [{"a": 1.0, "b": 2.0, "c": 0}, {}, {"a": 1.0, "b": 0.5, "c": 1}]
    assert reasons == {1: "b: why; c: too"}


def test_a_failure_names_the_function_the_error_and_its_place() -> None:
    with pytest.raises(KeyError) as caught:
        raise KeyError("no such column")
    assert "reward 'mine' raised KeyError: 'no such column' (line " in str(failure("mine", caught.value))


def test_what_a_function_says_is_kept_in_reasonable_length() -> None:
    error = ValueError("x" * 10**6)
    assert len(str(failure("mine", error))) < 2000
    (reason,) = checked("mine", [error], count=1)
    assert isinstance(reason, str) and len(reason) < 2000


def test_a_function_is_known_as_asynchronous_however_it_is_made() -> None:
    here = "tests.unit.rollout.reward_functions"
    rewards = load_rewards([f"{here}.half", f"{here}.async_wrong"])
    assert [reward.is_async for reward in rewards] == [False, True]


@pytest.mark.parametrize("path", ["nowhere.at.all", "kintsugi.rollout.rewards.missing", "math.pi"])
def test_a_path_that_is_no_function_is_refused_by_name(path: str) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.reward.*" + path.replace(".", r"\.")):
        load_rewards([path])
