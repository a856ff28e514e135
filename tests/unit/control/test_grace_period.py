"""During the grace period after an unrecoverable fault no process is replaced and nothing is recovered."""

from __future__ import annotations

import pytest

from kintsugi.control.phases.table import Phase
from kintsugi.control.protocol import RequestFailed
from kintsugi.errors import Fault
from kintsugi.journal.facts import ProcessRequested, RunEnded, SampleQuarantined, StrategyChosen
from kintsugi.protocol.agents import StartProcess
from kintsugi.protocol.rollout import EpisodesDone, RunEpisodes
from kintsugi.types import sample_key
from tests.unit.control.driven import CONFIG, Driven


def spoil_a_group(driven: Driven) -> None:
    request = driven.asked(RunEpisodes)[0]
    assert isinstance(request.body, RunEpisodes)
    ticket = request.body.ticket
    reasons = {sample_key(ticket.id, i): f"bad {ticket.id}/{i}" for i in range(ticket.num_samples)}
    driven.answer(request, EpisodesDone(ticket.id, (), reasons))


def failing() -> Driven:
    """More groups than a batch has were set aside."""
    driven = Driven()
    driven.begin()
    driven.until(Phase.COLLECTING)
    for _ in range(CONFIG.algorithm.batch_size + 1):
        spoil_a_group(driven)
    return driven


@pytest.mark.parametrize("process", ["rollout-0", "server-0", "manager-0", "model-0"])
def test_whoever_dies_after_the_run_failed_is_not_replaced(process: str) -> None:
    driven = failing()
    decision = driven.lose(process)
    assert not any(isinstance(fact, ProcessRequested | StrategyChosen) for fact in decision.facts)
    assert driven.asked(StartProcess) == []
    driven.let_grace_pass()
    assert (driven.master.phase, driven.state.outcome) == (Phase.ENDED, "failed")


def test_a_rank_that_fails_after_the_run_failed_is_not_mended() -> None:
    driven = Driven()
    driven.begin()
    driven.until(Phase.TRAINING)
    first, second = [request for request in driven.open.values() if request.to.startswith("model-")]
    for request in (first, second):
        fault = Fault(request.to, "ConfigError", request.to, "a mistake of the user", 0.0)
        del driven.open[request.token]
        decision = driven.feed(RequestFailed(request.token, request.to, fault))
    assert not any(isinstance(fact, StrategyChosen) for fact in decision.facts)
    driven.let_grace_pass()
    assert driven.state.outcome == "failed"


def test_the_cause_of_a_run_that_lost_too_many_groups_names_the_last_reason() -> None:
    driven = failing()
    reasons = [fact.reason for fact in driven.facts if isinstance(fact, SampleQuarantined)]
    driven.let_grace_pass()
    ended = driven.facts[-1]
    assert isinstance(ended, RunEnded) and ended.fault is not None
    group = reasons[-1].rpartition("/")[0]
    assert group in ended.fault.message
