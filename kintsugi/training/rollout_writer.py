"""`store_rollouts`: a step that trains nothing and writes the samples to the run folder.

`telemetry/saved_rollouts.py` defines the files; this module converts trajectories into their records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kintsugi.config.schema import Config
from kintsugi.config.stages import stages
from kintsugi.data.dataset import DataSet, open_data
from kintsugi.data.saved_rollouts import plain_columns
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.protocol.training import RunCall
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.saved_rollouts import SavedSample, write_shard
from kintsugi.types import FinishReason, ShardItem, Trajectory, place_of_ticket

COMPONENT = "reward/"
"""Prefix of the reward components among the scalars of a sample."""


class RolloutStore:
    """Writes this rank's shards of a step into the run folder; the data are opened for the first one."""

    def __init__(self, config: Config, *, tokenizer: Callable[[], Tokenizer], run_dir: Path) -> None:
        self._config, self._run_dir = config, run_dir
        self._folder = RunFolder(run_dir).rollouts_folder
        self._tokenizer = tokenizer
        self._seeds = {stage.name: stage.seed for stage in stages(config)}
        self._data: DataSet | None = None

    def write(self, call: RunCall, trajectories: Mapping[str, Trajectory]) -> None:
        for shard in call.shards:
            samples = [self._sample(call.step, item, trajectories[item.key]) for item in shard.items]
            write_shard(
                self._folder, step=call.step, shard=shard.index, num_shards=call.num_shards, samples=samples
            )

    def _columns(self, ticket: str) -> dict[str, Any]:
        if self._data is None:
            self._data = open_data(self._config, run_dir=self._run_dir)
        stage, epoch, position = place_of_ticket(ticket)
        row = self._data.training_row(stage=stage, seed=self._seeds[stage], epoch=epoch, position=position)
        return plain_columns(row)

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
            columns=self._columns(ticket),
        )
