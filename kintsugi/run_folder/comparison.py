"""Comparison of runs: differences in configuration, metric curves, and paired tests on held-out problems.

Reads run folders only, of running and ended runs. `remarks` state the limits of a comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.config.recipe import fields_of, shown
from kintsugi.config.stages import stages
from kintsugi.errors import UserError
from kintsugi.run_folder import reader
from kintsugi.run_folder.creation import read_origins
from kintsugi.telemetry.eval_stats import difference_interval, mcnemar, unpaired_interval
from kintsugi.telemetry.step_metrics import EvalAnswerRecord

METRICS = ("reward/mean", "loss", "eval/accuracy", "kl", "entropy", "completions/mean_length")
"""Metrics that are shown by default, if a run has them."""
NO_KL = 1e-9
"""Smaller divergences are rounding."""
NOT_A_DIFFERENCE = frozenset({"run_dir", "name"})


class ComparedRun(msgspec.Struct, frozen=True):
    """One of the runs, with the letter that refers to it in the output."""

    label: str
    folder: str
    state: str
    step: int
    total_steps: int
    seed: int
    accuracy: float | None
    """Accuracy of the last evaluation."""


class Difference(msgspec.Struct, frozen=True):
    """A configuration field with different values; one value and origin per run."""

    field: str
    values: tuple[str, ...]
    origins: tuple[str, ...]
    """Empty if the run did not record it."""


class MetricCurve(msgspec.Struct, frozen=True):
    """One metric over the steps of the main stage, for each run."""

    metric: str
    steps: tuple[tuple[int, ...], ...]
    values: tuple[tuple[float, ...], ...]


class PairedResult(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of the last evaluations of two runs; `difference` is second − first, with its 95 % interval."""

    first: str
    second: str
    steps: tuple[int, int]
    difference: float
    low: float
    high: float
    paired: bool
    """Whether both were evaluated on the same problems, so that the answers are compared in pairs."""
    problems: tuple[int, int]
    only_first: int = 0
    only_second: int = 0
    p_value: float | None = None
    """P-value of McNemar's exact test; None if the problems differ."""


class SeedSummary(msgspec.Struct, frozen=True):
    """Runs that differ only in the seed."""

    labels: tuple[str, ...]
    accuracies: tuple[float, ...]


class Comparison(msgspec.Struct, frozen=True):
    """Result of `kintsugi compare`."""

    runs: tuple[ComparedRun, ...]
    differences: tuple[Difference, ...]
    curves: tuple[MetricCurve, ...]
    judgements: tuple[PairedResult, ...]
    seeds: tuple[SeedSummary, ...]
    remarks: tuple[str, ...]


def compare(folders: Sequence[Path], *, metrics: Sequence[str] = ()) -> Comparison:
    """Compare two or more runs."""
    if len(folders) < 2:
        raise UserError(f"expected two runs or more to compare, got {len(folders)}")
    for first, second in combinations(folders, 2):
        if first.resolve() == second.resolve():
            raise UserError(f"expected different runs to compare, got {first} twice")
    statuses = [reader.read_status(folder) for folder in folders]
    labels = [_label(index) for index in range(len(folders))]
    compared = tuple(map(_compared, labels, statuses))
    verdicts = [_last_verdicts(folder) for folder in folders]
    judgements = tuple(
        _judged(compared[i], compared[j], statuses[i], statuses[j], verdicts[i], verdicts[j])
        for i, j in combinations(range(len(folders)), 2)
        if statuses[i].evaluations and statuses[j].evaluations
    )
    differences = tuple(_differences(folders, statuses))
    seeds = tuple(_seeds(compared, statuses))
    return Comparison(
        compared,
        differences,
        tuple(_curves(folders, statuses, metrics)),
        judgements,
        seeds,
        tuple(_remarks(compared, statuses, differences, judgements, seeds)),
    )


def _label(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else f"R{index + 1}"


def _compared(label: str, status: reader.RunStatus) -> ComparedRun:
    return ComparedRun(
        label,
        str(status.folder),
        status.state,
        status.step,
        status.total_steps,
        status.config.seed,
        status.evaluations[-1]["eval/accuracy"] if status.evaluations else None,
    )


def _differences(folders: Sequence[Path], statuses: Sequence[reader.RunStatus]) -> Iterator[Difference]:
    """Yield the fields with different values, in the order of the configuration."""
    configs = [fields_of(status.config) for status in statuses]
    origins = [read_origins(folder) for folder in folders]
    for field in dict.fromkeys(field for config in configs for field in config):
        values = tuple(shown(config[field]) if field in config else "–" for config in configs)
        if field not in NOT_A_DIFFERENCE and len(set(values)) > 1:
            yield Difference(field, values, tuple(origin.get(field, "") for origin in origins))


def _curves(
    folders: Sequence[Path], statuses: Sequence[reader.RunStatus], metrics: Sequence[str]
) -> Iterator[MetricCurve]:
    """Yield the curves of the main stage; the warm-up has a different loss."""
    every = []
    for folder, status in zip(folders, statuses, strict=True):
        first = stages(status.config)[-1].first_step
        lines, _ = reader.read_metrics(folder)
        every.append([line for line in lines if (line["step"] or 0) >= first - reader.is_evaluation(line)])
    for metric in metrics or METRICS:
        points = [
            [(int(line["step"] or 0), line[metric]) for line in lines if line.get(metric) is not None]
            for lines in every
        ]
        if (
            metric == "kl"
            and not metrics
            and all(abs(value or 0.0) < NO_KL for run in points for _, value in run)
        ):
            continue  # Rounding: the run has no reference model.
        if any(points):
            yield MetricCurve(
                metric,
                tuple(tuple(step for step, _ in run) for run in points),
                tuple(tuple(float(value or 0.0) for _, value in run) for run in points),
            )
        elif metrics:
            known = sorted({name for lines in every for line in lines for name in line})
            raise UserError(f"--metric: expected one of {', '.join(known)}, got {metric!r}")


def _last_verdicts(folder: Path) -> EvalAnswerRecord | None:
    records = reader.read_verdicts(folder)
    return records[-1] if records else None


def _judged(
    first: ComparedRun,
    second: ComparedRun,
    first_status: reader.RunStatus,
    second_status: reader.RunStatus,
    first_verdicts: EvalAnswerRecord | None,
    second_verdicts: EvalAnswerRecord | None,
) -> PairedResult:
    """Compare two runs: in pairs if both were evaluated on the same problems, else as independent samples."""
    named: dict[str, Any] = {"first": first.label, "second": second.label}
    last = [status.evaluations[-1] for status in (first_status, second_status)]
    steps = (int(last[0]["step"] or 0), int(last[1]["step"] or 0))
    accuracies = [float(line["eval/accuracy"] or 0.0) for line in last]
    counts = (int(last[0].get("eval/problems") or 0), int(last[1].get("eval/problems") or 0))
    if (
        first_verdicts is None
        or second_verdicts is None
        or first_verdicts.problems != second_verdicts.problems
        or (first_verdicts.step, second_verdicts.step) != steps
    ):
        low, high = unpaired_interval(accuracies[0], accuracies[1], counts=counts)
        return PairedResult(
            **named,
            steps=steps,
            difference=accuracies[1] - accuracies[0],
            low=low,
            high=high,
            paired=False,
            problems=counts,
        )
    pairs = list(zip(first_verdicts.right, second_verdicts.right, strict=True))
    only_first, only_second = pairs.count((True, False)), pairs.count((False, True))
    low, high = difference_interval(
        both=pairs.count((True, True)),
        only_first=only_first,
        only_second=only_second,
        neither=pairs.count((False, False)),
    )
    return PairedResult(
        **named,
        steps=steps,
        difference=(only_second - only_first) / len(pairs),
        low=low,
        high=high,
        paired=True,
        problems=(len(pairs), len(pairs)),
        only_first=only_first,
        only_second=only_second,
        p_value=mcnemar(only_first=only_first, only_second=only_second),
    )


def _seeds(compared: Sequence[ComparedRun], statuses: Sequence[reader.RunStatus]) -> Iterator[SeedSummary]:
    """Group runs that differ only in their seed; the first run of each seed counts."""
    groups: dict[bytes, dict[int, ComparedRun]] = {}
    for run, status in zip(compared, statuses, strict=True):
        alike = msgspec.structs.replace(status.config, seed=0, run_dir=None, name="")
        groups.setdefault(msgspec.json.encode(alike), {}).setdefault(run.seed, run)
    for group in groups.values():
        yield SeedSummary(
            tuple(run.label for run in group.values()),
            tuple(run.accuracy for run in group.values() if run.accuracy is not None),
        )


def _remarks(
    compared: Sequence[ComparedRun],
    statuses: Sequence[reader.RunStatus],
    differences: Sequence[Difference],
    judgements: Sequence[PairedResult],
    seeds: Sequence[SeedSummary],
) -> Iterator[str]:
    """Yield notes that limit the conclusions from the numbers."""
    for run in compared:
        if run.state != reader.RunState.FINISHED:
            yield f"{run.label} is {run.state} at step {run.step} of {run.total_steps}."
    if len({judgement.steps for judgement in judgements} | {j.steps[::-1] for j in judgements}) > 1:
        yield "The last evaluations were not all made after the same number of steps."
    if any(not judgement.paired for judgement in judgements):
        yield (
            "Not all runs were evaluated on the same held-out problems (or they did not record the answers), so "
            "their accuracies are compared as independent samples."
        )
    if len({status.config.algorithm.reward[0] for status in statuses}) > 1:
        yield "The first reward function differs; it decides whether an answer is right."
    if {difference.field for difference in differences} == {"seed"}:
        yield (
            "The runs differ only in the seed: the differences show the variance of this recipe, not the effect "
            "of a change."
        )
    elif not differences:
        yield "The runs have the same configuration."
    elif all(len(group.labels) == 1 for group in seeds):
        yield (
            "One seed each: the intervals describe the difference between these two sets of weights on these "
            "problems. To compare the recipes rather than the seeds, run each with several seeds and compare all "
            "of these runs together."
        )
