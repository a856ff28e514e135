"""What people see of a trouble: a phase that does not end, a step that took long, a process that was replaced. Pure."""

from __future__ import annotations

from itertools import zip_longest
from statistics import median

import msgspec

from kintsugi.diagnosis.baseline import Baselines, usual
from kintsugi.diagnosis.evidence import MASTER, Bundle
from kintsugi.diagnosis.findings import Finding
from kintsugi.diagnosis.verdict import Hop

LATE_FACTOR = 3.0
LATE_S = 0.7
"""A phase or step that takes so much longer than usual is seen by people."""
LONGEST_LOOK_S = 6.0
FAILED_AFTER_S = 20.0
"""A run that fails so long after something was last seen has failed because of it: recovery takes its time."""


class Symptom(msgspec.Struct, frozen=True):
    hop: Hop
    seconds: float
    """By how much something took longer than usual; 0 where nothing did."""
    is_failure: bool = False


def symptom_of(bundle: Bundle, baselines: Baselines, finding: Finding, *, at: float) -> Symptom:
    """What showed between the onset of a finding and some seconds after its end."""
    until = min(at, max(finding.until, finding.onset) + LONGEST_LOOK_S)
    failed = _failure(bundle, finding, at)
    if failed is not None:
        return failed
    late = _late_phase(bundle, baselines, since=finding.onset - 0.5, until=until, at=at)
    noted = _noted(bundle, finding, until)
    if late is not None and (noted is None or late.seconds > 2 * LATE_S):
        return late
    go_on = any(finding.onset < step.time <= at for step in bundle.steps)
    words = "the steps go on as usual" if go_on else "no step has been committed since"
    return noted or late or Symptom(Hop(MASTER, words, until), 0.0)


def _failure(bundle: Bundle, finding: Finding, at: float) -> Symptom | None:
    for phase in bundle.phases:
        is_after = finding.onset <= phase.time <= min(at, finding.until + FAILED_AFTER_S)
        if is_after and phase.name == "ended" and "failed" in phase.reason:
            return Symptom(
                Hop(MASTER, f"the run failed: {phase.reason[:160]}", phase.time), 0.0, is_failure=True
            )
    return None


def _late_phase(
    bundle: Bundle, baselines: Baselines, *, since: float, until: float, at: float
) -> Symptom | None:
    """The phase that took most longer than it usually does, all others of its kind considered; one that was never seen
    before is held against a whole step."""
    lengths: dict[str, list[float]] = {}
    spans: list[tuple[float, float, str]] = []
    for phase, following in zip_longest(bundle.phases, bundle.phases[1:]):
        end = following.time if following is not None else at
        if phase.time >= baselines.settled or following is None:
            lengths.setdefault(phase.name, []).append(end - phase.time)
        if end >= since and phase.time <= until and phase.name not in ("starting", "preparing", "ended"):
            spans.append((phase.time, end, phase.name))
    step = usual([step.duration_s for step in bundle.steps if step.time >= baselines.settled])
    worst: Symptom | None = None
    for begin, end, name in spans:
        seconds = end - begin
        others = list(lengths.get(name, []))
        if seconds in others:
            others.remove(seconds)
        if not others and (step is None or name == "evaluating"):
            continue  # How long an evaluation takes has nothing to do with a step.
        known = usual(others) or (step if not others else None)
        middle = known.middle if known else median(others or [0.0])
        extra = seconds - middle
        if seconds < LATE_FACTOR * middle or extra < LATE_S or (worst is not None and extra <= worst.seconds):
            continue
        whole = "" if others else " for a whole step"
        what = f"{name} takes {seconds:.1f} s, usually {middle:.2f} s{whole}"
        worst = Symptom(Hop(MASTER, what, max(begin + middle, since)), extra)
    return worst


def _noted(bundle: Bundle, finding: Finding, until: float) -> Symptom | None:
    """What the master itself said about the process."""
    for said in (*bundle.faults, *bundle.alerts):
        about = said.fault.process if said.fault is not None else said.message
        if said.by == MASTER and finding.onset - 0.5 <= said.time <= until + 2.0 and finding.process in about:
            return Symptom(Hop(MASTER, said.message[:160], said.time), 0.0)
    return None


HELD_UP_FACTOR = 2.5
HELD_UP_S = 1.0


def is_held_up(bundle: Bundle, baselines: Baselines, *, since: float, at: float) -> bool:
    """Whether steps have taken far longer since a moment, or none has come at all."""
    before = usual([step.duration_s for step in bundle.steps if baselines.settled <= step.time < since])
    if before is None:
        return False
    after = [step for step in bundle.steps if since <= step.time <= at]
    waiting_s = at - (after[-1].time if after else since)
    now_s = max(median([step.duration_s for step in after] or [0.0]), waiting_s)
    return now_s >= HELD_UP_FACTOR * before.middle and now_s - before.middle >= HELD_UP_S
