"""Report of a soak: JSON for programs, tables for the terminal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Group
from rich.table import Table

from kintsugi.errors import StorageError
from kintsugi.lab.injector.injection import Ability
from kintsugi.lab.soak.plan import SIGNAL_ABILITIES, WHOLE_HOSTS, FaultRole

PARTS = ("detect", "start", "rebuild", "repair", "replay")
MIN_FAULTS_PER_PAIR = 2
"""A pair of role and phase with fewer faults is reported as not covered."""
REWARD_TOLERANCE = 0.05
"""Accepted loss of reward of an asynchronous run with faults: which weights generate a sample depends on timing."""


class FaultReport(msgspec.Struct, frozen=True, kw_only=True):
    """One injected fault. Faults of one incident overlap: they are recovered together, timed from the last one."""

    incident: int
    role: str
    kind: str
    phase: str
    processes: tuple[str, ...]
    step: int
    """Last step committed before the fault."""
    detected_ms: float | None
    """Time until a process recorded the fault; None if that never happened."""
    recovered_ms: float | None
    """Time from the incident's last fault to the first step committed with all processes restored; None if that never
    happened."""
    next_step_ms: float | None
    """Time until the next committed step, even if processes were still missing."""
    steps_lost: int
    healthy_pids_unchanged: bool
    split: dict[str, float]
    """Milliseconds per part of the recovery: detect, start, rebuild, repair, replay."""


class Percentiles(msgspec.Struct, frozen=True):
    count: int
    p50_ms: float | None
    p99_ms: float | None


class FullRestart(msgspec.Struct, frozen=True):
    """Kill all processes and resume from the last checkpoint, until a step beyond the last committed one is
    committed."""

    seconds: tuple[float, ...]
    mean_s: float
    recovery_mean_s: float | None
    """Mean recovery time after the kill of one process, in the same soak."""
    ratio: float | None


GROWTH_WALL_S = 120.0
"""A soak that takes longer must have observed a process long enough to decide whether it leaks."""


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    weights_sha256: str
    """Hash of the final weights of the disturbed runs; several if they differ, empty if none completed."""
    weights_sha256_undisturbed: str
    steps: int
    """Steps per run."""
    runs: int
    step_hashes_equal: bool
    """Whether state, samples, cursor and ledger of every step of every disturbed run equal those of the undisturbed
    run."""
    first_different_step: int | None
    states_distinct: bool
    """Whether every step left a new state: guards against equal hashes of runs that made no progress."""
    max_staleness: int
    """Limit of the recipe; above 0 the runs are asynchronous and compared by samples and rewards, not by hashes."""
    staleness_max: int
    """Largest staleness that occurred."""
    reward: float | None
    """Lowest mean reward over the last steps of a disturbed run."""
    reward_undisturbed: float
    samples_trained: int
    samples_lost: int
    samples_duplicated: int
    processes_left: int
    fd_growth: int | None
    rss_growth_mb: float | None
    """Growth of the worst process over its lifetime; None when no process lived long enough."""
    num_processes: int
    """Number of processes that lived long enough to be measured."""
    growth: dict[str, tuple[int, float]]
    """Process name → growth in descriptors and MB, of the worst process with that name."""
    ettr: float
    """Effective training time ratio: time of the steps without faults divided by the time with faults."""
    step_s: float
    """Median step time of the undisturbed run."""
    wall_s: float
    detected: dict[str, Percentiles]
    """`kill server` → percentiles; also `kill` and `stop` over all roles."""
    recovered: dict[str, Percentiles]
    coverage: dict[str, dict[str, int]]
    """Role → phase → number of faults."""
    uncovered: tuple[tuple[str, str], ...]
    missed: int
    """Planned faults that were not injected because their phase passed or no process was found."""
    full_restart: FullRestart | None
    failures: tuple[str, ...]
    """Reasons why runs failed."""
    cold: bool
    seed: int

    @property
    def wrong(self) -> list[str]:
        """Violations of the guarantees; empty for a successful soak."""
        found = list(self.failures)
        if not self.weights_sha256:
            found.append("no disturbed run came to its end")
        if self.max_staleness:
            found += self._wrong_when_asynchronous()
        elif self.weights_sha256 and self.weights_sha256 != self.weights_sha256_undisturbed:
            found.append("the weights differ from those of the undisturbed run")
        if not self.max_staleness and not self.step_hashes_equal:
            found.append(f"step {self.first_different_step} differs from the undisturbed run's")
        if not self.states_distinct:
            found.append("some step left the state as it was")
        if self.samples_lost or self.samples_duplicated:
            found.append(f"{self.samples_lost} samples lost, {self.samples_duplicated} trained twice")
        if self.processes_left:
            found.append(f"{self.processes_left} processes left")
        if not self.num_processes and self.wall_s > GROWTH_WALL_S:
            found.append("no process lived long enough to say whether it grows")
        return found

    def _wrong_when_asynchronous(self) -> list[str]:
        found = []
        if self.staleness_max > self.max_staleness:
            found.append(
                f"a sample of staleness {self.staleness_max} was trained, allowed are {self.max_staleness}"
            )
        if self.reward is not None and self.reward < (1.0 - REWARD_TOLERANCE) * self.reward_undisturbed:
            found.append(f"reward {self.reward:.3f} at the end, undisturbed {self.reward_undisturbed:.3f}")
        return found


class Report(msgspec.Struct, frozen=True):
    faults: tuple[FaultReport, ...]
    totals: Totals


def write(report: Report, path: Path) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}") from error


def percentile(values: Sequence[float], fraction: float) -> float | None:
    """Return the smallest value that at least this fraction of the values does not exceed.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5)
    2.0
    """
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(fraction * len(values)) - 1)]


def percentiles(values: Sequence[float]) -> Percentiles:
    return Percentiles(len(values), percentile(values, 0.5), percentile(values, 0.99))


def single(faults: Iterable[FaultReport]) -> list[FaultReport]:
    """Return the faults of incidents with a single fault."""
    faults = list(faults)
    incidents = [fault.incident for fault in faults]
    return [fault for fault in faults if incidents.count(fault.incident) == 1]


def detection(faults: Sequence[FaultReport]) -> dict[str, Percentiles]:
    return {
        name: percentiles([fault.detected_ms for fault in group if fault.detected_ms is not None])
        for name, group in _groups(faults)
    }


def recovery(faults: Sequence[FaultReport]) -> dict[str, Percentiles]:
    """Return recovery times of single-fault incidents: an incident of several faults takes as long as the worst of
    them."""
    return {
        name: percentiles([fault.recovered_ms for fault in group if fault.recovered_ms is not None])
        for name, group in _groups(single(faults))
    }


def _groups(faults: Sequence[FaultReport]) -> Iterator[tuple[str, list[FaultReport]]]:
    for kind in SIGNAL_ABILITIES:
        of_kind = [fault for fault in faults if fault.kind == kind.value]
        yield f"{kind.value} of one process", [f for f in of_kind if f.role not in WHOLE_HOSTS]
        for target in FaultRole:
            yield f"{kind.value} {target.value}", [f for f in of_kind if f.role == target.value]


def full_restart(seconds: Sequence[float], faults: Sequence[FaultReport]) -> FullRestart | None:
    """Compare full restarts with the recovery from the kill of one process."""
    if not seconds:
        return None
    recovered = [
        fault.recovered_ms / 1000
        for fault in single(faults)
        if fault.recovered_ms is not None and fault.role not in WHOLE_HOSTS
        if fault.kind == Ability.KILL.value
    ]
    mean_s, recovery_s = statistics.fmean(seconds), statistics.fmean(recovered) if recovered else None
    return FullRestart(tuple(seconds), mean_s, recovery_s, mean_s / recovery_s if recovery_s else None)


def render(report: Report) -> Group:
    """Render coverage, times and totals for the terminal."""
    return Group(_coverage_table(report.totals), _times_table(report), _totals_table(report))


def _coverage_table(totals: Totals) -> Table:
    table = Table(title="injected faults", title_justify="left", box=None, pad_edge=False)
    phases = list(next(iter(totals.coverage.values()), {}))
    for name in ("role", *phases):
        table.add_column(name, justify="left" if name == "role" else "right")
    for role, counts in totals.coverage.items():
        table.add_row(role, *(str(counts[phase]) for phase in phases))
    return table


def _times_table(report: Report) -> Table:
    table = Table(title="milliseconds", title_justify="left", box=None, pad_edge=False)
    table.add_column("fault")
    for name in ("count", "detected p50", "p99", "recovered p50", "p99", *PARTS):
        table.add_column(name, justify="right")
    totals = report.totals
    for name, group in _groups(report.faults):
        if not group:
            continue
        detected, recovered = totals.detected[name], totals.recovered[name]
        parts = ([fault.split[part] for fault in group if part in fault.split] for part in PARTS)
        table.add_row(
            name,
            str(len(group)),
            *map(_number, (detected.p50_ms, detected.p99_ms, recovered.p50_ms, recovered.p99_ms)),
            *(_number(statistics.median(values) if values else None) for values in parts),
        )
    return table


def _totals_table(report: Report) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    totals = report.totals
    unchanged = sum(fault.healthy_pids_unchanged for fault in report.faults)
    lost = sum(fault.steps_lost for fault in report.faults)
    table.add_row("faults", f"{len(report.faults)} injected, {totals.missed} missed")
    table.add_row(
        "weights", f"{totals.weights_sha256[:16]}…, undisturbed {totals.weights_sha256_undisturbed[:16]}…"
    )
    if totals.max_staleness:
        bound = f"{totals.staleness_max} at most, {totals.max_staleness} allowed"
        table.add_row("staleness", bound)
        reached = "" if totals.reward is None else f"{totals.reward:.3f}, "
        table.add_row("reward at the end", f"{reached}undisturbed {totals.reward_undisturbed:.3f}")
    else:
        equal = "equal" if totals.step_hashes_equal else "DIFFERENT"
        table.add_row("steps", f"{totals.steps}, hashes {equal}")
    table.add_row("steps lost", str(lost))
    table.add_row("samples", f"{totals.samples_lost} lost, {totals.samples_duplicated} trained twice")
    table.add_row("healthy pids unchanged", f"{unchanged} of {len(report.faults)}")
    table.add_row("processes left", str(totals.processes_left))
    table.add_row("growth", _growth(totals))
    table.add_row(
        "productive share of time", f"{totals.ettr:.1%}, a step takes {totals.step_s:.2f} s undisturbed"
    )
    if (restart := totals.full_restart) is not None:
        ratio = f", {restart.ratio:.1f}× the recovery" if restart.ratio is not None else ""
        table.add_row("full restart", f"{restart.mean_s:.1f} s{ratio}")
    for problem in totals.wrong:
        table.add_row("wrong", problem)
    return table


def _growth(totals: Totals) -> str:
    if totals.fd_growth is None or totals.rss_growth_mb is None:
        return "not measured"
    worst = f"{totals.fd_growth} descriptors, {totals.rss_growth_mb:.1f} MB"
    return f"{worst} in the worst of {totals.num_processes} processes"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"
