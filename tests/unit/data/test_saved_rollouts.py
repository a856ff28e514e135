from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kintsugi.config.schema import (
    AlgorithmSection,
    Config,
    DataSection,
    GenerationSection,
    ModelSection,
    NewModel,
    SamplingSection,
    WarmupSection,
)
from kintsugi.config.validation import validate
from kintsugi.data.dataset import open_data
from kintsugi.data.saved_rollouts import SavedRollouts, plain_columns, saved_samples
from kintsugi.errors import ConfigError, DataError
from kintsugi.telemetry.saved_rollouts import write_shard
from kintsugi.types import Row
from tests.unit.telemetry.test_saved_rollouts import saved


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    samples = [saved(f"rollout:0:{place}:0", number) for place in range(4) for number in range(2)]
    right = [msgspec.structs.replace(each, rewards={"exact_answer": each.reward}) for each in samples]
    write_shard(tmp_path / "rollouts", step=1, shard=0, num_shards=1, samples=right)
    return tmp_path / "rollouts"


def config_of(folder: Path, **fields: object) -> Config:
    base = Config(
        name="offline",
        model=ModelSection(new=NewModel(max_positions=16)),
        data=DataSection(source=str(folder), eval_source="arithmetic", max_digits=1, num_eval=5),
        algorithm=AlgorithmSection(steps=1, batch_size=2, group_size=2),
        sampling=SamplingSection(max_new_tokens=4),
        generation=GenerationSection(max_length=16),
    )
    return msgspec.structs.replace(base, **fields)


def test_a_row_is_a_prompt_with_its_answers(folder: Path) -> None:
    rollouts = SavedRollouts(folder)
    assert (len(rollouts), rollouts.largest_group, rollouts.longest) == (4, 2, 4)
    assert [sample.sample for sample in saved_samples(rollouts.row(1))] == [0, 1]
    assert saved_samples(Row(prompt="1+1=")) == ()


def test_the_columns_that_were_saved_are_those_of_the_row(tmp_path: Path) -> None:
    sample = msgspec.structs.replace(saved("rollout:0:0:0", 0), columns={"answer": "2", "saved": ["mine"]})
    write_shard(tmp_path, step=1, shard=0, num_shards=1, samples=[sample])
    row = SavedRollouts(tmp_path).row(0)
    assert row.columns["answer"] == "2" and saved_samples(row) == (sample,)
    assert plain_columns(row) == {"answer": "2"}
    assert plain_columns(Row(prompt="1+1=", columns={"saved": ["mine"]})) == {"saved": ["mine"]}


def test_a_folder_of_rollouts_is_a_source_beside_held_out_rows(folder: Path) -> None:
    config = config_of(folder)
    validate(config)
    data = open_data(config)
    assert (data.num_positions, data.num_held_out) == (4, 5)
    assert saved_samples(data.training_row(stage="grpo", seed=0, epoch=0, position=0))
    assert not saved_samples(data.held_out_row(0))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"algorithm": AlgorithmSection(steps=1, batch_size=2, group_size=3)},
            "at most the 2 samples per prompt",
        ),
        ({"warmup": WarmupSection(steps=1, batch_size=4)}, "no answers for warmup to imitate"),
        (
            {
                "algorithm": AlgorithmSection(
                    steps=1, batch_size=2, group_size=2, reward=("kintsugi.rollout.rewards.gsm8k_answer",)
                )
            },
            r"saved rewards \(exact_answer\), not gsm8k_answer",
        ),
    ],
)
def test_what_saved_rollouts_can_not_serve_is_refused_before_anything_starts(
    folder: Path, fields: dict[str, object], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        validate(config_of(folder, **fields))


def test_saved_rollouts_need_held_out_rows_of_their_own(folder: Path) -> None:
    with pytest.raises(DataError, match=r"eval_source.*beside saved rollouts"):
        validate(config_of(folder, data=DataSection(source=str(folder), num_eval=2)))


def test_a_folder_with_half_a_step_only_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path, step=1, shard=0, num_shards=2, samples=[saved("rollout:0:0:0", 0)])
    with pytest.raises(DataError, match="no step with all of its shards"):
        SavedRollouts(tmp_path)


def test_a_column_that_happens_to_have_the_name_is_no_saved_answer() -> None:
    assert saved_samples(Row(prompt="1+1=", columns={"saved": [1, 2]})) == ()


@pytest.mark.parametrize("alphabet", ["2", "9876543210+="])
def test_rollouts_in_the_tokens_of_another_model_are_refused(folder: Path, alphabet: str) -> None:
    """Fewer tokens would be asked for rows that no table has; others would be trained as something else."""
    model = ModelSection(new=NewModel(max_positions=16, alphabet=alphabet))
    own = folder.parent / "held.jsonl"
    own.write_text('{"prompt": "2", "answer": "2"}\n')
    data = DataSection(source=str(folder), eval_source=str(own), num_eval=1)
    with pytest.raises(ConfigError, match=r"`data.source`: .*sampled with another tokenizer"):
        validate(config_of(folder, model=model, data=data))


def test_the_folder_of_the_run_is_not_that_of_its_rollouts(folder: Path) -> None:
    with pytest.raises(DataError, match=r"`data.source`: expected the folder of the rollouts, '.*/rollouts'"):
        open_data(config_of(folder.parent))
