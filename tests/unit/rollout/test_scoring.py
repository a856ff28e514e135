from typing import Any

import pytest

from kintsugi.errors import ConfigError
from kintsugi.rollout.scoring import RewardFailed, checked, load_rewards, score


def half(completions: list[str], **columns: Any) -> list[float]:
    return [0.5] * len(completions)


def test_components_are_named_after_their_functions_and_columns_are_repeated() -> None:
    rewards = load_rewards(["kintsugi.rollout.rewards.exact_answer"]) | {"half": half}
    components = score(
        rewards, prompt="1+1=", completions=["2", "3"], columns={"answer": "2", "completion": "2"}
    )
    assert components == [{"exact_answer": 1.0, "half": 0.5}, {"exact_answer": 0.0, "half": 0.5}]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([1.0], "expected 2 numbers, got 1"),
        (None, "expected a list of 2 numbers, got NoneType"),
        ([float("nan"), 0.0], "expected finite numbers, got nan"),
        (["1", 0.0], "expected finite numbers, got '1'"),
        ([None, 0.0], "expected finite numbers, got None"),
    ],
)
def test_a_wrong_result_is_refused_and_never_becomes_zero(returned: Any, expected: str) -> None:
    with pytest.raises(RewardFailed, match=expected):
        checked("mine", returned, count=2)


def test_a_reward_that_raises_keeps_its_reason() -> None:
    def broken(completions: list[str], **columns: Any) -> list[float]:
        raise KeyError("no such column")

    with pytest.raises(RewardFailed, match="reward 'broken' raised KeyError"):
        score({"broken": broken}, prompt="", completions=["a"], columns={})


@pytest.mark.parametrize("path", ["nowhere.at.all", "kintsugi.rollout.rewards.missing", "plain", "math.pi"])
def test_a_path_that_is_no_function_is_refused_by_name(path: str) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.reward.*" + path.replace(".", r"\.")):
        load_rewards([path])
