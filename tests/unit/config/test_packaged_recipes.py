"""Recipes that are part of the package: found by name, described by their first comment."""

from __future__ import annotations

from pathlib import Path

import pytest

from kintsugi.config.recipe import description, find_recipe, load, packaged_recipes
from kintsugi.config.validation import validate
from kintsugi.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_name_is_the_packaged_recipe_and_the_origin_of_its_values() -> None:
    resolved = load("sft_arithmetic", ["run_dir=mine"])
    assert resolved.config.name == "sft_arithmetic"
    assert resolved.origins["name"] == "sft_arithmetic"
    validate(resolved.config, origins=resolved.origins)


def test_a_file_of_that_name_wins_and_a_folder_does_not(folder: Path) -> None:
    (folder / "grpo_arithmetic").mkdir()
    assert find_recipe(Path("grpo_arithmetic")) == packaged_recipes()["grpo_arithmetic"]
    (folder / "sft_arithmetic").write_text("name: mine\nmodel: {new: {}}\n")
    assert load("sft_arithmetic").config.name == "mine"


def test_a_recipe_extends_a_packaged_one_by_name_unless_a_file_of_that_name_lies_next_to_it(
    folder: Path,
) -> None:
    (folder / "mine.yaml").write_text("extends: grpo_arithmetic\nname: mine\n")
    assert load("mine.yaml").config.warmup is not None
    (folder / "grpo_arithmetic").write_text("name: other\n")
    assert load("mine.yaml").config.warmup is None


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("grpo_arithmetc", "expected a recipe file or the name of a packaged recipe .*closest packaged recipes: grpo_"),
        ("zzz", r"`kintsugi recipes` lists them\), found neither$"),
        ("mine/grpo_arithmetic.yaml", "found nothing there; the closest packaged recipes: grpo_arithmetic, "),
        ("zzz.yaml", "found nothing there$"),
    ],
)  # fmt: skip
def test_what_is_neither_a_file_nor_a_name_is_refused_with_the_closest_names(
    argument: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(argument)


def test_the_folder_of_the_recipes_may_be_named_where_it_does_not_exist(folder: Path) -> None:
    assert load("recipes/grpo_arithmetic.yaml").config == load("grpo_arithmetic").config
    (folder / "recipes").mkdir()
    (folder / "recipes" / "grpo_arithmetic.yaml").write_text("name: other\n")
    assert load("recipes/grpo_arithmetic.yaml").config.name == "other"


@pytest.mark.parametrize("name", packaged_recipes())
def test_every_packaged_recipe_begins_with_a_sentence_about_it_and_can_be_loaded(name: str) -> None:
    sentence = description(packaged_recipes()[name])
    assert len(sentence) > 20 and sentence.endswith(".")
    assert load(name).config.name == name
