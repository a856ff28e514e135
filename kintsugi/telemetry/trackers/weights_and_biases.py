"""Runs at Weights & Biases, or in its offline files (`WANDB_MODE=offline`)."""

from __future__ import annotations

from collections.abc import Mapping

from kintsugi.telemetry.trackers.tracker import PROJECT, TrackedRun, TrackerTable


class WeightsAndBiases:
    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._table = wandb.Table
        self._run = wandb.init(
            project=PROJECT,
            id=run.id,
            name=run.run_dir.name,
            dir=str(run.run_dir),
            resume="allow",
            # What the master prints is in the run folder.
            settings=wandb.Settings(console="off", silent=True),
        )
        # A resumed run may have other steps or rates than its beginning.
        self._run.config.update(dict(run.parameters), allow_val_change=True)

    def write(self, step: int, values: Mapping[str, float], *, time: float) -> None:
        self._run.log(dict(values), step=step)

    def write_table(self, name: str, step: int, table: TrackerTable, *, time: float) -> None:
        rows = [list(row) for row in table.rows]
        self._run.log({name: self._table(columns=list(table.columns), data=rows)}, step=step)

    def truncate_after(self, step: int, *, time: float) -> None:
        """W&B keeps its history; repeated steps are ignored there."""

    def close(self) -> None:
        self._run.finish()
