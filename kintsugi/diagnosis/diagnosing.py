"""`diagnose(run_dir)`: one look at a run, dead or alive."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from kintsugi.diagnosis.baseline import Baselines
from kintsugi.diagnosis.evidence import Bundle
from kintsugi.diagnosis.ranking import judge
from kintsugi.diagnosis.reading import Reader
from kintsugi.diagnosis.verdict import Diagnosis
from kintsugi.runtime import SYSTEM_CLOCK, Clock

PAST_S = 600.0
"""So much of the past is read: what is usual does not get clearer from more. What was wrong before, the watcher has
said when it was (`telling.earlier`)."""
KEPT_S = 240.0
"""So much of it is kept by who follows a run."""
REFRESH_S = 10.0
"""Who follows a run computes what is usual anew so often."""
LOOK_S = 40.0
"""A run that goes on is looked at for so long: what follows from something must find it."""
PRESENT_S = 8.0
"""What last showed longer ago is over, and not what is wrong now; the watcher's verdicts tell of it."""
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
    latest = _last_change(path) if at is None else at
    is_over = at is None and now - latest >= ALIVE_S
    reader = Reader(path, since=latest - PAST_S)
    try:
        bundle = reader.read(until=math.inf if at is None else at)
    finally:
        reader.close()
    moment = at if at is not None else bundle.at if is_over else now
    diagnosis = look(bundle, at=moment, since=since, is_over=is_over)
    return msgspec.structs.replace(diagnosis, took_s=round(clock.monotonic() - began, 4))


class Follower:
    """Diagnoses a run that goes on, again and again: reads only what is new, and remembers what is usual."""

    def __init__(self, run_dir: str | Path, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._reader = Reader(Path(run_dir), since=clock.wall() - KEPT_S)
        self._refresh_at = -math.inf
        self.bundle = self._reader.bundle
        self.baselines = Baselines(self.bundle, at=0.0)

    def look(self) -> Diagnosis:
        """What is wrong now. Where nobody records any more, as on a full disk, nobody has become well: what was wrong
        last still is."""
        began, now = self._clock.monotonic(), self._clock.wall()
        self._reader.read()
        if now >= self._refresh_at:
            self.bundle.forget_before(now - KEPT_S)
            self.baselines = Baselines(self.bundle, at=now)
            self._refresh_at = now + REFRESH_S
        at = min(now, self.bundle.at + ALIVE_S) if self.bundle.at else now
        diagnosis = look(self.bundle, at=at, baselines=self.baselines)
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
) -> Diagnosis:
    """Judge what was gathered. Pure."""
    if since is None:
        since = bundle.began if is_over else at - PRESENT_S
    begin = min(since, at - LOOK_S)
    return judge(bundle, baselines or Baselines(bundle, at=at), begin=begin, since=since, at=at)


def _last_change(run_dir: Path) -> float:
    """When anything was last recorded."""
    folders = (run_dir / "events", run_dir / "figures")
    times = [path.stat().st_mtime for folder in folders for path in folder.glob("*.jsonl")]
    return max(times, default=0.0)
