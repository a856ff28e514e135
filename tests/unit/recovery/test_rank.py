"""The protocol around a framework's callbacks, and a torch-free framework that goes through it in both flows."""

from __future__ import annotations

import pytest

from kintsugi.errors import GroupBroken, IntegrityError, RefusedError, UnknownPeer
from kintsugi.protocol.recovery import (
    DeviceClean,
    DeviceStop,
    NotifyNormal,
    PreLock,
    RebuildGroup,
    Repair,
    Rollback,
)
from kintsugi.recovery.rank import FLOWS, OWN_STATE, Flow, Operation, Processor
from kintsugi.simulation.replay_adapter import ReplayAdapter, ReplaySnapshot, Snapshots, digest_of

KEYS = {step: tuple(f"grpo:0:{step}:0/{index}" for index in range(4)) for step in range(1, 9)}
BOTH = pytest.mark.parametrize("flow", list(Flow))


class Rank:
    """An adapter with its processor; a step of it is train and commit."""

    def __init__(self, flow: Flow, *, snapshots: Snapshots | None = None, process: str = "model-0") -> None:
        self.snapshots: Snapshots = {} if snapshots is None else snapshots
        self.reachable: dict[str, ReplaySnapshot] = {}
        self.adapter = ReplayAdapter(process, self.snapshots, flow=flow, fetch=self._fetch)
        self.processor = Processor(self.adapter)
        self.flow = flow

    def start(self) -> Rank:
        self.adapter.rebuild(rebuild(1, sequence=0))
        self.adapter.start_stage("grpo")
        return self

    def run(self, first: int, last: int) -> list[str]:
        digests = []
        for step in range(first, last + 1):
            self.processor.admit(step)
            digests.append(self.adapter.train(step, KEYS[step]))
            self.adapter.commit(step)
        return digests

    def recover(self, step: int, *, sequence: int, generation: int, digest: str = "") -> None:
        own = (f"snapshot:{self.adapter.process}",)
        operations: dict[type[Operation], Operation] = {
            PreLock: PreLock(step, sequence),
            DeviceStop: DeviceStop(generation - 1, sequence + 1),
            DeviceClean: DeviceClean(sequence + 2),
            RebuildGroup: rebuild(generation, sequence=sequence + 3),
            Repair: Repair(step, own, sequence + 4, digest),
            Rollback: Rollback(step, sequence + 5),
            NotifyNormal: NotifyNormal(step, sequence + 6),
        }
        for kind in FLOWS[self.flow]:
            ready = self.processor.carry_out(operations[kind])
        assert (ready.step, ready.half_updated, ready.prepared_step) == (step, False, -1)

    def _fetch(self, source: str, step: int) -> ReplaySnapshot:
        if source not in self.reachable:
            raise RefusedError(f"{source} is not there")
        return self.reachable[source]


def rebuild(generation: int, *, sequence: int) -> RebuildGroup:
    return RebuildGroup(generation, ("model-0", "model-1"), "", sequence=sequence)


def undisturbed(flow: Flow, num_steps: int) -> list[str]:
    return Rank(flow).start().run(1, num_steps)


@BOTH
def test_a_rank_that_was_caught_half_updated_goes_on_with_the_digests_of_an_undisturbed_one(
    flow: Flow,
) -> None:
    rank = Rank(flow).start()
    digests = rank.run(1, 3)
    rank.adapter.train(4, KEYS[4], interrupted=True)
    assert rank.adapter.standing().half_updated
    rank.recover(3, sequence=1, generation=2, digest=digests[-1])
    assert digests + rank.run(4, 6) == undisturbed(flow, 6)


@BOTH
def test_a_replacement_goes_on_from_its_predecessors_snapshot(flow: Flow) -> None:
    rank = Rank(flow).start()
    digests = rank.run(1, 3)
    rank.adapter.train(4, KEYS[4], interrupted=True)
    newcomer = Rank(flow, snapshots=rank.snapshots)
    newcomer.recover(3, sequence=1, generation=2, digest=digests[-1])
    assert digests + newcomer.run(4, 6) == undisturbed(flow, 6)


@BOTH
def test_a_prepared_step_that_the_master_committed_is_adopted_by_a_replacement(flow: Flow) -> None:
    rank = Rank(flow).start()
    digests = [*rank.run(1, 3), rank.adapter.train(4, KEYS[4])]
    newcomer = Rank(flow, snapshots=rank.snapshots)
    newcomer.recover(4, sequence=1, generation=2, digest=digests[-1])
    assert digests + newcomer.run(5, 6) == undisturbed(flow, 6)


@BOTH
def test_a_prepared_step_that_was_not_committed_leaves_nothing_behind(flow: Flow) -> None:
    rank = Rank(flow).start()
    digests = rank.run(1, 3)
    rank.adapter.train(4, ["other samples"])
    rank.recover(3, sequence=1, generation=2)
    with pytest.raises(RefusedError, match="no snapshot of step 4"):
        rank.adapter.repair(4, source="snapshot:model-0", digest="")
    assert digests + rank.run(4, 6) == undisturbed(flow, 6)


def test_in_the_flow_without_rollback_a_rank_is_unfit_between_rebuild_and_repair() -> None:
    rank = Rank(Flow.RESTORE).start()
    rank.run(1, 2)
    rank.processor.carry_out(DeviceStop(1, 1))
    ready = rank.processor.carry_out(rebuild(2, sequence=2))
    assert ready.half_updated
    with pytest.raises(RefusedError, match="half updated"):
        rank.processor.admit(3)
    with pytest.raises(RefusedError, match="training can not go on from step 2"):
        rank.processor.carry_out(NotifyNormal(2, 3))
    with pytest.raises(RefusedError, match="knows no Rollback"):
        rank.processor.carry_out(Rollback(2, 4))


@BOTH
def test_an_operation_of_an_earlier_round_is_refused_and_one_of_the_same_is_a_repetition(flow: Flow) -> None:
    rank = Rank(flow).start()
    rank.run(1, 2)
    first = rank.processor.carry_out(PreLock(2, 7))
    assert rank.processor.carry_out(PreLock(2, 7)) == first
    with pytest.raises(RefusedError, match=r"DeviceStop of round 6 comes late: this rank is in round 7"):
        rank.processor.carry_out(DeviceStop(1, 6))
    assert rank.adapter.generation == 1


def test_what_repeats_itself_after_the_round_is_over_is_answered_and_changes_nothing() -> None:
    rank = Rank(Flow.ROLLBACK).start()
    rank.run(1, 2)
    for operation in (PreLock(2, 5), Rollback(2, 5), NotifyNormal(2, 5)):
        rank.processor.carry_out(operation)
    rank.run(3, 3)
    rank.adapter.train(4, KEYS[4])
    for late in (PreLock(2, 5), Rollback(3, 5), NotifyNormal(2, 5), DeviceStop(1, 5)):
        assert rank.processor.carry_out(late).prepared_step == 4
    assert rank.adapter.generation == 1
    rank.adapter.commit(4)
    rank.processor.admit(5)


def test_an_attempt_that_fails_has_still_ended_the_rounds_before_it() -> None:
    rank = Rank(Flow.ROLLBACK).start()
    with pytest.raises(RefusedError, match="not among the ranks"):
        rank.processor.carry_out(RebuildGroup(2, ("model-7",), "", sequence=9))
    with pytest.raises(RefusedError, match="comes late"):
        rank.processor.carry_out(PreLock(0, 8))


def test_a_locked_rank_runs_nothing_until_it_is_told_that_all_is_normal() -> None:
    rank = Rank(Flow.ROLLBACK).start()
    rank.run(1, 2)
    rank.processor.carry_out(PreLock(2, 1))
    rank.processor.carry_out(Rollback(2, 2))
    with pytest.raises(RefusedError, match="locked after step 2"):
        rank.processor.admit(3)
    rank.processor.carry_out(NotifyNormal(2, 3))
    rank.processor.admit(3)


def test_training_goes_on_only_from_where_the_rank_stands() -> None:
    rank = Rank(Flow.ROLLBACK).start()
    rank.run(1, 2)
    rank.processor.carry_out(PreLock(2, 1))
    with pytest.raises(RefusedError, match="can not go on from step 5: this rank has committed 2"):
        rank.processor.carry_out(NotifyNormal(5, 2))
    with pytest.raises(RefusedError, match="locked after step 2"):
        rank.processor.admit(3)


def test_a_repair_falls_to_the_next_source_and_says_which_it_was() -> None:
    replica = Rank(Flow.ROLLBACK, process="model-1").start()
    digests = replica.run(1, 3)
    newcomer = Rank(Flow.ROLLBACK)
    good = replica.adapter.committed
    newcomer.reachable = {
        "model-2": good._replace(vector=(1, *good.vector[1:])),
        "model-3": ReplaySnapshot(2, "grpo", good.vector, digest_of(2, "grpo", good.vector), committed=True),
        "model-1": good,
    }
    sources = ("snapshot:model-0", "agent-1", "model-2", "model-3", "model-1")
    ready = newcomer.processor.carry_out(Repair(3, sources, 1, digests[-1]))
    assert (ready.source, ready.step, ready.state_digest) == ("model-1", 3, digests[-1])


def test_a_repair_without_any_good_source_names_the_fault_of_each_and_changes_nothing() -> None:
    newcomer = Rank(Flow.ROLLBACK).start()
    before = newcomer.adapter.standing()
    vector = (9,) * len(newcomer.adapter.committed.vector)
    newcomer.reachable = {
        "model-1": ReplaySnapshot(3, "grpo", vector, digest_of(3, "grpo", vector), committed=True)
    }
    with pytest.raises(RefusedError) as caught:
        newcomer.processor.carry_out(Repair(3, ("snapshot:model-0", "model-1", "model-2"), 1, "feed"))
    message = str(caught.value)
    assert "snapshot:model-0 has no snapshot of step 3; there are: 0" in message
    assert "model-1: expected step 3 with digest feed" in message
    assert "model-2 is not there" in message
    assert newcomer.adapter.standing() == before


def test_a_repair_that_failed_for_want_of_an_address_says_so_by_its_type() -> None:
    newcomer = Rank(Flow.ROLLBACK)

    def unknown(source: str, step: int) -> ReplaySnapshot:
        if source == "model-2":
            raise RefusedError("model-2 is not there")
        raise UnknownPeer(f"{source} is not in the address book")

    newcomer.adapter = ReplayAdapter("model-0", {}, flow=Flow.ROLLBACK, fetch=unknown)
    processor = Processor(newcomer.adapter)
    with pytest.raises(UnknownPeer, match=r"no source has the state of step 1: model-1: .* model-2: "):
        processor.carry_out(Repair(1, ("model-1", "model-2"), 1))
    with pytest.raises(RefusedError) as caught:
        processor.carry_out(Repair(1, ("model-2",), 2))
    assert type(caught.value) is RefusedError


def test_a_bug_in_a_source_is_not_taken_for_a_bad_source() -> None:
    newcomer = Rank(Flow.ROLLBACK)

    def broken(source: str, step: int) -> ReplaySnapshot:
        raise ZeroDivisionError

    newcomer.adapter = ReplayAdapter("model-0", {}, flow=Flow.ROLLBACK, fetch=broken)
    with pytest.raises(ZeroDivisionError):
        Processor(newcomer.adapter).carry_out(Repair(1, ("model-1", "model-2"), 1))


def test_a_rank_that_is_what_the_repair_would_make_it_needs_no_source() -> None:
    rank = Rank(Flow.ROLLBACK).start()
    digests = rank.run(1, 2)
    assert rank.processor.carry_out(Repair(2, (), 1, digests[-1])).source == OWN_STATE


def test_a_call_gives_way_to_a_round_that_is_not_over_and_to_no_other() -> None:
    rank = Rank(Flow.ROLLBACK).start()
    processor = rank.processor
    for operation in (PreLock(0, 4), NotifyNormal(0, 5)):
        processor.carry_out(operation)
    assert not processor.interrupts(DeviceStop(1, 5))
    assert processor.interrupts(DeviceStop(1, 6))
    processor.carry_out(PreLock(0, 6))
    assert processor.interrupts(DeviceStop(1, 6))


def test_an_operation_gives_way_to_a_later_round_only_and_tries_no_further_source_then() -> None:
    rank = Rank(Flow.ROLLBACK)
    seen: list[bool] = []

    def interrupted(source: str, step: int) -> ReplaySnapshot:
        seen.extend(processor.interrupts(DeviceStop(1, number)) for number in (7, 8))
        processor.carry_out(PreLock(0, 8))
        raise GroupBroken(f"{source}: the rank was told to stop")

    rank.adapter = ReplayAdapter("model-0", {}, flow=Flow.ROLLBACK, fetch=interrupted)
    processor = Processor(rank.adapter)
    with pytest.raises(GroupBroken, match="model-1"):
        processor.carry_out(Repair(1, ("model-1", "model-2"), 7))
    assert seen == [False, True]


@BOTH
def test_a_generation_is_joined_once_and_none_before_the_latest_that_was_heard_of(flow: Flow) -> None:
    def failing(request: RebuildGroup) -> None:
        if request.generation == 3:
            raise IntegrityError("the probe's sum is wrong")

    adapter = ReplayAdapter("model-0", {}, flow=flow, probe=failing)
    adapter.rebuild(rebuild(2, sequence=0))
    adapter.rebuild(rebuild(2, sequence=0))
    with pytest.raises(IntegrityError, match="the probe's sum"):
        adapter.rebuild(rebuild(3, sequence=1))
    assert (adapter.generation, adapter.standing().generation) == (0, 3)
    with pytest.raises(RefusedError, match="generation 3 is over"):
        adapter.rebuild(rebuild(3, sequence=2))


def test_a_rank_that_is_locked_after_a_step_may_still_run_that_step() -> None:
    rank = Rank(Flow.ROLLBACK).start()
    rank.run(1, 1)
    rank.processor.carry_out(PreLock(2, 1))
    rank.processor.admit(2)
    rank.run(2, 2)
    with pytest.raises(RefusedError, match="locked after step 2"):
        rank.processor.admit(3)
