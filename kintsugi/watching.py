"""A person beside a run: what is new since the last look, as lines, and as notifications for whoever wants them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.observe.alerts import Notification, Webhook
from kintsugi.observe.events import Alert, FaultSeen, ProcessGone, Record, Span, Tail
from kintsugi.observe.lines import LineTail
from kintsugi.observe.prometheus import DIAGNOSES_FILE
from kintsugi.observe.telling import told
from kintsugi.observe.timeline import clock_text

WATCHER = "watcher-0"


class Watching:
    """Follows the events of all processes and the diagnoses. What was there before the first look is not told."""

    def __init__(self, run_dir: Path, *, say: Callable[[str], None], hook: Webhook | None = None) -> None:
        self._run_dir, self._say, self._hook = run_dir, say, hook
        self._tails: dict[str, Tail] = {}
        self._diagnoses = LineTail(run_dir / DIAGNOSES_FILE)
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
                if not self._is_first:
                    self._take_diagnosis(line)

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()
        self._diagnoses.close()

    def _take(self, process: str, record: Record) -> None:
        event, time = record.event, record.stamp.time
        match event:
            case Span(name="step", attributes=attributes):
                self._tell(time, process, f"step {attributes.get('step', '?')} took {event.duration_s:.2f} s")
            case ProcessGone(ordered=False):
                self._tell(time, process, told(event))
                self._post("fault", time, event.of, told(event), record.event)
            case FaultSeen(fault=fault):
                self._tell(time, process, told(event))
                self._post("fault", time, fault.process, told(event), fault)
            case Alert(message=message, values=values):
                self._tell(time, process, f"alert: {told(event)}")
                self._post("alert", time, process, message, None, values)
            case _:
                pass

    def _take_diagnosis(self, line: bytes) -> None:
        try:
            diagnosis = msgspec.json.decode(line, type=_Diagnosed)
        except msgspec.MsgspecError:  # What a killed process left of a line.
            return
        for cause in diagnosis.causes[:1]:
            text = f"diagnosis: {cause.summary} ({cause.confidence:.0%} sure)"
            self._tell(diagnosis.at, cause.process, text)
            self._post("diagnosis", diagnosis.at, cause.process, cause.summary, msgspec.json.decode(line))

    def _tell(self, time: float, process: str, text: str) -> None:
        self._say(f"{clock_text(time)} {process:<10} {text}")

    def _post(
        self,
        kind: str,
        time: float,
        process: str,
        text: str,
        details: Any,
        values: Mapping[str, float] | None = None,
    ) -> None:
        if self._hook is not None:
            self._hook.send(
                Notification(
                    run=str(self._run_dir),
                    time=time,
                    process=process,
                    kind=kind,
                    text=text,
                    values=values or {},
                    details=details,
                )
            )


class _Suspect(msgspec.Struct, frozen=True):
    """What is told of a `diagnosis.verdict.Cause`."""

    process: str
    summary: str
    confidence: float


class _Diagnosed(msgspec.Struct, frozen=True):
    at: float
    causes: tuple[_Suspect, ...] = ()
