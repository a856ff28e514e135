"""`diagnose(run_dir)`: diagnosis of a run, ended or running."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from kintsugi.diagnosis.baseline import COLD_S, Baselines, PastReadings, past_of
from kintsugi.diagnosis.evidence import EvidenceBundle
from kintsugi.diagnosis.ranking import judge
from kintsugi.diagnosis.reader import EvidenceReader, last_recorded
from kintsugi.diagnosis.verdict import Cause, Diagnosis, Evidence, FaultKind
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.telemetry.stack_dump import newest_dump

PAST_S = 600.0
"""Past that is read: more does not improve the usual ranges. Earlier causes are in the watcher's file
(`format.earlier`)."""
EARLIER_S, PART_S = (3600.0, 2400.0, 1200.0), 120.0
"""Begin and length of the earlier parts of the run from which usual ranges are taken."""
KEPT_S = 240.0
"""Past that a follower of a run keeps."""
REFRESH_S = 10.0
"""Interval at which a follower computes the usual ranges."""
LOOK_S = 40.0
LOOK_STEPS, MOST_LOOK_S = 8.0, 200.0
"""Past of a running job in which findings are made, so that effects find their cause: seconds, additional steps, and
the limit of both, below what a follower keeps."""
PRESENT_S = 8.0
"""Age above which a finding is over and not reported as current."""
UNRECORDED_S = 3.0
"""Time without any record that is abnormal: each process has a heartbeat twice a second."""
CLOCKS_DIFFER_S = 2.0
"""Tolerance between the clock of a host, which stamps stack dumps, and the master's."""
ALIVE_S = 5.0
"""Age of the last record of a running job."""


def diagnose(
    run_dir: str | Path,
    *,
    at: float | None = None,
    since: float | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Diagnosis:
    """Diagnose a run now, or at the wall-clock time `at`: the last ten minutes of an ended run, the present of a
    running one, or the time from `since` on.

    Raises UserError if there is no run. Reads only records of the run itself.
    """
    began, now = clock.monotonic(), clock.wall()
    path = Path(run_dir)
    latest = last_recorded(path) if at is None else at
    is_over = at is None and now - latest >= ALIVE_S
    bundle = _read(path, since=latest - PAST_S, until=math.inf if at is None else at)
    moment = at if at is not None else bundle.at if is_over else now
    earlier = [
        _read(path, since=begin, until=begin + PART_S)
        for ago_s in EARLIER_S
        if bundle.began + COLD_S < (begin := latest - ago_s)
    ]
    baselines = Baselines(bundle, at=moment, past=past_of(bundle, earlier))
    diagnosis = look(
        bundle, at=moment, since=since, is_over=is_over, baselines=baselines, begin=latest - PAST_S
    )
    diagnosis = with_stacks(diagnosis, path)
    return msgspec.structs.replace(diagnosis, took_s=round(clock.monotonic() - began, 4))


def with_stacks(diagnosis: Diagnosis, run_dir: Path) -> Diagnosis:
    """Quote where a hung process stood: its agent lets it dump its stacks to its log before it ends it."""
    causes = tuple(
        msgspec.structs.replace(cause, evidence=(*cause.evidence, *_stacks(cause, run_dir)))
        if cause.kind is FaultKind.HUNG
        else cause
        for cause in diagnosis.causes
    )
    return msgspec.structs.replace(diagnosis, causes=causes)


def _stacks(cause: Cause, run_dir: Path) -> tuple[Evidence, ...]:
    log = RunFolder(run_dir).log_file(cause.process)
    dump = newest_dump(log, since=cause.onset - CLOCKS_DIFFER_S)
    if dump is None:
        return ()
    source = str(log.relative_to(run_dir))
    return (Evidence(source, dump.time, f"its main thread was in {dump.main_thread}"),)


def _read(run_dir: Path, *, since: float, until: float) -> EvidenceBundle:
    reader = EvidenceReader(run_dir, since=since)
    try:
        return reader.read(until=until)
    finally:
        reader.close()


class DiagnosisMemory:
    """State of a repeated diagnosis: usual ranges, and the onsets of current causes."""

    def __init__(self) -> None:
        self.baselines = Baselines(EvidenceBundle(), at=0.0)
        self._refresh_at = -math.inf
        self._past = PastReadings()
        self._was_silent = False
        self._onsets: dict[tuple[str, FaultKind], float] = {}
        """Onsets of the causes of the last diagnosis."""

    def look(self, bundle: EvidenceBundle, *, now: float) -> Diagnosis:
        """Diagnose the present. While nothing is recorded, as on a full disk, the last causes remain."""
        if now >= self._refresh_at:
            bundle.forget_before(now - KEPT_S)
            if not self._onsets:
                self._past.forget(at=now)
            self.baselines = Baselines(bundle, at=now, past=self._past)
            self._refresh_at = now + REFRESH_S
        at = min(now, bundle.at + ALIVE_S) if bundle.at else now
        unrecorded_s = self._unrecorded_s(bundle, now)
        return self._since_when(look(bundle, at=at, baselines=self.baselines, unrecorded_s=unrecorded_s))

    def _unrecorded_s(self, bundle: EvidenceBundle, now: float) -> float:
        """Return the time without any record, if it is abnormal; only if it was so at the diagnosis before too, since
        this process itself may have been suspended."""
        silent_s = now - bundle.at
        is_silent = len(bundle.beats) > 1 and silent_s >= UNRECORDED_S and not bundle.is_over(bundle.at)
        was_silent, self._was_silent = self._was_silent, is_silent
        return silent_s if is_silent and was_silent else 0.0

    def _since_when(self, diagnosis: Diagnosis) -> Diagnosis:
        """Keep the earliest onset of causes that last over several diagnoses."""
        causes = tuple(
            msgspec.structs.replace(
                cause, onset=min(cause.onset, self._onsets.get((cause.process, cause.kind), cause.onset))
            )
            for cause in diagnosis.causes
        )
        self._onsets = {(cause.process, cause.kind): cause.onset for cause in causes}
        return msgspec.structs.replace(diagnosis, causes=causes)


class Follower:
    """Diagnoses a running job repeatedly: reads only new records, and keeps the usual ranges."""

    def __init__(self, run_dir: str | Path, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._run_dir = Path(run_dir)
        self._reader = EvidenceReader(Path(run_dir), since=clock.wall() - KEPT_S)
        self._memory = DiagnosisMemory()
        self.bundle = self._reader.bundle

    @property
    def baselines(self) -> Baselines:
        return self._memory.baselines

    def look(self) -> Diagnosis:
        began, now = self._clock.monotonic(), self._clock.wall()
        self._reader.read()
        diagnosis = with_stacks(self._memory.look(self.bundle, now=now), self._run_dir)
        return msgspec.structs.replace(diagnosis, took_s=round(self._clock.monotonic() - began, 4))

    def close(self) -> None:
        self._reader.close()


def look(
    bundle: EvidenceBundle,
    *,
    at: float,
    since: float | None = None,
    is_over: bool = False,
    baselines: Baselines | None = None,
    begin: float = math.inf,
    unrecorded_s: float = 0.0,
) -> Diagnosis:
    """Diagnose gathered evidence: the last moments of a running job, or from `begin` on. Pure."""
    if since is None:
        since = max(bundle.began, at - PAST_S) if is_over else at - PRESENT_S
    baselines = baselines or Baselines(bundle, at=at)
    begin = min(since, at - min(MOST_LOOK_S, LOOK_S + LOOK_STEPS * baselines.step_s), begin)
    return judge(
        bundle, baselines, begin=begin, since=since, at=at, is_over=is_over, unrecorded_s=unrecorded_s
    )
