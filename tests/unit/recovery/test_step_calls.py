"""A call that is asked for again is answered from the record, and never run twice."""

from __future__ import annotations

import msgspec
import pytest

from kintsugi.errors import RefusedError
from kintsugi.protocol.recovery import RankReady, RankStanding
from kintsugi.protocol.sample_transfer import Routes
from kintsugi.protocol.training import CallDone, RunCall
from kintsugi.recovery.step_calls import StepCalls
from kintsugi.types import LogicalShard, ShardItem

ITEM = ShardItem("0/0", "rollout-0", "digest", 8, 4, {"advantage": 0.5})
CALL = RunCall("actor_train", "policy_train", 4, (LogicalShard(0, (ITEM,)),), 2, {"tokens": 4.0}, 5)
DONE = CallDone(4, "state", {"loss": 1.0})
READY = RankReady(3, "d3", generation=6, stage="main")


def standing(calls: StepCalls, ready: RankReady = READY, **changes: object) -> RankStanding:
    arguments: dict[str, object] = {"group": 5, "ranks": ("model-0",), "is_normal": True}
    arguments |= {"is_between_calls": False, "queued": ()} | changes
    return calls.standing(ready, **arguments)  # type: ignore[arg-type]


def test_a_finished_call_is_answered_again_whatever_its_routes() -> None:
    calls = StepCalls()
    assert calls.answer_to(CALL) is None
    calls.begin(CALL)
    calls.end(CALL, DONE)
    again = msgspec.structs.replace(CALL, routes=Routes(batch_bytes=1))
    assert calls.answer_to(again) is DONE
    assert calls.is_done(4, "actor_train") and calls.names == ("actor_train",)


@pytest.mark.parametrize(
    "change",
    [
        {"blocks": (1, 0)},
        {"generation": 6},
        {"totals": {"tokens": 5.0}},
        {"shards": (LogicalShard(1, (ITEM,)),)},
        {"prepares": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_call_of_the_same_name_with_other_contents_is_refused(change: dict[str, object]) -> None:
    calls = StepCalls()
    calls.begin(CALL)
    calls.end(CALL, DONE)
    with pytest.raises(RefusedError, match="actor_train of step 4 was run on other samples"):
        calls.answer_to(msgspec.structs.replace(CALL, **change))


def test_a_step_that_is_over_is_forgotten() -> None:
    calls = StepCalls()
    calls.begin(CALL)
    calls.end(CALL, DONE)
    calls.forget()
    assert calls.answer_to(CALL) is None and standing(calls).call_step == -1


def test_the_standing_names_the_group_and_the_step_of_running_finished_and_queued_calls() -> None:
    calls = StepCalls()
    placed = msgspec.structs.replace(CALL, blocks=(1, 0))
    assert (standing(calls).call_step, standing(calls).ready.generation) == (-1, 5)
    assert standing(calls, queued=[placed]).blocks == (1, 0)
    calls.begin(placed)
    assert (standing(calls).call_step, standing(calls).blocks) == (4, (1, 0))
    calls.end(placed, DONE)
    assert (standing(calls).call_step, standing(calls).blocks) == (4, (1, 0))


def test_calls_of_an_earlier_group_do_not_count() -> None:
    calls = StepCalls()
    calls.begin(CALL)
    assert standing(calls, group=6).call_step == -1


def test_a_rank_is_half_updated_only_where_no_call_will_finish_the_update() -> None:
    calls, half = StepCalls(), msgspec.structs.replace(READY, half_updated=True)
    assert standing(calls, half).ready.half_updated
    assert not standing(calls, half, is_between_calls=True).ready.half_updated
    calls.begin(CALL)
    assert not standing(calls, half).ready.half_updated


def test_a_rank_whose_call_failed_is_not_normal_until_the_step_is_given_up() -> None:
    calls = StepCalls()
    calls.fail()
    assert standing(calls).is_normal, "nothing was running"
    calls.begin(CALL)
    calls.fail()
    assert not standing(calls).is_normal and calls.answer_to(CALL) is None
    calls.forget()
    assert standing(calls).is_normal
