"""How trouble travels from the one who does not move to what people see."""

from __future__ import annotations

from kintsugi.diagnosis.wait_graph import sinks, waits_in
from tests.unit.diagnosis.healthy import START, HealthyRun
from tests.unit.diagnosis.looking import diagnosis_of
from tests.unit.diagnosis.test_thresholds import throttle


def path_of(run: HealthyRun) -> list[str]:
    return [hop.process for hop in diagnosis_of(run).causes[0].path]


def test_the_way_follows_the_waits_that_processes_declared() -> None:
    run = HealthyRun().play(30)
    run.changes["model-1"] = throttle
    run.waits["model-0"] = ("model-1", "all-reduce", 30.0)
    run.waits["master-0"] = ("model-0", "RunCall", 30.0)
    run.play(4)
    assert path_of(run) == ["model-1", "model-0", "master-0"]
    assert "all-reduce" in diagnosis_of(run).causes[0].path[1].what


def test_where_nobody_declared_a_wait_the_way_is_that_of_the_work() -> None:
    run = HealthyRun().play(30)
    run.kill("server-0")
    assert path_of(run.play(1))[0] == "server-0"
    assert path_of(run)[-1] == "master-0"


def test_a_way_ends_with_the_phase_that_takes_too_long() -> None:
    run = HealthyRun().play(30)
    run.changes["model-1"] = throttle
    run.stalled = True
    run.play(6)
    last = diagnosis_of(run).causes[0].path[-1]
    assert last.process == "master-0"
    assert "publishing takes" in last.what


def test_who_is_waited_for_and_waits_for_nobody_is_where_waits_end() -> None:
    run = HealthyRun().play(30)
    run.waits["model-0"] = ("model-1", "all-reduce", 30.0)
    run.waits["master-0"] = ("model-0", "RunCall", 30.0)
    run.play(3)
    edges = waits_in(run.bundle, since=START + 30, until=run.time)
    assert set(sinks(edges)) == {"model-1"}
