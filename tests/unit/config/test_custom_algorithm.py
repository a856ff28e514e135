"""Algorithms in the user's own files: the description, its path in a recipe, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kintsugi import CustomAlgorithm
from kintsugi.config import custom_algorithm
from kintsugi.config.custom_algorithm import load_custom_algorithm
from kintsugi.config.recipe import Resolved, anchored, dump, load, load_config, rollout_only
from kintsugi.config.stages import stages
from kintsugi.config.validation import validate
from kintsugi.errors import ConfigError

FILE = """
from kintsugi import CustomAlgorithm

def ranks(rewards, *, scale_by_std):
    return [reward - max(rewards) for reward in rewards]

against_best = CustomAlgorithm(base="dapo", defaults={"clip_high": 0.5, "beta": 0.1}, group_advantages=ranks)
per_token = CustomAlgorithm(base="ppo", group_advantages=ranks)
not_one = 3
"""
RECIPE = """
name: mine
extends: grpo_arithmetic
algorithm:
  name: {name}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    load_custom_algorithm.cache_clear()
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path


def loaded(name: str = "mine.py:against_best", *overrides: str) -> Resolved:
    Path("recipe.yaml").write_text(RECIPE.format(name=name))
    return load("recipe.yaml", overrides)


def test_a_path_as_name_becomes_base_and_path() -> None:
    resolved = loaded()
    assert resolved.config.algorithm.name == "dapo"
    assert resolved.config.algorithm.custom == "mine.py:against_best"
    assert resolved.origins["algorithm.custom"] == "recipe.yaml"
    validate(resolved.config, origins=resolved.origins)


def test_its_defaults_fill_what_the_recipe_leaves_open_and_say_where_they_come_from() -> None:
    resolved = loaded("mine.py:against_best", "algorithm.beta=0.3")
    assert (resolved.config.algorithm.clip_high, resolved.config.algorithm.beta) == (0.5, 0.3)
    assert resolved.origins["algorithm.clip_high"] == "mine.py:against_best"
    assert stages(resolved.config)[-1].algorithm.resampling_rounds == 4, "the base's own values still apply"


def test_a_built_in_name_on_the_command_line_replaces_it() -> None:
    algorithm = loaded("mine.py:against_best", "algorithm.name=grpo").config.algorithm
    assert (algorithm.name, algorithm.custom, algorithm.clip_high) == ("grpo", None, None)


def test_the_recorded_configuration_is_read_without_the_users_file(folder: Path) -> None:
    config = anchored(loaded().config)
    assert config.algorithm.custom == f"{folder}/mine.py:against_best"
    dump(config, folder / "config.yaml")
    (folder / "mine.py").unlink()
    assert load_config(folder / "config.yaml") == config


def test_the_recorded_configuration_is_a_recipe_that_gives_the_same_again(folder: Path) -> None:
    config = anchored(loaded().config)
    dump(config, folder / "config.yaml")
    assert load(folder / "config.yaml").config == config


def test_sampling_without_learning_leaves_it_out() -> None:
    assert rollout_only(loaded(), steps=2).config.algorithm.custom is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mine.py:not_one", r"`algorithm.name`: expected `not_one = kintsugi.*, found int"),
        ("mine.py:missing", r"expected `missing = kintsugi.CustomAlgorithm.*, found nothing"),
        ("nowhere.py:x", r"`algorithm.name`: expected nowhere.py:x to be importable.*there is no such file"),
        ("no_such_module_here.x", r"`algorithm.name`: .*ModuleNotFoundError"),
        ("grpoo", r"expected one of sft, .*rollout or the path of a custom algorithm, got 'grpoo'"),
    ],
)  # fmt: skip
def test_a_name_that_leads_to_no_algorithm_is_refused(name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        loaded(name)


def test_group_advantages_of_an_algorithm_with_advantages_per_token_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`algorithm.custom` .*with a base of dapo, .*, got the base ppo"):
        validate(loaded("mine.py:per_token").config)


def test_a_base_that_is_not_the_recorded_one_is_refused(folder: Path) -> None:
    dump(loaded().config, folder / "config.yaml")
    config = load(folder / "config.yaml", ["algorithm.name=grpo", "algorithm.resampling_rounds=0"]).config
    with pytest.raises(ConfigError, match=r"the base grpo, as `algorithm.name` says, got dapo"):
        validate(config)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"base": "sft"}, "`base`: expected one of dapo, .*, got 'sft'"),
        ({"base": "grpo", "defaults": {"clip_hi": 1}}, "`defaults`: expected fields of .*clip_high.*got 'clip_hi'"),
        ({"base": "grpo", "defaults": {"name": "x"}}, "`defaults`: .*got 'name'"),
        ({"base": "grpo", "token_loss": 3}, "`token_loss`: expected a function, got int"),
    ],
)  # fmt: skip
def test_a_description_that_can_not_be_right_is_refused(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        CustomAlgorithm(**arguments)


def test_a_default_of_the_wrong_type_is_refused_with_its_origin(folder: Path) -> None:
    (folder / "wrong.py").write_text(
        "from kintsugi import CustomAlgorithm\n"
        "much = CustomAlgorithm(base='grpo', defaults={'clip_high': 'much'})\n"
    )
    expected = r"`algorithm.clip_high` \(from wrong.py:much\): expected a number or null, got 'much'"
    with pytest.raises(ConfigError, match=expected):
        loaded("wrong.py:much")


def test_a_file_that_imports_torch_is_refused_because_the_master_imports_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom_algorithm, "sys", SimpleNamespace(modules={}))
    (folder / "heavy.py").write_text(
        "from kintsugi.config import custom_algorithm\n"
        "custom_algorithm.sys.modules['torch'] = None  # What `import torch` does, for this test.\n"
        "heavy = custom_algorithm.CustomAlgorithm(base='grpo')\n"
    )
    with pytest.raises(ConfigError, match="expected a module that imports torch inside its functions only"):
        loaded("heavy.py:heavy")


def test_a_built_in_algorithm_imports_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, *, field: str) -> Callable[..., Any]:
        raise AssertionError(path)

    monkeypatch.setattr(custom_algorithm, "import_object", refuse)
    validate(loaded("grpo").config)
