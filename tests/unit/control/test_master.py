"""The decisions themselves, one event at a time. Whole runs and their faults are in `tests/simulation`."""

from __future__ import annotations

import math

import msgspec
import pytest

from kintsugi.config.schema import ActorSection, ClusterSection, LayoutSection
from kintsugi.control.master import FAULT_GRACE_S
from kintsugi.control.phases.save import MOST_REFUSALS, RETRY_S
from kintsugi.control.phases.table import Phase
from kintsugi.control.protocol import (
    Finish,
    Raise,
    Replied,
    Request,
    RequestFailed,
    StopRequested,
    Tick,
)
from kintsugi.errors import Fault, StatesDiverged, root_first
from kintsugi.journal.facts import (
    CheckpointFailed,
    CheckpointSaved,
    FaultNoted,
    IncidentOpened,
    RunEnded,
    StepCommitted,
    TicketsIssued,
    VersionCurrent,
)
from kintsugi.protocol.agents import StartProcess
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.recovery import PreLock, RankReady, RebuildGroup, Rollback
from kintsugi.protocol.rollout import RunEpisodes
from kintsugi.protocol.training import CallDone, RunCall, Save, Saved
from kintsugi.protocol.weights import LoadWeights, Publish, Published, WeightsLoaded
from kintsugi.types import StreamSource, WeightManifest
from tests.unit.control.driven import CONFIG, Driven, scored
from tests.unit.control.outcomes import begun, outcome, undisturbed


@pytest.fixture
def driven() -> Driven:
    driven = Driven()
    driven.begin()
    return driven


def ended(driven: Driven) -> RunEnded:
    last = driven.facts[-1]
    assert isinstance(last, RunEnded)
    assert driven.master.phase is Phase.ENDED
    assert [effect.outcome for effect in driven.effects if isinstance(effect, Finish)] == [last.outcome]
    return last


def count(driven: Driven, kind: type) -> int:
    return sum(isinstance(fact, kind) for fact in driven.facts)


def test_a_run_without_faults_commits_publishes_and_saves_every_step(driven: Driven) -> None:
    driven.until(Phase.ENDED)
    assert ended(driven).outcome == "finished"
    assert count(driven, StepCommitted) == count(driven, CheckpointSaved) == 3
    assert [fact.version for fact in driven.facts if isinstance(fact, VersionCurrent)] == [0, 1, 2, 3]


def test_a_stop_that_comes_while_processes_start_ends_the_run_at_once(driven: Driven) -> None:
    assert driven.master.phase is Phase.STARTING
    driven.feed(StopRequested("SIGTERM"))
    assert ended(driven).outcome == "stopped"
    assert count(driven, TicketsIssued) == count(driven, StepCommitted) == count(driven, CheckpointSaved) == 0


def test_a_stop_during_a_step_is_obeyed_after_it_with_a_checkpoint() -> None:
    driven = Driven(
        msgspec.structs.replace(CONFIG, checkpoint=msgspec.structs.replace(CONFIG.checkpoint, every=0))
    )
    driven.begin()
    driven.until(Phase.TRAINING)
    driven.feed(StopRequested("SIGTERM"))
    driven.until(Phase.ENDED)
    assert ended(driven).outcome == "stopped"
    assert count(driven, StepCommitted) == count(driven, CheckpointSaved) == 1


def test_an_answer_that_nobody_waits_for_changes_nothing(driven: Driven) -> None:
    driven.until(Phase.TRAINING)
    (first, second) = driven.asked(RunCall)
    done = CallDone(1, "state 1", {})
    driven.answer(first)
    for late in (
        Replied(first.token, first.to, done),
        Replied("call:1:actor_train:model-9", "model-9", done),
    ):
        decision = driven.feed(late)
        assert (decision.facts, decision.effects) == ((), ())
        assert "is not pending at" in decision.reason
    failed = Fault("a", "StorageError", first.to, "late", 0.0)
    assert driven.feed(RequestFailed(first.token, first.to, failed)).effects == ()
    driven.answer(second)
    driven.until(Phase.ENDED)
    assert ended(driven).outcome == "finished"


def test_an_answer_in_the_name_of_a_process_that_was_not_asked_changes_nothing(driven: Driven) -> None:
    driven.until(lambda: bool(driven.asked(RebuildGroup)))
    first, second = driven.asked(RebuildGroup)
    assert driven.feed(Replied(first.token, second.to, Ok())).effects == ()
    driven.answer(second)
    assert driven.asked(RebuildGroup) == [first]
    assert driven.answer(first).effects != ()


def test_a_groups_answer_that_comes_twice_or_from_a_moved_request_is_counted_once(driven: Driven) -> None:
    driven.until(Phase.COLLECTING)
    request = driven.asked(RunEpisodes)[0]
    assert isinstance(request.body, RunEpisodes)
    answer = scored(request.body.ticket, version=0)
    assert len(driven.answer(request, answer).facts) == 1
    assert driven.feed(Replied(request.token, request.to, answer)).facts == ()
    assert driven.feed(Replied(f"episode 9.9 {answer.ticket}", "rollout-1", answer)).facts == ()


def test_a_failed_save_in_the_middle_raises_an_alert_and_the_run_goes_on(driven: Driven) -> None:
    driven.until(lambda: bool(driven.asked(Save)))
    (save,) = driven.asked(Save)
    assert driven.master.phase is Phase.COLLECTING, "the run goes on while a rank saves"
    decision = driven.fail(save, "disk full")
    assert [
        (fact.step, fact.fault.message) for fact in decision.facts if isinstance(fact, CheckpointFailed)
    ] == [(1, "disk full")]
    assert any(isinstance(effect, Raise) and "disk full" in effect.message for effect in decision.effects)
    assert driven.master.phase is Phase.COLLECTING
    driven.until(Phase.ENDED)
    assert ended(driven).outcome == "finished"
    assert [fact.step for fact in driven.facts if isinstance(fact, CheckpointSaved)] == [2, 3]


def saved_steps(driven: Driven) -> list[int]:
    return [fact.step for fact in driven.facts if isinstance(fact, CheckpointSaved)]


def held_save(driven: Driven) -> Request:
    """A save that the driver does not answer by itself."""
    driven.until(lambda: bool(driven.asked(Save)))
    (save,) = driven.asked(Save)
    driven.hold(save)
    return save


def test_steps_go_on_while_a_save_is_under_way_and_its_answer_is_taken_whenever_it_comes(
    driven: Driven,
) -> None:
    save = held_save(driven)
    driven.until(lambda: driven.master.phase is Phase.TRAINING and driven.state.step == 2)
    assert driven.asked(Save) == [save], "one save at a time"
    driven.answer(save, Saved(1, "folder/step-1", "digest"))
    assert saved_steps(driven) == [1]
    driven.until(Phase.ENDED)
    assert saved_steps(driven) == [1, 3]
    assert ended(driven).outcome == "finished"


def test_the_end_of_a_run_waits_for_a_save_that_is_under_way_and_then_for_the_last_one(
    driven: Driven,
) -> None:
    save = held_save(driven)
    driven.until(lambda: driven.master.phase is Phase.SAVING and driven.state.step == 3)
    assert driven.asked(Save) == [save]
    driven.answer(save, Saved(1, "folder/step-1", "digest"))
    (last,) = driven.asked(Save)
    assert isinstance(last.body, Save) and last.body.step == 3
    driven.until(Phase.ENDED)
    assert saved_steps(driven) == [1, 3]


def test_a_save_that_was_lost_with_its_rank_is_made_up_for(driven: Driven) -> None:
    save = held_save(driven)
    driven.lose(save.to)
    assert not driven.master.is_saving
    driven.until(lambda: bool(driven.asked(Save)))
    (again,) = driven.asked(Save)
    assert isinstance(again.body, Save) and again.body.step == driven.state.step == 1
    driven.until(Phase.ENDED)
    assert saved_steps(driven) == [1, 2, 3]


def test_the_loss_of_another_rank_leaves_a_save_under_way(driven: Driven) -> None:
    save = held_save(driven)
    (other,) = {"model-0", "model-1"} - {save.to}
    driven.lose(other)
    assert driven.master.phase is Phase.RECOVERING and driven.master.is_saving
    driven.answer(save, Saved(1, "folder/step-1", "digest"))
    assert saved_steps(driven) == [1]
    driven.until(Phase.ENDED)
    assert saved_steps(driven) == [1, 2, 3]


def test_a_new_master_asks_again_and_takes_the_save_that_was_under_way(driven: Driven) -> None:
    save = held_save(driven)
    driven.until(lambda: driven.master.phase is Phase.TRAINING and driven.state.step == 1)
    successor = driven.succeed(carried_out=False)
    successor.take_over()
    successor.until(lambda: bool(successor.asked(Save)))
    (again,) = successor.asked(Save)
    assert again.to == save.to
    successor.answer(again, Saved(1, "folder/step-1", "digest"))
    assert successor.state.saved_steps == [1]


def test_a_rank_that_refuses_to_save_is_asked_again_after_the_next_step_and_it_is_no_failure(
    driven: Driven,
) -> None:
    save = held_save(driven)
    driven.fail(save, "the state was replaced", kind="RefusedError")
    assert count(driven, CheckpointFailed) == 0 and driven.master.phase is Phase.COLLECTING
    driven.until(Phase.ENDED)
    assert saved_steps(driven) == [2, 3]


def test_a_last_save_that_is_refused_is_repeated_a_few_times_and_then_the_ranks_recover(
    driven: Driven,
) -> None:
    driven.until(lambda: driven.master.phase is Phase.SAVING and driven.state.step == 3)
    for _ in range(MOST_REFUSALS):
        driven.fail(driven.asked(Save)[0], "not now", kind="RefusedError")
        assert driven.master.phase is Phase.SAVING
        driven.pass_time(RETRY_S)
    driven.fail(driven.asked(Save)[0], "not now", kind="RefusedError")
    assert driven.master.phase is Phase.RECOVERING
    driven.until(Phase.ENDED)
    assert saved_steps(driven) == [1, 2, 3]


def test_a_stop_that_comes_while_ranks_prepare_ends_the_run_before_its_first_step(driven: Driven) -> None:
    driven.until(Phase.PREPARING)
    driven.feed(StopRequested("SIGTERM"))
    driven.until(Phase.ENDED)
    assert ended(driven).outcome == "stopped"
    assert count(driven, TicketsIssued) == count(driven, CheckpointSaved) == 0


def test_a_failed_save_of_a_run_that_stops_ends_it_as_failed(driven: Driven) -> None:
    driven.until(Phase.TRAINING)
    driven.feed(StopRequested("SIGTERM"))
    driven.until(lambda: driven.master.phase is Phase.SAVING and driven.state.step == 1)
    driven.fail(driven.asked(Save)[0], "disk full")
    driven.let_grace_pass()
    fact = ended(driven)
    assert fact.outcome == "failed" and fact.fault is not None and fact.fault.message == "disk full"


@pytest.mark.parametrize(
    ("kind", "what"),
    [("StorageFull", "room"), ("StorageError", "the disk"), ("DeadlineExceeded", "the disk")],
)
def test_a_last_save_that_the_disk_does_not_take_waits_for_it_and_the_run_finishes(
    driven: Driven, kind: str, what: str
) -> None:
    driven.until(lambda: driven.master.phase is Phase.SAVING and driven.state.step == 3)
    told = [
        effect.message
        for attempt in range(3)
        for decision in (
            driven.fail(driven.asked(Save)[0], f"refused {attempt}", kind=kind),
            driven.pass_time(RETRY_S * (1 if kind == "StorageFull" else 2**attempt)),
        )
        for effect in decision.effects
        if isinstance(effect, Raise)
    ]
    assert told == [f"checkpoint of step 3 waits for {what}: refused 0"], "once, although the messages differ"
    driven.until(Phase.ENDED)
    assert ended(driven).outcome == "finished"
    assert count(driven, CheckpointFailed) == 0
    assert [fact.step for fact in driven.facts if isinstance(fact, CheckpointSaved)] == [1, 2, 3]


def test_a_rank_that_dies_while_the_last_save_waits_is_replaced_and_the_save_comes_after(
    driven: Driven,
) -> None:
    driven.until(lambda: driven.master.phase is Phase.SAVING and driven.state.step == 3)
    driven.fail(driven.asked(Save)[0], "full", kind="StorageFull")
    driven.lose("model-0")
    assert driven.master.phase is Phase.RECOVERING
    driven.pass_time(RETRY_S)
    assert driven.asked(Save) == []
    driven.until(Phase.ENDED)
    assert ended(driven).outcome == "finished"
    assert [fact.step for fact in driven.facts if isinstance(fact, CheckpointSaved)] == [1, 2, 3]


def test_who_does_not_want_to_wait_for_room_stops_the_run(driven: Driven) -> None:
    driven.until(lambda: driven.master.phase is Phase.SAVING and driven.state.step == 3)
    driven.fail(driven.asked(Save)[0], "full", kind="StorageFull")
    driven.feed(StopRequested("SIGTERM"))
    driven.pass_time(RETRY_S)
    driven.fail(driven.asked(Save)[0], "full", kind="StorageFull")
    driven.let_grace_pass()
    fact = ended(driven)
    assert fact.outcome == "failed" and fact.fault is not None and fact.fault.message == "full"


def test_a_last_save_that_failed_is_tried_again_when_the_run_is_resumed(driven: Driven) -> None:
    driven.until(lambda: driven.master.phase is Phase.SAVING and driven.state.step == 3)
    driven.feed(StopRequested("SIGTERM"))
    driven.fail(driven.asked(Save)[0], "disk full")
    driven.let_grace_pass()
    resumed = Driven(state=driven.state)
    resumed.world.checkpoints = driven.world.checkpoints
    resumed.begin(restore_step=2)
    resumed.until(Phase.ENDED)
    assert [fact.step for fact in resumed.facts if isinstance(fact, StepCommitted)] == [3]
    assert [fact.step for fact in resumed.facts if isinstance(fact, CheckpointSaved)] == [3]
    assert ended(resumed).outcome == "finished"


def test_ranks_that_end_a_step_in_different_states_repeat_it(driven: Driven) -> None:
    driven.until(Phase.TRAINING)
    first, second = driven.asked(RunCall)
    driven.answer(first)
    decision = driven.answer(second, CallDone(1, "state b", {}))
    (opened,) = [fact for fact in decision.facts if isinstance(fact, IncidentOpened)]
    assert opened.fault.kind == "IntegrityError"
    assert second.to in opened.fault.message and "state b" in opened.fault.message
    assert (
        isinstance(opened.fault.detail, StatesDiverged) and opened.fault.detail.states[second.to] == "state b"
    )
    assert count(driven, StepCommitted) == 0 and driven.master.phase is Phase.RECOVERING
    driven.until(Phase.ENDED)
    assert outcome(driven.facts) == undisturbed(CONFIG, num_eval_rows=0)


def test_ranks_that_differ_twice_give_two_faults_with_ids_of_their_own(driven: Driven) -> None:
    noted: list[Fault] = []
    for state in ("state b", "state c"):
        driven.until(Phase.TRAINING)
        first, second = driven.asked(RunCall)
        driven.answer(first)
        decision = driven.answer(second, CallDone(1, state, {}))
        noted += [fact.fault for fact in decision.facts if isinstance(fact, IncidentOpened | FaultNoted)]
    assert [fault.kind for fault in noted] == ["IntegrityError", "IntegrityError"]
    assert len({fault.id for fault in noted}) == len(root_first(noted)) == 2


def test_ranks_that_return_to_different_states_twice_give_two_faults_with_ids_of_their_own(
    driven: Driven,
) -> None:
    driven.until(lambda: driven.state.step == 1 and driven.master.phase is Phase.TRAINING)
    driven.fail(driven.asked(RunCall)[0], "a rank is gone", kind="GroupBroken")
    for _ in range(2):
        driven.until(lambda: len(driven.asked(Rollback)) == 2)
        for request in driven.asked(Rollback):
            ready = driven.serve(request)
            assert isinstance(ready, RankReady)
            driven.answer(request, msgspec.structs.replace(ready, state_digest=f"state of {request.to}"))
    noted = [fact.fault for fact in driven.facts if isinstance(fact, FaultNoted)]
    found = [fault for fault in noted if fault.kind == "IntegrityError"]
    assert len({fault.id for fault in found}) == len(found) == 2


def published(request_version: int, digest: str, process: str) -> Published:
    return Published(
        WeightManifest(request_version, request_version, (), 0, digest), (StreamSource(process),)
    )


def test_hosts_that_publish_different_weights_have_to_agree_again_before_anybody_loads_them() -> None:
    driven = Driven(msgspec.structs.replace(CONFIG, cluster=ClusterSection(hosts=2)))
    driven.begin()
    driven.until(Phase.PUBLISHING)
    first, second = driven.asked(Publish)
    driven.answer(first, published(0, "digest a", first.to))
    decision = driven.answer(second, published(0, "digest b", second.to))
    assert driven.asked(LoadWeights) == [] and driven.master.phase is Phase.RECOVERING
    (opened,) = [fact for fact in decision.facts if isinstance(fact, IncidentOpened)]
    assert "digest a" in opened.fault.message and "digest b" in opened.fault.message
    driven.until(Phase.ENDED)
    assert ended(driven).outcome == "finished"


def test_servers_that_hold_other_weights_than_were_published_are_given_them_again(driven: Driven) -> None:
    driven.until(lambda: bool(driven.asked(LoadWeights)))
    decision = driven.answer(driven.asked(LoadWeights)[0], WeightsLoaded(0, "other", ("server-0",)))
    (opened,) = [fact for fact in decision.facts if isinstance(fact, IncidentOpened)]
    assert "other" in opened.fault.message
    assert count(driven, VersionCurrent) == 0 and driven.master.phase is Phase.RECOVERING
    driven.until(Phase.ENDED)
    assert [fact.version for fact in driven.facts if isinstance(fact, VersionCurrent)] == [0, 1, 2, 3]


def test_processes_that_never_come_end_the_run_by_name(driven: Driven) -> None:
    driven.answer(driven.asked(StartProcess)[0])
    driven.now += CONFIG.cluster.start_timeout_s
    driven.let_grace_pass()
    driven.let_grace_pass()
    fault = ended(driven).fault
    assert fault is not None and fault.kind == "StartFailed"
    assert "manager-0" not in fault.message and "model-0" in fault.message and "server-1" in fault.message


def test_the_ranks_of_the_first_model_each_publish_their_part_of_it() -> None:
    cut = ActorSection(workers=4, logical_shards=2, layout=LayoutSection(stages=2))
    driven = Driven(msgspec.structs.replace(CONFIG, actor=cut))
    driven.begin()
    driven.until(lambda: bool(driven.asked(Publish)))
    orders = {request.to: request.body for request in driven.asked(Publish)}
    shares = {rank: order.share for rank, order in orders.items() if isinstance(order, Publish)}
    assert shares == {"model-0": (0, 2), "model-1": (1, 2)}


def test_a_rank_that_can_not_publish_leads_to_a_recovery_and_the_run_goes_on() -> None:
    driven = begun()
    driven.until(lambda: bool(driven.asked(Publish)))
    driven.fail(driven.asked(Publish)[0], "no room", kind="RuntimeError")
    assert driven.asked(PreLock)
    driven.until(Phase.ENDED)
    assert driven.state.outcome == "finished"


def test_when_the_run_is_called_failed_nothing_is_mended_any_more() -> None:
    driven = begun()
    driven.until(Phase.TRAINING)
    driven.master._fail(Fault("a", "DataError", "rollout-0", "no data", 0.0), driven.now)
    calls = driven.asked(RunCall)
    driven.fail(calls[0], "broken", kind="RuntimeError")
    driven.lose("model-1")
    assert driven.master.phase is Phase.TRAINING
    assert driven.asked(PreLock) == []
    driven.let_grace_pass()
    ended = driven.facts[-1]
    assert isinstance(ended, RunEnded) and ended.fault is not None
    assert ended.fault.message == "no data"


def test_a_run_that_is_called_failed_ends_at_the_very_moment_that_its_grace_is_over() -> None:
    driven = begun()
    driven.until(Phase.TRAINING)
    driven.master._fail(Fault("a", "DataError", "rollout-0", "no data", 0.0), 64.0)
    early = driven.master.decide(Tick(), math.nextafter(64.0 + FAULT_GRACE_S, 0.0))
    ended = driven.master.decide(Tick(), 64.0 + FAULT_GRACE_S)
    assert early.effects == ()
    assert [type(effect) for effect in ended.effects] == [Finish]
