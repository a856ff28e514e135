"""What is computed from the results: times between instants, shares with their uncertainty, factors. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

import msgspec

from kintsugi.lab.fragile.scale import Scale
from kintsugi.lab.injection import Ability
from kintsugi.lab.records import Diagnosed, Moment, RunRecord
from kintsugi.lab.report.document import MISSING
from kintsugi.lab.report.plan import SCENARIOS, scenario_of
from kintsugi.lab.scoring import culprit, is_right

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
"""Which stage a process works in, by its role."""
MOST_STATIONS = 8


class Share(msgspec.Struct, frozen=True):
    """So many of so many."""

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
    """A line of a log without its time and level, and without the way to its files, on one line.

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


def start_of(run: RunRecord) -> float | None:
    """The first injection; everything in a figure is counted from it."""
    return min((fault.start for fault in run.injected), default=None)


def same_faults(run: RunRecord, other: RunRecord) -> bool:
    """Whether what struck both was as many faults of the same kinds and strengths."""

    def struck(record: RunRecord) -> list[tuple[str, list[tuple[str, float]]]]:
        return sorted((fault.kind, sorted(fault.amount.items())) for fault in record.injected)

    return struck(run) == struck(other)


def error_delay_s(run: RunRecord) -> float | None:
    """From the injection to the error that a person sees."""
    start = start_of(run)
    return None if run.surfaced is None or start is None else run.surfaced.t - start


def masking_s(run: RunRecord) -> float | None:
    """From the first effect to the error that a person sees: so long something else was to be seen."""
    return None if run.surfaced is None or run.first_effect is None else run.surfaced.t - run.first_effect


def diagnosis_s(run: RunRecord) -> float | None:
    """From the injection to the first verdict, right or wrong. Systems that record nothing have no first effect but
    their first error, so that only the injection is an origin for all of them."""
    start = start_of(run)
    return None if run.diagnosed is None or start is None else run.diagnosed.t - start


def stations_of(run: RunRecord) -> list[Moment]:
    """The way that the fault took: as the diagnosis says where it was right, else as the logs tell it afterwards."""
    start = start_of(run) or 0.0
    if run.diagnosed is not None and run.correct and run.diagnosed.path:
        return list(run.diagnosed.path)[:MOST_STATIONS]
    told: list[Moment] = []
    for moment in sorted(run.timeline, key=lambda each: each.t):
        is_ours = moment.what.startswith(("injected:", "undone:", "diagnosed:"))
        if moment.t >= start and not is_ours and (not told or told[-1].process != moment.process):
            told.append(moment)
    return told if len(told) <= MOST_STATIONS else [*told[: MOST_STATIONS - 1], told[-1]]


def path_of(run: RunRecord) -> tuple[str, ...]:
    """The processes that the fault went through, the cause first, each once."""
    named = [fault.target for fault in run.injected[:1]] + [moment.process for moment in stations_of(run)]
    if run.surfaced is not None:
        named.append(run.surfaced.process)
    return tuple(dict.fromkeys(named))


def reached(run: RunRecord) -> int:
    """How many processes the fault was in: its own, and one more for every hop."""
    return run.hops + 1


def says_right(run: RunRecord, said: Diagnosed | None) -> bool:
    """Whether somebody who believed this would have looked at what was broken first: what is injected elsewhere later
    only hides it."""
    if said is None or not run.injected:
        return False
    judged = run.diagnosed
    if judged is not None and (judged.process, judged.kind) == (said.process, said.kind):
        return run.correct
    first = run.injected[0].target
    culprits = [
        # All use the disk of the run folder, and any of them may speak for it.
        culprit(Ability(fault.kind), target=fault.target, start=fault.start, host_of={said.process: ""})
        for fault in run.injected
        if fault.target == first
    ]
    return is_right(said.process, said.kind, culprits)


def unscaled(value: float | None, run: RunRecord, *, scale: float) -> float | None:
    """What a time of the fragile system is with the plan's time-out in the place of the shortened one that passed in
    it; None where none did. At least: where several passed, one is lengthened."""
    scenario = SCENARIOS.get(scenario_of(run.scenario))
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
    """The mean of factors: twice and half cancel out."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def quantile(values: Sequence[float], fraction: float) -> float | None:
    """Interpolated between neighbours.

    >>> quantile([1.0, 2.0, 3.0, 4.0], 0.5)
    2.5
    """
    if not values:
        return None
    ordered, place = sorted(values), fraction * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def anomaly(run: RunRecord, name: str) -> float:
    """How far a series leaves its band after the first injection, in σ of the fault-free steps."""
    start, values = start_of(run), run.series[name]
    if start is None:
        return 0.0
    before = [value for t, value in values if t < start]
    after = [value for t, value in values if t >= start]
    band = run.baseline.get(name)
    mean = band.mean if band else quantile(before, 0.5)
    if mean is None or not after:
        return 0.0
    sigma = band.sigma if band else (max(before) - min(before)) / 4
    worst = max(abs(value - mean) for value in after)
    # A figure that never moved before leaves its band by any change; a floor keeps it comparable with the others.
    return worst / max(sigma, 0.02 * abs(mean), 1e-9)
