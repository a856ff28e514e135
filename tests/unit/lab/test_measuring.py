from __future__ import annotations

from pathlib import Path

import msgspec

from kintsugi.lab import measuring
from kintsugi.lab.records import Spread
from kintsugi.observe.figures import HostSample, LinkSample, ProcessSample, Sample

STEADY = Spread(1.0, 0.1)


def test_totals_become_rates_and_a_new_process_begins_anew() -> None:
    assert measuring.rates([(0.0, 1.0), (2.0, 5.0), (3.0, 0.0), (4.0, 1.0)]) == [(2.0, 2.0), (4.0, 1.0)]


def test_a_baseline_is_taken_from_its_time_only() -> None:
    series = {"rtt_s": [(t, 1.0 if t < 5 else 100.0) for t in map(float, range(10))]}
    spread = measuring.spreads(series, since=0.0, until=4.0)["rtt_s"]
    assert spread.mean == 1.0 and spread.holds(1.01) and not spread.holds(2.0)


def test_a_figure_seen_once_has_no_spread() -> None:
    assert measuring.spreads({"x": [(1.0, 1.0)]}, since=0.0, until=5.0) == {}


def test_one_look_outside_is_chance_and_two_in_a_row_are_an_effect() -> None:
    once = [(1.0, 1.0), (2.0, 5.0), (3.0, 1.0), (4.0, 1.0)]
    twice = [(1.0, 1.0), (2.0, 5.0), (3.0, 5.0)]
    assert measuring.first_outside(once, STEADY, since=0.0) is None
    assert measuring.first_outside(twice, STEADY, since=0.0) == 2.0
    assert measuring.first_outside(twice, STEADY, since=2.5) is None


def test_a_step_is_overdue_before_it_ends() -> None:
    assert measuring.first_overdue([(10.0, 1.0), (20.0, 10.0)], STEADY, since=9.0) == 11.2


def test_the_first_effect_is_the_earliest_of_figures_steps_and_errors() -> None:
    effect = measuring.first_effect(
        steps={"timing/step": [(20.0, 10.0)]},
        figures={"model-1 cpu_s": [(12.0, 9.0), (13.0, 9.0)]},
        baseline={"timing/step": STEADY, "model-1 cpu_s": STEADY},
        since=10.5,
        errors=[30.0],
    )
    assert effect == 11.2


def test_without_any_effect_there_is_no_moment_of_it() -> None:
    assert measuring.first_effect(steps={}, figures={}, baseline={}, since=0.0, errors=[]) is None


def test_figures_are_those_of_the_process_its_host_and_its_links(tmp_path: Path) -> None:
    samples: list[tuple[float, Sample]] = []
    for t in (1.0, 2.0):
        samples += [
            (t, ProcessSample("model-1", 7, "S", {"cpu_s": t / 2, "rss_bytes": 5.0})),
            (t, ProcessSample("model-0", 8, "S", {"cpu_s": t})),
            (t, HostSample("host-1", {"fsync_s": 0.01})),
            (t, LinkSample("model-1", "agent-0", 99, "ESTABLISHED", {"rtt_s": 0.002})),
        ]
    folder = tmp_path / "figures"
    folder.mkdir()
    lines = [
        b'{"time":%f,"monotonic":0.0,"process":"agent-1",' % t + msgspec.json.encode(sample)[1:]
        for t, sample in samples
    ]
    (folder / "agent-1.jsonl").write_bytes(b"\n".join(lines) + b'\n{"torn')
    read = measuring.samples_in(tmp_path)
    assert len(read) == len(samples)
    assert measuring.figures_of(read, process="model-1", host="host-1") == {
        "model-1 cpu_s": [(2.0, 0.5)],
        "model-1 rss_bytes": [(1.0, 5.0), (2.0, 5.0)],
        "host-1 fsync_s": [(1.0, 0.01), (2.0, 0.01)],
        "model-1>agent-0 rtt_s": [(1.0, 0.002), (2.0, 0.002)],
    }


def test_a_run_without_figures_or_metrics_has_no_series(tmp_path: Path) -> None:
    assert measuring.samples_in(tmp_path) == [] and measuring.steps_of(tmp_path) == {}
