"""The watcher's part that follows learning: changed findings go to `learning.jsonl`, alerts and the webhook."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from kintsugi.errors import KintsugiError
from kintsugi.learning_health import (
    LearningFinding,
    LearningFollower,
    LearningKind,
    LearningReport,
    recorded_findings,
)
from kintsugi.learning_health.format import finding_line
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import Alert, EventLog, Note
from kintsugi.telemetry.export.webhooks import Notification, Webhook
from kintsugi.telemetry.jsonl_log import LineFile
from kintsugi.telemetry.verdict_files import WATCHER

LARGEST_SIZE = 1 << 20


class LearningWatch:
    """Judges the learning of a run after every step that it finds recorded; `look` is called once a second."""

    def __init__(self, run_dir: Path, *, log: EventLog, webhook: Webhook | None = None) -> None:
        self._run_dir, self._log, self._webhook = run_dir, log, webhook
        self._follower: LearningFollower | None = None
        with suppress(KintsugiError):  # A folder without a configuration has no learning to follow.
            self._follower = LearningFollower(run_dir)
        self._file = LineFile(RunFolder(run_dir).learning_file, largest_size=LARGEST_SIZE)
        last = recorded_findings(run_dir)
        self._reported = {} if last is None else _by_kind(last)
        """Current findings, also those that the watcher before reported."""
        self._step = -1

    def look(self) -> None:
        """Read new steps; report findings that are new, and the end of those that are over."""
        if self._follower is None:
            return
        report = self._follower.look()
        if report.step == self._step:
            return
        self._step = report.step
        findings = _by_kind(report)
        if findings.keys() == self._reported.keys():
            return
        with suppress(OSError):  # On a full disk the line is lost and the watcher continues.
            self._file.append(msgspec.json.encode(report) + b"\n")
        for kind, finding in findings.items():
            if kind not in self._reported:
                self._announce(finding, report)
        for kind in self._reported.keys() - findings.keys():
            self._log.emit(Note(f"learning: {kind.value} is over at step {report.step}"))
        self._reported = findings

    def _announce(self, finding: LearningFinding, report: LearningReport) -> None:
        values = {"confidence": finding.confidence, "since_step": float(finding.since_step)}
        self._log.emit(Alert(f"learning: {finding_line(finding)}", values))
        if self._webhook is not None:
            self._webhook.send(notification_of_finding(finding, report))

    def close(self) -> None:
        self._file.close()


def notification_of_finding(finding: LearningFinding, report: LearningReport) -> Notification:
    """`runs/demo-1: learning: equal_rewards since step 3, 95 % sure: no group has different rewards …`."""
    text = f"{finding.kind.value} since step {finding.since_step}, {100 * finding.confidence:.0f} % sure"
    return Notification(
        run=report.run,
        time=report.time,
        process=WATCHER,
        kind="learning",
        text=f"{report.run}: learning: {text}: {finding.summary}",
        values={"confidence": finding.confidence, "since_step": float(finding.since_step)},
        details=msgspec.to_builtins(finding),
    )


def _by_kind(report: LearningReport) -> dict[LearningKind, LearningFinding]:
    return {finding.kind: finding for finding in report.findings}
