"""Runs in MLflow: at the server, database or folder that MLflow is set to (`MLFLOW_TRACKING_URI`)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kintsugi.telemetry.trackers.tracker import PROJECT, TrackedRun, TrackerTable

ID_TAG = "kintsugi.id"
CHANGED_TAG = "changed."
"""Prefix of the tag of a parameter that a resumed run changed: MLflow does not change parameters."""
LONGEST_VALUE = 500
"""Characters of a parameter; the oldest servers accept as many."""
MOST_PARAMETERS = 100
"""Parameters of one request."""
_REFUSED = re.compile(r"[^\w\-. /]")


class MlflowRun:
    """One run of the experiment `kintsugi`, continued if there is one of the same id. MLflow's functions with a global
    active run are not used: they are for the thread and the environment of the caller."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        self._metric, self._param, self._tag = Metric, Param, RunTag
        self._client = MlflowClient()
        experiment = self._client.get_experiment_by_name(PROJECT)
        number = self._client.create_experiment(PROJECT) if experiment is None else experiment.experiment_id
        found = self._client.search_runs([number], filter_string=f"tags.`{ID_TAG}` = '{run.id}'")
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            created = self._client.create_run(number, run_name=run.run_dir.name, tags={ID_TAG: run.id})
            self._run_id = created.info.run_id
        self._write_parameters(run, known=found[0].data.params if found else {})

    def _write_parameters(self, run: TrackedRun, *, known: Mapping[str, str]) -> None:
        given = {name: str(value)[:LONGEST_VALUE] for name, value in run.flat_parameters.items()}
        new = [self._param(name, value) for name, value in given.items() if name not in known]
        for start in range(0, len(new), MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=new[start : start + MOST_PARAMETERS])
        changed = {name: value for name, value in given.items() if known.get(name, value) != value}
        self._client.log_batch(
            self._run_id, tags=[self._tag(f"{CHANGED_TAG}{name}", value) for name, value in changed.items()]
        )

    def write(self, step: int, values: Mapping[str, float], *, time: float) -> None:
        metrics = [
            self._metric(_REFUSED.sub("_", name), value, int(time * 1000), step)
            for name, value in values.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def write_table(self, name: str, step: int, table: TrackerTable, *, time: float) -> None:
        """Write an artifact of its own, in the format of MLflow's tables. `log_table` names each in one tag of the run,
        whose length is limited, and would read all rows again to append to one."""
        content = {"columns": list(table.columns), "data": [list(row) for row in table.rows]}
        self._client.log_dict(self._run_id, content, f"{name}/step-{step:06}-{int(time * 1000)}.json")

    def truncate_after(self, step: int, *, time: float) -> None:
        """MLflow keeps its history; a repeated step has two values."""

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
