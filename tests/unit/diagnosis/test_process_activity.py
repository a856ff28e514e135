"""Activities of processes, from starts, counters, phases and open requests."""

from __future__ import annotations

from kintsugi.diagnosis.process_activity import (
    LONGEST_START_S,
    MARGIN_S,
    OF_REQUEST,
    WARM_S,
    Activity,
    ProcessActivities,
)
from kintsugi.protocol import recovery, training, weights
from kintsugi.telemetry.events import Transition
from kintsugi.types import Wait
from tests.unit.diagnosis.healthy import START, HealthyRun


def activities(run: HealthyRun) -> ProcessActivities:
    return ProcessActivities(run.bundle, at=run.time)


def test_every_request_that_implies_an_activity_is_a_message() -> None:
    modules = (recovery, training, weights)
    assert all(any(hasattr(module, name) for module in modules) for name in OF_REQUEST)


def test_a_process_starts_until_it_makes_progress_and_at_least_for_a_moment() -> None:
    run = HealthyRun().play(30)
    known = activities(run)
    assert known.intervals("model-0", Activity.STARTING) == [(START, START + WARM_S)]
    assert known.is_settled("model-0", START + 20.0)


def test_a_replacement_without_progress_is_starting_but_not_for_ever() -> None:
    run = HealthyRun(stalled=True).play(10)
    assert not activities(run).is_settled("model-0", run.time)
    run.play(int(LONGEST_START_S))
    assert activities(run).is_settled("model-0", run.time)


def enter(run: HealthyRun, phase: str) -> None:
    run.say("master-0", Transition("master", "run", "", phase, ""))


def test_ranks_save_and_are_repaired_in_the_phases_of_the_master_and_servers_are_not() -> None:
    run = HealthyRun().play(30)
    run.stalled = True
    enter(run, "saving")
    run.play(10)
    enter(run, "recovering")
    run.play(5)
    known = activities(run)
    assert known.is_in("model-1", START + 35, Activity.SAVING)
    assert known.is_in("model-1", START + 42, Activity.REPAIRING)
    assert not known.is_settled("model-1", START + 35)
    assert known.is_settled("server-0", START + 35)


def test_a_short_save_hides_what_follows_for_no_longer_than_it_took() -> None:
    run = HealthyRun().play(30)
    run.stalled = True
    enter(run, "saving")
    run.now += 0.1
    enter(run, "collecting")
    run.play(5)
    known = activities(run)
    assert not known.is_settled("model-0", START + 30.15)
    assert known.is_settled("model-0", START + 30.3)


def test_a_long_save_hides_the_samples_that_still_show_it() -> None:
    run = HealthyRun().play(30)
    run.stalled = True
    enter(run, "saving")
    run.play(10)
    enter(run, "collecting")
    run.play(5)
    known = activities(run)
    assert not known.is_settled("model-0", START + 40 + MARGIN_S - 0.1)
    assert known.is_settled("model-0", START + 40 + MARGIN_S + 0.1)
    assert known.has_transient("model-0", START + 25, START + 31)
    assert not known.has_transient("model-0", START + 25, START + 29)


def test_an_open_request_of_the_master_shows_a_save_beside_training() -> None:
    run = HealthyRun().play(30)
    run.waits["master-0"] = ("model-1", "Save", 30.0)
    run.play(5)
    del run.waits["master-0"]
    run.play(10)
    known = activities(run)
    assert known.is_in("model-1", START + 33, Activity.SAVING)
    assert not known.is_in("model-0", START + 33, Activity.SAVING)
    assert known.is_settled("model-1", START + 40)


def test_settled_readings_come_in_the_parts_that_transient_times_separate() -> None:
    run = HealthyRun().play(30)
    run.stalled = True
    enter(run, "saving")
    run.play(4)
    enter(run, "collecting")
    run.play(10)
    track = run.bundle.processes["model-0"]["rss_bytes"]
    first, second = activities(run).settled_parts("model-0", track, START + 20, run.time)
    assert [round(time - START) for time, _ in first] == list(range(20, 30))
    assert [round(time - START) for time, _ in second] == list(range(36, 45))


def test_a_wait_that_names_no_known_request_is_no_activity() -> None:
    run = HealthyRun().play(20)
    run.bundle.beats["master-0"][-1].waits = (Wait("model-0", "RunCall", run.time, run.time + 9),)
    assert activities(run).is_settled("model-0", run.time)


def test_a_save_is_usual_while_it_takes_no_longer_than_those_before() -> None:
    run = HealthyRun().play(20)
    run.stalled = True
    for seconds in (2, 2, 30):
        enter(run, "saving")
        run.play(seconds)
        enter(run, "collecting")
        run.play(10)
    known = activities(run)
    assert known.is_usual_save("model-0", START + 21)
    assert not known.is_usual_save("model-0", START + 28), "between two saves"
    assert known.is_usual_save("model-0", START + 44 + 5)
    assert not known.is_usual_save("model-0", START + 44 + 15), "three times as long as usual"
