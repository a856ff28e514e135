from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kintsugi.errors import StorageError
from kintsugi.lab.soak import report as reports
from kintsugi.lab.soak.report import FaultReport, Report, Totals


def fault(
    number: int, *, role: str = "server", kind: str = "kill", recovered_ms: float | None = 500.0
) -> FaultReport:
    return FaultReport(
        incident=number,
        role=role,
        kind=kind,
        phase="training",
        processes=(f"{role}-0",),
        step=number,
        detected_ms=10.0 * number,
        recovered_ms=recovered_ms,
        next_step_ms=recovered_ms,
        steps_lost=0,
        healthy_pids_unchanged=True,
        split={"detect": 10.0, "replay": 300.0},
    )


def report(faults: list[FaultReport], **changes: object) -> Report:
    totals = Totals(
        weights_sha256="w",
        weights_sha256_undisturbed="w",
        steps=10,
        runs=1,
        step_hashes_equal=True,
        max_staleness=0,
        staleness_max=0,
        reward=0.9,
        reward_undisturbed=0.9,
        first_different_step=None,
        states_distinct=True,
        samples_trained=80,
        samples_lost=0,
        samples_duplicated=0,
        processes_left=0,
        fd_growth=0,
        rss_growth_mb=0.0,
        num_processes=1,
        growth={"launcher": (0, 0.0)},
        ettr=0.8,
        step_s=0.2,
        wall_s=60.0,
        detected=reports.detection(faults),
        recovered=reports.recovery(faults),
        coverage={"server": {"training": len(faults)}},
        uncovered=(),
        missed=0,
        full_restart=reports.full_restart([4.0, 6.0], faults),
        failures=(),
        cold=False,
        seed=0,
    )
    return Report(tuple(faults), msgspec.structs.replace(totals, **changes))


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(value) for value in range(1, 201)]
    assert (reports.percentile(values, 0.5), reports.percentile(values, 0.99)) == (100.0, 198.0)
    assert reports.percentile([7.0], 0.99) == 7.0
    assert reports.percentile([], 0.5) is None


def test_times_are_told_per_kind_and_role() -> None:
    faults = [fault(1), fault(2), fault(3, role="model"), fault(4, role="host"), fault(5, kind="stop")]
    detected = reports.detection(faults)
    assert detected["kill server"].count == 2
    assert detected["kill of one process"].count == 3
    assert detected["kill host"].p99_ms == 40.0
    assert detected["stop of one process"].p50_ms == 50.0
    assert detected["stop master"].count == 0


def test_overlapping_faults_do_not_count_among_those_of_one_process() -> None:
    faults = [fault(1), fault(2, recovered_ms=9000.0), fault(2, role="model", recovered_ms=9000.0)]
    assert reports.recovery(faults)["kill of one process"].p99_ms == 500.0


def test_a_full_restart_is_compared_with_the_kill_of_one_process() -> None:
    faults = [fault(1), fault(2), fault(3, role="host", recovered_ms=5000.0), fault(4, kind="stop")]
    restart = reports.full_restart([4.0, 6.0], faults)
    assert restart is not None
    assert (restart.mean_s, restart.recovery_mean_s, restart.ratio) == (5.0, 0.5, 10.0)
    assert reports.full_restart([], faults) is None


def test_nothing_is_wrong_with_equal_runs() -> None:
    assert report([fault(1)]).totals.wrong == []


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"weights_sha256": "x"}, "the weights differ"),
        ({"step_hashes_equal": False, "first_different_step": 4}, "step 4 differs"),
        ({"max_staleness": 2, "staleness_max": 3}, "a sample of staleness 3 was trained, allowed are 2"),
        ({"max_staleness": 2, "reward": 0.5}, "reward 0.500 at the end, undisturbed 0.900"),
        ({"states_distinct": False}, "left the state as it was"),
        ({"samples_lost": 2}, "2 samples lost"),
        ({"samples_duplicated": 3}, "3 trained twice"),
        ({"processes_left": 1}, "1 processes left"),
        ({"num_processes": 0, "fd_growth": None, "wall_s": 600.0}, "no process lived long enough"),
        ({"failures": ("it ended with code 1",)}, "it ended with code 1"),
    ],
)
def test_every_broken_promise_is_named(changes: dict[str, object], found: str) -> None:
    (problem,) = report([fault(1)], **changes).totals.wrong
    assert found in problem


def test_the_report_is_written_as_faults_and_totals(tmp_path: Path) -> None:
    made = report([fault(1), fault(2)])
    reports.write(made, tmp_path / "soak.json")
    read = msgspec.json.decode((tmp_path / "soak.json").read_bytes())
    assert set(read) == {"faults", "totals"}
    assert {
        "role",
        "kind",
        "phase",
        "detected_ms",
        "recovered_ms",
        "steps_lost",
        "healthy_pids_unchanged",
    } <= set(read["faults"][0])


def test_a_report_that_can_not_be_written_says_where(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        reports.write(report([]), tmp_path / "nowhere" / "soak.json")


def test_people_see_coverage_times_and_what_is_wrong() -> None:
    console = Console(record=True, width=160)
    console.print(reports.render(report([fault(1), fault(2)], samples_lost=2)))
    text = console.export_text()
    assert "kill server" in text and "10.0× the recovery" in text and "2 samples lost" in text


def test_an_asynchronous_run_may_come_to_other_bits() -> None:
    found = report([], max_staleness=2, weights_sha256="v", step_hashes_equal=False)
    assert found.totals.wrong == []
