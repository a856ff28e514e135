"""What holds a healthy run up the most, from what was gathered."""

from __future__ import annotations

import pytest

from kintsugi.diagnosis.activity import ActivityTable
from kintsugi.diagnosis.bottleneck import Bottleneck, bottleneck_of, format_bottleneck
from kintsugi.diagnosis.evidence import MASTER, EvidenceBundle
from kintsugi.errors import UserError
from kintsugi.telemetry.events import ProcessBegan, Transition
from tests.unit.diagnosis.healthy import START, HealthyRun

SERVERS, RANKS = ("server-0", "server-1"), ("model-0", "model-1")


def in_phases(run: HealthyRun, *phases: tuple[str, int]) -> HealthyRun:
    """Play seconds of each, one after the other."""
    run.stalled = True
    for name, seconds in phases:
        run.say(MASTER, Transition("master", "run", "", name, ""))
        run.play(seconds)
    run.say(MASTER, Transition("master", "run", "", "ended", ""))
    return run


def generating(begin: float, end: float) -> ActivityTable:
    return ActivityTable(generating={server: [(START + begin, START + end)] for server in SERVERS})


def share(report: Bottleneck, kind: str, where: str) -> float:
    return sum(part.share for part in report.parts if (part.kind, part.where) == (kind, where))


def test_the_shares_of_all_kinds_are_all_of_the_time() -> None:
    report = bottleneck_of(HealthyRun().play(20).bundle)
    assert sum(report.shares.values()) == pytest.approx(1.0, abs=0.001)
    assert report.seconds == pytest.approx(20.0)
    assert report.dominant in format_bottleneck(report)


def test_processes_that_wait_for_a_processor_while_they_work_make_it_the_system() -> None:
    run = HealthyRun()
    for process in (*SERVERS, *RANKS):
        run.changes[process] = lambda _, rates: rates.update(cpu_s=0.15, run_delay_s=0.8)
    report = bottleneck_of(in_phases(run, ("collecting", 10), ("training", 10)).bundle, generating(0, 10))
    assert report.dominant == "system"
    assert "More CPUs" in report.suggestion
    assert share(report, "system", "sampling") == pytest.approx(0.4, abs=0.03)


def test_servers_that_have_little_to_do_wait_little_though_that_is_most_of_what_they_do() -> None:
    run = HealthyRun()
    for process in SERVERS:
        run.changes[process] = lambda _, rates: rates.update(cpu_s=0.01, run_delay_s=0.03)
    report = bottleneck_of(in_phases(run, ("collecting", 20)).bundle, generating(0, 20))
    assert share(report, "system", "sampling") == pytest.approx(0.03, abs=0.005)


def test_what_servers_wait_for_while_ranks_train_does_not_hold_collecting_up() -> None:
    run = HealthyRun()
    for process in SERVERS:
        run.changes[process] = lambda now, rates: rates.update(run_delay_s=0.9 if now > 10.5 else 0.0)
    report = bottleneck_of(in_phases(run, ("collecting", 10), ("training", 10)).bundle, generating(0, 20))
    assert share(report, "system", "sampling") == 0.0
    assert share(report, "compute", "sampling") == pytest.approx(0.5, abs=0.01)


def test_a_phase_shorter_than_a_look_is_taken_for_the_time_in_which_they_waited() -> None:
    """Servers that generate for 0.3 s of every second, and wait for 0.15 s, wait half of what they generate."""
    run = HealthyRun()
    for process in SERVERS:
        run.changes[process] = lambda _, rates: rates.update(cpu_s=0.15, run_delay_s=0.15)
    run.play(20)
    spans = [(START + second, START + second + 0.3) for second in range(20)]
    report = bottleneck_of(run.bundle, ActivityTable(generating={"server-0": spans, "server-1": spans}))
    assert share(report, "system", "sampling") == pytest.approx(0.15, abs=0.01)
    assert share(report, "compute", "sampling") == pytest.approx(0.15, abs=0.01)


def test_a_run_that_saves_most_of_the_time_is_held_up_by_its_disk() -> None:
    report = bottleneck_of(in_phases(HealthyRun(), ("training", 5), ("saving", 15)).bundle)
    assert report.dominant == "storage"
    assert report.shares["storage"] == pytest.approx(0.75)
    assert "checkpoint.every" in report.suggestion


def test_ranks_that_wait_for_each_other_make_it_communication() -> None:
    run = HealthyRun()
    for process in RANKS:
        run.waits[process] = ("model-9", "all-reduce", 0.0)
    report = bottleneck_of(in_phases(run, ("training", 20)).bundle)
    assert report.dominant == "communication"


def test_the_phase_that_is_under_way_counts_up_to_the_last_record() -> None:
    run = in_phases(HealthyRun(), ("collecting", 2), ("training", 30))
    del run.bundle.phases[-1]
    report = bottleneck_of(run.bundle)
    assert report.seconds == pytest.approx(32.0)
    assert share(report, "compute", "training") + share(report, "system", "training") == pytest.approx(
        30 / 32
    )


def test_the_part_of_a_phase_counts_that_lies_after_the_beginning_of_what_is_looked_at() -> None:
    run = in_phases(HealthyRun(), ("training", 30), ("saving", 5))
    report = bottleneck_of(run.bundle, since=START + 20)
    assert report.seconds == pytest.approx(15.0)
    assert report.shares["storage"] == pytest.approx(5 / 15, abs=0.001)


def test_servers_that_generate_beside_training_are_told_of() -> None:
    run = in_phases(HealthyRun(), ("collecting", 2), ("training", 20))
    assert "servers generate during 50% of it" in bottleneck_of(run.bundle, generating(0, 12)).figure
    assert "beside" not in format_bottleneck(bottleneck_of(run.bundle, generating(0, 2)))


def test_the_use_of_accelerators_and_their_memory_are_those_of_the_phase() -> None:
    run = HealthyRun()

    def device(now: float, values: dict[str, float]) -> None:
        values["device_0_utilization"] = 0.9 if now <= 10 else 0.2
        values |= {"device_0_memory_bytes": 60e9, "device_0_memory_total_bytes": 80e9}

    run.changes["host-0"] = device
    report = bottleneck_of(in_phases(run, ("collecting", 10), ("training", 10)).bundle, generating(0, 10))
    figures = {(part.kind, part.where): part.figure for part in report.parts}
    assert "accelerator is used 90% of it, its memory is 75% full" in figures["compute", "sampling"]
    assert "accelerator is used 20% of it" in figures["compute", "training"]


def test_time_in_which_there_was_no_master_is_nobodys() -> None:
    run = HealthyRun(stalled=True)
    run.say(MASTER, Transition("master", "run", "", "training", ""))
    run.play(10)
    run.now += 7200.0
    run.say(MASTER, ProcessBegan("master", "2", 9000))
    run.now += 5.0
    run.say(MASTER, Transition("master", "run", "starting", "saving", ""))
    report = bottleneck_of(run.bundle)
    assert report.seconds == pytest.approx(15.0)
    assert share(report, "system", "other") == pytest.approx(5 / 15, abs=0.001)


def test_without_spans_collecting_is_sampling_and_that_is_said() -> None:
    report = bottleneck_of(in_phases(HealthyRun(), ("collecting", 20)).bundle)
    assert share(report, "compute", "sampling") == pytest.approx(1.0)
    assert "not recorded" in report.figure


def test_of_a_run_that_recorded_nothing_nothing_is_said() -> None:
    with pytest.raises(UserError, match="no phase of its work"):
        bottleneck_of(EvidenceBundle(run="runs/empty"))
