"""Mistakes that people make in data files and recipes, each answered by what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from kintsugi.config.recipe import load
from kintsugi.config.schema import SourceSection
from kintsugi.data.columns import RequiredColumns, UnusableRow, row_of
from kintsugi.data.jsonl_rows import record_of


def test_a_column_that_is_there_twice_is_refused() -> None:
    with pytest.raises(UnusableRow, match="expected every column once, got 'answer' twice"):
        record_of(b'{"prompt": "a", "answer": "1", "answer": "2"}')


def test_the_name_of_a_column_inside_a_value_is_no_second_column() -> None:
    line = b'{"prompt": "say \\"answer\\" or {\\"answer\\": 1}", "answer": "1", "meta": {"answer": 2}}'
    assert record_of(line)["answer"] == "1"


def test_a_missing_prompt_column_names_the_likely_one() -> None:
    with pytest.raises(
        UnusableRow, match=r"columns there: answer, question; try `data.prompt_column=question`"
    ):
        row_of({"question": "q", "answer": "1"}, SourceSection(), needs=RequiredColumns())


def test_one_reward_needs_no_list(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("name: mine\nalgorithm:\n  reward: my.module.right\n")
    assert load(recipe).config.algorithm.reward == ("my.module.right",)
    assert load(recipe, ["algorithm.reward=other.f"]).config.algorithm.reward == ("other.f",)
