"""One call of a library holds the interpreter of a process, which can not be heard meanwhile: it is left alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest

from kintsugi.control.suspicion import HOST_LOST_S
from kintsugi.journal.facts import ProcessLost
from kintsugi.recovery.liveness import HUNG_S, SLEEPING_CALL_S, UNINTERRUPTIBLE_S, UNREACHABLE_S
from kintsugi.telemetry.events import ProcessBusy, read_events
from kintsugi.telemetry.readings import HeartbeatReading, figures_in
from tests.cluster.real_runs import Run, play_selected

pytestmark = pytest.mark.cluster

LONGEST_S = 150.0
LIMITS_S = (UNREACHABLE_S, HUNG_S, UNINTERRUPTIBLE_S, HOST_LOST_S)
"""Silences after which something else than one long call is found and ended."""
IN_RANK = "model-1:kintsugi.training.worker:ModelWorker._run_call"
IN_WORKER = "rollout-0:kintsugi.rollout.single_turn:SingleTurnGroups._score"
IN_MANAGER = "manager-0:kintsugi.generation.manager:GenerationManager.submit"
IN_SERVER = "server-0:kintsugi.generation.server:GenerationServer._advance"


def keep(run: Run, *, kept: tuple[str, ...]) -> None:
    run.environment = {"KINTSUGI_TEST_KEPT": " ".join(kept)}
    run.start()
    assert run.launcher is not None
    _, errors = run.launcher.communicate(timeout=LONGEST_S)
    assert run.launcher.returncode == 0, errors


QUICK: dict[str, tuple[str, ...]] = {
    "ranks and servers": (f"{IN_RANK}:sleep:8:5", f"{IN_SERVER}:sleep:8:4"),
    "loops": (f"{IN_WORKER}:sleep:8:4", f"{IN_MANAGER}:sleep:8:5"),
}
"""Longer than the silence for which a process that sleeps used to be replaced."""
LONG: dict[str, tuple[str, ...]] = {
    "rank sleeps": (f"{IN_RANK}:sleep:20:5",),
    "worker sleeps": (f"{IN_WORKER}:sleep:20:5",),
    "manager computes": (f"{IN_MANAGER}:compute:20:4",),
}
"""Longer than each limit after which a silent process or host is given up, but for the limits of such calls."""


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """All at once: most of their time is sleep."""
    scenarios = {name: partial(keep, kept=kept) for name, kept in (LONG | QUICK).items()}
    return play_selected(scenarios, request, tmp_path_factory.mktemp("kept"), at_once=len(scenarios))


def longest_silence_s(run: Run, process: str) -> float:
    """The longest time between two heartbeats that a process recorded."""
    beats = [
        record.stamp.monotonic
        for record in figures_in(run.run_dir, process=process)
        if isinstance(record.sample, HeartbeatReading)
    ]
    return max(later - earlier for earlier, later in pairwise(beats))


def assert_kept_and_not_replaced(run: Run, undisturbed: Run, *kept: str) -> None:
    assert run.summary.outcome == "finished"
    assert run.summary.weights_sha256 == undisturbed.summary.weights_sha256
    assert [fact.process for fact in run.facts if isinstance(fact, ProcessLost)] == []
    for each in kept:
        process, *_, seconds, _ = each.split(":")
        pid, kept_s = (run.gates / f"kept-{process}").read_text().split()
        assert [int(pid)] == run.pids_joined()[process]
        assert float(kept_s) > 0.99 * float(seconds)
        assert longest_silence_s(run, process) > 0.9 * float(kept_s), "its heartbeats really stopped"
    run.assert_nothing_left()


@pytest.mark.parametrize("name", QUICK)
def test_a_process_that_sleeps_in_one_call_for_eight_seconds_is_not_replaced(
    undisturbed: Run, played: Callable[[str], Run], name: str
) -> None:
    assert_kept_and_not_replaced(played(name), undisturbed, *QUICK[name])


def test_the_long_calls_are_longer_than_the_limits_of_every_other_silence() -> None:
    kept_s = {float(kept.split(":")[-2]) for each in LONG.values() for kept in each}
    assert max(LIMITS_S) < min(kept_s) and max(kept_s) < SLEEPING_CALL_S


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_a_process_that_one_call_keeps_for_twenty_seconds_is_not_replaced(
    undisturbed: Run, played: Callable[[str], Run], name: str
) -> None:
    assert_kept_and_not_replaced(played(name), undisturbed, *LONG[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_the_operator_is_told_which_process_one_call_keeps(played: Callable[[str], Run], name: str) -> None:
    events = [record.event for record in read_events(played(name).run_dir, process="master-0")]
    busy = [event for event in events if isinstance(event, ProcessBusy)]
    process, _, _, how, *_ = LONG[name][0].split(":")
    assert [(event.of, event.computes) for event in busy] == [(process, how == "compute")]
