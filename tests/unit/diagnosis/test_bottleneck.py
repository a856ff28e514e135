"""What holds a healthy run up the most."""

from __future__ import annotations

import pytest

from kintsugi.diagnosis.bottleneck import bottleneck_of, tell
from kintsugi.diagnosis.evidence import Bundle
from kintsugi.errors import UserError
from kintsugi.observe.events import Transition
from tests.unit.diagnosis.healthy import HealthyRun


def test_the_shares_of_all_kinds_are_all_of_the_time() -> None:
    report = bottleneck_of(HealthyRun().play(20).bundle)
    assert sum(report.shares.values()) == pytest.approx(1.0, abs=0.001)
    assert report.dominant in tell(report)


def test_processes_that_wait_for_a_processor_make_it_the_system() -> None:
    run = HealthyRun()
    for process in ("model-0", "model-1", "server-0", "server-1"):
        run.changes[process] = lambda _, rates: rates.update(cpu_s=0.05, run_delay_s=0.8)
    report = bottleneck_of(run.play(20).bundle)
    assert report.dominant == "system"
    assert "More processors" in report.suggestion


def test_a_run_that_saves_most_of_the_time_is_held_up_by_its_disk() -> None:
    run = HealthyRun(stalled=True)
    for second in range(20):
        run.now = float(second)
        name = "saving" if second % 4 else "training"
        run.say("master-0", Transition("master", "run", "", name, ""))
    report = bottleneck_of(run.bundle)
    assert report.dominant == "storage"
    assert "checkpoint.every" in report.suggestion


def test_ranks_that_wait_for_each_other_make_it_communication() -> None:
    run = HealthyRun(stalled=True)
    run.say("master-0", Transition("master", "run", "", "training", ""))
    for process in ("model-0", "model-1"):
        run.waits[process] = ("model-9", "all-reduce", 0.0)
    run.play(20)
    run.say("master-0", Transition("master", "run", "", "committing", ""))
    report = bottleneck_of(run.bundle)
    assert report.dominant == "communication"


def test_of_a_run_that_recorded_nothing_nothing_is_said() -> None:
    with pytest.raises(UserError, match="no phase of its work"):
        bottleneck_of(Bundle(run="runs/empty"))
