"""The watcher: a process of the run that diagnoses it continuously and reports to files, webhook and master.

    files that grow ─► evidence of the last minutes ─► diagnosis, once a second ─► <run>/diagnoses.jsonl, events,
                                                                                   webhook, the master's requests
    metrics, samples ─► history of the stage ─► findings about learning ─► <run>/learning.jsonl, events, webhook

It consumes the records of the run, waits for the next second, and ends with its lifeline, that is with the launcher. No
process depends on it, and it depends on none: it may be killed at any time and is started again.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from kintsugi.config.recipe import load_config
from kintsugi.config.schema import MonitoringSection
from kintsugi.diagnosis.diagnose import Follower
from kintsugi.diagnosis.learning_watch import LearningWatch
from kintsugi.diagnosis.notifications import (
    CauseKey,
    cause_key,
    notification,
    notification_of,
    notification_of_end,
)
from kintsugi.diagnosis.ranking import replaceable
from kintsugi.diagnosis.symptoms import is_delayed
from kintsugi.diagnosis.verdict import Cause, Diagnosis
from kintsugi.errors import DeadlineExceeded, UserError
from kintsugi.protocol.agents import DiagnosisVerdict
from kintsugi.run_folder.layout import REDACTED, RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.owned_files import read_owned
from kintsugi.runtime.stacks import enable_stack_dumps
from kintsugi.runtime.waits import wait
from kintsugi.telemetry.events import (
    Alert,
    EventLog,
    Note,
    ProcessBegan,
    ProcessEnded,
    ProcessGone,
)
from kintsugi.telemetry.export.prometheus import MetricsServer
from kintsugi.telemetry.export.webhooks import Webhook
from kintsugi.telemetry.jsonl_log import LineFile, lines_in
from kintsugi.telemetry.verdict_files import WATCHER, hand_over

EVERY_S = 1.0
SURE = 0.8
"""Least confidence of a verdict for which a process is replaced, …"""
LASTING_S = 5.0
"""… and least time that it has lasted."""
STILL_S = 2.5
"""Age of the evidence above which a fault may be over."""
AGAIN_S = 60.0
"""Interval at which the request to replace a process is repeated: the master may have been replaced itself."""
LARGEST_SIZE = 4 << 20
"""Size of the file of diagnoses; three older files are kept."""
NICENESS = 10
"""Niceness of the watcher: a diagnosis takes milliseconds and can wait for a free CPU."""


class DiagnosisWatcher:
    """Diagnoses a run repeatedly; `look` is called once a second."""

    def __init__(
        self,
        run_dir: Path,
        *,
        log: EventLog,
        webhook: Webhook | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._run_dir, self._log, self._webhook, self._clock = run_dir, log, webhook, clock
        self._follower = Follower(run_dir, clock=clock)
        self._file = LineFile(RunFolder(run_dir).diagnoses_file, largest_size=LARGEST_SIZE)
        self._learning = LearningWatch(run_dir, log=log, webhook=webhook)
        self._since: dict[CauseKey, float] = {}
        """Current verdicts → time since when they were reported."""
        self._standing: dict[CauseKey, Cause] = {}
        """Current verdicts → their latest cause."""
        self._stale = bool((last := last_diagnosis(run_dir)) and last.causes)
        """The watcher before reported causes and ended before it could report their end."""
        self._handed: dict[tuple[CauseKey, bool], float] = {}
        """Verdict, and whether to replace → time at which it was sent to the master."""
        self._reported_before = clock.wall()
        """Events before this time were reported by the watcher before."""

    def look(self) -> Diagnosis:
        """Diagnose the present and report what is new."""
        diagnosis = self._follower.look()
        self._report(diagnosis)
        self._hand_over(diagnosis)
        self._post_news()
        self._learning.look()
        return diagnosis

    def _report(self, diagnosis: Diagnosis) -> None:
        """Write a line whenever the verdicts change, and raise an alert for each new one."""
        causes = {cause_key(cause): cause for cause in diagnosis.causes}
        before, self._standing = self._standing, causes
        if causes.keys() == self._since.keys() and not self._stale:
            return
        self._stale = False
        with suppress(OSError):  # On a full disk the line is lost and the watcher continues.
            self._file.append(msgspec.json.encode(diagnosis) + b"\n")
        for key, cause in causes.items():
            if key not in self._since:
                values = {"confidence": cause.confidence, "onset": cause.onset}
                self._log.emit(Alert(f"cause {cause.kind.value}: {cause.summary}", values))
                if self._webhook is not None:
                    self._webhook.send(notification_of(cause, run=str(self._run_dir), time=diagnosis.at))
        for key in before.keys() - causes.keys():
            ended = notification_of_end(before[key], run=str(self._run_dir), time=diagnosis.at)
            if self._webhook is not None and ended is not None:
                self._webhook.send(ended)
        self._since = {key: self._since.get(key, diagnosis.at) for key in causes}
        self._handed = {each: at for each, at in self._handed.items() if each[0] in causes}

    def _hand_over(self, diagnosis: Diagnosis) -> None:
        """Send every verdict to the master once; repeat it while a replacement would clearly help."""
        for cause in diagnosis.causes:
            key = cause_key(cause)
            replace = self._is_to_replace(cause, diagnosis)
            handed_at = self._handed.get((key, replace))
            if handed_at is not None and not (replace and diagnosis.at - handed_at >= AGAIN_S):
                continue
            verdict = DiagnosisVerdict(
                process=cause.process,
                incarnation=self._follower.bundle.incarnations.get(cause.process, ""),
                kind=cause.kind.value,
                onset=cause.onset,
                confidence=cause.confidence,
                summary=cause.summary,
                path=tuple(dict.fromkeys(hop.process for hop in cause.path)),
                replace=replace,
            )
            with suppress(OSError):  # Repeated at the next diagnosis.
                hand_over(self._run_dir, verdict)
                self._handed[key, replace] = diagnosis.at

    def _is_to_replace(self, cause: Cause, diagnosis: Diagnosis) -> bool:
        """Return whether to replace a process: only if it is the only cause, since otherwise a replacement would
        suffer too."""
        if len(diagnosis.causes) > 1 or cause.confidence < SURE or not replaceable(cause):
            return False
        shown = max(evidence.time for evidence in cause.evidence)
        if diagnosis.at - self._since[cause_key(cause)] < LASTING_S or diagnosis.at - shown > STILL_S:
            return False
        follower = self._follower
        return is_delayed(follower.bundle, follower.baselines, since=cause.onset, at=diagnosis.at)

    # Notifications.

    def _post_news(self) -> None:
        """Post the faults, alerts and ends that were read since the last call, whenever they happened."""
        bundle = self._follower.bundle
        news, bundle.news = sorted(bundle.news, key=lambda each: each.time), []
        before, self._reported_before = self._reported_before, -math.inf
        if self._webhook is None:
            return
        for each in news:
            ends_with_the_run = isinstance(each.event, ProcessGone) and bundle.is_over(each.time)
            said = notification(str(self._run_dir), each.time, each.process, each.event)
            if said is not None and each.time > before and not ends_with_the_run:
                self._webhook.send(said)

    def close(self) -> None:
        self._follower.close()
        self._learning.close()
        self._file.close()


def last_diagnosis(run_dir: Path) -> Diagnosis | None:
    """Return the last diagnosis in the file."""
    path = RunFolder(run_dir).diagnoses_file
    lines = lines_in(path.read_bytes()) if path.exists() else []
    try:
        return msgspec.json.decode(lines[-1], type=Diagnosis) if lines else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def webhook_of(run_dir: Path, configured: str | None) -> str | None:
    """Return the webhook's address, if there is one. It may be a credential, so the configuration shows its host only.
    An evaluation, which has a folder of its own, reports to none."""
    try:
        return read_owned(RunFolder(run_dir).webhook_file, secret=True).decode()
    except FileNotFoundError:
        return None if configured is None or configured.endswith(REDACTED) else configured


def run(run_dir: Path, section: MonitoringSection, *, lifeline: int, log: EventLog) -> None:
    """Watch until the lifeline ends; then diagnose once more, for the end of the run."""
    with ExitStack() as stack:
        if section.port:
            try:
                stack.enter_context(MetricsServer(run_dir, host=section.host, port=section.port))
            except UserError as error:  # The run continues without it.
                log.emit(Alert(f"no metrics for Prometheus: {error}"))
        webhook = None
        if (url := webhook_of(run_dir, section.webhook)) is not None:
            webhook = Webhook(url, say=lambda text: log.emit(Note(text)))
            stack.callback(webhook.close)
        watcher = DiagnosisWatcher(run_dir, log=log, webhook=webhook)
        stack.callback(watcher.close)
        poller = select.poll()
        poller.register(lifeline, select.POLLIN | select.POLLHUP)
        is_over = False
        while not is_over:
            watcher.look()
            with suppress(DeadlineExceeded):
                is_over = wait(
                    lambda remaining_s: bool(poller.poll(remaining_s * 1000)) or None,
                    whom="the run",
                    what="the next second, or its end",
                    timeout_s=EVERY_S,
                )
        watcher.look()


def main(arguments: list[str]) -> int:
    """Body of the process: `python -m kintsugi.diagnosis.watcher RUN_DIR LIFELINE`."""
    run_dir, lifeline = Path(arguments[0]), int(arguments[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICENESS)
    enable_stack_dumps()
    log = EventLog(RunFolder(run_dir).events_file(WATCHER), process=WATCHER)
    path = RunFolder(run_dir).config_file
    log.emit(ProcessBegan("watcher", str(os.getpid()), os.getpid()))
    code, reason = 1, ""
    try:
        section = load_config(path).monitoring if path.exists() else MonitoringSection()
        run(run_dir, section, lifeline=lifeline, log=log)
        code = 0
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        log.emit(ProcessEnded(code, reason))
        log.close()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
