"""Segments that are damaged on their way."""

from tests.unit.diagnosis.healthy import HOSTS, PROCESSES, HealthyRun
from tests.unit.diagnosis.looking import diagnosis_of, named


def test_wrong_checksums_are_a_damage_and_explain_the_losses_that_follow() -> None:
    run = HealthyRun().play(40)
    errors = {"tcp_checksum_errors": 0.0}

    def count(now: float, rates: dict[str, float]) -> None:
        errors["tcp_checksum_errors"] += 5.0
        rates |= errors

    run.changes["host-1"] = count
    for process in HOSTS["host-1"]:
        for other in PROCESSES:
            run.changes[process, other] = run.changes[other, process] = _lose
    run.play(6)
    assert named(run) == [("agent-1", "corruption")]
    (cause,) = diagnosis_of(run).causes
    assert "5.0 segments a second reach its host with a wrong checksum" in cause.summary


def test_a_single_wrong_checksum_is_no_fault() -> None:
    run = HealthyRun().play(40)
    run.changes["host-1"] = lambda now, rates: rates.update(tcp_checksum_errors=1.0)
    run.play(6)
    assert named(run) == []


def test_losses_without_a_wrong_checksum_stay_losses() -> None:
    run = HealthyRun().play(40)
    run.changes["host-1"] = lambda now, rates: rates.update(tcp_checksum_errors=0.0)
    for process in HOSTS["host-1"]:
        for other in PROCESSES:
            run.changes[process, other] = run.changes[other, process] = _lose
    run.play(6)
    assert {kind for _, kind in named(run)} == {"network_loss"}


def _lose(now: float, rates: dict[str, float]) -> None:
    rates["retransmits"] += 4.0
