from __future__ import annotations

from kintsugi.lab.residue.residue import ResidueAttempt, ResidueReport, report_of


def report(*attempts: ResidueAttempt, left: tuple[str, ...] = ()) -> ResidueReport:
    return report_of(attempts, left=left, laboratories=1, seconds=1.0, seed=0)


def attempt(
    number: int, *, begun: bool = True, killed: tuple[str, ...] = (), problem: str = ""
) -> ResidueAttempt:
    return ResidueAttempt(
        number=number, ability="stop", mechanism="SIGSTOP", begun=begun, killed=killed, problem=problem
    )


def test_only_faults_that_began_count_and_the_others_are_told_apart_by_their_reason() -> None:
    found = report(
        attempt(0, killed=("injector", "target")),
        attempt(1, killed=("target",), problem="DeadlineExceeded: its end"),
        attempt(2, begun=False, problem="ProcessDied: probe-1 (pid 77) ended"),
        attempt(3, begun=False, problem="ProcessDied: probe-0 (pid 99) ended"),
        attempt(4, begun=False, killed=("laboratory",)),
    )
    assert (found.injections, found.took_effect) == (5, 2)
    assert found.killed == {"injector": 1, "target": 2, "laboratory": 1}
    assert found.mechanisms == {"SIGSTOP": 2}
    assert found.not_begun == {
        "ProcessDied: probe-N (pid N) ended": 2,
        "the laboratory was killed before": 1,
    }


def test_nothing_left_proves_nothing_where_hardly_anything_was_done() -> None:
    failed = [attempt(number, begun=False, problem="UserError: no") for number in range(2)]
    assert report(attempt(8), attempt(9), *failed).proves_it
    assert not report(attempt(9), *failed).proves_it
    assert not report(attempt(9), left=("a mount",)).proves_it
