from __future__ import annotations

import msgspec

from kintsugi.lab.records import RunsFile
from kintsugi.lab.report import metrics


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
