"""Event files for TensorBoard."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from kintsugi.runtime.disk import append_whole
from kintsugi.telemetry.trackers.tracker import TrackedRun, TrackerTable

HYPERPARAMETERS = (
    *("algorithm.name", "algorithm.steps", "algorithm.batch_size", "algorithm.group_size"),
    *("algorithm.updates_per_step", "algorithm.clip_low", "algorithm.clip_high", "algorithm.beta"),
    *("algorithm.ratio", "algorithm.denominator", "algorithm.entropy_weight", "actor.learning_rate"),
    *("actor.schedule", "actor.weight_decay", "actor.max_grad_norm", "actor.dtype", "actor.workers"),
    *("generation.servers", "sampling.temperature", "sampling.max_new_tokens", "asynchrony.max_staleness"),
    *("warmup.steps", "data.source", "model.path", "seed"),
)
"""Fields that the table of hyperparameters shows; the others are in `config.yaml`."""
RESULTS = ("eval/accuracy", "reward/mean", "train/loss", "sft/loss", "train/tokens_per_s")
"""Metrics beside them."""


class TensorBoardFiles:
    """Event files, written without torch or TensorFlow; imported late because that takes a while.

    TensorBoard's own writer has a thread that ends for good at its first error; a record a step needs none.
    """

    def __init__(self, folder: Path, *, run: TrackedRun, time: float) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, types_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._session = event_pb2.Event, summary_pb2.Summary, event_pb2.SessionLog
        self._record_writer, self._string_type = RecordWriter, types_pb2.DT_STRING
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time:010.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab", buffering=0)
        self._add(self._event(wall_time=time, file_version="brain.Event:2"))
        for summary in _hyperparameters(run, time=time):
            self._add(self._event(step=0, wall_time=time, summary=summary))

    def _add(self, event: Any) -> None:
        record = BytesIO()
        self._record_writer(record).write(event.SerializeToString())
        append_whole(self._file, record.getvalue())

    def write(self, step: int, values: Mapping[str, float], *, time: float) -> None:
        summary = self._summary(
            value=[self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self._add(self._event(step=step, wall_time=time, summary=summary))

    def write_table(self, name: str, step: int, table: TrackerTable, *, time: float) -> None:
        """Write the table as text of TensorBoard's text plugin."""
        value = self._summary.Value(tag=name)
        value.metadata.plugin_data.plugin_name = "text"
        value.tensor.dtype = self._string_type
        value.tensor.tensor_shape.dim.add(size=1)
        value.tensor.string_val.append(table.markdown().encode())
        self._add(self._event(step=step, wall_time=time, summary=self._summary(value=[value])))

    def truncate_after(self, step: int, *, time: float) -> None:
        """A start mark makes TensorBoard drop what an earlier file says of this step and later ones."""
        started = self._session(status=self._session.START)
        self._add(self._event(step=step + 1, wall_time=time, session_log=started))

    def close(self) -> None:
        self._file.close()


def _hyperparameters(run: TrackedRun, *, time: float) -> list[Any]:
    """Summaries of TensorBoard's plugin *HParams*. Every run has the same names, so that any number of runs below one
    folder are one table."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2, summary_v2

    flat = run.flat_parameters
    values = {name: "" if flat.get(name) is None else flat[name] for name in HYPERPARAMETERS}
    metrics = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag), display_name=tag) for tag in RESULTS]
    experiment = api_pb2.Experiment(
        hparam_infos=[api_pb2.HParamInfo(name=name) for name in HYPERPARAMETERS],
        metric_infos=metrics,
        time_created_secs=time,
    )
    data = plugin_data_pb2.HParamsPluginData(experiment=experiment)
    name = f"{run.run_dir.name} {run.id[:4]}".rstrip()
    described = type(started := summary_v2.hparams_pb(values, trial_id=name, start_time_secs=time))()
    described.value.add(
        tag=metadata.EXPERIMENT_TAG,
        metadata=metadata.create_summary_metadata(data),
        tensor=metadata.NULL_TENSOR,
    )
    return [described, started]
