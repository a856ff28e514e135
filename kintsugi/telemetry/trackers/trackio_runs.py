"""Runs in Trackio, in its local folder (`TRACKIO_DIR`)."""

from __future__ import annotations

from collections.abc import Mapping

from kintsugi.telemetry.trackers.tracker import PROJECT, TrackedRun, TrackerTable


class TrackioRun:
    def __init__(self, run: TrackedRun) -> None:
        import trackio
        from trackio.utils import TRACKIO_DIR

        # Its own thread would only warn that nothing can be written.
        TRACKIO_DIR.mkdir(parents=True, exist_ok=True)
        self._table = trackio.Table
        self._run = trackio.init(
            project=PROJECT,
            name=f"{run.run_dir.name}-{run.id}",
            config=run.flat_parameters,
            resume="allow",
            embed=False,
            # The system metrics of all hosts come from the agents.
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, values: Mapping[str, float], *, time: float) -> None:
        self._run.log(dict(values), step=step)

    def write_table(self, name: str, step: int, table: TrackerTable, *, time: float) -> None:
        from pandas import DataFrame

        frame = DataFrame([list(row) for row in table.rows], columns=list(table.columns))
        self._run.log({name: self._table(dataframe=frame)}, step=step)

    def truncate_after(self, step: int, *, time: float) -> None:
        """Trackio keeps its history; a repeated step has two values."""

    def close(self) -> None:
        self._run.finish()
