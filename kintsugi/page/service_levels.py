"""Service levels of a run: throughput, success, hours of hardware, time lost to faults, and the targets for them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from kintsugi.page.incidents import title
from kintsugi.page.journal_tail import JournalTail
from kintsugi.page.line_files import last_lines
from kintsugi.page.metrics import MetricsTable
from kintsugi.page.schema import IncidentLoss, ServiceLevels, Target
from kintsugi.run_folder.incidents import IncidentReport
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.summary import Summary
from kintsugi.telemetry.readings import HostReading, samples_in
from kintsugi.types import Role

EFFECTIVE_TARGET = 0.95
SUCCESS_TARGET = 0.999
RECOVERY_TARGET_S = 30.0
"""Targets for every run: of the time, of the samples, and of the mean recovery."""
MOST_LOSSES = 50


def service_levels(
    run_dir: Path,
    *,
    metrics: MetricsTable,
    journal: JournalTail,
    summary: Summary | None,
    wall_s: float | None,
) -> ServiceLevels:
    """Return the service levels so far. `wall_s`: duration of all sessions of the run.

    While the journal is being read, what follows from incidents is not known: a part of them would look like a run that
    lost less.
    """
    report = journal.report() if journal.is_current else IncidentReport((), ())
    incidents, earlier = report.incidents, report.earlier
    losses = [
        IncidentLoss(incident=each.incident, title=title(each), seconds=each.seconds)
        for each in incidents
        if each.seconds is not None
    ]
    losses.sort(key=lambda each: -each.seconds)
    lost_s = math.fsum(each.seconds for each in losses) + earlier.seconds
    recovered = [each for each in incidents if each.mended_step is not None]
    num_recovered = len(recovered) + earlier.recovered
    success = _success(summary, journal, metrics)
    ratio = max(0.0, 1.0 - lost_s / wall_s) if wall_s and journal.is_current else None
    recovery_s = math.fsum(each.seconds or 0.0 for each in recovered) + earlier.seconds
    mean_s = recovery_s / num_recovered if num_recovered else None
    processors, accelerators = _hardware(run_dir)
    tokens = _total(metrics, "loss_tokens")
    samples = float(summary.samples_trained) if summary is not None else None
    targets = (
        _target("effective_ratio", "Effective training time", EFFECTIVE_TARGET, ratio, unit="share"),
        _target("success_rate", "Samples that were scored", SUCCESS_TARGET, success, unit="share"),
        _target("mean_recovery_s", "Mean recovery time", RECOVERY_TARGET_S, mean_s, unit="s", at_least=False),
    )
    return ServiceLevels(
        throughput=tokens / wall_s if tokens is not None and wall_s else None,
        samples_per_s=samples / wall_s if samples is not None and wall_s else None,
        success_rate=success,
        gpu_hours=accelerators * wall_s / 3600.0 if wall_s and accelerators else None,
        processor_hours=processors * wall_s / 3600.0 if wall_s and processors else None,
        wall_s=wall_s,
        training_s=_total(metrics, "timing/step"),
        lost_s=lost_s if journal.is_current else None,
        effective_ratio=ratio,
        incidents=len(incidents) + earlier.count if journal.is_current else None,
        recovered=num_recovered,
        mean_recovery_s=mean_s,
        steps_undone=sum(each.steps_undone for each in incidents) + earlier.steps_undone,
        losses=tuple(losses[:MOST_LOSSES]),
        targets=targets,
        problems=(*metrics.all_problems(), *journal.all_problems()),
    )


def _target(
    name: str, label: str, target: float, actual: float | None, *, unit: str, at_least: bool = True
) -> Target:
    met = None if actual is None else (actual >= target if at_least else actual <= target)
    return Target(name=name, label=label, target=target, actual=actual, met=met, unit=unit, at_least=at_least)


def _success(summary: Summary | None, journal: JournalTail, metrics: MetricsTable) -> float | None:
    """Return the share of samples that were neither lost nor unusable; of a run without a summary, of its groups."""
    if summary is not None and summary.samples:
        issued = summary.samples.get("issued", 0) - summary.samples.get("unfinished", 0)
        bad = summary.samples.get("lost", 0) + summary.samples.get("quarantined", 0)
        return 1.0 - bad / issued if issued > 0 else None
    quarantined = sum(count for reason, count in journal.dropped.items() if "quarantined" in reason)
    trained = _total(metrics, "ended/trained/samples")
    return trained / (trained + quarantined) if trained else None


def _total(metrics: MetricsTable, name: str) -> float | None:
    values = metrics.column(name)
    known = values[np.isfinite(values)]
    return float(known.sum()) if len(known) else None


def _hardware(run_dir: Path) -> tuple[float, int]:
    """Return the number of processors and accelerators of the run's hosts, as their agents measured them."""
    processors, accelerators = 0.0, 0
    for path in RunFolder(run_dir).readings_folder.glob(f"{Role.AGENT.value}-*.jsonl"):
        if "." in path.stem:
            continue
        lines = (line for line in reversed(last_lines(path, size=256 << 10)) if b'"HostSample"' in line)
        record = next(samples_in(lines), None)
        if record is not None and isinstance(record.sample, HostReading):
            values = record.sample.values
            processors += values.get("cpu_count", 0.0)
            accelerators += len(
                [
                    name
                    for name in values
                    if name.startswith("device_") and name.endswith("_memory_total_bytes")
                ]
            )
    return processors, accelerators
