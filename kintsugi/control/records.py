"""What the master writes for people beside its journal: metrics, samples, inputs, process reports, the summary.

The run does not depend on any of it: that a file can not be written is told once, and so is its return.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from kintsugi.bootstrap import Bootstrap
from kintsugi.config import Config
from kintsugi.control.inputs import InputRecorder
from kintsugi.control.membership import Member, MemberStatus
from kintsugi.control.protocol import Event, RecordEvaluation, RecordStep
from kintsugi.control.staff import RETIRED
from kintsugi.control.summary import stage_seconds
from kintsugi.data.source import open_data
from kintsugi.errors import Fault, StorageError
from kintsugi.facts import (
    CheckpointFailed,
    Fact,
    FaultNoted,
    IncidentOpened,
    PaceChanged,
    RolledBack,
    StepCommitted,
)
from kintsugi.observe.evaluation import problems_digest
from kintsugi.observe.events import Alert, EventLog, FaultSeen, Note, Span
from kintsugi.observe.figures import Beat, FiguresLog
from kintsugi.observe.metrics import (
    MetricsWriter,
    SamplesWriter,
    VerdictRecord,
    VerdictsWriter,
    step_metrics,
)
from kintsugi.observe.processes import ProcessReport, ProcessReports, write_processes
from kintsugi.runs import SUMMARY_FILE
from kintsugi.runtime import COUNTERS, WAITS
from kintsugi.types import Role, Wait, process_id

MASTER = process_id(Role.MASTER, 0)
MOST_TOLD = 256
DIFFERENT = "different states after"
"""How a disagreement of the ranks is told (`graph/executor.py`)."""
STEP_PARTS = ("data", "generate", "reward", "train", "commit", "weights")
"""What a step's time consists of; evaluations and saves come beside it."""


class Records:
    """The files of the run folder that nothing is decided by."""

    def __init__(self, run_dir: Path, log: EventLog, *, config: Config, job: str) -> None:
        self._run_dir, self._log, self._config = run_dir, log, config
        self._figures = FiguresLog(run_dir, process=MASTER)
        self._inputs = InputRecorder(run_dir / "inputs")
        self._metrics = MetricsWriter(run_dir, wandb_id=job if config.logging.wandb else None)
        self._samples = SamplesWriter(run_dir)
        self._verdicts = VerdictsWriter(run_dir)
        self._problems = ""
        """Which held-out problems these are; computed when it is first needed."""
        self._told: dict[str, None] = {}
        """Faults that were told, by id, the latest first."""
        self._differed = False
        """Ranks came to different states, and no step was committed since."""
        self._unwritable: dict[str, str] = {}
        """Files that the disk does not take, and why."""

    def truncate_after(self, step: int) -> None:
        """Later steps are undone, or were written down by a master that died before they were facts."""
        self.attempt("metrics", lambda: self._metrics.truncate_after(step))
        self.attempt("samples.jsonl", lambda: self._samples.truncate_after(step))
        self.attempt("verdicts.jsonl", lambda: self._verdicts.truncate_after(step))

    def fact(self, fact: Fact) -> None:
        """What people, and a diagnosis, should know of what was just journaled."""
        match fact:
            case RolledBack(step=step):
                self.truncate_after(step)
            case PaceChanged():
                pace = f"rollout runs {fact.ahead} steps ahead, {fact.groups} groups at once"
                self._log.emit(Note(f"{pace}: {fact.reason}"))
            case StepCommitted(step=step, state_digest=digest) if self._differed:
                # Who had come to another state is known now.
                self._differed = False
                self._log.emit(Note(f"step {step} was committed with state {digest}"))
            case IncidentOpened(fault=fault) | FaultNoted(fault=fault) | CheckpointFailed(fault=fault):
                self.fault(fault)
            case _:
                pass

    def lost(self, fault: Fault) -> None:
        """A process is gone, because of this fault or because it was not needed any more."""
        if fault.kind == RETIRED:
            self._log.emit(Note(fault.message))
        else:
            self.fault(fault)

    def fault(self, fault: Fault) -> None:
        """Each once, though it is noted in several places."""
        self._differed = self._differed or DIFFERENT in fault.message
        if fault.id not in self._told:
            self._told = {fault.id: None, **dict(list(self._told.items())[:MOST_TOLD])}
            self._log.emit(FaultSeen(fault))

    def input(self, event: Event, now: float, *, wall: float, after: int) -> None:
        self.attempt("inputs", lambda: self._inputs.write(event, now, wall=wall, after=after))

    def processes(self, reports: ProcessReports) -> None:
        """What every process said last. The others record their heartbeats themselves; the master has none."""
        self.attempt("processes.json", lambda: write_processes(self._run_dir, reports))
        own = next(report for report in reports.processes if report.process == MASTER)
        self._figures.write(Beat(own.incarnation, own.counters, own.load, own.waits, own.gauges))

    def evaluation(self, record: RecordEvaluation) -> None:
        """Its figures, and which problems were answered right, so that runs can be compared problem by problem."""
        self.attempt("metrics", lambda: self._metrics.write(record.step, record.metrics))
        self.attempt("verdicts.jsonl", lambda: self._verdicts.write(self._verdict(record)))

    def _verdict(self, record: RecordEvaluation) -> VerdictRecord:
        if not self._problems:
            data = open_data(self._config, run_dir=self._run_dir)
            self._problems = problems_digest(map(data.held_out_row, range(data.num_held_out)))
        return VerdictRecord(record.step, self._problems, record.verdicts)

    def summary(self, summary: object) -> None:
        text = json.dumps(summary, indent=2) + "\n"
        self.attempt("summary.json", lambda: _write_atomically(self._run_dir / SUMMARY_FILE, text))

    def step(self, record: RecordStep, now: float) -> None:
        """A step's metrics, samples and spans."""
        advantages = {
            key: values[name]
            for key, values in record.values.items()
            for name in ("advantage", "mean_advantage")  # One for the whole sample, or of its tokens.
            if name in values
        }
        timing = stage_seconds(record.timing)
        timing["step"] = sum(timing.get(name, 0.0) for name in STEP_PARTS)
        values = step_metrics(
            record.metas, advantages=advantages, call_metrics=record.call_metrics, timing=timing
        )
        self.attempt("metrics", lambda: self._metrics.write(record.step, values))
        self.attempt(
            "samples.jsonl",
            lambda: self._samples.write(record.step, record.metas, texts=record.texts, advantages=advantages),
        )
        attributes = {"step": str(record.step), "stage": record.stage}
        self._log.emit(Span("step", now - timing["step"], timing["step"], attributes))
        for span in record.spans:
            workers = ",".join(span.workers)
            self._log.emit(Span(span.call, span.start, span.duration_s, {**attributes, "workers": workers}))
        COUNTERS.add("steps")

    def attempt(self, what: str, write: Callable[[], None]) -> None:
        """The run does not depend on it: that it fails, or fails differently, is told once, and so is its return."""
        try:
            write()
        except (StorageError, OSError) as error:
            message = str(error)
            alert = Alert(f"{what} can not be written, the run goes on without it: {message}")
            if self._unwritable.get(what) != message and self._log.try_emit(alert):
                self._unwritable[what] = message
        else:
            if self._unwritable.pop(what, None) is not None:
                self._log.emit(Note(f"{what} is written again"))

    def close(self) -> None:
        self.attempt("the end of metrics", self._metrics.close)
        self.attempt("the end of samples.jsonl", self._samples.close)
        self.attempt("the end of verdicts.jsonl", self._verdicts.close)
        self.attempt("the end of inputs", self._inputs.close)
        self._figures.close()


def report_of(member: Member, now: float) -> ProcessReport:
    """What a process said last."""
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
    """What the process says of itself that nobody else would hear: the master, which waits for its requests."""
    return ProcessReport(
        process=bootstrap.process,
        role=bootstrap.role.value,
        host=bootstrap.host,
        pid=os.getpid(),
        incarnation=bootstrap.incarnation,
        status=MemberStatus.LIVE,
        silent_s=0.0,
        counters=COUNTERS.snapshot().counters,
        waits=(*WAITS.declared(), *waits),
    )


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
