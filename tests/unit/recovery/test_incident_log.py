from __future__ import annotations

import msgspec

from kintsugi.errors import EndedByError, Fault
from kintsugi.recovery.incident_log import IncidentLog
from kintsugi.recovery.states import RecoveryState

_S = RecoveryState


def fault(process: str) -> Fault:
    return Fault(f"{process} broke", "ProcessDied", process, f"{process} broke", 0.0)


def opened(*losses: tuple[str, float]) -> IncidentLog:
    incidents = IncidentLog()
    for process, now in losses:
        incidents.fault(fault(process), number=1, now=now, lost=process)
    return incidents


def test_faults_that_come_before_the_first_is_mended_are_one_incident() -> None:
    incidents = IncidentLog()
    incidents.fault(fault("model-0"), number=1, now=1.0, lost="model-0")
    incidents.fault(fault("model-1"), number=1, now=2.0, lost="model-1")
    assert incidents.current is not None
    assert [one.process for one in incidents.current.faults] == ["model-0", "model-1"]
    incidents.close()
    incidents.fault(fault("model-0"), number=2, now=3.0)
    assert incidents.current.number == 2


def test_a_loss_for_want_of_something_of_the_host_counts_every_fifth_time() -> None:
    incidents = IncidentLog()
    starved = Fault("f", "ProcessDied", "model-0", "lost", 0.0, detail=EndedByError("", "no memory"))
    for number in range(1, 11):
        incidents.fault(starved, number=1, now=float(number), lost="model-0")
        assert incidents.current is not None and incidents.current.deaths["model-0"] == number // 5
    incidents.fault(fault("model-0"), number=1, now=11.0, lost="model-0")
    assert incidents.current is not None and incidents.current.deaths["model-0"] == 3


def test_a_committed_step_clears_what_is_counted_but_not_what_is_told() -> None:
    incidents = opened(("model-0", 1.0), ("model-0", 2.0))
    assert incidents.current is not None and incidents.current.deaths["model-0"] == 2
    incidents.current.progressed()
    assert incidents.current.deaths["model-0"] == incidents.current.num_faults == 0
    assert len(incidents.current.faults) == 2 and list(incidents.current.processes) == ["model-0"]


def test_a_host_that_takes_a_hundred_processes_with_it_is_not_a_hundred_faults() -> None:
    incidents = opened(*((f"rollout-{number}", 1.0) for number in range(100)))
    assert incidents.current is not None and incidents.current.num_faults == 0
    incidents.fault(fault("rollout-7"), number=1, now=2.0, lost="rollout-7")
    incidents.fault(fault("model-0"), number=1, now=2.0)
    assert incidents.current.num_faults == 2


def test_an_incident_is_timed_from_its_last_fault_and_its_outage_from_its_first() -> None:
    incidents = opened(("model-0", 1.0), ("model-1", 5.0))
    assert incidents.current is not None
    timing = incidents.current.timing({}, 7.0)
    assert (timing["total"], timing["outage"]) == (2.0, 6.0)


def test_the_parts_of_a_recovery_are_told_apart() -> None:
    incidents = opened(("model-0", 10.0))
    incidents.all_live(11.0)
    since = {
        _S.PRE_LOCKING: 10.0,
        _S.WAITING: 10.25,
        _S.REBUILDING: 11.0,
        _S.REPAIRING: 11.5,
        _S.NOTIFYING: 12.25,
        _S.NORMAL: 12.5,
    }
    assert incidents.current is not None
    assert incidents.current.timing(since, 14.0) == {
        "total": 4.0,
        "outage": 4.0,
        "start": 1.0,
        "lock": 0.25,
        "rebuild": 0.5,
        "repair": 0.75,
        "replay": 1.5,
    }


def test_parts_of_an_earlier_recovery_and_parts_that_did_not_occur_are_left_out() -> None:
    incidents = IncidentLog()
    incidents.fault(fault("model-0"), number=1, now=10.0)
    earlier = {_S.PRE_LOCKING: 1.0, _S.WAITING: 2.0, _S.NORMAL: 3.0}
    assert incidents.current is not None
    assert incidents.current.timing(earlier, 12.0) == {"total": 2.0, "outage": 2.0, "replay": 2.0}


def test_no_part_is_ever_negative() -> None:
    incidents = opened(("model-0", 10.0))
    since = {_S.PRE_LOCKING: 12.0, _S.WAITING: 11.0, _S.REBUILDING: 13.0, _S.REPAIRING: 11.0, _S.NORMAL: 20.0}
    assert incidents.current is not None
    assert min(incidents.current.timing(since, 12.0).values()) == 0.0


def test_what_a_start_took_is_remembered_for_the_next_incident() -> None:
    incidents = opened(("model-0", 1.0))
    incidents.all_live(4.0)
    incidents.close()
    assert incidents.situation(missing=(), living=(), replacements_fail=False, step_s=1.0).start_s == 3.0


def test_that_everybody_is_there_says_nothing_about_starts_when_nobody_was_lost() -> None:
    incidents = IncidentLog()
    before = incidents.start_s
    incidents.all_live(100.0)
    incidents.fault(fault("model-0"), number=1, now=1.0)
    incidents.all_live(100.0)
    assert incidents.start_s == before


def test_the_policy_is_told_how_often_one_and_the_same_process_died() -> None:
    incidents = opened(("model-0", 1.0), ("model-1", 2.0), ("model-0", 3.0))
    assert incidents.current is not None
    incidents.current.attempts = 4
    given = incidents.situation(missing=("model-0",), living=("model-1",), replacements_fail=True, step_s=0.5)
    assert (given.most_deaths, given.attempts, len(given.faults)) == (2, 4, 3)
    assert (given.missing, given.living, given.replacements_fail, given.step_s) == (
        ("model-0",),
        ("model-1",),
        True,
        0.5,
    )


def test_a_loss_that_was_not_our_doing_explains_the_attempts_before_it_and_one_of_ours_does_not() -> None:
    incidents = opened(("model-0", 1.0))
    assert incidents.current is not None
    incidents.current.attempts = 3
    ended_by_us = msgspec.structs.replace(fault("model-1"), cause=fault("model-0"))
    incidents.fault(ended_by_us, number=1, now=2.0, lost="model-1")
    incidents.fault(fault("model-0"), number=1, now=2.0)
    assert incidents.current.attempts == 3
    incidents.fault(fault("model-1"), number=1, now=3.0, lost="model-1")
    assert incidents.current.attempts == 0


def test_times_are_told_to_a_tenth_of_a_millisecond() -> None:
    incidents = opened(("model-0", 1.0))
    assert incidents.current is not None
    assert incidents.current.timing({}, 1.0004)["total"] == 0.0004
