"""Files that the master writes for users: metrics, samples, inputs, process reports, the summary.

The run does not depend on them: a file that cannot be written is reported once, and so is its return.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kintsugi.config.schema import Config
from kintsugi.control.membership import WorkerRecord, WorkerStatus
from kintsugi.control.processes import RETIRED
from kintsugi.control.protocol import Event, RecordEvaluation, RecordStep
from kintsugi.control.summary import stage_seconds
from kintsugi.data.dataset import open_data
from kintsugi.errors import Fault, StatesDiverged, StorageError
from kintsugi.journal.facts import (
    CheckpointFailed,
    Fact,
    FaultNoted,
    IncidentClosed,
    IncidentOpened,
    PaceChanged,
    RolledBack,
    StepCommitted,
)
from kintsugi.journal.inputs import InputRecorder
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.run_folder.incidents import IncidentHistory
from kintsugi.run_folder.layout import RELATIVE, RunFolder
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.disk import write_atomically
from kintsugi.runtime.waits import WAITS
from kintsugi.telemetry.eval_stats import problems_digest
from kintsugi.telemetry.events import EventLog, FaultSeen, Note, OperationFailed, Span, StateCommitted
from kintsugi.telemetry.jsonl_log import LineFile
from kintsugi.telemetry.process_reports import ProcessReport, ProcessReports, write_processes
from kintsugi.telemetry.readings import HeartbeatReading, ReadingsLog
from kintsugi.telemetry.step_metrics import (
    FIGURES,
    EvalAnswerRecord,
    EvalAnswersWriter,
    MetricsWriter,
    SamplesWriter,
    source_metrics,
    step_metrics,
)
from kintsugi.telemetry.trackers.tracker import parameters_of
from kintsugi.types import Role, Wait, process_id

MASTER = process_id(Role.MASTER, 0)
MOST_TOLD = 256
LARGEST_INCIDENTS = 16 << 20
"""Size at which `incidents.jsonl` is put aside, some ten thousand incidents; three such files are kept."""
STEP_PARTS = ("data", "generate", "reward", "train", "commit", "weights")
"""Parts of the time of a step; evaluations and saves are not included."""


class Records:
    """Files of the run folder that no decision depends on."""

    def __init__(self, run_dir: Path, log: EventLog, *, config: Config, job: str) -> None:
        self._run_dir, self._log, self._config = run_dir, log, config
        self._figures = ReadingsLog(run_dir, process=MASTER)
        self._inputs = InputRecorder(RunFolder(run_dir).inputs_file)
        self._metrics = MetricsWriter(
            run_dir, run_id=job, parameters=parameters_of(config), also=config.logging
        )
        self._samples = SamplesWriter(run_dir, most_size=int(config.logging.samples_gib * (1 << 30)))
        self._verdicts = EvalAnswersWriter(run_dir)
        self._incidents = LineFile(
            RunFolder(run_dir).incidents_file, largest_size=LARGEST_INCIDENTS, reserved_size=0
        )
        self._problems = ""
        """Digest of the held-out problems; computed when it is first needed."""
        self._told: dict[str, None] = {}
        """Faults that were reported, by id, the latest first."""
        self._differed = False
        """Ranks came to different states, and no step was committed since."""
        self._unwritable: dict[str, str] = {}
        """File that cannot be written → reason."""

    def truncate_after(self, step: int) -> None:
        """Remove records of later steps: they were undone, or written by a master that died before the steps were
        facts."""
        self.attempt("metrics", lambda: self._metrics.truncate_after(step))
        self.attempt(str(RELATIVE.samples_file), lambda: self._samples.truncate_after(step))
        self.attempt(str(RELATIVE.eval_answers_file), lambda: self._verdicts.truncate_after(step))

    def fact(self, fact: Fact) -> None:
        """Report a fact that was just journaled to users and to the diagnosis."""
        match fact:
            case RolledBack(step=step):
                self.truncate_after(step)
            case PaceChanged():
                pace = f"rollout runs {fact.ahead} steps ahead, {fact.groups} groups at once"
                self._log.emit(Note(f"{pace}: {fact.reason}"))
            case StepCommitted(step=step, state_digest=digest) if self._differed:
                # The committed state shows which rank had diverged.
                self._differed = False
                message = f"step {step} was committed with state {digest}"
                self._log.emit(StateCommitted(message, step=step, state=digest))
            case IncidentOpened(incident=incident, step=step, fault=fault):
                self._incident(step, incident, fault.message)
                self.fault(fault)
            case IncidentClosed(incident=incident, step=step, timing=timing):
                seconds = timing.get("outage", timing.get("total", 0.0))
                self._incident(step, incident, f"recovered by {fact.outcome} in {seconds:.1f} s")
            case FaultNoted(fault=fault) | CheckpointFailed(fault=fault):
                self.fault(fault)
            case _:
                pass

    def _incident(self, step: int, incident: int, text: str) -> None:
        self.attempt(
            "incidents of the trackers",
            lambda: self._metrics.write_incident(step, incident=incident, text=text),
        )

    def old_incidents(self, incidents: Sequence[IncidentHistory]) -> None:
        """Write incidents that the state of the master does not keep any more."""
        if incidents:
            lines = b"".join(msgspec.json.encode(incident) + b"\n" for incident in incidents)
            self.attempt(str(RELATIVE.incidents_file), lambda: self._incidents.append(lines))

    def lost(self, fault: Fault) -> None:
        """Report the end of a process: its fault, or its retirement."""
        if fault.kind == RETIRED:
            self._log.emit(Note(fault.message))
        else:
            self.fault(fault)

    def fault(self, fault: Fault) -> None:
        """Report a fault once, though several facts mention it."""
        self._differed = self._differed or isinstance(fault.detail, StatesDiverged)
        if fault.id not in self._told:
            self._told = {fault.id: None, **dict(list(self._told.items())[:MOST_TOLD])}
            self._log.emit(FaultSeen(fault))

    def input(self, event: Event, now: float, *, wall: float, after: int) -> None:
        self.attempt(
            str(RELATIVE.inputs_file), lambda: self._inputs.write(event, now, wall=wall, after=after)
        )

    def processes(self, reports: ProcessReports) -> None:
        """Write the latest report of every process, and the heartbeat of the master; other processes write their
        own."""
        self.attempt(str(RELATIVE.processes_file), lambda: write_processes(self._run_dir, reports))
        own = next(report for report in reports.processes if report.process == MASTER)
        self._figures.write(HeartbeatReading(own.incarnation, own.counters, own.load, own.waits, own.gauges))

    def evaluation(self, record: RecordEvaluation) -> None:
        """Write the metrics of an evaluation, and which problems were answered correctly, so that runs can be
        compared."""
        self.attempt("metrics", lambda: self._metrics.write(record.step, record.metrics))
        self.attempt(str(RELATIVE.eval_answers_file), lambda: self._verdicts.write(self._verdict(record)))

    def _verdict(self, record: RecordEvaluation) -> EvalAnswerRecord:
        if not self._problems:
            data = open_data(self._config, run_dir=self._run_dir)
            self._problems = problems_digest(map(data.held_out_row, range(data.num_held_out)))
        return EvalAnswerRecord(record.step, self._problems, record.verdicts)

    def summary(self, summary: object) -> None:
        path, data = RunFolder(self._run_dir).summary_file, json.dumps(summary, indent=2).encode() + b"\n"
        self.attempt(path.name, lambda: write_atomically(path, data, durable=False))

    def step(self, record: RecordStep, now: float) -> None:
        """Write metrics, samples and spans of a step."""
        advantages = {
            key: values[name]
            for key, values in record.values.items()
            for name in ("advantage", "mean_advantage")  # Of the whole sample, or the mean over its tokens.
            if name in values
        }
        timing = stage_seconds(record.timing)
        timing["step"] = sum(timing.get(name, 0.0) for name in STEP_PARTS)
        values = step_metrics(
            record.metas, advantages=advantages, call_metrics=record.call_metrics, timing=timing
        )
        values |= source_metrics(record.metas, texts=record.texts)
        self.attempt("metrics", lambda: self._metrics.write(record.step, values, stage=record.stage))
        self.attempt("system metrics of the trackers", lambda: self._metrics.write_system(record.step))
        self.attempt(
            "completions of the trackers",
            lambda: self._metrics.write_completions(record.step, record.metas, texts=record.texts),
        )
        self.attempt(
            str(RELATIVE.samples_file),
            lambda: self._samples.write(record.step, record.metas, texts=record.texts, advantages=advantages),
        )
        attributes = {"step": str(record.step), "stage": record.stage}
        figures = {name: f"{values[metric]:.4g}" for name, metric in FIGURES.items() if metric in values}
        self._log.emit(Span("step", now - timing["step"], timing["step"], {**attributes, **figures}))
        for span in record.spans:
            workers = ",".join(span.workers)
            self._log.emit(Span(span.call, span.start, span.duration_s, {**attributes, "workers": workers}))
        COUNTERS.add("steps")

    def attempt(self, what: str, write: Callable[[], None]) -> None:
        """Write a file that the run does not depend on. A failure is reported once, and so is its end."""
        try:
            write()
        except (StorageError, OSError) as error:
            message = str(error)
            alert = OperationFailed(
                f"{what} can not be written, the run goes on without it: {message}",
                operation=what,
                error=message,
            )
            if self._unwritable.get(what) != message and self._log.try_emit(alert):
                self._unwritable[what] = message
        else:
            if self._unwritable.pop(what, None) is not None:
                self._log.emit(Note(f"{what} is written again"))

    def close(self) -> None:
        self.attempt("the end of metrics", self._metrics.close)
        self.attempt(f"the end of {RELATIVE.samples_file}", self._samples.close)
        self.attempt(f"the end of {RELATIVE.eval_answers_file}", self._verdicts.close)
        self.attempt("the end of inputs", self._inputs.close)
        self._incidents.close()
        self._figures.close()


def report_of(member: WorkerRecord, now: float) -> ProcessReport:
    """Return the latest report of a process."""
    return ProcessReport(
        process=member.process,
        role=member.role.value,
        host=member.host,
        pid=member.pid,
        incarnation=member.incarnation,
        status=member.status.value,
        load=member.load,
        silent_s=now - member.last_heartbeat if member.last_heartbeat else None,
        counters=member.progress.counters,
        gauges=member.gauges,
        waits=member.waits,
    )


def own_report(bootstrap: Bootstrap, *, waits: tuple[Wait, ...]) -> ProcessReport:
    """Return the report of the master itself, including its pending requests."""
    return ProcessReport(
        process=bootstrap.process,
        role=bootstrap.role.value,
        host=bootstrap.host,
        pid=os.getpid(),
        incarnation=bootstrap.incarnation,
        status=WorkerStatus.LIVE,
        silent_s=0.0,
        counters=COUNTERS.snapshot().counters,
        waits=(*WAITS.declared(), *waits),
    )
