"""Controller: drives all workers, stage by stage, and contains the meta-server.

A step: send weights to the rollout workers, rollout, training, and a checkpoint of the latest step. Any error ends the
run, after the jobs have been stopped through the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kintsugi.config.stages import Stage, stages
from kintsugi.control.dispatch import next_tickets
from kintsugi.control.phases.table import Phase
from kintsugi.data.dataset import open_data
from kintsugi.data.prefetch import PrefetchingReader
from kintsugi.errors import StorageError, WorldError
from kintsugi.graph.executor import GraphExecution
from kintsugi.lab.fragile import messages
from kintsugi.lab.fragile.batch import DistributedBatchMemory, call_of, execution_of, rows
from kintsugi.lab.fragile.directory import META_PORT, META_SERVER, announce
from kintsugi.lab.fragile.metaserver import WeightMetaServer
from kintsugi.lab.fragile.process import FragileProcess, begin
from kintsugi.lab.fragile.rpc import CallFailed, WorkerGone
from kintsugi.lab.fragile.storage import latest_folder
from kintsugi.lab.fragile.workers import Workers
from kintsugi.model.architecture import parameter_shapes
from kintsugi.model.plan import plan_model
from kintsugi.process.exit_codes import EXIT_ERROR
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.training import CallDone, RunCall
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.telemetry.events import EventLog, Span, Transition
from kintsugi.telemetry.step_metrics import MetricsWriter, step_metrics
from kintsugi.types import Role, Ticket

log = logging.getLogger("controller")


class StageFailed(WorldError):
    """A stage of a step failed."""


class FragileController:
    """Runs the steps of a configuration, one after another."""

    def __init__(self, process: FragileProcess, events: EventLog) -> None:
        self._process, self._events = process, events
        self._config = config = process.config
        architecture, tokenizer = plan_model(config)
        self._names = tuple(parameter_shapes(architecture))
        self._feed = PrefetchingReader(config, tokenizer, run_dir=process.run_dir)
        self._num_rows = open_data(config, run_dir=process.run_dir).num_positions
        self._meta = WeightMetaServer(
            host=process.host, port=process.port(META_PORT), known_as=process.known_as
        )
        announce(process.run_dir, META_SERVER, self._meta.address)
        self._workers = Workers(process)
        self._metrics = MetricsWriter(process.run_dir)
        self._phase = Phase.STARTING.value
        self._timing: dict[str, float] = {}
        self._saved = -1
        """Step of the latest checkpoint."""

    def run(self) -> int:
        """Run to the end and return the exit code; after an error, clean-up is logged last."""
        code = 0
        try:
            self._workers.start()
            self._enter(Phase.PREPARING)
            for stage in stages(self._config):
                self._run_stage(stage)
            log.info("Training finished")
        except WorldError as error:
            log.error("%s: %s", type(error).__name__, error)
            log.info("An error occurred during training, scheduler begin cleanup resource.")
            code = EXIT_ERROR
        self._enter(Phase.ENDING)
        self._workers.clean_up()
        self._enter(Phase.ENDED)
        return code

    def _run_stage(self, stage: Stage) -> None:
        self._workers.each(
            Role.MODEL, "/start_stage", messages.StartFragileStage(stage.name, stage.first_step - 1)
        )
        num_issued = 0
        if stage.samples_completions and self._process.uses_disk:
            self._save(stage.first_step - 1)
        for step in range(stage.first_step, stage.last_step + 1):
            since = SYSTEM_CLOCK.monotonic()
            self._timing = {}
            tickets = next_tickets(
                stage, num_issued=num_issued, count=stage.algorithm.batch_size, num_rows=self._num_rows
            )
            num_issued += len(tickets)
            if stage.samples_completions:
                self._weights_update(step)
                batch = self._rollout(stage, tickets, step=step)
            else:
                batch = rows(self._feed, stage, tickets, holder=self._process.name)
            self._train(stage, batch, step=step, since=since)
            if self._is_saved(step, last=stage.last_step):
                self._save(step)
            log.info("Step %d completed", step)

    def _is_saved(self, step: int, *, last: int) -> bool:
        every = self._config.checkpoint.every
        return self._process.uses_disk or step == last or (every > 0 and step % every == 0)

    # Stages of a step.

    def _weights_update(self, step: int) -> None:
        """Send the weights with which the step begins."""
        version = step - 1
        with self._stage(Phase.PUBLISHING, step, "weights_update"):
            try:
                if self._process.uses_disk:
                    checkpoint = str(latest_folder(self._process.run_dir, step=self._saved))
                    self._workers.update_by_checkpoint(
                        messages.UpdateWeights(version, checkpoint=checkpoint),
                        messages.UploadShard(version, checkpoint),
                    )
                else:
                    self._workers.update_weights(
                        messages.UpdateWeights(version, self._names), messages.UploadShard(version)
                    )
            except CallFailed as error:
                raise StageFailed(f"Weight update failed: {error}") from error
            self._meta.forget()

    def _rollout(self, stage: Stage, tickets: tuple[Ticket, ...], *, step: int) -> DistributedBatchMemory:
        prompts = []
        for ticket in tickets:
            row, fed = self._feed.training(
                stage=stage.name, seed=stage.seed, epoch=ticket.epoch, position=ticket.position
            )
            prompts.append(messages.Prompt(ticket, row, tuple(fed.prompt)))
        with self._stage(Phase.COLLECTING, step, "rollout"):
            if self._process.num_shared:
                self._notify("rollout_start", step=step)
            parts = self._samples(prompts, step=step)
            if self._process.num_shared:
                self._notify("rollout_end", step=step)
        return DistributedBatchMemory(parts)

    def _samples(self, prompts: list[messages.Prompt], *, step: int) -> list[messages.RolledOut]:
        """Collect the samples of every worker that replies; a worker that is gone has none."""
        parts: list[messages.RolledOut] = []
        for name, future in self._workers.roll_out(prompts, step=step).items():
            try:
                parts += self._workers.wait_ordered([future], what="/rollout", whom=name)
            except WorkerGone as error:
                log.warning("%s returned no data: %s", name, error)
            except CallFailed as error:
                raise StageFailed(f"rollout_distributed_batch failed: {error}") from error
        return parts

    def _train(self, stage: Stage, batch: DistributedBatchMemory, *, step: int, since: float) -> None:
        with self._stage(Phase.TRAINING, step, "train"):
            log.info("start to train, step: %d, batch size: %d", step, len(batch.metas))
            batch.check(size=stage.algorithm.batch_size * stage.algorithm.group_size)
            ranks = self._workers.names(Role.MODEL)
            execution = execution_of(stage, batch, config=self._config, ranks=ranks, step=step)
            while dispatches := execution.ready(now=SYSTEM_CLOCK.monotonic()):
                calls = {
                    dispatch.worker: call_of(dispatch, stage, batch, config=self._config, step=step)
                    for dispatch in dispatches
                }
                answers = self._train_batch(calls, batch)
                for worker, answer in answers.items():
                    problem = execution.answered(
                        calls[worker].call, worker, answer, now=SYSTEM_CLOCK.monotonic()
                    )
                    if problem:
                        raise StageFailed(f"train_distributed_batch failed: {problem}")
        with self._stage(Phase.COMMITTING, step, "commit"):
            self._workers.each(Role.MODEL, "/commit", messages.CommitFragileStep(step))
            self._committed(batch, execution, step=step, since=since)

    def _train_batch(self, calls: dict[str, RunCall], batch: DistributedBatchMemory) -> dict[str, CallDone]:
        try:
            return self._workers.train(calls, batch.trajectories)
        except CallFailed as error:
            log.error("%s", error)
            raise StageFailed("train_distributed_batch failed") from error

    def _save(self, step: int) -> None:
        """Write the latest checkpoint; the run does not depend on it, so a save that takes too long is abandoned."""
        self._saved = step
        folder = str(latest_folder(self._process.run_dir, step=step))
        with self._stage(Phase.SAVING, step, "latest_recover_save"):
            try:
                self._workers.first("/save", messages.SaveCheckpoint(step, folder))
            except CallFailed as error:
                how = "timeout" if "time" in str(error) else "error"
                log.warning("latest_recover_save %s, continuing to next step (%s)", how, error)

    def _notify(self, event: str, *, step: int) -> None:
        """Send an event without acknowledgement; a worker that does not accept it in time is skipped."""
        for name, error in self._workers.notify(messages.NotifyEvent(event, step)).items():
            log.warning("notify_event timeout: %s, %s: %s", event, name, error)

    # Metrics and events.

    def _committed(
        self, batch: DistributedBatchMemory, execution: GraphExecution, *, step: int, since: float
    ) -> None:
        now = SYSTEM_CLOCK.monotonic()
        advantages = {key: values.get("advantage", 0.0) for key, values in execution.values.items()}
        metrics = step_metrics(
            batch.metas,
            advantages=advantages,
            call_metrics=execution.metrics,
            timing={**self._timing, "step": now - since},
        )
        metrics |= {"batch_size": float(len(batch.metas)), "meta_server_bytes": float(self._meta.size)}
        try:
            self._metrics.write(step, metrics)
        except StorageError as error:
            log.warning("metrics of step %d were not written: %s", step, error)
        self._events.emit(Span("step", since, now - since, {"step": str(step)}))

    @contextmanager
    def _stage(self, phase: Phase, step: int, name: str) -> Iterator[None]:
        log.info("step %d: %s begins", step, name)
        self._enter(phase)
        since = SYSTEM_CLOCK.monotonic()
        try:
            yield
        finally:
            self._timing[name] = SYSTEM_CLOCK.monotonic() - since
        log.info("step %d: %s took %.2f s", step, name, self._timing[name])

    def _enter(self, phase: Phase) -> None:
        self._events.emit(Transition("master", "run", self._phase, phase.value, ""))
        self._phase = phase.value


def main(bootstrap: Bootstrap) -> int:
    process = begin(bootstrap)
    events = EventLog(RunFolder(process.run_dir).events_file(process.name), process=process.name)
    return FragileController(process, events).run()
