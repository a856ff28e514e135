"""Failures that repeat themselves end the run with their cause: a group after its last attempt, a start before step
1."""

from __future__ import annotations

import pytest

from kintsugi.control.phases.table import Phase
from kintsugi.control.protocol import Exited, Tick
from kintsugi.journal.facts import RunEnded
from kintsugi.protocol.agents import StartProcess
from kintsugi.protocol.rollout import EpisodesDone, RunEpisodes
from tests.unit.control.driven import CONFIG, Driven, scored


def cause(driven: Driven) -> str:
    driven.let_grace_pass()
    ended = driven.facts[-1]
    assert isinstance(ended, RunEnded) and ended.fault is not None
    return ended.fault.message


def test_a_group_that_fails_in_its_last_attempt_ends_the_run_and_not_in_the_one_before() -> None:
    driven = Driven()
    driven.begin()
    driven.until(Phase.COLLECTING)
    group = driven.asked(RunEpisodes)[0].token.rpartition(" ")[2]
    for attempt in range(1, CONFIG.rollout.attempts + 1):
        (request,) = [r for r in driven.asked(RunEpisodes) if r.token.endswith(f" {group}")]
        driven.fail(request, f"attempt {attempt}", kind="RemoteError")
    assert cause(driven) == f"attempt {CONFIG.rollout.attempts}"


def test_a_group_whose_worker_died_has_lost_no_attempt() -> None:
    driven = Driven()
    driven.begin()
    driven.until(Phase.COLLECTING)
    group = driven.asked(RunEpisodes)[0].token.rpartition(" ")[2]
    for _ in range(2 * CONFIG.rollout.attempts):
        (request,) = [r for r in driven.asked(RunEpisodes) if r.token.endswith(f" {group}")]
        driven.fail(request, "it died", kind="ProcessDied")
        driven.feed(Tick())
    driven.let_grace_pass()
    assert driven.master.phase is not Phase.ENDED


def test_a_start_that_is_refused_before_the_first_step_ends_the_run() -> None:
    driven = Driven()
    driven.begin()
    driven.fail(driven.asked(StartProcess)[0], "no such command", kind="WorldError")
    assert "no such command" in cause(driven)


def test_an_evaluation_that_another_version_answered_ends_the_run() -> None:
    driven = Driven(num_eval_rows=2)
    driven.begin()
    driven.until(Phase.EVALUATING)
    request = driven.asked(RunEpisodes)[0]
    assert isinstance(request.body, RunEpisodes)
    driven.answer(request, scored(request.body.ticket, version=7))
    assert "answered by version [7]" in cause(driven)


@pytest.mark.parametrize("num_unscored", [1, 2])
def test_a_problem_that_can_not_be_scored_counts_as_wrong_unless_none_can_be(num_unscored: int) -> None:
    driven = Driven(num_eval_rows=2)
    driven.begin()
    driven.until(Phase.EVALUATING)
    for request in driven.asked(RunEpisodes)[:num_unscored]:
        assert isinstance(request.body, RunEpisodes)
        name = request.body.ticket.id
        driven.answer(request, EpisodesDone(name, (), {f"{name}/0": "no answer in it"}))
    if num_unscored == 2:
        assert "no answer in it" in cause(driven)
    else:
        driven.until(Phase.COLLECTING)
        assert driven.state.evaluations[0].metrics["eval/unscored"] == 1.0


@pytest.mark.parametrize("status", [-9, 0, None])
def test_a_process_that_was_killed_before_it_came_is_started_again_even_before_the_first_step(
    status: int | None,
) -> None:
    driven = Driven()
    driven.begin()
    start = driven.asked(StartProcess)[0].body
    assert isinstance(start, StartProcess)
    driven.feed(Exited(start.process, start.incarnation, status))
    driven.let_grace_pass()
    assert driven.master.phase is Phase.STARTING
    driven.until(Phase.ENDED)
    assert driven.state.outcome == "finished"


def test_a_process_that_exits_by_itself_before_the_first_step_ends_the_run_and_later_does_not() -> None:
    driven = Driven()
    driven.begin()
    start = driven.asked(StartProcess)[0].body
    assert isinstance(start, StartProcess)
    driven.feed(Exited(start.process, start.incarnation, 1, "no such module"))
    assert "no such module" in cause(driven)
    driven = Driven()
    driven.begin()
    driven.until(Phase.TRAINING)
    driven.lose("server-0")
    (request,) = driven.asked(StartProcess)
    assert isinstance(request.body, StartProcess)
    driven.feed(Exited("server-0", request.body.incarnation, 1, "no such module"))
    driven.until(Phase.ENDED)
    assert driven.state.outcome == "finished"


def test_a_start_that_was_killed_before_the_first_step_is_repeated() -> None:
    driven = Driven()
    driven.begin()
    driven.fail(driven.asked(StartProcess)[0], "killed by SIGKILL", kind="StartKilled")
    driven.let_grace_pass()
    driven.until(Phase.ENDED)
    assert driven.state.outcome == "finished"
