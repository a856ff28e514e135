from __future__ import annotations

from pathlib import Path

import msgspec

from kintsugi.lab.scenarios import measuring
from kintsugi.lab.scenarios.records import Spread
from kintsugi.run_folder.layout import RunFolder
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.events import EventLog, Span
from kintsugi.telemetry.readings import HostReading, LinkReading, ProcessReading, Sample, figures_in

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


def test_the_first_effect_is_the_earliest_of_metrics_steps_and_errors() -> None:
    effect = measuring.first_effect(
        steps={"timing/step": [(20.0, 10.0)]},
        metrics={"model-1 cpu_s": [(12.0, 9.0), (13.0, 9.0)]},
        baseline={"timing/step": STEADY, "model-1 cpu_s": STEADY},
        since=10.5,
        errors=[30.0],
    )
    assert effect == 11.2


def test_a_step_that_never_ended_was_overdue_when_it_should_have_ended() -> None:
    steps = [(9.0, 1.0), (10.0, 1.0)]
    assert measuring.first_overdue(steps, STEADY, since=9.5, until=30.0) == 11.2
    assert measuring.first_overdue(steps, STEADY, since=9.5, until=11.0) is None
    assert measuring.first_overdue(steps, STEADY, since=9.5) is None, "it came to its end"


def test_a_figure_that_was_not_there_before_counts_if_it_is_of_the_fault() -> None:
    def effect(metrics: measuring.Series) -> float | None:
        return measuring.first_effect(
            steps={}, metrics=metrics, baseline={}, since=10.0, errors=[], least={"throttled_s": 0.2}
        )

    assert effect({"model-1 throttled_s": [(9.0, 0.5), (11.0, 0.1), (12.0, 0.4)]}) == 12.0
    assert effect({"model-1>agent-0 rtt_s": [(11.0, 0.4), (12.0, 0.4)]}) is None


def test_without_any_effect_there_is_no_moment_of_it() -> None:
    assert measuring.first_effect(steps={}, metrics={}, baseline={}, since=0.0, errors=[]) is None


def record(run_dir: Path, recorder: str, *samples: tuple[float, Sample]) -> None:
    folder = run_dir / "figures"
    folder.mkdir(exist_ok=True)
    lines = [
        b'{"time":%f,"monotonic":0.0,"process":"%s",' % (t, recorder.encode())
        + msgspec.json.encode(sample)[1:]
        for t, sample in samples
    ]
    (folder / f"{recorder}.jsonl").write_bytes(b"\n".join(lines) + b'\n{"torn')


def test_metrics_are_those_of_the_process_its_host_and_its_links(tmp_path: Path) -> None:
    samples: list[tuple[float, Sample]] = []
    for t in (1.0, 2.0):
        samples += [
            (t, ProcessReading("model-1", 7, "S", {"cpu_s": t / 2, "rss_bytes": 5.0})),
            (t, ProcessReading("model-0", 8, "S", {"cpu_s": t})),
            (t, HostReading("host-1", {"fsync_s": 0.01})),
            (t, LinkReading("model-1", "agent-0", 99, "ESTABLISHED", {"rtt_s": 0.002})),
        ]
    record(tmp_path, "agent-1", *samples)
    record(tmp_path, "agent-0", (1.0, HostReading("host-0", {"fsync_s": 9.0})))
    read = figures_in(tmp_path)
    assert len(read) == len(samples) + 1
    assert measuring.hosts_of(read, "model-1") == ["host-1"]
    assert measuring.hosts_of(read, "model-7") == []
    assert measuring.metrics_of(read, process="model-1") == {
        "model-1 cpu_s": [(2.0, 0.5)],
        "model-1 rss_bytes": [(1.0, 5.0), (2.0, 5.0)],
        "host-1 fsync_s": [(1.0, 0.01), (2.0, 0.01)],
        "model-1>agent-0 rtt_s": [(1.0, 0.002), (2.0, 0.002)],
    }


def test_of_several_connections_of_a_link_the_worst_counts_at_each_moment(tmp_path: Path) -> None:
    links = [
        (t, LinkReading("model-1", "agent-0", port, "ESTABLISHED", {"rtt_s": rtt_s, "retransmits": total}))
        for t, port, rtt_s, total in [
            (1.0, 80, 0.1, 10),
            (1.0, 81, 0.9, 500),
            (2.0, 80, 0.3, 14),
            (2.0, 81, 0.2, 501),
        ]
    ]
    record(tmp_path, "agent-1", *links)
    assert measuring.metrics_of(figures_in(tmp_path), process="model-1") == {
        "model-1>agent-0 rtt_s": [(1.0, 0.9), (2.0, 0.3)],
        "model-1>agent-0 retransmits": [(2.0, 4.0)],
    }


def test_a_step_whose_metrics_could_not_be_written_is_known_by_its_event(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "time": 101.0, "timing/step": 1.0, "timing/train": 0.5}\n'
    )
    for step, wall in ((1, 101.0), (2, 103.5)):
        log = EventLog(
            RunFolder(tmp_path).events_file("master-0"),
            process="master-0",
            clock=VirtualClock(start=0.0, wall=wall),
        )
        log.emit(Span("step", 0.0, 2.5, {"step": str(step)}))
        log.close()
    assert measuring.steps_of(tmp_path) == {
        "timing/step": [(101.0, 1.0), (103.5, 2.5)],
        "timing/train": [(101.0, 0.5)],
    }


def test_a_run_without_figures_or_metrics_has_no_series(tmp_path: Path) -> None:
    assert measuring.metrics_of(figures_in(tmp_path), process="model-1") == {}
    assert measuring.steps_of(tmp_path) == {}
