"""Visible symptoms of a fault: a phase that does not end, a slow step, a replaced process. Pure."""

from __future__ import annotations

from itertools import zip_longest
from statistics import median

import msgspec

from kintsugi.diagnosis.baseline import Baselines, usual
from kintsugi.diagnosis.evidence import MASTER, EvidenceBundle
from kintsugi.diagnosis.findings import Finding
from kintsugi.diagnosis.verdict import Hop
from kintsugi.telemetry.events import RunFinished

LATE_FACTOR = 3.0
LATE_S = 0.7
"""Factor and seconds above the usual duration from which on a phase or step is a symptom."""
WINDOW_S = 6.0
FAILED_AFTER_S = 20.0
"""Longest time from the end of a finding to the failure of the run that it caused, with recovery in between."""


class Symptom(msgspec.Struct, frozen=True):
    hop: Hop
    seconds: float
    """Seconds above the usual duration; 0 where nothing took longer."""
    is_failure: bool = False


def symptom_of(bundle: EvidenceBundle, baselines: Baselines, finding: Finding, *, at: float) -> Symptom:
    """Return the symptom between the onset of a finding and some seconds after its end."""
    until = min(at, max(finding.until, finding.onset) + WINDOW_S)
    failed = _failure(bundle, finding, at)
    if failed is not None:
        return failed
    late = _late_phase(bundle, baselines, since=finding.onset - 0.5, until=until, at=at)
    recorded = _recorded(bundle, finding, until)
    if late is not None and (recorded is None or late.seconds > 2 * LATE_S):
        return late
    continues = any(finding.onset < step.time <= at for step in bundle.steps)
    words = "steps continue as usual" if continues else "no step has been committed since"
    return recorded or late or Symptom(Hop(MASTER, words, until), 0.0)


def _failure(bundle: EvidenceBundle, finding: Finding, at: float) -> Symptom | None:
    for note in bundle.notes:
        is_after = finding.onset <= note.time <= min(at, finding.until + FAILED_AFTER_S)
        if is_after and isinstance(note.event, RunFinished) and note.event.outcome == "failed":
            return Symptom(Hop(MASTER, note.message, note.time), 0.0, is_failure=True)
    return None


def _late_phase(
    bundle: EvidenceBundle, baselines: Baselines, *, since: float, until: float, at: float
) -> Symptom | None:
    """Return the phase with the largest excess over its usual duration; a phase that occurs for the first time is
    compared with a whole step."""
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
            continue  # The duration of an evaluation is not related to that of a step.
        known = usual(others) or (step if not others else None)
        middle = known.middle if known else median(others or [0.0])
        extra = seconds - middle
        if seconds < LATE_FACTOR * middle or extra < LATE_S or (worst is not None and extra <= worst.seconds):
            continue
        whole = "" if others else " for a whole step"
        what = f"{name} takes {seconds:.1f} s, usually {middle:.2f} s{whole}"
        worst = Symptom(Hop(MASTER, what, max(begin + middle, since)), extra)
    return worst


def _recorded(bundle: EvidenceBundle, finding: Finding, until: float) -> Symptom | None:
    """Return the first fault or alert about the process that the master recorded."""
    for each in (*bundle.faults, *bundle.alerts):
        is_close = finding.onset - 0.5 <= each.time <= until + 2.0
        if each.by == MASTER and is_close and each.about == finding.process:
            return Symptom(Hop(MASTER, each.message[:160], each.time), 0.0)
    return None


DELAY_FACTOR = 2.5
DELAY_S = 1.0


def is_delayed(bundle: EvidenceBundle, baselines: Baselines, *, since: float, at: float) -> bool:
    """Return whether steps have become far slower since a moment, or none was committed."""
    before = usual([step.duration_s for step in bundle.steps if baselines.settled <= step.time < since])
    if before is None:
        return False
    after = [step for step in bundle.steps if since <= step.time <= at]
    waiting_s = at - (after[-1].time if after else since)
    now_s = max(median([step.duration_s for step in after] or [0.0]), waiting_s)
    return now_s >= DELAY_FACTOR * before.middle and now_s - before.middle >= DELAY_S
