"""`kintsugi watch`: print new events, alerts, diagnoses and findings about learning, and post them to a webhook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from kintsugi.diagnosis.learning_watch import notification_of_finding
from kintsugi.diagnosis.notifications import CauseKey, cause_key, notification, notification_of
from kintsugi.diagnosis.verdict import Diagnosis
from kintsugi.learning_health import LearningKind, LearningReport
from kintsugi.learning_health.format import finding_line
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.printable import printable_line
from kintsugi.telemetry.events import Alert, Record, Span, Tail
from kintsugi.telemetry.export.webhooks import Notification, Webhook
from kintsugi.telemetry.format import clock_text, format_event
from kintsugi.telemetry.jsonl_log import LineTail
from kintsugi.telemetry.verdict_files import WATCHER


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
                self._print(time, process, f"step {step} took {event.duration_s:.2f} s")
            return
        message = notification(str(self._run_dir), time, process, event)
        if message is not None:
            text = f"alert: {format_event(event)}" if isinstance(event, Alert) else message.text
            self._print(time, process, text)
            self._post(message)

    def _take_diagnosis(self, line: bytes) -> None:
        """Report causes that were not in the last diagnosis: a line is written whenever the causes change."""
        try:
            diagnosis = msgspec.json.decode(line, type=Diagnosis)
        except (msgspec.MsgspecError, UnicodeDecodeError):  # Partial line of a killed process.
            return
        for cause in diagnosis.causes:
            if not self._is_first and cause_key(cause) not in self._causes:
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
