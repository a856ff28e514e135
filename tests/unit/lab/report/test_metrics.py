from __future__ import annotations

import msgspec

from kintsugi.lab.report import metrics
from kintsugi.lab.scenarios.records import RunsFile


def test_what_was_hit_is_shown_beside_what_that_held_up(runs: RunsFile) -> None:
    run = next(run for run in runs.runs if run.scenario == "S1")
    step, usual = run.series["timing/step"], run.baseline["timing/step"]
    series = {
        "timing/train": step,
        "timing/weights": [(t, 9.0) for t, _ in step],
        "model-0 cpu_s": [(t, 1e9 * number) for number, (t, _) in enumerate(step)],
        **run.series,
    }
    baseline = {**run.baseline, "timing/train": usual, "timing/weights": usual}

    shown = metrics.chosen(msgspec.structs.replace(run, series=series, baseline=baseline))

    assert shown == ["model-1>agent-0 rtt_s", "timing/weights"]


def test_the_figure_of_the_fault_that_is_to_be_named_comes_first(runs: RunsFile) -> None:
    run = next(run for run in runs.runs if run.scenario == "S1" and run.profile == "ours")
    start = run.injected[0].start
    other = msgspec.structs.replace(run.injected[0], kind="cpu")
    named = msgspec.structs.replace(run.injected[0], culprit=True)
    series = {**run.series, "model-1 throttled_s": [(start + second, 0.9) for second in range(5)]}
    both = msgspec.structs.replace(run, injected=(other, named), series=series)

    assert metrics.chosen(both)[0] == "model-1>agent-0 rtt_s"
    alone = msgspec.structs.replace(both, injected=(other,))
    assert metrics.chosen(alone)[0] == "model-1 throttled_s", "that of a limit which was not there before"


def test_what_stayed_within_its_band_is_not_shown_as_an_anomaly(runs: RunsFile) -> None:
    run = next(run for run in runs.runs if run.profile == "fragile")
    steps = run.series["timing/step"]
    flat = {"timing/step": steps, "tokens_per_s": [(t, 5.0) for t, _ in steps]}

    assert metrics.chosen(msgspec.structs.replace(run, series=flat)) == ["timing/step"]
