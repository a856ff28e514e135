"""What explains what, how sure it is, and when to say nothing."""

from __future__ import annotations

from kintsugi.diagnosis.diagnose import look
from kintsugi.diagnosis.evidence import EvidenceBundle
from kintsugi.diagnosis.ranking import ADVICE, EXPLAINS_LOCALLY, replaceable
from kintsugi.diagnosis.verdict import FaultKind
from kintsugi.telemetry.events import SlowProcess
from tests.unit.diagnosis.healthy import LINKS, HealthyRun
from tests.unit.diagnosis.looking import diagnosis_of, named
from tests.unit.diagnosis.test_thresholds import starve, throttle


def test_a_run_that_recorded_nothing_is_not_said_to_warm_up() -> None:
    assert look(EvidenceBundle(), at=1.0).abstained == "nothing was recorded of its processes"


def test_a_run_that_stands_still_is_not_said_to_be_well_though_nobody_is_to_blame() -> None:
    run = HealthyRun().play(30)
    assert "no process failed" in diagnosis_of(run).abstained
    run.stalled = True
    assert "no step was committed for 25 s, usually one in 1.0 s" in diagnosis_of(run.play(25)).abstained


def test_every_kind_of_fault_has_its_advice_and_its_consequences() -> None:
    assert set(ADVICE) == set(EXPLAINS_LOCALLY) == set(FaultKind)


def test_a_neighbour_that_is_starved_while_somebody_is_replaced_is_no_cause() -> None:
    run = HealthyRun().play(30)
    run.kill("server-0")
    run.changes["rollout-0"] = starve
    assert named(run.play(4)) == [("server-0", "killed")]


def test_two_faults_of_two_processes_are_both_named() -> None:
    run = HealthyRun().play(30)
    run.changes["model-1"] = throttle
    run.play(3)
    run.kill("rollout-0")
    assert set(named(run.play(1))) == {("rollout-0", "killed"), ("model-1", "cpu")}


def test_a_quota_that_holds_a_process_is_named_beside_a_slow_disk() -> None:
    run = HealthyRun().play(30)
    run.changes["host-0"] = lambda now, rates: rates.update(fsync_s=2.0)
    run.changes["rollout-1"] = throttle
    assert {("rollout-1", "cpu"), ("master-0", "disk_slow")} <= set(named(run.play(4)))


def test_a_process_that_is_cut_off_is_named_beside_one_that_was_killed() -> None:
    run = HealthyRun().play(30)
    run.kill("rollout-0")
    for link in LINKS:
        if "model-1" in link and "rollout-0" not in link:
            run.changes[link] = lambda now, rates: rates.update(backoff=min(5.0, now - 30), out_bytes=0.0)
    assert set(named(run.play(5))) == {("model-1", "network_cut"), ("rollout-0", "killed")}


def test_dead_connections_with_a_process_that_was_killed_are_no_fault_of_the_network() -> None:
    run = HealthyRun().play(30)
    run.kill("rollout-0")
    for link in LINKS:
        if "rollout-0" in link:
            run.changes[link] = lambda now, rates: rates.update(backoff=min(5.0, now - 30), out_bytes=0.0)
    assert named(run.play(5)) == [("rollout-0", "killed")]


def test_what_goes_on_comes_before_what_is_over() -> None:
    run = HealthyRun().play(30)
    run.kill("rollout-0")
    run.play(4)
    run.changes["model-1"] = throttle
    assert named(run.play(3)) == [("model-1", "cpu"), ("rollout-0", "killed")]


def test_an_error_that_names_what_broke_is_not_explained_away_by_a_figure() -> None:
    run = HealthyRun().play(30)
    run.changes["server-1"] = throttle
    run.play(3)
    run.fault("DeviceOutOfMemory", "server-1", "CUDA out of memory", by="server-1")
    assert ("server-1", "device_memory") in named(run.play(1))


def test_harm_that_people_see_makes_a_verdict_surer() -> None:
    calm, harmed = HealthyRun().play(30), HealthyRun().play(30)
    harmed.stalled = True
    for run in (calm, harmed):
        run.changes["model-1"] = throttle
        run.play(4)
    assert diagnosis_of(harmed).causes[0].confidence > diagnosis_of(calm).causes[0].confidence


def test_only_workers_are_replaced_and_only_for_what_another_may_do_better() -> None:
    run = HealthyRun().play(30)
    run.changes["model-1"] = throttle
    (cpu,) = diagnosis_of(run.play(3)).causes
    assert replaceable(cpu)
    run.kill("rollout-0")
    killed = next(cause for cause in diagnosis_of(run.play(1)).causes if cause.kind == "killed")
    assert not replaceable(killed)


def test_that_somebody_is_slow_is_said_only_when_what_would_explain_it_had_time_to_show() -> None:
    run = HealthyRun().play(30)
    run.stalled = True
    run.say("master-0", SlowProcess("a call takes 3 s", of="server-0"))
    assert named(run.play(1)) == []
    run.say("master-0", SlowProcess("a call takes 3 s", of="server-0"))
    assert ("server-0", "slow") in named(run.play(5))


def test_a_hang_of_long_ago_does_not_explain_a_kill_of_its_successor() -> None:
    run = HealthyRun().play(30)
    run.fault("Hung", "server-1", "no heartbeat of server-1 for 6.6 s")
    run.play(25)
    run.kill("server-1")
    assert named(run.play(2)) == [("server-1", "killed")]


def test_a_process_that_was_missed_before_its_end_was_reported_was_killed() -> None:
    run = HealthyRun().play(30)
    run.fault("Hung", "model-1", "no heartbeat of model-1 for 1.5 s")
    run.play(1)
    run.kill("model-1")
    assert named(run.play(2)) == [("model-1", "killed")]
