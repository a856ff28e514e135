"""The watcher: a process of the run that diagnoses it all the time, and tells people, alerts and the master.

    files that grow ─► evidence of the last minutes ─► diagnosis, once a second ─► <run>/diagnoses.jsonl, events,
                                                                                   webhook, the master's requests

It consumes what the run records, waits for the next second, and ends when its lifeline does: with the launcher. Nobody
depends on it, and it depends on nobody: it may be killed at any time, and is started again.
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

from kintsugi.config import MonitoringSection
from kintsugi.diagnosis.diagnosing import Follower
from kintsugi.diagnosis.notifying import (
    CauseKey,
    cause_key,
    notification,
    notification_of,
    notification_of_end,
)
from kintsugi.diagnosis.ranking import replaceable
from kintsugi.diagnosis.symptoms import is_held_up
from kintsugi.diagnosis.verdict import Cause, Diagnosis
from kintsugi.errors import DeadlineExceeded, UserError
from kintsugi.observe.alerts import Webhook
from kintsugi.observe.events import (
    Alert,
    EventLog,
    Note,
    ProcessBegan,
    ProcessEnded,
    ProcessGone,
    events_path,
)
from kintsugi.observe.lines import LineFile, lines_in
from kintsugi.observe.prometheus import FiguresServer
from kintsugi.observe.verdicts import DIAGNOSES_FILE, WATCHER, hand_over
from kintsugi.recipe import load_config
from kintsugi.runtime import SYSTEM_CLOCK, Clock, wait
from kintsugi.supervision import Verdict

EVERY_S = 1.0
SURE = 0.8
"""A process is replaced only for a verdict that is surer than this, …"""
LASTING_S = 5.0
"""… and that has held for so long."""
STILL_S = 2.5
"""What last showed longer ago may be over."""
AGAIN_S = 60.0
"""That a process is to be replaced is said again while it holds: the master may have been replaced itself."""
LARGEST_SIZE = 4 << 20
"""Of the file of verdicts; the three before it are kept too."""
STEPS_BACK = 10
"""How nice it is to those that it watches: a look takes milliseconds, and may take them when a processor is free."""
CONFIG_FILE = "config.yaml"


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
        self._file = LineFile(run_dir / DIAGNOSES_FILE, largest_size=LARGEST_SIZE)
        self._since: dict[CauseKey, float] = {}
        """Verdicts that hold → since when they were told."""
        self._standing: dict[CauseKey, Cause] = {}
        """The same, as they were last."""
        self._stale = bool((last := last_diagnosis(run_dir)) and last.causes)
        """The watcher before said that something is wrong, and did not live to say that it is over."""
        self._handed: dict[tuple[CauseKey, bool], float] = {}
        """A verdict, and whether to replace → when the master was told of it."""
        self._told_before = clock.wall()
        """What happened before the first look was told by the watcher before."""

    def look(self) -> Diagnosis:
        """Diagnose this moment, and tell what is new."""
        diagnosis = self._follower.look()
        self._tell(diagnosis)
        self._hand_over(diagnosis)
        self._post_news()
        return diagnosis

    def _tell(self, diagnosis: Diagnosis) -> None:
        """The verdicts as a line whenever they change, and each new one as an alert."""
        causes = {cause_key(cause): cause for cause in diagnosis.causes}
        before, self._standing = self._standing, causes
        if causes.keys() == self._since.keys() and not self._stale:
            return
        self._stale = False
        with suppress(OSError):  # A full disk costs this line, not the watch.
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
        """Every verdict once; and again, while it is clear that the run would do better with another process."""
        for cause in diagnosis.causes:
            key = cause_key(cause)
            replace = self._is_to_replace(cause, diagnosis)
            handed_at = self._handed.get((key, replace))
            if handed_at is not None and not (replace and diagnosis.at - handed_at >= AGAIN_S):
                continue
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
            with suppress(OSError):  # It is tried again at the next look.
                hand_over(self._run_dir, verdict)
                self._handed[key, replace] = diagnosis.at

    def _is_to_replace(self, cause: Cause, diagnosis: Diagnosis) -> bool:
        """Only who is alone in it: where several suffer, another process would suffer too."""
        if len(diagnosis.causes) > 1 or cause.confidence < SURE or not replaceable(cause):
            return False
        shown = max(evidence.time for evidence in cause.evidence)
        if diagnosis.at - self._since[cause_key(cause)] < LASTING_S or diagnosis.at - shown > STILL_S:
            return False
        follower = self._follower
        return is_held_up(follower.bundle, follower.baselines, since=cause.onset, at=diagnosis.at)

    # To people who are elsewhere.

    def _post_news(self) -> None:
        """What the processes of the run said themselves, and was read since the last look, whenever it happened."""
        bundle = self._follower.bundle
        news, bundle.news = sorted(bundle.news, key=lambda each: each.time), []
        before, self._told_before = self._told_before, -math.inf
        if self._webhook is None:
            return
        for each in news:
            ends_with_the_run = isinstance(each.event, ProcessGone) and bundle.is_over(each.time)
            said = notification(str(self._run_dir), each.time, each.process, each.event)
            if said is not None and each.time > before and not ends_with_the_run:
                self._webhook.send(said)

    def close(self) -> None:
        self._follower.close()
        self._file.close()


def last_diagnosis(run_dir: Path) -> Diagnosis | None:
    """What the watcher before said last."""
    path = run_dir / DIAGNOSES_FILE
    lines = lines_in(path.read_bytes()) if path.exists() else []
    try:
        return msgspec.json.decode(lines[-1], type=Diagnosis) if lines else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def run(run_dir: Path, section: MonitoringSection, *, lifeline: int, log: EventLog) -> None:
    """Until the lifeline ends; then one last look, so that the end of the run is diagnosed too."""
    with ExitStack() as stack:
        if section.port:
            try:
                stack.enter_context(FiguresServer(run_dir, host=section.host, port=section.port))
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
    os.nice(STEPS_BACK)
    log = EventLog(events_path(run_dir, WATCHER), process=WATCHER)
    path = run_dir / CONFIG_FILE
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
