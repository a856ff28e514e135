"""`diagnose(run_dir)`: one look at a run, dead or alive."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from kintsugi.diagnosis.baseline import COLD_S, Baselines, Past, past_of
from kintsugi.diagnosis.evidence import Bundle
from kintsugi.diagnosis.ranking import judge
from kintsugi.diagnosis.reading import Reader, last_recorded
from kintsugi.diagnosis.verdict import Diagnosis, FaultKind
from kintsugi.runtime import SYSTEM_CLOCK, Clock

PAST_S = 600.0
"""So much of the past is read: what is usual does not get clearer from more. What was wrong before, the watcher has
said when it was (`telling.earlier`)."""
EARLIER_S, PART_S = (3600.0, 2400.0, 1200.0), 120.0
"""What was usual before is taken from parts of the last hour, so long each."""
KEPT_S = 240.0
"""So much of it is kept by who follows a run."""
REFRESH_S = 10.0
"""Who follows a run computes what is usual anew so often."""
LOOK_S = 40.0
"""A run that goes on is looked at for so long: what follows from something must find it."""
PRESENT_S = 8.0
"""What last showed longer ago is over, and not what is wrong now; the watcher's verdicts tell of it."""
UNRECORDED_S = 3.0
"""So long all of them together are never silent: each has a heartbeat twice a second."""
ALIVE_S = 5.0
"""A run that recorded something so recently goes on."""


def diagnose(
    run_dir: str | Path,
    *,
    at: float | None = None,
    since: float | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Diagnosis:
    """What is wrong, or was at the wall clock time `at`: of a run that has ended all of its last ten minutes, of one
    that goes on what shows now, or has shown `since`.

    Raises UserError where there is no run. Reads nothing but what the run itself has recorded.
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
    return msgspec.structs.replace(diagnosis, took_s=round(clock.monotonic() - began, 4))


def _read(run_dir: Path, *, since: float, until: float) -> Bundle:
    reader = Reader(run_dir, since=since)
    try:
        return reader.read(until=until)
    finally:
        reader.close()


class Memory:
    """What is usual in a run that is looked at again and again, and since when something is wrong with it."""

    def __init__(self) -> None:
        self.baselines = Baselines(Bundle(), at=0.0)
        self._refresh_at = -math.inf
        self._past = Past()
        self._was_silent = False
        self._onsets: dict[tuple[str, FaultKind], float] = {}
        """Of what was wrong at the last look."""

    def look(self, bundle: Bundle, *, now: float) -> Diagnosis:
        """What is wrong now. Where nobody records any more, as on a full disk, nobody has become well: what was wrong
        last still is."""
        if now >= self._refresh_at:
            bundle.forget_before(now - KEPT_S)
            if not self._onsets:
                self._past.forget(at=now)
            self.baselines = Baselines(bundle, at=now, past=self._past)
            self._refresh_at = now + REFRESH_S
        at = min(now, bundle.at + ALIVE_S) if bundle.at else now
        unrecorded_s = self._unrecorded_s(bundle, now)
        return self._since_when(look(bundle, at=at, baselines=self.baselines, unrecorded_s=unrecorded_s))

    def _unrecorded_s(self, bundle: Bundle, now: float) -> float:
        """For how long nobody has written anything, if somebody should have: where that was so at the look before too,
        it is not that this process was kept from looking."""
        silent_s = now - bundle.at
        is_silent = len(bundle.beats) > 1 and silent_s >= UNRECORDED_S and not bundle.is_over(bundle.at)
        was_silent, self._was_silent = self._was_silent, is_silent
        return silent_s if is_silent and was_silent else 0.0

    def _since_when(self, diagnosis: Diagnosis) -> Diagnosis:
        """What was wrong at the last look too has been so since then, however little of it is looked at."""
        causes = tuple(
            msgspec.structs.replace(
                cause, onset=min(cause.onset, self._onsets.get((cause.process, cause.kind), cause.onset))
            )
            for cause in diagnosis.causes
        )
        self._onsets = {(cause.process, cause.kind): cause.onset for cause in causes}
        return msgspec.structs.replace(diagnosis, causes=causes)


class Follower:
    """Diagnoses a run that goes on, again and again: reads only what is new, and remembers what is usual."""

    def __init__(self, run_dir: str | Path, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._reader = Reader(Path(run_dir), since=clock.wall() - KEPT_S)
        self._memory = Memory()
        self.bundle = self._reader.bundle

    @property
    def baselines(self) -> Baselines:
        return self._memory.baselines

    def look(self) -> Diagnosis:
        began, now = self._clock.monotonic(), self._clock.wall()
        self._reader.read()
        diagnosis = self._memory.look(self.bundle, now=now)
        return msgspec.structs.replace(diagnosis, took_s=round(self._clock.monotonic() - began, 4))

    def close(self) -> None:
        self._reader.close()


def look(
    bundle: Bundle,
    *,
    at: float,
    since: float | None = None,
    is_over: bool = False,
    baselines: Baselines | None = None,
    begin: float = math.inf,
    unrecorded_s: float = 0.0,
) -> Diagnosis:
    """Judge what was gathered: of a run that goes on the last moments, or from `begin` on. Pure."""
    if since is None:
        since = max(bundle.began, at - PAST_S) if is_over else at - PRESENT_S
    begin = min(since, at - LOOK_S, begin)
    baselines = baselines or Baselines(bundle, at=at)
    return judge(
        bundle, baselines, begin=begin, since=since, at=at, is_over=is_over, unrecorded_s=unrecorded_s
    )
