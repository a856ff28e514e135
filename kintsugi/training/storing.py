"""`store_rollouts`: a step that learns nothing and keeps what was sampled (`observe/rollouts.py` says how)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kintsugi.messages import RunCall
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.observe.rollouts import ROLLOUTS_FOLDER, SavedSample, write_shard
from kintsugi.types import Finish, ShardItem, Trajectory

COMPONENT = "reward/"
"""Before the names of a sample's rewards among what the master knows of it."""


class RolloutStore:
    """Writes this rank's shards of a step into the run folder."""

    def __init__(self, run_dir: Path, tokenizer: Tokenizer) -> None:
        self._folder, self._tokenizer = run_dir / ROLLOUTS_FOLDER, tokenizer

    def write(self, call: RunCall, trajectories: Mapping[str, Trajectory]) -> None:
        for shard in call.shards:
            samples = [self._sample(call.step, item, trajectories[item.key]) for item in shard.items]
            write_shard(
                self._folder, step=call.step, shard=shard.index, num_shards=call.num_shards, samples=samples
            )

    def _sample(self, step: int, item: ShardItem, trajectory: Trajectory) -> SavedSample:
        ticket, _, number = item.key.rpartition("/")
        tokens = np.frombuffer(trajectory.tokens, dtype="<i4").tolist()
        num_prompt = trajectory.loss_mask.find(1)
        num_prompt = len(tokens) if num_prompt < 0 else num_prompt
        ended = trajectory.finish is Finish.EOS
        return SavedSample(
            step=step,
            ticket=ticket,
            sample=int(number),
            prompt=self._tokenizer.decode(tokens[:num_prompt], skip_special=False),
            completion=self._tokenizer.text_of_completion(tokens[num_prompt:], ended=ended),
            reward=item.values["reward"],
            rewards={
                name.removeprefix(COMPONENT): value
                for name, value in item.values.items()
                if name.startswith(COMPONENT)
            },
            finish=trajectory.finish,
            tokens=tokens,
            loss_mask=list(trajectory.loss_mask),
            logprobs=np.frombuffer(trajectory.logprobs, dtype="<f4").tolist(),
            versions=np.frombuffer(trajectory.versions, dtype="<i4").tolist(),
        )
