"""A person beside a run: what is new since the last look, as lines, and as notifications for whoever wants them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from kintsugi.diagnosis.notifying import CauseKey, cause_key, notification, notification_of
from kintsugi.diagnosis.verdict import Diagnosis
from kintsugi.observe.alerts import Notification, Webhook
from kintsugi.observe.events import Alert, Record, Span, Tail
from kintsugi.observe.lines import LineTail
from kintsugi.observe.telling import told
from kintsugi.observe.timeline import clock_text
from kintsugi.observe.verdicts import DIAGNOSES_FILE, WATCHER


class Watching:
    """Follows the events of all processes and the diagnoses. What was there before the first look is not told."""

    def __init__(self, run_dir: Path, *, say: Callable[[str], None], hook: Webhook | None = None) -> None:
        self._run_dir, self._say, self._hook = run_dir, say, hook
        self._tails: dict[str, Tail] = {}
        self._diagnoses = LineTail(run_dir / DIAGNOSES_FILE)
        self._causes: set[CauseKey] = set()
        """Of the last diagnosis: told, or there before the first look."""
        self._is_first = True
        self.look()
        self._is_first = False

    def look(self) -> None:
        """Tell of what is new."""
        for path in sorted((self._run_dir / "events").glob("*.jsonl")):
            # Spans of single prompts are nothing to be told of, and the watcher's alerts are the diagnoses.
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

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()
        self._diagnoses.close()

    def _take(self, process: str, record: Record) -> None:
        event, time = record.event, record.stamp.time
        if isinstance(event, Span):
            if event.name == "step":
                step = event.attributes.get("step", "?")
                self._tell(time, process, f"step {step} took {event.duration_s:.2f} s")
            return
        said = notification(str(self._run_dir), time, process, event)
        if said is not None:
            self._tell(time, process, f"alert: {told(event)}" if isinstance(event, Alert) else said.text)
            self._post(said)

    def _take_diagnosis(self, line: bytes) -> None:
        """Each cause when it joins those that hold: a line is written whenever one comes or goes."""
        try:
            diagnosis = msgspec.json.decode(line, type=Diagnosis)
        except (msgspec.MsgspecError, UnicodeDecodeError):  # What a killed process left of a line.
            return
        for cause in diagnosis.causes:
            if not self._is_first and cause_key(cause) not in self._causes:
                text = f"diagnosis: {cause.summary} ({cause.confidence:.0%} sure)"
                self._tell(diagnosis.at, cause.process, text)
                self._post(notification_of(cause, run=str(self._run_dir), time=diagnosis.at))
        self._causes = {cause_key(cause) for cause in diagnosis.causes}

    def _tell(self, time: float, process: str, text: str) -> None:
        self._say(f"{clock_text(time)} {process:<10} {text}")

    def _post(self, notification: Notification) -> None:
        if self._hook is not None:
            self._hook.send(notification)
