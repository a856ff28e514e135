from __future__ import annotations

import json
from pathlib import Path

import pytest

from kintsugi.errors import DataError, StorageError
from kintsugi.telemetry.saved_rollouts import SavedSample, is_rollouts, read_groups, write_shard
from kintsugi.types import FinishReason


def saved(ticket: str, sample: int, *, step: int = 1, reward: float = 0.5) -> SavedSample:
    return SavedSample(
        step=step,
        ticket=ticket,
        sample=sample,
        prompt="1+1=",
        completion="2",
        reward=reward,
        rewards={"right": reward},
        finish=FinishReason.EOS,
        tokens=[3, 12, 4, 1],
        loss_mask=[0, 0, 1, 1],
        logprobs=[0.0, 0.0, -0.25, -0.1],
        versions=[-1, -1, 0, 0],
    )


def test_the_samples_of_a_prompt_come_back_together_in_the_order_of_sampling(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    second, tenth = "rollout:0:2:0", "rollout:0:10:0"
    write_shard(folder, step=1, shard=1, num_shards=2, samples=[saved(tenth, 1), saved(second, 0)])
    write_shard(folder, step=1, shard=0, num_shards=2, samples=[saved(tenth, 0), saved(second, 1)])
    groups = read_groups(folder)
    assert [[(each.ticket, each.sample) for each in group] for group in groups] == [
        [(second, 0), (second, 1)],
        [(tenth, 0), (tenth, 1)],
    ]
    assert groups[0][0] == saved(second, 0)


def test_a_step_without_all_of_its_shards_is_left_out(tmp_path: Path) -> None:
    write_shard(tmp_path, step=1, shard=0, num_shards=1, samples=[saved("rollout:0:0:0", 0)])
    write_shard(tmp_path, step=2, shard=1, num_shards=2, samples=[saved("rollout:0:1:0", 0, step=2)])
    assert [group[0].ticket for group in read_groups(tmp_path)] == ["rollout:0:0:0"]


def test_a_shard_that_is_written_again_is_there_once(tmp_path: Path) -> None:
    for _ in range(2):
        path = write_shard(tmp_path, step=1, shard=0, num_shards=1, samples=[saved("rollout:0:0:0", 0)])
    assert list(tmp_path.iterdir()) == [path]
    assert json.loads(path.read_text())["completion"] == "2"


def test_a_shard_that_can_not_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "step-000001-shard-0-of-1.jsonl").mkdir()
    with pytest.raises(StorageError, match="could not write"):
        write_shard(tmp_path, step=1, shard=0, num_shards=1, samples=[])
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001-shard-0-of-1.jsonl"]


def test_a_folder_of_rollouts_is_told_from_others(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    assert not is_rollouts(str(tmp_path)) and not is_rollouts(str(tmp_path / "rows.jsonl"))
    write_shard(tmp_path, step=1, shard=0, num_shards=1, samples=[])
    assert is_rollouts(str(tmp_path))


def test_a_line_that_is_no_sample_is_named_by_file_and_number(tmp_path: Path) -> None:
    path = write_shard(tmp_path, step=1, shard=0, num_shards=1, samples=[saved("rollout:0:0:0", 0)])
    path.write_text(path.read_text() + '{"step": 1}\n')
    with pytest.raises(DataError, match=r"shard-0-of-1\.jsonl, line 2: expected a saved sample"):
        read_groups(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"rollout:0:0:0", b"nonsense"), (b'"tokens":[3,', b'"tokens":['), (b"1+1=", b"\xff")],
)
def test_a_sample_that_does_not_fit_together_is_named_by_file_and_line(
    tmp_path: Path, old: bytes, new: bytes
) -> None:
    path = write_shard(tmp_path, step=1, shard=0, num_shards=1, samples=[saved("rollout:0:0:0", 0)])
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(DataError, match=r"shard-0-of-1.jsonl, line 1: expected"):
        read_groups(tmp_path)
