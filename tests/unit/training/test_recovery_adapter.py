"""How a model worker comes back to an agreed state: from every source, with equal bits."""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kintsugi.checkpoint.snapshot import HeldSnapshots, Snapshots
from kintsugi.cluster.peer_snapshots import PeerSnapshotStore
from kintsugi.config.schema import ClusterSection, Config
from kintsugi.errors import DeviceError, IntegrityError, Unfit
from kintsugi.protocol.membership import Failed, Ok
from kintsugi.protocol.messages import Body
from kintsugi.protocol.recovery import (
    AskStanding,
    DeviceClean,
    DeviceStop,
    FetchState,
    KeepState,
    NotifyNormal,
    PreLock,
    RankReady,
    RankStanding,
    RebuildGroup,
    Repair,
    Rollback,
    StateFetched,
)
from kintsugi.protocol.training import CallDone, CommitStep, Save, Saved, StartStage
from kintsugi.runtime.counters import COUNTERS
from kintsugi.training.group import check_sum, known_numbers
from kintsugi.training.peer_replication import PeerReplica
from kintsugi.training.process_group import ProcessGroup
from kintsugi.transport import Reply
from kintsugi.transport.store import StoreServer
from kintsugi.types import Peer
from tests.unit.bulk.loop import Loop
from tests.unit.training.fakes import (
    BETA_CONFIG,
    CONFIG,
    PPO_CONFIG,
    Done,
    FakeSegments,
    FakeShell,
    Rank,
    bulk_of,
    grpo_call,
    rebuild,
)
from tests.unit.training.world import in_world


@pytest.fixture
def segments() -> Iterator[FakeSegments]:
    held = FakeSegments()
    yield held
    held.close()


def ready(rank: Rank, *, step: int, source: str = "", generation: int = 1) -> RankReady:
    """Where a rank should stand, by its own measure of itself."""
    return RankReady(step, rank.state.digest(), generation=generation, stage=rank.stage.name, source=source)


def replica_of(rank: Rank, into: Rank) -> None:
    """Let `into` reach the other rank, as it would over a socket."""

    def ask(body: Body) -> Reply:
        answer = rank.ask(body)
        assert not isinstance(answer, Failed), answer
        return Reply(answer)

    into.shell.peers["model-0"] = ask
    into.shell.bulk["model-0"] = rank.bulk


def go_on(rank: Rank, *, step: int, generation: int = 1) -> CallDone:
    done = rank.ask(grpo_call(step, generation=generation))
    assert isinstance(done, CallDone), done
    return done


def test_a_stop_that_arrives_during_a_call_ends_it_before_the_update() -> None:
    rank = Rank().start()
    rank.shell.replies.clear()
    rank.ask(grpo_call(), DeviceStop(1, 2))
    failed, stopped = rank.shell.replies
    assert isinstance(failed, Failed) and failed.fault.kind == "GroupBroken"
    assert stopped == ready(rank, step=2)


def test_a_stop_of_an_earlier_round_ends_nothing_and_is_refused() -> None:
    rank = Rank().start()
    rank.ask(PreLock(2, 5), NotifyNormal(2, 6))
    rank.shell.replies.clear()
    rank.ask(grpo_call(), DeviceStop(1, 4))
    done, late = rank.shell.replies
    assert isinstance(done, CallDone)
    assert isinstance(late, Failed) and "comes late" in late.fault.message


def test_a_rank_answers_a_pre_lock_and_its_peers_in_the_middle_of_a_call() -> None:
    rank = Rank().start()
    rank.shell.replies.clear()
    rank.ask(grpo_call(), PreLock(3, 2), FetchState(2))
    assert [type(body) for body in rank.shell.replies] == [RankReady, StateFetched, CallDone]


def test_a_new_master_that_asks_in_the_middle_of_a_call_is_told_of_it_and_gets_its_answer_once() -> None:
    rank = Rank().start()
    rank.ask(NotifyNormal(2, 6))
    rank.shell.replies.clear()
    before = COUNTERS.snapshot().counters
    rank.ask(grpo_call(), AskStanding(), grpo_call())
    standing, done, again = rank.shell.replies
    assert isinstance(standing, RankStanding) and standing.is_normal
    assert (standing.call_step, standing.ranks) == (3, ("model-0",))
    assert (standing.ready.step, standing.ready.prepared_step, standing.ready.half_updated) == (2, -1, False)
    assert isinstance(done, CallDone) and again == done
    steps = COUNTERS.snapshot().counters["steps"] - before.get("steps", 0)
    assert steps == 1


def test_a_call_that_has_ended_is_answered_again_while_the_next_one_runs() -> None:
    """The other rank may wait for that answer: the master sends it the running call only then."""
    rank = Rank(config=PPO_CONFIG).start()
    first, second, *_ = rank.calls(3)
    done = rank.ask(first)
    rank.shell.replies.clear()
    rank.ask(second, first)
    again, ended = rank.shell.replies
    assert again == done and isinstance(ended, CallDone) and ended != done


def test_a_new_master_is_told_of_a_prepared_step_and_may_commit_it() -> None:
    rank = Rank().start()
    rank.ask(NotifyNormal(2, 6))
    done = go_on(rank, step=3)
    standing = rank.ask(AskStanding())
    assert isinstance(standing, RankStanding)
    assert (standing.ready.prepared_step, standing.call_step, standing.is_normal) == (3, 3, True)
    assert rank.ask(grpo_call()) == done
    rank.ask(CommitStep(3))
    standing = rank.ask(AskStanding())
    assert isinstance(standing, RankStanding)
    assert (standing.ready.step, standing.ready.state_digest, standing.call_step) == (
        3,
        done.state_digest,
        -1,
    )


def test_a_rank_whose_call_was_interrupted_tells_a_new_master_that_it_has_to_recover() -> None:
    rank = Rank().start()
    rank.ask(NotifyNormal(2, 6))
    rank.ask(grpo_call(), DeviceStop(1, 7))
    standing = rank.ask(AskStanding())
    assert isinstance(standing, RankStanding) and not standing.is_normal and standing.ranks == ()


def test_a_locked_rank_runs_nothing_until_it_is_told_that_all_is_normal() -> None:
    rank = Rank().start()
    assert isinstance(rank.ask(PreLock(2, 2)), RankReady)
    assert "locked after step 2" in rank.refusal(grpo_call())
    rank.ask(Rollback(2, 3))
    assert "locked after step 2" in rank.refusal(grpo_call())
    rank.ask(NotifyNormal(2, 4))
    assert isinstance(rank.ask(grpo_call()), CallDone)


def test_the_whole_protocol_brings_a_rank_back_to_the_agreed_step_with_equal_bits() -> None:
    undisturbed = Rank().start()
    expected = go_on(undisturbed, step=3)
    rank = Rank().start()
    before = rank.state.digest()
    go_on(rank, step=3)
    bodies: list[Body] = [PreLock(2, 2), DeviceStop(1, 3), DeviceClean(4)]
    bodies += [RebuildGroup(2, ("model-0",), "", sequence=5), Rollback(2, 6), NotifyNormal(2, 7)]
    answers = [rank.ask(body) for body in bodies]
    assert all(isinstance(answer, RankReady) and answer.state_digest == before for answer in answers)
    assert answers[-1] == ready(rank, step=2, generation=2)
    again = go_on(rank, step=3, generation=2)
    assert (again.state_digest, again.metrics) == (expected.state_digest, expected.metrics)


def test_a_prepared_step_shows_and_is_adopted_by_the_rollback_to_it() -> None:
    rank = Rank().start()
    done = go_on(rank, step=3)
    locked = rank.ask(PreLock(3, 2))
    assert isinstance(locked, RankReady)
    assert (locked.step, locked.prepared_step) == (2, 3)
    adopted = rank.ask(Rollback(3, 3))
    assert isinstance(adopted, RankReady)
    assert (adopted.step, adopted.prepared_step, adopted.state_digest) == (3, -1, done.state_digest)


def test_an_old_generation_cannot_be_joined_and_the_present_one_only_once() -> None:
    rank = Rank()
    rank.ask(rebuild(3))
    assert "generation 2 is over: this rank is in 3" in rank.refusal(
        RebuildGroup(2, ("model-0",), "", sequence=4)
    )
    assert isinstance(rank.ask(RebuildGroup(3, ("model-0",), "", sequence=5)), RankReady)


def test_a_generation_that_was_stopped_is_not_joined_again() -> None:
    rank = Rank()
    rank.ask(rebuild(3))
    stopped = rank.ask(DeviceStop(3, 4))
    assert isinstance(stopped, RankReady) and stopped.generation == 3
    assert "generation 3 is over" in rank.refusal(RebuildGroup(3, ("model-0",), "", sequence=5))
    assert "expected a call of group generation none" in rank.refusal(grpo_call(1, generation=3))


def test_a_rebuilt_group_adds_up() -> None:
    def rank_main(rank: int, group: ProcessGroup) -> bool:
        check_sum(group, torch.tensor(known_numbers(group), dtype=torch.float64), timeout_s=5.0)
        return True

    assert in_world(2, rank_main) == [True, True]


def test_a_group_that_does_not_add_up_is_not_used() -> None:
    def rank_main(rank: int, group: ProcessGroup) -> str:
        if rank == 0:
            group.group_id = 7
        with pytest.raises(IntegrityError) as caught:
            check_sum(group, torch.tensor(known_numbers(group), dtype=torch.float64), timeout_s=5.0)
        return str(caught.value)

    for message in in_world(2, rank_main):
        assert "does not add up" in message and "[3.0, 8.0]" in message


SOURCES = ("snapshot:model-0", "snapshot of another rank", "model-0", "agent-1", "checkpoint")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("config", [CONFIG, BETA_CONFIG, PPO_CONFIG], ids=["plain", "reference", "critic"])
def test_a_replacement_repaired_from_any_source_goes_on_with_equal_bits(
    source: str, config: Config, segments: FakeSegments, tmp_path: Path
) -> None:
    rank = Rank(segments=segments, config=config).start()
    rank.train(3)
    newcomer = Rank(
        "model-1" if "another" in source else "model-0", seed=99, segments=segments, config=config
    )
    name = source
    match source:
        case "snapshot of another rank":
            name = "snapshot:model-0"
        case "model-0":
            replica_of(rank, newcomer)
        case "agent-1":
            keep_and_offer(rank, newcomer)
        case "checkpoint":
            saved = rank.ask(Save(3, rank.stage.name, str(tmp_path)))
            assert isinstance(saved, Saved)
            name = saved.path
    digest = rank.state.digest()
    sources = ("model-9", "snapshot:model-7", name)
    answer = newcomer.ask(Repair(3, sources, 1, digest))
    assert answer == ready(rank, step=3, source=name, generation=0)
    assert newcomer.state.digest() == digest
    newcomer.ask(RebuildGroup(1, (newcomer.shell.process,), "", sequence=2))
    assert newcomer.train(4) == rank.train(4)


def keep_and_offer(rank: Rank, newcomer: Rank) -> None:
    """An agent of another host keeps what the rank sends, and gives it to the newcomer."""
    shell, loop = FakeShell("agent-1"), Loop()
    shell.bulk["model-0"] = rank.bulk
    answering: Any = loop
    keeping_bulk = bulk_of(shell)
    keeper = PeerSnapshotStore(answering, keeping_bulk, answering, capacity=1 << 30)
    kept = threading.Event()

    def send(agent: str, body: KeepState) -> Done:
        delivery = loop.delivery("model-0", body)
        keeper.handle(delivery)
        answer = loop.until_answered(delivery.envelope.sequence)
        kept.set()
        return Done(lambda: Reply(answer))

    keeping = Peer("agent-1", "a", "host-1", "", b"")
    replica = PeerReplica(send, rank.bulk.server, process="model-0")
    assert replica.offer(rank.state.hold_latest, digest=rank.state.prepared_digest, agent=keeping)
    assert kept.wait(10)

    def agent(body: Body) -> Reply:
        assert isinstance(body, FetchState) and body.owner == "model-0"
        delivery = loop.delivery("model-0", body)
        keeper.handle(delivery)
        return Reply(loop.until_answered(delivery.envelope.sequence))

    newcomer.shell.peers["agent-1"] = agent
    newcomer.shell.bulk["agent-1"] = keeping_bulk


def test_a_replacement_without_initial_weights_is_repaired_from_the_snapshot_with_equal_bits(
    segments: FakeSegments,
) -> None:
    rank = Rank(segments=segments).start()
    digest = rank.train(3)
    newcomer = Rank(segments=segments, is_blank=True)
    assert newcomer.state.has_snapshot and newcomer.state.is_fresh
    standing = newcomer.ask(PreLock(3, 1))
    assert isinstance(standing, RankReady) and standing.state_digest == "", "nothing is there to be hashed"
    newcomer.ask(rebuild(2), Repair(3, ("snapshot:model-0",), 5, digest), Rollback(3, 6), NotifyNormal(3, 7))
    assert newcomer.state.digest() == digest == newcomer.state.committed_digest


@pytest.mark.parametrize("fails", [False, True], ids=["no repair", "failed repair"])
def test_a_blank_rank_of_a_run_at_its_beginning_loads_the_initial_weights(
    fails: bool, segments: FakeSegments
) -> None:
    seed = CONFIG.model.new.seed if CONFIG.model.new is not None else 0
    expected = Rank(seed=seed).start()
    rank = Rank(seed=99, segments=segments, is_blank=True)
    if fails:
        assert "no source" in rank.refusal(Repair(1, ("snapshot:model-0",), 1, ""))
    rank.start()
    assert rank.state.digest() == expected.state.digest()


def test_the_prepared_step_of_a_dead_rank_is_used_when_it_was_committed(segments: FakeSegments) -> None:
    rank = Rank(segments=segments).start()
    done = go_on(rank, step=3)
    newcomer = Rank(seed=99, segments=segments)
    answer = newcomer.ask(Repair(3, ("snapshot:model-0",), 1, done.state_digest))
    assert isinstance(answer, RankReady)
    assert (answer.step, answer.state_digest) == (3, done.state_digest)


def test_the_committed_step_of_a_dead_rank_is_used_when_the_prepared_one_was_not_committed(
    segments: FakeSegments,
) -> None:
    rank = Rank(segments=segments).start()
    before = rank.state.digest()
    go_on(rank, step=3)
    newcomer = Rank(seed=99, segments=segments)
    newcomer.ask(StartStage("grpo", 2), Repair(2, ("snapshot:model-0",), 1, before))
    assert newcomer.state.digest() == before
    assert "no snapshot of step 3" in newcomer.refusal(Repair(3, ("snapshot:model-0",), 2))


def test_a_half_written_or_damaged_slot_is_never_used(segments: FakeSegments) -> None:
    rank = Rank(segments=segments).start()
    rank.train(3)
    slots = Snapshots("model-0", size=3 * rank.state.gradient.nbytes, segments=segments).slots
    newest = max(slots, key=lambda slot: slot.header.serial if slot.header else -1)
    newest.payload[100] ^= 0xFF
    newcomer = Rank(seed=99, segments=segments)
    fresh = newcomer.state.digest()
    assert "hashes to" in newcomer.refusal(Repair(3, ("snapshot:model-0",), 1))
    newest.payload[100] ^= 0xFF
    newest.begin()
    assert "no snapshot of step 3" in newcomer.refusal(Repair(3, ("snapshot:model-0",), 2))
    assert newcomer.state.digest() == fresh


def test_a_snapshot_whose_reference_weights_are_damaged_is_never_used(segments: FakeSegments) -> None:
    rank = Rank(segments=segments, config=BETA_CONFIG).start()
    rank.train(3)
    reference = HeldSnapshots("model-0", segments=segments).stored_reference("grpo")
    reference.payload[100] ^= 0xFF
    newcomer = Rank(seed=99, segments=segments, config=BETA_CONFIG)
    assert "the reference weights of stage 'grpo' hash to" in newcomer.refusal(
        Repair(3, ("snapshot:model-0",), 1)
    )
    reference.payload[100] ^= 0xFF
    newcomer.ask(Repair(3, ("snapshot:model-0",), 2))
    assert newcomer.state.digest() == rank.state.digest()


def test_a_repair_with_the_wrong_digest_changes_nothing(segments: FakeSegments) -> None:
    rank, newcomer = Rank(segments=segments).start(), Rank("model-1", seed=99)
    fresh = newcomer.state.digest()
    replica_of(rank, newcomer)
    refusal = newcomer.refusal(Repair(2, ("model-0",), 1, "feed"))
    assert "hashes to" in refusal and "expected feed" in refusal
    assert (newcomer.state.digest(), newcomer.state.committed_step) == (fresh, 0)


def test_a_rank_that_waits_for_a_group_to_form_still_answers_its_peers() -> None:
    rank = Rank().start()
    rank.shell.replies.clear()
    with closing(StoreServer(keys=rank.shell.keys)) as server:
        alone = RebuildGroup(2, ("model-0", "model-1"), server.address, sequence=2, timeout_s=0.1)
        rank.ask(alone, FetchState(2))
    fetched, failed = rank.shell.replies
    assert isinstance(fetched, StateFetched)
    assert isinstance(failed, Failed) and failed.fault.kind == "GroupBroken"


def test_a_rank_that_waits_for_its_own_repair_still_answers_its_peers(segments: FakeSegments) -> None:
    rank, newcomer = Rank(segments=segments).start(), Rank("model-1", seed=99)
    replica_of(rank, newcomer)
    answer_of_replica = newcomer.shell.peers["model-0"]

    def ask(body: Body) -> Reply:
        newcomer.shell.arrive(FetchState(0))
        return answer_of_replica(body)

    newcomer.shell.peers["model-0"] = ask
    newcomer.ask(Repair(2, ("model-0",), 1))
    kinds = [type(body) for body in newcomer.shell.replies]
    assert StateFetched in kinds and kinds.index(StateFetched) < kinds.index(RankReady)


def test_a_half_updated_rank_rolls_back_from_its_slot() -> None:
    rank = Rank().start()
    before = rank.state.digest()
    rank.state.begin_update()
    rank.state.update(torch.ones_like(rank.state.gradient))
    half = rank.ask(PreLock(2, 2))
    assert isinstance(half, RankReady) and half.half_updated and half.state_digest == before
    assert rank.ask(Rollback(2, 3)) == ready(rank, step=2)
    assert rank.state.digest() == before


def test_a_rank_that_goes_back_between_two_training_calls_starts_clean() -> None:
    undisturbed = Rank(config=PPO_CONFIG).start()
    expected = [undisturbed.train(3), undisturbed.train(4)]
    rank = Rank(config=PPO_CONFIG).start()
    rank.train(3)
    before = rank.state.digest()
    *earlier, last = rank.calls(4)
    rank.ask(*earlier)
    assert rank.state.half_updated and rank.state.prepared_step is None and rank.state.digest() != before
    half = rank.ask(PreLock(3, 2))
    assert isinstance(half, RankReady) and half.half_updated and half.state_digest == before
    assert "locked after step 3" in rank.refusal(last)
    rank.ask(DeviceClean(3), Rollback(3, 4), NotifyNormal(3, 5))
    assert rank.state.digest() == before
    last = msgspec.structs.replace(last, after=())
    assert "has not covered sample" in rank.refusal(last), "nothing of the step is left"
    assert rank.train(4) == expected[1]


def test_a_call_that_broke_off_within_its_updates_is_not_gone_on_from() -> None:
    rank = Rank(config=PPO_CONFIG).start()
    *earlier, last = rank.calls(3)
    rank.ask(*earlier)
    rank.state.begin_update()
    assert "half updated and needs a rollback" in rank.refusal(last)


def test_a_rollback_measures_the_state_and_mends_what_nobody_noticed() -> None:
    rank = Rank().start()
    before = rank.state.digest()
    with torch.no_grad():
        next(iter(rank.state.model.parameters())).add_(1.0)
    assert rank.state.digest() != before
    rank.ask(Rollback(2, 2))
    assert rank.state.digest() == before


def test_an_agent_gets_a_prepared_step_when_all_ranks_are_on_one_host() -> None:
    config = msgspec.structs.replace(CONFIG, cluster=ClusterSection(hosts=2))
    rank = Rank(config=config).start()
    rank.shell.hosts = {"agent-0": "host-0", "agent-1": "host-1"}
    arrived: queue.SimpleQueue[KeepState] = queue.SimpleQueue()

    def agent(body: Body) -> Reply:
        return Reply(Ok())

    rank.shell.peers["agent-1"] = agent
    rank.shell.on_send = lambda body: arrived.put(body) if isinstance(body, KeepState) else None
    rank.ask(grpo_call())
    kept = arrived.get(timeout=10)
    assert (kept.owner, kept.state.manifest.step) == ("model-0", 3)


def test_a_device_that_failed_is_named_and_ends_the_process() -> None:
    rank = Rank().start()

    def illegal(body: Body) -> Reply:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nfor debugging")

    rank.shell.peers["rollout-0"] = illegal
    with pytest.raises(DeviceError, match="illegal memory access"):
        rank.ask(grpo_call())
    failed = rank.shell.replies[-1]
    assert isinstance(failed, Failed) and failed.fault.kind == "DeviceError"


def test_a_rank_without_descriptors_says_so_and_ends() -> None:
    rank = Rank().start()

    def no_descriptor(body: Body) -> Reply:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    rank.shell.peers["rollout-0"] = no_descriptor
    with pytest.raises(Unfit, match="no descriptor is left to this process"):
        rank.ask(grpo_call())


def test_a_device_without_memory_is_named_and_the_rank_goes_on() -> None:
    rank = Rank().start()
    good = rank.shell.peers["rollout-0"]

    def full(body: Body) -> Reply:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    rank.shell.peers["rollout-0"] = full
    assert rank.refusal(grpo_call()).startswith("DeviceOutOfMemory: CUDA out of memory")
    rank.shell.peers["rollout-0"] = good
    assert isinstance(rank.ask(grpo_call()), CallDone)
