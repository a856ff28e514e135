"""`store_rollouts`: a step that trains nothing and writes the samples to the run folder.

`telemetry/saved_rollouts.py` defines the files; this module converts trajectories into their records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from kintsugi.model.tokenizer import Tokenizer
from kintsugi.protocol.training import RunCall
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.saved_rollouts import SavedSample, write_shard
from kintsugi.types import FinishReason, ShardItem, Trajectory

COMPONENT = "reward/"
"""Prefix of the reward components among the scalars of a sample."""


class RolloutStore:
    """Writes this rank's shards of a step into the run folder."""

    def __init__(self, run_dir: Path, tokenizer: Callable[[], Tokenizer]) -> None:
        self._folder = RunFolder(run_dir).rollouts_folder
        self._tokenizer = tokenizer

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
        ended = trajectory.finish is FinishReason.EOS
        return SavedSample(
            step=step,
            ticket=ticket,
            sample=int(number),
            prompt=self._tokenizer().decode(tokens[:num_prompt], skip_special=False),
            completion=self._tokenizer().text_of_completion(tokens[num_prompt:], ended=ended),
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
