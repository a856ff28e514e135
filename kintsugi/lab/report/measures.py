"""Values computed from the results: times between events, shares with their uncertainty, factors. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from kintsugi.diagnosis.verdict import FaultKind
from kintsugi.lab.campaign.scoring import KINDS, expected_cause, is_right
from kintsugi.lab.fragile.timeouts import Scale
from kintsugi.lab.injector.injection import Ability
from kintsugi.lab.report.document import MISSING
from kintsugi.lab.report.expectations import SCENARIOS, scenario_of
from kintsugi.lab.scenarios.records import DiagnosisRecord, InjectedRecord, RunRecord, TimedEvent

STAGES = {
    "master": "controller",
    "controller": "controller",
    "model": "train",
    "train": "train",
    "rollout": "rollout",
    "server": "rollout",
    "manager": "rollout",
    "agent": "host",
    "meta": "weight sync",
    "scheduler": "scheduler",
}
"""Stage that a process works in, by its role."""
MOST_STATIONS = 8
STEP_SERIES = "timing/step"
SECONDS_AFTER = 8.0
"""Metrics are considered up to this time after the last event of a run."""


class Share(msgspec.Struct, frozen=True):
    """`part` of `whole`."""

    part: int
    whole: int

    @property
    def value(self) -> float | None:
        return self.part / self.whole if self.whole else None

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval: it stays within 0 and 1, and does not vanish where all were right."""
        z = 1.96
        share, count = self.part / self.whole, self.whole
        centre = share + z * z / (2 * count)
        half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
        scale = 1 + z * z / count
        return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)

    def __str__(self) -> str:
        if not self.whole:
            return MISSING
        low, high = self.interval
        return f"{self.part / self.whole:.0%} ({self.part}/{self.whole}; {low:.0%}–{high:.0%})"


def share(values: Iterable[bool]) -> Share:
    each = list(values)
    return Share(sum(each), len(each))


def message_of(line: str) -> str:
    """Return a log line without timestamp, level and folders of paths, on one line.

    >>> message_of("[2026-11-16 09:08:02.863] ERROR: /data/lab/S5/run/step-3/config.json: No space left")
    '…/config.json: No space left'
    """
    bare = re.sub(
        r"^\W*\d{4}-\d\d-\d\d[ T][\d:.,]+[\]\s]*(?:(?:ERROR|WARNING|CRITICAL|FATAL)[:\s]*)?", "", line
    )
    short = re.sub(r"(?<![\w:/])/(?:[^/\s'\"]+/){2,}", "…/", bare or line)
    return " ".join(short.split()).replace("`", "'")


def stage_of(process: str) -> str:
    role = process.rpartition("-")[0] or process
    return STAGES.get(role, role)


def seconds(value: float | None) -> str:
    """
    >>> seconds(0.0123), seconds(4.56), seconds(3600.0), seconds(None)
    ('12 ms', '4.6 s', '60 min', 'not measured')
    """
    if value is None:
        return MISSING
    if value < 0:
        return f"-{seconds(-value)}"
    for limit, unit, factor, digits in ((0.1, "ms", 1e3, 0), (10, "s", 1, 1), (120, "s", 1, 0)):
        if value < limit:
            return f"{value * factor:.{digits}f} {unit}"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def target_fault_of(run: RunRecord) -> InjectedRecord | None:
    """Return the fault that has to be named; the first one in a record that does not mark it."""
    return next((fault for fault in run.injected if fault.culprit), next(iter(run.injected), None))


def strength(name: str, value: float) -> str:
    """Format one parameter of a fault with its unit.

    >>> strength("rate", 1e9), strength("block_size", 4 << 20), strength("delay_s", 1.0), strength("share", 0.95)
    ('rate 1 GB/s', 'block size 4 MiB', 'delay 1 s', 'share 95 %')
    """
    label = name.removesuffix("_s").replace("_", " ")
    if name == "rate":
        return f"{label} {_scaled(value, 1000, ('B/s', 'kB/s', 'MB/s', 'GB/s'))}"
    if name in ("limit", "block_size"):
        return f"{label} {_scaled(value, 1024, ('B', 'KiB', 'MiB', 'GiB'))}"
    if name == "share":
        return f"{label} {100 * value:g} %"
    return f"{label} {value:g} s" if name.endswith("_s") else f"{label} {value:g}"


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    place = min(len(units) - 1, int(math.log(value, base) + 1e-9)) if value >= 1 else 0
    return f"{value / base**place:.4g} {units[place]}"


def start_of(run: RunRecord) -> float | None:
    """Return the start of the fault that has to be named, the origin of all times."""
    fault = target_fault_of(run)
    return None if fault is None else fault.start


def end_of(run: RunRecord) -> float | None:
    """Return when it was known that the run would not continue: by its error, else by its end."""
    if run.surfaced is not None:
        return run.surfaced.t
    return run.ended or max((fault.end for fault in run.injected if fault.end), default=None)


def last_instant(run: RunRecord) -> float:
    """Return the last event that a figure shows: fault, error, verdict, or the end of a run that did not complete."""
    instants = [each.t for each in (run.surfaced, run.diagnosed) if each is not None]
    instants += [fault.end or fault.start for fault in run.injected]
    if unfinished_since(run) is not None:
        instants += [end] if (end := end_of(run)) is not None else []
    return max(instants, default=0.0)


def unfinished_since(run: RunRecord) -> float | None:
    """Return when the step began in which the run ended; None for a run that reached its last step."""
    ends = [t for t, _ in run.series.get(STEP_SERIES, [])]
    return max(ends) if ends and not run.recovered else None


def stalled_s(run: RunRecord) -> float | None:
    """Return the longest time without a committed step after the injection, up to the run's end where none came any
    more."""
    start, ends = start_of(run), sorted(t for t, _ in run.series.get(STEP_SERIES, []))
    if start is None or not ends:
        return None
    moments = [max((t for t in ends if t <= start), default=start), *(t for t in ends if t > start)]
    if not run.recovered:
        moments.append(max(moments[-1], end_of(run) or moments[-1]))
    return max((after - before for before, after in pairwise(moments)), default=None)


def steps_late(run: RunRecord) -> int | None:
    """Return the steps from the one that was hit to the one in which the error showed; None where that was not
    recorded."""
    fault, seen = target_fault_of(run), run.surfaced
    if fault is None or seen is None or seen.step is None:
        return None
    return seen.step - fault.step


def same_faults(run: RunRecord, other: RunRecord) -> bool:
    """Whether both runs had the same number of faults of the same kinds and strengths."""

    def faults_of(record: RunRecord) -> list[tuple[str, list[tuple[str, float]]]]:
        return sorted((fault.kind, sorted(fault.amount.items())) for fault in record.injected)

    return faults_of(run) == faults_of(other)


def error_delay_s(run: RunRecord) -> float | None:
    """Return the time from the injection to the visible error."""
    start = start_of(run)
    return None if run.surfaced is None or start is None else run.surfaced.t - start


def masking_s(run: RunRecord) -> float | None:
    """Return the time from the first effect to the visible error, during which something else was visible."""
    return None if run.surfaced is None or run.first_effect is None else run.surfaced.t - run.first_effect


def diagnosis_s(run: RunRecord) -> float | None:
    """Return the time from the injection to the first verdict, right or wrong."""
    start = start_of(run)
    return None if run.diagnosed is None or start is None else run.diagnosed.t - start


def stations_of(run: RunRecord) -> list[TimedEvent]:
    """Return the propagation of the fault: as diagnosed where the diagnosis is right, else from the logs."""
    start = start_of(run) or 0.0
    if run.diagnosed is not None and run.correct and run.diagnosed.path:
        return list(run.diagnosed.path)[:MOST_STATIONS]
    seen = run.surfaced

    def is_last(moment: TimedEvent) -> bool:
        """Whether this is the visible error, which follows the other log lines of the same millisecond."""
        return seen is not None and (moment.process, moment.what) == (seen.process, seen.message)

    found: list[TimedEvent] = []
    for moment in sorted(run.timeline, key=lambda each: (each.t, is_last(each))):
        is_ours = moment.what.startswith(("injected:", "undone:", "diagnosed:"))
        in_time = moment.t >= start and (seen is None or moment.t <= seen.t)
        if in_time and not is_ours and (not found or found[-1].process != moment.process):
            found.append(moment)
    return found if len(found) <= MOST_STATIONS else [*found[: MOST_STATIONS - 1], found[-1]]


def way_of(run: RunRecord) -> tuple[str, ...]:
    """Return the processes that the fault propagated through, one more than the hops; empty where they are not
    known."""
    if run.way:
        return run.way
    path = [moment.process for moment in run.diagnosed.path] if run.diagnosed is not None else []
    way = (*path[:1], *(after for before, after in pairwise(path) if before != after))
    return way if len(way) == run.hops + 1 else ()


def reached(run: RunRecord) -> int:
    """Return the number of processes that the fault reached: its own, and one per hop."""
    return run.hops + 1


def says_right(run: RunRecord, said: DiagnosisRecord | None) -> bool:
    """Whether a verdict points to the fault that has to be named; other faults only hide it."""
    if said is None or not run.injected:
        return False
    judged = run.diagnosed
    if judged is not None and (judged.process, judged.kind) == (said.process, said.kind):
        return run.correct
    target = target_fault_of(run)
    assert target is not None, "something was injected"
    expected = [
        # All processes use the disk of the run folder, so any of them is right.
        expected_cause(
            Ability(fault.kind),
            target=fault.target,
            start=fault.start,
            host_of={said.process: ""},
            kinds={*KINDS[Ability(fault.kind)], *map(FaultKind, run.kinds)},
        )
        for fault in run.injected
        if fault.target == target.target
    ]
    return is_right(said.process, said.kind, expected)


def unscaled(value: float | None, run: RunRecord, *, scale: float) -> float | None:
    """Return a time of the fragile system with the original time-out in place of the scaled one that passed in it; None
    where none did. A lower bound: where several passed, only one is replaced."""
    scenario = SCENARIOS.get(scenario_of(run))
    if value is None or run.profile != "fragile" or scenario is None or scenario.wait_s is None:
        return None
    here_s = Scale.by(scale).of(scenario.wait_s)
    return value - here_s + scenario.wait_s if here_s < scenario.wait_s and value >= 0.9 * here_s else None


def with_unscaled(value: float | None, run: RunRecord, *, scale: float) -> str:
    real = unscaled(value, run, scale=scale)
    return seconds(value) if real is None else f"{seconds(value)} → {seconds(real)}"


def factor(much: float, little: float) -> float | None:
    return much / little if little > 0 and much > 0 else None


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean of factors: 2 and ½ cancel out."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def quantile(values: Sequence[float], fraction: float) -> float | None:
    """Return the quantile, interpolated between neighbours.

    >>> quantile([1.0, 2.0, 3.0, 4.0], 0.5)
    2.5
    """
    if not values:
        return None
    ordered, place = sorted(values), fraction * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def is_own_metric(name: str) -> bool:
    """Whether a metric without a baseline belongs to the fault: a new metric of a process, such as that of a limit,
    does; one of a link does not, since connections are new for other reasons too."""
    return " " in name and ">" not in name


def anomaly(run: RunRecord, name: str) -> float:
    """Return how far a series leaves its band after the injection, in σ of the fault-free steps."""
    start, values = start_of(run), run.series[name]
    if start is None:
        return 0.0
    before = [value for t, value in values if t < start]
    after = [value for t, value in values if start <= t <= last_instant(run) + SECONDS_AFTER]
    band = run.baseline.get(name)
    if not after or not (before or band or is_own_metric(name)):
        return 0.0
    mean = band.mean if band else quantile(before, 0.5) or 0.0
    sigma = band.sigma if band else (max(before) - min(before)) / 4 if before else 0.0
    worst = max(abs(value - mean) for value in after)
    # A constant metric leaves its band with any change; the floor keeps it comparable with others.
    return worst / max(sigma, 0.02 * abs(mean), 1e-9)
