"""Plain supervised fine-tuning, for contrast: ranks that run one loop, without controller, rollout or calls.

Every rank reads the whole batch, computes its own part, and exits with its own error. The first rank writes the events
and metrics that a master would write, so that both systems can be followed in the same way.
"""

from __future__ import annotations

import logging

from kintsugi.config.stages import Stage, stages
from kintsugi.control.dispatch import next_tickets
from kintsugi.control.phases.table import Phase
from kintsugi.data.dataset import open_data
from kintsugi.data.prefetch import PrefetchingReader
from kintsugi.errors import StorageError
from kintsugi.lab.fragile.batch import call_of, execution_of, rows
from kintsugi.lab.fragile.directory import STORE, Address, announce, find
from kintsugi.lab.fragile.process import FragileProcess, begin
from kintsugi.lab.fragile.storage import latest_folder, write_without_retry
from kintsugi.lab.fragile.trainer import Trainer, return_freed_memory
from kintsugi.lab.testbed.watch import MASTER
from kintsugi.model.plan import plan_model
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.telemetry.events import EventLog, Span, Transition
from kintsugi.telemetry.step_metrics import MetricsWriter, step_metrics
from kintsugi.types import Role, process_id

log = logging.getLogger("plain")

_RENDEZVOUS_S = 120.0


class SftLeader:
    """Events and metrics that the first rank writes."""

    def __init__(self, process: FragileProcess) -> None:
        self._events = EventLog(RunFolder(process.run_dir).events_file(MASTER), process=MASTER)
        self._metrics = MetricsWriter(process.run_dir)
        self._phase = Phase.STARTING.value

    def enter(self, phase: Phase) -> None:
        self._events.emit(Transition("master", "run", self._phase, phase.value, ""))
        self._phase = phase.value

    def committed(self, step: int, *, since: float, metrics: dict[str, float]) -> None:
        duration_s = SYSTEM_CLOCK.monotonic() - since
        try:
            self._metrics.write(step, metrics)
        except StorageError as error:
            log.warning("metrics of step %d were not written: %s", step, error)
        self._events.emit(Span("step", since, duration_s, {"step": str(step)}))


class SftRank:
    """One rank of the loop; waits for the others in every step."""

    def __init__(self, process: FragileProcess) -> None:
        self._process, self._config = process, process.config
        self._ranks = [process_id(Role.MODEL, index) for index in range(process.config.actor.workers)]
        _, tokenizer = plan_model(process.config)
        self._feed = PrefetchingReader(process.config, tokenizer, run_dir=process.run_dir)
        self._num_rows = open_data(process.config, run_dir=process.run_dir).num_positions
        self._trainer = Trainer(process.config, process=process.name, host=process.host)
        self._leader = SftLeader(process) if process.index == 0 else None

    def run(self) -> None:
        self._join()
        for stage in stages(self._config):
            self._trainer.start_stage(stage.name, step=stage.first_step - 1)
            for number, step in enumerate(range(stage.first_step, stage.last_step + 1)):
                self._step(stage, number=number, step=step)
        self._enter(Phase.ENDED)

    def _join(self) -> None:
        if self._leader is not None:
            announce(self._process.run_dir, STORE, Address(self._trainer.store, 0))
        found = find(self._process.run_dir, STORE, timeout_s=_RENDEZVOUS_S)
        self._trainer.join(self._ranks, store=found.host, timeout_s=_RENDEZVOUS_S)

    def _step(self, stage: Stage, *, number: int, step: int) -> None:
        since = SYSTEM_CLOCK.monotonic()
        self._enter(Phase.TRAINING)
        size = stage.algorithm.batch_size
        tickets = next_tickets(stage, num_issued=number * size, count=size, num_rows=self._num_rows)
        batch = rows(self._feed, stage, tickets, holder=self._process.name)
        execution = execution_of(stage, batch, config=self._config, ranks=self._ranks, step=step)
        for dispatch in execution.ready(now=since):
            if dispatch.worker == self._process.name:
                call = call_of(dispatch, stage, batch, config=self._config, step=step)
                done = self._trainer.run(call, batch.trajectories)
        self._trainer.commit(step)
        log.info("step %d: loss %.4f", step, done.metrics["loss"])
        if self._leader is None:
            return
        timing = {"train": SYSTEM_CLOCK.monotonic() - since, "step": SYSTEM_CLOCK.monotonic() - since}
        metrics = step_metrics(batch.metas, advantages={}, call_metrics=done.metrics, timing=timing)
        self._leader.committed(step, since=since, metrics=metrics)
        every = self._config.checkpoint.every
        if step == stage.last_step or (every > 0 and step % every == 0):
            self._enter(Phase.SAVING)
            folder = latest_folder(self._process.run_dir, step=step)
            log.info("Saving checkpoint of step %d to %s", step, folder)
            write_without_retry(folder, self._trainer.files())

    def _enter(self, phase: Phase) -> None:
        if self._leader is not None:
            self._leader.enter(phase)


def main(bootstrap: Bootstrap) -> int:
    return_freed_memory()
    SftRank(begin(bootstrap)).run()
    return 0
