"""The text format that all pages share."""

from __future__ import annotations

import re
from pathlib import Path

from kintsugi.telemetry.export.metric_help import HELP, help_of
from kintsugi.telemetry.export.prometheus_text import Histogram, metric_lines, text_of

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_a_histogram_counts_cumulatively() -> None:
    histogram = Histogram((0.5, 1.0))
    histogram.observe(0.25)
    histogram.observe(0.75, count=2)
    histogram.observe(9.0)
    assert list(histogram.lines("wait_seconds", help_text="Waits.")) == [
        "# HELP kintsugi_wait_seconds Waits.",
        "# TYPE kintsugi_wait_seconds histogram",
        'kintsugi_wait_seconds_bucket{le="0.5"} 1',
        'kintsugi_wait_seconds_bucket{le="1.0"} 3',
        'kintsugi_wait_seconds_bucket{le="+Inf"} 4',
        "kintsugi_wait_seconds_sum 10.75",
        "kintsugi_wait_seconds_count 4",
    ]


def test_values_that_are_not_finite_have_the_formats_spelling() -> None:
    series = [
        ((("n", str(number)),), value) for number, value in enumerate((float("nan"), float("inf"), -1e400))
    ]
    lines = text_of(metric_lines("x", "gauge", help_text="X.", series=series)).splitlines()
    assert [line.split()[-1] for line in lines[2:]] == ["NaN", "+Inf", "-Inf"]


def test_a_metric_of_a_family_is_described_by_the_family() -> None:
    assert help_of("step_timing/rollout") == HELP["step_timing"]
    assert help_of("step_reward/mean") == HELP["step_reward/mean"] != HELP["step_reward"]
    assert help_of("no_such_metric") is None


def test_every_described_step_metric_is_documented() -> None:
    documented = set(re.findall(r"`([a-z0-9_/]+)", DOCS.read_text(encoding="utf-8")))
    names = {name.removeprefix("step_") for name in HELP if name.startswith("step_")}
    assert {name for name in names if not any(each.startswith(name) for each in documented)} == set()
