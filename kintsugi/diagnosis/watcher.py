"""The watcher: a process of the run that diagnoses it all the time, and tells people, alerts and the master.

    files that grow ─► evidence of the last minutes ─► diagnosis, once a second ─► <run>/diagnoses.jsonl, events,
                                                                                   webhook, the master's requests

It consumes what the run records, waits for the next second, and ends when its lifeline does: with the launcher. Nobody
depends on it, and it depends on nobody: it may be killed at any time, and is started again.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from kintsugi.config import MonitoringSection
from kintsugi.diagnosis.diagnosing import Follower
from kintsugi.diagnosis.ranking import replaceable
from kintsugi.diagnosis.symptoms import is_held_up
from kintsugi.diagnosis.telling import DIAGNOSES_FILE
from kintsugi.diagnosis.verdict import Cause, Diagnosis
from kintsugi.errors import DeadlineExceeded, UserError
from kintsugi.observe.alerts import Notification, Webhook
from kintsugi.observe.events import Alert, EventLog, Note, ProcessBegan, ProcessEnded, events_path
from kintsugi.observe.lines import LineFile
from kintsugi.observe.prometheus import FiguresServer
from kintsugi.observe.verdicts import hand_over
from kintsugi.recipe import load_config
from kintsugi.runtime import SYSTEM_CLOCK, Clock, wait
from kintsugi.supervision import Verdict

PROCESS = "watcher-0"
EVERY_S = 1.0
SURE = 0.8
"""A process is replaced only for a verdict that is surer than this, …"""
LASTING_S = 5.0
"""… and that has held for so long."""
STILL_S = 2.5
"""What last showed longer ago may be over."""
CONFIG_FILE = "config.yaml"

_Key = tuple[str, str]


class Watcher:
    """One look after the other; `look` is what happens in a second."""

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
        self._file = LineFile(run_dir / DIAGNOSES_FILE)
        self._since: dict[_Key, float] = {}
        """Verdicts that hold → since when they were told."""
        self._handed: set[tuple[_Key, bool]] = set()
        self._posted = clock.wall()

    def look(self) -> Diagnosis:
        """Diagnose this moment, and tell what is new."""
        diagnosis = self._follower.look()
        self._tell(diagnosis)
        self._hand_over(diagnosis)
        self._post_alerts(diagnosis.at)
        return diagnosis

    def _tell(self, diagnosis: Diagnosis) -> None:
        """The verdicts as a line whenever they change, and each new one as an alert."""
        causes = {_key(cause): cause for cause in diagnosis.causes}
        if causes.keys() == self._since.keys():
            return
        with suppress(OSError):  # A full disk costs this line, not the watch.
            self._file.append(msgspec.json.encode(diagnosis) + b"\n")
        for key, cause in causes.items():
            if key not in self._since:
                values = {"confidence": cause.confidence, "onset": cause.onset}
                self._log.emit(Alert(f"cause {cause.kind.value}: {cause.summary}", values))
                self._post(diagnosis.at, cause.process, "diagnosis", cause.summary, cause)
        self._since = {key: self._since.get(key, diagnosis.at) for key in causes}
        self._handed = {each for each in self._handed if each[0] in causes}

    def _hand_over(self, diagnosis: Diagnosis) -> None:
        """Every verdict once; and once more when it is clear that the run would do better with another process."""
        for cause in diagnosis.causes:
            key = _key(cause)
            replace = self._is_to_replace(cause, diagnosis)
            if (key, replace) in self._handed:
                continue
            self._handed.add((key, replace))
            verdict = Verdict(
                process=cause.process,
                incarnation=self._follower.bundle.incarnations.get(cause.process, ""),
                kind=cause.kind.value,
                onset=cause.onset,
                confidence=cause.confidence,
                summary=cause.summary,
                path=tuple(dict.fromkeys(hop.process for hop in cause.path)),
                replace=replace,
            )
            with suppress(OSError):
                hand_over(self._run_dir, verdict)

    def _is_to_replace(self, cause: Cause, diagnosis: Diagnosis) -> bool:
        """Only who is alone in it: where several suffer, another process would suffer too."""
        if len(diagnosis.causes) > 1 or cause.confidence < SURE or not replaceable(cause):
            return False
        shown = max(evidence.time for evidence in cause.evidence)
        if diagnosis.at - self._since[_key(cause)] < LASTING_S or diagnosis.at - shown > STILL_S:
            return False
        follower = self._follower
        return is_held_up(follower.bundle, follower.baselines, since=cause.onset, at=diagnosis.at)

    # To people who are elsewhere.

    def _post_alerts(self, now: float) -> None:
        """What the processes of the run raised themselves."""
        if self._webhook is None:
            return
        bundle = self._follower.bundle
        for kind, said in (("fault", bundle.faults), ("alert", bundle.alerts)):
            for each in said:
                if self._posted < each.time <= now:
                    process = each.fault.process if each.fault is not None else each.by
                    self._post(each.time, process, kind, each.message, each.fault)
        self._posted = now

    def _post(self, time: float, process: str, kind: str, text: str, details: object) -> None:
        if self._webhook is not None:
            plain = msgspec.to_builtins(details)
            run = str(self._run_dir)
            self._webhook.send(
                Notification(run=run, time=time, process=process, kind=kind, text=text, details=plain)
            )

    def close(self) -> None:
        self._follower.close()
        self._file.close()


def _key(cause: Cause) -> _Key:
    return cause.process, cause.kind.value


def run(run_dir: Path, section: MonitoringSection, *, lifeline: int, log: EventLog) -> None:
    """Until the lifeline ends; then one last look, so that the end of the run is diagnosed too."""
    with ExitStack() as stack:
        if section.port:
            try:
                stack.enter_context(FiguresServer(run_dir, host="127.0.0.1", port=section.port))
            except UserError as error:  # The run goes on without it.
                log.emit(Alert(f"no figures for Prometheus: {error}"))
        webhook = None
        if section.webhook is not None:
            webhook = Webhook(section.webhook, say=lambda text: log.emit(Note(text)))
            stack.callback(webhook.close)
        watcher = Watcher(run_dir, log=log, webhook=webhook)
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
    log = EventLog(events_path(run_dir, PROCESS), process=PROCESS)
    path = run_dir / CONFIG_FILE
    log.emit(ProcessBegan("watcher", str(os.getpid()), os.getpid()))
    try:
        section = load_config(path).monitoring if path.exists() else MonitoringSection()
        run(run_dir, section, lifeline=lifeline, log=log)
    finally:
        log.emit(ProcessEnded(0, ""))
        log.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
