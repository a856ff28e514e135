"""`kintsugi watch`: print new events, alerts, diagnoses and findings about learning, and post them to a webhook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from kintsugi.cli.progress import alert_text
from kintsugi.diagnosis.learning_watch import notification_of_finding
from kintsugi.diagnosis.notifications import CauseKey, cause_key, notification, notification_of
from kintsugi.diagnosis.verdict import Cause, Diagnosis, FaultKind
from kintsugi.errors import ProcessDied
from kintsugi.learning_health import LearningKind, LearningReport
from kintsugi.learning_health.format import finding_line
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.printable import printable_line
from kintsugi.telemetry.events import Alert, Event, FaultHandled, FaultSeen, ProcessGone, Record, Span, Tail
from kintsugi.telemetry.export.webhooks import Notification, Webhook
from kintsugi.telemetry.format import clock_text, format_event
from kintsugi.telemetry.jsonl_log import LineTail
from kintsugi.telemetry.step_metrics import FIGURES
from kintsugi.telemetry.verdict_files import WATCHER
from kintsugi.types import Role, process_id

MASTER = process_id(Role.MASTER, 0)
SAME_LOSS_S = 5.0
"""Longest time between the recorded end of a process and the onset of its diagnosis."""
MOST_LOSSES = 256


class ToldLosses:
    """Ends of processes that were reported. The agent, the master and the diagnosis record each of them, in any order;
    only the first record is news."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], float] = {}
        """(process, incarnation) → time, the latest last."""
        self._masters = 0
        """Masters whose end only their agent has reported so far: the next master knows their term, not their
        incarnation."""

    def is_news(self, event: Event, time: float) -> bool:
        """Whether an event says something that was not reported."""
        match event:
            case ProcessGone(of=process, incarnation=incarnation):
                if process == MASTER:
                    self._masters += 1
                return self._add(process, incarnation, time)
            case FaultSeen(fault=fault) if fault.kind == ProcessDied.__name__:
                if fault.process == MASTER and self._masters:
                    self._masters -= 1
                    self._add(*_incarnation_of(fault.id), time)
                    return False
                return self._add(*_incarnation_of(fault.id), time)
            case FaultHandled(values=timing, fault=fault_id) if not timing:
                return _incarnation_of(fault_id) not in self._told
            case _:
                return True

    def is_new_cause(self, cause: Cause) -> bool:
        """Whether a diagnosis says more than that a process was killed, if that was reported."""
        return cause.kind is not FaultKind.KILLED or not any(
            process == cause.process and abs(cause.onset - time) <= SAME_LOSS_S
            for (process, _), time in self._told.items()
        )

    def _add(self, process: str, incarnation: str, time: float) -> bool:
        is_new = (process, incarnation) not in self._told
        self._told.setdefault((process, incarnation), time)
        while len(self._told) > MOST_LOSSES:
            del self._told[next(iter(self._told))]
        return is_new


def _incarnation_of(fault_id: str) -> tuple[str, str]:
    """Process and incarnation of the fault of a loss: `model-1@1.3`."""
    process, _, incarnation = fault_id.partition("@")
    return process, incarnation


class RunFollower:
    """Follows the events of all processes and the diagnoses. Records from before the first `look` are not reported."""

    def __init__(self, run_dir: Path, *, say: Callable[[str], None], hook: Webhook | None = None) -> None:
        self._run_dir, self._say, self._hook = run_dir, say, hook
        self._tails: dict[str, Tail] = {}
        self._diagnoses = LineTail(RunFolder(run_dir).diagnoses_file)
        self._causes: set[CauseKey] = set()
        """Causes of the last diagnosis; they are not reported again."""
        self._learning = LineTail(RunFolder(run_dir).learning_file)
        self._findings: set[LearningKind] = set()
        """Findings of the last report about learning; they are not reported again."""
        self._losses = ToldLosses()
        self._is_first = True
        self.look()
        self._is_first = False

    def look(self) -> None:
        """Report new records."""
        for path in sorted(RunFolder(self._run_dir).events_folder.glob("*.jsonl")):
            # Spans of single prompts are not reported, and the watcher's alerts repeat the diagnoses.
            if "." in path.stem or path.stem == WATCHER:
                continue
            tail = self._tails.setdefault(path.name, Tail(path))
            while records := list(tail.records()):
                for record in records:
                    if not self._is_first:
                        self._take(path.stem, record)
        while lines := self._diagnoses.lines():
            for line in lines:
                self._take_diagnosis(line)
        while lines := self._learning.lines():
            for line in lines:
                self._take_learning(line)

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()
        self._diagnoses.close()
        self._learning.close()

    def _take(self, process: str, record: Record) -> None:
        event, time = record.event, record.stamp.time
        if isinstance(event, Span):
            if event.name == "step":
                step = event.attributes.get("step", "?")
                figures = (
                    f", {name} {event.attributes[name]}" for name in FIGURES if name in event.attributes
                )
                self._print(time, process, f"step {step} took {event.duration_s:.2f} s{''.join(figures)}")
            return
        message = notification(str(self._run_dir), time, process, event)
        if message is not None and self._losses.is_news(event, time):
            self._print(time, process, self._text(record, message))
            self._post(message)

    @staticmethod
    def _text(record: Record, message: Notification) -> str:
        """The text of a notification; of the response to a fault one short sentence, as the live view has it."""
        if isinstance(record.event, FaultHandled):
            return alert_text(record)
        return f"alert: {format_event(record.event)}" if isinstance(record.event, Alert) else message.text

    def _take_diagnosis(self, line: bytes) -> None:
        """Report causes that were not in the last diagnosis: a line is written whenever the causes change."""
        try:
            diagnosis = msgspec.json.decode(line, type=Diagnosis)
        except (msgspec.MsgspecError, UnicodeDecodeError):  # Partial line of a killed process.
            return
        for cause in diagnosis.causes:
            is_told = cause_key(cause) in self._causes or not self._losses.is_new_cause(cause)
            if not self._is_first and not is_told:
                text = f"diagnosis: {cause.summary} ({cause.confidence:.0%} sure)"
                self._print(diagnosis.at, cause.process, text)
                self._post(notification_of(cause, run=str(self._run_dir), time=diagnosis.at))
        self._causes = {cause_key(cause) for cause in diagnosis.causes}

    def _take_learning(self, line: bytes) -> None:
        """Report findings about learning that were not in the last report."""
        try:
            report = msgspec.json.decode(line, type=LearningReport)
        except (msgspec.MsgspecError, UnicodeDecodeError):  # Partial line of a killed process.
            return
        for finding in report.findings:
            if not self._is_first and finding.kind not in self._findings:
                self._print(report.time, WATCHER, f"learning: {finding_line(finding)}")
                self._post(notification_of_finding(finding, report))
        self._findings = {finding.kind for finding in report.findings}

    def _print(self, time: float, process: str, text: str) -> None:
        self._say(printable_line(f"{clock_text(time)} {process:<10} {text}"))

    def _post(self, notification: Notification) -> None:
        if self._hook is not None:
            self._hook.send(notification)
