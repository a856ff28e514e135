"""`kintsugi init`: what it writes is accepted as it stands."""

from __future__ import annotations

import json
import typing
from pathlib import Path

import pytest

from kintsugi.cli.recipe_template import write_starter
from kintsugi.config.recipe import load
from kintsugi.config.schema import AlgorithmName, Config
from kintsugi.config.validation import validate
from kintsugi.errors import DataError, UserError


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


def rows(name: str, *records: dict[str, str]) -> str:
    Path(name).write_text("".join(json.dumps(record) + "\n" for record in records * 10))
    return name


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(name, marks=() if name == "grpo" else pytest.mark.slow)
        for name in typing.get_args(AlgorithmName)
    ],
)
def test_a_recipe_of_every_algorithm_is_valid_and_names_every_section(algorithm: str) -> None:
    path = Path(f"{algorithm}.yaml")
    assert write_starter(path, algorithm=algorithm) == [path]
    resolved = load(path)
    validate(resolved.config, origins=resolved.origins)
    assert resolved.config.algorithm.name == algorithm and resolved.config.name == algorithm
    text = path.read_text()
    left_out = {"run_dir", "deterministic", "warmup"} | ({"critic"} if algorithm != "ppo" else set())
    assert {name for name in Config.__struct_fields__ if f"{name}:" not in text} <= left_out


def test_data_of_ones_own_are_looked_at() -> None:
    data = rows("mine.jsonl", {"question": "What is seven times six?", "answer": "42"})
    write_starter(Path("mine.yaml"), data=data)
    config = load("mine.yaml").config
    assert (config.data.source, config.data.prompt_column, config.data.num_eval) == (data, "question", 1)
    assert config.generation.max_length >= len("What is seven times six?") + config.sampling.max_new_tokens
    validate(config)


def test_data_that_do_not_say_what_is_right_get_a_reward_to_fill_in() -> None:
    data = rows("mine.jsonl", {"prompt": "1+1=", "topic": "sums"})
    written = write_starter(Path("mine.yaml"), data=data)
    assert written == [Path("mine.yaml"), Path("mine_rewards.py")]
    config = load("mine.yaml").config
    assert config.algorithm.reward == ("mine_rewards.py:my_reward",)
    assert "topic" in written[1].read_text()
    validate(config)


def test_supervised_learning_finds_what_to_learn() -> None:
    data = rows("mine.jsonl", {"instruction": "Add 1 and 1.", "output": "2", "answer": "2"})
    write_starter(Path("mine.yaml"), algorithm="sft", data=data)
    found = load("mine.yaml").config.data
    assert (found.prompt_column, found.completion_column) == ("instruction", "output")


def test_data_without_what_the_algorithm_learns_from_are_refused_and_nothing_is_written() -> None:
    with pytest.raises(DataError, match="'chosen'"):
        write_starter(Path("mine.yaml"), algorithm="dpo", data=rows("mine.jsonl", {"prompt": "1+1="}))
    assert not Path("mine.yaml").exists()


def test_a_file_that_is_there_is_not_overwritten() -> None:
    Path("mine.yaml").write_text("precious")
    with pytest.raises(UserError, match="nothing is overwritten"):
        write_starter(Path("mine.yaml"))
    assert Path("mine.yaml").read_text() == "precious"


@pytest.mark.parametrize("name", ["1", "true", "a, [b] #c"])
def test_any_name_of_a_file_will_do(name: str) -> None:
    data = rows("mine.jsonl", {"prompt": "1+1=", 'odd "name"': "x"})
    write_starter(Path(f"{name}.yaml"), data=data)
    config = load(f"{name}.yaml").config
    assert config.algorithm.reward == (f"{name}_rewards.py:my_reward",)
    validate(config)


def test_an_algorithm_that_there_is_not_is_refused_with_those_there_are() -> None:
    with pytest.raises(UserError, match=r"expected one of sft, .*gspo, rollout, got 'dance'"):
        write_starter(Path("mine.yaml"), algorithm="dance")
