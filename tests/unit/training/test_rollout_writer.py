from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from kintsugi.config.schema import AlgorithmSection, Config, DataSection
from kintsugi.data.dataset import open_data
from kintsugi.model.tokenizer import character_tokenizer
from kintsugi.protocol.training import RunCall
from kintsugi.telemetry.saved_rollouts import read_groups
from kintsugi.training.rollout_writer import RolloutStore
from kintsugi.types import FinishReason, LogicalShard, ShardItem, Trajectory


def test_a_sample_is_kept_with_its_texts_tokens_and_rewards(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("12+=")
    prompt, answer = tokenizer.encode("1+1="), [*tokenizer.encode("2"), tokenizer.eos_token_id]
    num_prompt, count = len(prompt), len(prompt) + len(answer)
    trajectory = Trajectory(
        key="rollout:0:3:0/1",
        tokens=array("i", [*prompt, *answer]).tobytes(),
        loss_mask=bytes(num_prompt) + b"\1" * len(answer),
        logprobs=array("f", [0.0] * num_prompt + [-0.5, -0.1]).tobytes(),
        versions=array("i", [-1] * num_prompt + [2] * len(answer)).tobytes(),
        finish=FinishReason.EOS,
    )
    values = {"reward": 0.6, "truncated": 0.0, "mask": 1.0, "reward/right": 1.0, "reward/brevity": -4.0}
    item = ShardItem(trajectory.key, "rollout-0", "", count, len(answer), values)
    call = RunCall(
        call="store_rollouts",
        interface="store_rollouts",
        step=5,
        shards=(LogicalShard(0, (item,)),),
        num_shards=1,
        totals={},
        generation=0,
    )
    config = Config(
        name="kept", data=DataSection(max_digits=1, num_eval=5), algorithm=AlgorithmSection(name="rollout")
    )
    RolloutStore(config, tokenizer=lambda: tokenizer, run_dir=tmp_path).write(
        call, {trajectory.key: trajectory}
    )
    ((kept,),) = read_groups(tmp_path / "rollouts")
    assert (kept.step, kept.ticket, kept.sample) == (5, "rollout:0:3:0", 1)
    assert (kept.prompt, kept.completion, kept.finish) == ("1+1=", "2", FinishReason.EOS)
    assert (kept.reward, kept.rewards) == (0.6, {"right": 1.0, "brevity": -4.0})
    assert kept.tokens == [*prompt, *answer] and kept.loss_mask == [0] * num_prompt + [1, 1]
    row = open_data(config).training_row(stage="rollout", seed=config.seed, epoch=0, position=3)
    assert kept.columns == row.columns and kept.columns["answer"]
    assert kept.logprobs[-2:] == pytest.approx([-0.5, -0.1]) and kept.versions[-1] == 2
