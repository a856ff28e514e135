"""What is refused about rewards before anything starts."""

from pathlib import Path

import pytest

from kintsugi.config.schema import (
    AlgorithmSection,
    Config,
    DataSection,
    GenerationSection,
    ModelSection,
    NewModel,
    RolloutSection,
)
from kintsugi.config.validation import validate
from kintsugi.errors import ConfigError
from kintsugi.rollout.sandbox import sandbox

PROGRAM = "kintsugi.rollout.rewards.program_output"


def config(*rewards: str, rollout: RolloutSection | None = None, data: DataSection | None = None) -> Config:
    return Config(
        name="t",
        model=ModelSection(new=NewModel()),
        data=data or DataSection(num_eval=10),
        algorithm=AlgorithmSection(reward=rewards),
        rollout=rollout or RolloutSection(),
        generation=GenerationSection(),
    )


@pytest.fixture
def tasks(tmp_path: Path) -> DataSection:
    """Rows that programs can be judged by."""
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(f'{{"prompt": "{n}+{n}=", "expected_output": "{2 * n}"}}\n' for n in range(40)))
    return DataSection(source=str(file), num_eval=5, cache_dir=str(tmp_path / "cache"))


def refusal(settings: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(settings)
    return str(caught.value)


def test_rewards_with_weights_are_accepted() -> None:
    validate(config("kintsugi.rollout.rewards.exact_answer", "kintsugi.lab.rewards.odd_digits * 0.1"))


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("kintsugi.lab.rewards.odd_digits * lots", "a path and its weight like `my.module.brevity * 0.1`"),
        ("my_lost_module.reward", "modules are looked for in"),
        ("json.dumps", "functions `f(completions, **columns)` that can be called with completions, prompts"),
    ],
)
def test_a_reward_that_can_not_work_is_refused_with_what_is_expected(reward: str, expected: str) -> None:
    message = refusal(config(reward))
    assert message.startswith("`algorithm.reward`") and expected in message


def test_a_module_that_raises_when_it_is_imported_is_refused_with_its_error(tmp_path: Path) -> None:
    file = tmp_path / "unwell.py"
    file.write_text("1 / 0\n")
    assert "ZeroDivisionError: division by zero" in refusal(config(f"{file}:reward"))


def test_programs_need_rows_that_say_what_is_right() -> None:
    message = refusal(config(PROGRAM))
    assert "expected rows with a column `tests` or `expected_output`" in message


def test_programs_need_time_for_each_of_a_group(tasks: DataSection) -> None:
    message = refusal(config(PROGRAM, rollout=RolloutSection(reward_timeout_s=31.0), data=tasks))
    assert message.startswith("`rollout.reward_timeout_s`") and "expected at least 32" in message


def test_programs_need_a_machine_that_can_isolate_or_the_users_word(
    tasks: DataSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[None] = []

    def impossible() -> None:
        asked.append(None)
        raise ConfigError("programs can not be isolated")

    monkeypatch.setattr(sandbox, "require", impossible)
    strict, permissive = (
        RolloutSection(reward_timeout_s=40.0, allow_unsandboxed=allowed) for allowed in (False, True)
    )
    assert refusal(config(PROGRAM, rollout=strict, data=tasks)) == "programs can not be isolated"
    assert len(asked) == 1
    validate(config(PROGRAM, rollout=permissive, data=tasks))
    assert len(asked) == 1
