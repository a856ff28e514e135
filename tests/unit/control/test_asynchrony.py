"""Rollout, training and weights beside each other, as the master decides it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kintsugi.config.schema import (
    AlgorithmSection,
    AsynchronySection,
    CheckpointSection,
    EvaluationSection,
    RolloutSection,
)
from kintsugi.control.phases.table import Phase
from kintsugi.control.protocol import Request
from kintsugi.journal.facts import (
    BatchFormed,
    PaceChanged,
    ProcessLost,
    StepCommitted,
    TicketExpired,
    TicketFiltered,
    TicketsIssued,
    VersionCurrent,
)
from kintsugi.protocol.messages import Body
from kintsugi.protocol.rollout import RunEpisodes
from kintsugi.protocol.training import RunCall
from kintsugi.protocol.weights import LoadWeights, WeightsLoaded
from tests.unit.control.driven import CONFIG, Driven, scored

AHEAD = msgspec.structs.replace(
    CONFIG,
    algorithm=AlgorithmSection(steps=6, batch_size=2, group_size=2),
    asynchrony=AsynchronySection(max_staleness=2, adaptive=False),
    checkpoint=CheckpointSection(every=0),
)


def with_asynchrony(**values: object) -> Driven:
    section = msgspec.structs.replace(AHEAD.asynchrony, **values)
    driven = Driven(msgspec.structs.replace(AHEAD, asynchrony=section))
    driven.begin()
    return driven


@pytest.fixture
def driven() -> Driven:
    return with_asynchrony()


def advance(driven: Driven, until: Callable[[], bool], *, holding: type[Body]) -> list[Request]:
    """Answer everything but requests of one kind; gives those that wait."""
    for _ in range(500):
        if until():
            return driven.asked(holding)
        others = [one for one in driven.open.values() if not isinstance(one.body, holding)]
        request = next((one for one in others if driven.world.is_alive(one.to)), None)
        if request is None:
            driven.pass_time(0.2)
        else:
            driven.answer(request)
    raise AssertionError(f"still {driven.master.phase} at step {driven.state.step}")


def issued(driven: Driven) -> int:
    return sum(len(fact.tickets) for fact in driven.facts if isinstance(fact, TicketsIssued))


def test_groups_of_later_steps_run_while_the_ranks_train(driven: Driven) -> None:
    driven.until(Phase.TRAINING)
    assert issued(driven) == 6  # For steps 1, 2 and 3: with version 0, two steps ahead.
    before = len(driven.asked(RunEpisodes))
    advance(driven, lambda: not driven.asked(RunEpisodes), holding=RunCall)
    assert before > 0 and driven.master.phase is Phase.TRAINING and driven.state.step == 0


def test_a_synchronous_run_issues_one_batch_at_a_time() -> None:
    driven = with_asynchrony(max_staleness=0)
    driven.until(Phase.TRAINING)
    assert issued(driven) == 2 and driven.asked(RunEpisodes) == []


def test_steps_are_trained_while_servers_load_an_earlier_version(driven: Driven) -> None:
    driven.until(lambda: driven.state.step == 1)
    loads = advance(driven, lambda: driven.state.step == 2, holding=LoadWeights)
    assert [request.body.manifest.version for request in loads] == [1]  # type: ignore[union-attr]
    assert driven.state.version == 0


def test_the_run_waits_for_a_version_without_which_the_bound_would_be_broken(driven: Driven) -> None:
    driven.until(lambda: driven.state.step == 1)
    advance(driven, lambda: driven.state.step == 3, holding=LoadWeights)
    for _ in range(20):
        driven.pass_time(0.2)
    assert driven.state.step == 3 and driven.state.version == 0
    (load,) = driven.asked(LoadWeights)
    assert load.body.manifest.version == 1  # type: ignore[union-attr]
    driven.answer(load)
    assert driven.state.version == 1
    driven.until(lambda: driven.state.outcome is not None)
    assert driven.state.step == 6


def test_a_version_that_would_come_while_another_is_on_its_way_is_left_out(driven: Driven) -> None:
    driven.until(lambda: driven.state.step == 1)
    advance(driven, lambda: driven.state.step == 3, holding=LoadWeights)
    driven.until(lambda: driven.state.outcome is not None)
    versions = [fact.version for fact in driven.facts if isinstance(fact, VersionCurrent)]
    assert 2 not in versions and versions == sorted(versions) and versions[-1] == 6


def test_the_last_version_is_current_when_the_run_ends(driven: Driven) -> None:
    driven.until(lambda: driven.state.outcome is not None)
    assert (driven.state.outcome, driven.state.version) == ("finished", 6)
    counts = driven.state.ledger.counts()
    assert sum(counts.values()) == counts[next(state for state in counts if state == "trained")] == 24


def test_no_sample_is_trained_that_is_older_than_the_bound(driven: Driven) -> None:
    driven.until(lambda: driven.state.outcome is not None)
    ledger = driven.state.ledger
    ages = [
        fact.step - 1 - meta.version
        for fact in driven.facts
        if isinstance(fact, BatchFormed)
        for ticket in fact.tickets
        for meta in ledger.metas(ticket)
    ]
    assert max(ages) == 2 and min(ages) >= 0


def test_a_sample_of_older_weights_than_its_order_allows_expires_and_is_replaced(driven: Driven) -> None:
    """As of a server that is at the wrong version."""
    driven.until(lambda: driven.state.version == 2 and bool(driven.asked(RunEpisodes)))
    late = driven.asked(RunEpisodes)[0]
    assert isinstance(late.body, RunEpisodes)
    driven.answer(late, scored(late.body.ticket, version=0, holder=late.to))
    driven.until(lambda: any(isinstance(fact, TicketExpired) for fact in driven.facts))
    (expired,) = [fact for fact in driven.facts if isinstance(fact, TicketExpired)]
    assert expired.ticket == late.body.ticket.id and "max_staleness is 2" in expired.reason
    driven.until(lambda: driven.state.outcome is not None)
    assert driven.state.outcome == "finished" and issued(driven) == 12 + 1
    assert driven.state.ledger.ends.tokens_discarded == 8


def test_a_lost_rank_does_not_stop_rollout_and_the_run_ends_with_every_sample_trained_once() -> None:
    driven = with_asynchrony()
    driven.until(Phase.TRAINING)
    driven.lose("model-1")
    assert driven.master.phase is Phase.RECOVERING
    while driven.asked(RunEpisodes):
        driven.answer(driven.asked(RunEpisodes)[0])
    assert driven.master.phase is Phase.RECOVERING
    driven.until(lambda: driven.state.outcome is not None)
    trained = [ticket for fact in driven.facts if isinstance(fact, BatchFormed) for ticket in fact.tickets]
    assert driven.state.outcome == "finished" and len(trained) == len(set(trained)) == 12


def test_an_incomplete_group_is_passed_over_and_trained_later() -> None:
    driven = with_asynchrony(overtake=1)
    driven.until(lambda: len(driven.asked(RunEpisodes)) == 6)
    first = driven.asked(RunEpisodes)[0]
    assert isinstance(first.body, RunEpisodes)

    def others_are_done() -> bool:
        return any(isinstance(fact, BatchFormed) for fact in driven.facts)

    while not others_are_done():
        driven.answer(driven.asked(RunEpisodes)[1])
    (batch,) = [fact for fact in driven.facts if isinstance(fact, BatchFormed)]
    assert first.body.ticket.id not in batch.tickets
    driven.until(lambda: driven.state.outcome is not None)
    assert driven.state.ledger.trained_in(2)[0] == first.body.ticket.id


def test_what_is_being_sampled_when_weights_arrive_is_treated_as_configured() -> None:
    driven = with_asynchrony(running="recompute")
    driven.until(lambda: bool(driven.asked(LoadWeights)))
    assert driven.asked(LoadWeights)[0].body.running == "recompute"  # type: ignore[union-attr]


def test_rollout_runs_less_far_ahead_while_complete_batches_wait_and_says_why() -> None:
    driven = with_asynchrony(adaptive=True, max_staleness=4)
    for step in (1, 2):
        driven.until(Phase.TRAINING)
        advance(driven, lambda: not driven.asked(RunEpisodes), holding=RunCall)
        driven.until(lambda step=step: driven.state.step == step)  # type: ignore[misc]
    changes = [fact for fact in driven.facts if isinstance(fact, PaceChanged)]
    assert changes[-1].ahead == 3 and "complete batches wait" in changes[-1].reason


def test_a_new_master_keeps_the_pace_and_the_versions_that_groups_began_with(driven: Driven) -> None:
    driven.until(lambda: driven.state.step == 2 and bool(driven.asked(RunEpisodes)))
    ticket = driven.asked(RunEpisodes)[0].body.ticket.id  # type: ignore[union-attr]
    began_with = driven.state.ledger.version_of(ticket)
    successor = driven.succeed(carried_out=False)
    successor.take_over()
    asked = {request.body.ticket.id: request.body.version for request in successor.asked(RunEpisodes)}  # type: ignore[union-attr]
    assert asked[ticket] == began_with
    successor.until(lambda: successor.state.outcome is not None)
    trained = [fact.step for fact in successor.facts if isinstance(fact, StepCommitted)]
    assert successor.state.outcome == "finished" and trained == [1, 2, 3, 4, 5, 6]


def test_how_long_servers_paused_is_kept_for_the_summary(driven: Driven) -> None:
    driven.until(lambda: bool(driven.asked(LoadWeights)))
    load = driven.asked(LoadWeights)[0]
    assert isinstance(load.body, LoadWeights)
    manifest = load.body.manifest
    driven.answer(load, WeightsLoaded(manifest.version, manifest.digest, pause_ms={"server-0": 1.5}))
    assert list(driven.state.pauses_ms) == [1.5]


def test_a_version_is_not_left_out_that_a_slower_pace_needs() -> None:
    """Rollout runs less far ahead than the bound allows, so that a version that would do for the bound will not do."""
    driven = with_asynchrony(max_staleness=3)
    driven.until(lambda: driven.state.step == 1)
    driven.state.apply(PaceChanged(1, 1, 128, "because"))
    advance(
        driven,
        lambda: driven.state.step >= 3 and list(driven.open.values()) == driven.asked(LoadWeights),
        holding=LoadWeights,
    )
    driven.until(lambda: driven.state.outcome is not None)
    assert (driven.state.outcome, driven.state.step) == ("finished", 6)


def test_groups_that_were_lost_are_run_again_though_rollout_runs_less_far_ahead_than_it_did() -> None:
    """Younger ones are complete, more than may now be issued: they do not take the place of the lost ones."""
    driven = Driven(
        msgspec.structs.replace(
            AHEAD,
            algorithm=AlgorithmSection(steps=12, batch_size=2, group_size=2),
            asynchrony=AsynchronySection(max_staleness=8, adaptive=False),
            rollout=RolloutSection(workers=3),
        )
    )
    driven.begin()
    driven.until(Phase.TRAINING)
    advance(driven, lambda: not driven.asked(RunEpisodes), holding=RunCall)
    assert issued(driven) == 18
    driven.state.apply(PaceChanged(0, 1, 192, "because"))
    driven.until(lambda: driven.state.step == 1 and driven.master.phase is Phase.TRAINING)
    (oldest,) = driven.state.ledger.oldest_ready(1)
    driven.lose(driven.state.ledger.worker_of(oldest)[0])
    driven.until(lambda: driven.state.outcome is not None)
    assert (driven.state.outcome, driven.state.step) == ("finished", 12)


def test_what_is_complete_takes_the_place_of_what_expired_where_nothing_more_may_be_issued() -> None:
    config = msgspec.structs.replace(AHEAD, algorithm=AlgorithmSection(steps=10, batch_size=2, group_size=2))
    section = AsynchronySection(max_staleness=4, adaptive=False)
    driven = Driven(msgspec.structs.replace(config, asynchrony=section))
    driven.begin()
    driven.until(lambda: issued(driven) == 12)
    wrong = driven.asked(RunEpisodes)[-2]
    assert isinstance(wrong.body, RunEpisodes)
    driven.answer(wrong, scored(wrong.body.ticket, version=0, holder=wrong.to))
    driven.until(lambda: issued(driven) == 16)
    driven.state.apply(PaceChanged(3, 1, 128, "because"))
    driven.until(lambda: driven.state.outcome is not None)
    assert [fact.ticket for fact in driven.facts if isinstance(fact, TicketExpired)] == [wrong.body.ticket.id]
    assert (driven.state.outcome, driven.state.step) == ("finished", 10)


def test_an_evaluation_does_not_wait_for_groups_of_later_steps() -> None:
    config = msgspec.structs.replace(
        AHEAD,
        algorithm=AlgorithmSection(steps=6, batch_size=40, group_size=2),
        rollout=RolloutSection(workers=1),
        eval=EvaluationSection(num_samples=0, every=1),
    )
    driven = Driven(config, num_eval_rows=3)
    driven.begin()
    driven.until(Phase.TRAINING)
    advance(driven, lambda: driven.master.phase is Phase.EVALUATING, holding=RunEpisodes)
    assert len(driven.asked(RunEpisodes)) == 64
    for _ in range(3):
        driven.answer(driven.asked(RunEpisodes)[0])
    assert [request.body.split for request in driven.asked(RunEpisodes)][-3:] == ["eval"] * 3  # type: ignore[union-attr]


def load(driven: Driven, *, late: tuple[str, ...]) -> None:
    driven.until(lambda: bool(driven.asked(LoadWeights)))
    (request,) = driven.asked(LoadWeights)
    assert isinstance(request.body, LoadWeights)
    manifest = request.body.manifest
    driven.answer(request, WeightsLoaded(manifest.version, manifest.digest, ("server-0",), late=late))


def test_a_server_that_is_late_with_two_versions_in_a_row_is_replaced_with_the_reason(driven: Driven) -> None:
    load(driven, late=("server-1",))
    load(driven, late=("server-1",))
    driven.until(lambda: any(isinstance(fact, ProcessLost) for fact in driven.facts))
    (lost,) = [fact for fact in driven.facts if isinstance(fact, ProcessLost)]
    assert lost.process == "server-1" and lost.fault.cause is not None
    assert lost.fault.cause.message == "server-1 did not load version 1 in time, nor the one before"
    driven.until(lambda: driven.state.outcome is not None)
    assert driven.state.outcome == "finished"


def test_a_server_that_has_caught_up_is_not_late_in_a_row(driven: Driven) -> None:
    for late in (("server-1",), (), ("server-1",)):
        load(driven, late=late)
    driven.until(lambda: driven.state.outcome is not None)
    assert not any(isinstance(fact, ProcessLost) for fact in driven.facts)


def test_what_a_new_manager_was_given_again_is_not_awaited_when_a_newer_version_follows(
    driven: Driven,
) -> None:
    driven.until(lambda: driven.state.version == 1)
    driven.lose("manager-0")
    advance(driven, lambda: bool(driven.asked(LoadWeights)), holding=LoadWeights)
    (again,) = driven.asked(LoadWeights)
    advance(driven, lambda: driven.asked(LoadWeights) != [again], holding=LoadWeights)
    asked = driven.asked(LoadWeights)
    driven.fail(again, "superseded by version 2", kind="RefusedError")
    driven.pass_time(1.0)
    assert driven.asked(LoadWeights) == asked != [again]


def test_groups_that_say_nothing_are_replaced_also_behind_one_that_is_passed_over() -> None:
    dapo = AlgorithmSection(name="dapo", steps=6, batch_size=2, group_size=2)
    section = AsynchronySection(max_staleness=2, adaptive=False, overtake=1)
    config = msgspec.structs.replace(AHEAD, algorithm=dapo, asynchrony=section)
    driven = Driven(config, rewards=lambda ticket, index: float(index % 2 and ticket.position != 1))
    driven.begin()
    driven.until(lambda: len(driven.asked(RunEpisodes)) == 6)
    while driven.master.phase is Phase.COLLECTING:
        driven.answer(driven.asked(RunEpisodes)[1])
    (batch,) = [fact for fact in driven.facts if isinstance(fact, BatchFormed)]
    (filtered,) = [fact for fact in driven.facts if isinstance(fact, TicketFiltered)]
    assert filtered.ticket == "dapo:0:1:0" and batch.tickets == ("dapo:0:2:0", "dapo:0:3:0")


def test_what_a_lost_worker_kept_is_run_again_while_the_ranks_train(driven: Driven) -> None:
    driven.until(Phase.TRAINING)
    advance(driven, lambda: not driven.asked(RunEpisodes), holding=RunCall)
    driven.lose("rollout-0")
    assert driven.master.phase is Phase.TRAINING and driven.asked(RunEpisodes)
