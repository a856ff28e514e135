"""What is refused about environments before anything starts."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kintsugi.config.schema import (
    AlgorithmSection,
    Config,
    DataSection,
    ModelSection,
    NewModel,
    RolloutSection,
)
from kintsugi.config.validation import validate
from kintsugi.errors import ConfigError, UserError
from kintsugi.rollout.environments.registry import EnvironmentMaker, find_environment

HERE = "tests.unit.rollout.environment_classes"


def config(environment: str, *, turn_discount: float = 1.0, **options: Any) -> Config:
    return Config(
        name="t",
        model=ModelSection(new=NewModel()),
        data=DataSection(num_eval=10),
        rollout=RolloutSection(environment=environment, options=options, turn_discount=turn_discount),
    )


def refusal(settings: Config, **known: Any) -> str:
    with pytest.raises(UserError) as caught:
        validate(settings, **known)
    return str(caught.value)


@pytest.mark.parametrize("name", ["calculator", "number_game", f"{HERE}.AsyncEcho"])
def test_shipped_environments_and_ones_own_are_accepted(name: str) -> None:
    validate(config(name))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (config("chess"), "expected one of calculator, number_game, reasoning_gym, or the dotted path"),
        (config("my_lost_module.Game"), "expected my_lost_module.Game to be importable"),
        (config(f"{HERE}.Missing"), "expected a function 'Missing'"),
        (config(f"{HERE}.Methodless"), f"{HERE}.Methodless has no step"),
        (config(f"{HERE}.Unmakeable"), "it raised OSError: no simulator here"),
        (config(f"{HERE}.Echo", speed=3), "`rollout.options`: expected arguments of"),
        (config("number_game", low=9, high=1), "expected `low` ≤ `high`, got 9 and 1"),
        (config("reasoning_gym", task="no_such_task"), "expected a task of reasoning-gym"),
        (
            config("calculator", turn_discount=0.0),
            "`rollout.turn_discount`: expected more than 0 and at most 1",
        ),
    ],
)
def test_an_environment_that_can_not_work_is_refused_with_what_is_expected(
    settings: Config, expected: str
) -> None:
    assert expected in refusal(settings)


def test_a_file_is_as_good_as_a_module(tmp_path: Path) -> None:
    file = tmp_path / "games.py"
    file.write_text(
        "class Game:\n    def reset(self, row, *, seed): ...\n    def step(self, action): ...\n"
        "    def close(self): ...\n"
    )
    found = find_environment(RolloutSection(environment=f"{file}:Game"))
    assert isinstance(found, EnvironmentMaker) and not found.demonstrates


def test_a_reward_function_beside_an_environment_would_never_be_asked_and_is_refused() -> None:
    message = refusal(config("calculator"), origins={"algorithm.reward": "mine.yaml"})
    assert (
        "`algorithm.reward` (from mine.yaml): expected nothing together with `rollout.environment`" in message
    )


def test_a_price_of_long_answers_is_refused_where_the_limit_is_that_of_a_turn() -> None:
    settings = msgspec.structs.replace(
        config("calculator"), algorithm=AlgorithmSection(name="dapo", overlong_buffer=2)
    )
    assert "`algorithm.overlong_buffer`: expected 0" in refusal(settings)


def test_options_without_an_environment_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`rollout\.options`.*without a `rollout\.environment`"):
        validate(
            Config(
                name="t",
                model=ModelSection(new=NewModel()),
                data=DataSection(num_eval=10),
                rollout=RolloutSection(options={"low": 1}),
            )
        )
