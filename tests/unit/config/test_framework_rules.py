"""A framework that can not run the configuration is refused before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kintsugi import __version__
from kintsugi.config.framework_rules import Interpreter, inspect_interpreter, interpreter_problems
from kintsugi.config.recipe import load
from kintsugi.config.validation import validate
from kintsugi.errors import UserError

RECIPES = Path(__file__).parents[3] / "kintsugi" / "recipes"


def refusal(*overrides: str, recipe: str = "grpo_arithmetic_mindspore") -> str:
    result = load(RECIPES / f"{recipe}.yaml", overrides)
    with pytest.raises(UserError) as caught:
        validate(result.config, origins=result.origins)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["algorithm.name=ppo"], ["`algorithm.name`", "the MindSpore adapter has", "got 'ppo'"]),
        (["actor.dtype=bfloat16"], ["`actor.dtype`", "float32", "got 'bfloat16'"]),
        (["actor.recompute=true"], ["`actor.recompute`", "expected false"]),
        (["weights.transport=collective"], ["`weights.transport`", "got 'collective'"]),
        (["actor.python=/nowhere/python"], ["`actor.python`", "no such file", "setup-mindspore"]),
        ([f"actor.python={sys.executable}"], ["`actor.python`", "mindspore", "does not have"]),
    ],
)
def test_what_mindspore_ranks_can_not_do_is_refused(overrides: list[str], parts: list[str]) -> None:
    message = refusal(*overrides)
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"mindspore": "2.9.1", "kintsugi": __version__}, "mindspore 2.10, /python has 2.9.1"),
        ({"mindspore": "2.100.0", "kintsugi": __version__}, "mindspore 2.10, /python has 2.100.0"),
        ({"mindspore": "2.10.0", "kintsugi": ""}, "has none"),
        ({"mindspore": "2.10.0", "kintsugi": "0.0.1"}, "has 0.0.1"),
    ],
)
def test_an_interpreter_of_the_wrong_version_is_refused(versions: dict[str, str], expected: str) -> None:
    config = load(RECIPES / "grpo_arithmetic_mindspore.yaml").config
    (problem,) = interpreter_problems(config, Interpreter("/python", versions))
    assert problem[0] == "actor.python" and expected in problem[1]


def test_the_right_interpreter_is_accepted() -> None:
    config = load(RECIPES / "grpo_arithmetic_mindspore.yaml").config
    found = Interpreter("/python", {"mindspore": "2.10.0", "kintsugi": __version__})
    assert list(interpreter_problems(config, found)) == []


def test_an_interpreter_is_asked_for_its_versions() -> None:
    found = inspect_interpreter(sys.executable, framework="torch")
    assert found.versions["kintsugi"] == __version__ and found.versions["torch"]
