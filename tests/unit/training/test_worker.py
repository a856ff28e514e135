"""A model worker between fakes: what it answers, and what it refuses."""

from __future__ import annotations

import weakref
from pathlib import Path

import msgspec
import pytest
import torch

from kintsugi.bulk.exports import slices
from kintsugi.errors import GroupBroken, IntegrityError, fault_of
from kintsugi.model import huggingface
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.process.membership import ShuttingDown
from kintsugi.protocol.membership import Failed, Ok
from kintsugi.protocol.messages import Body
from kintsugi.protocol.recovery import DeviceStop, RankReady, Repair
from kintsugi.protocol.rollout import FetchSamples
from kintsugi.protocol.sample_transfer import FetchRelayed, Relayed, Routes
from kintsugi.protocol.training import (
    CallDone,
    CommitStep,
    HashWeights,
    RunCall,
    Save,
    Saved,
    StartStage,
    WeightsHashed,
)
from kintsugi.protocol.weights import FetchWeights, Publish, Published, WeightsFetched
from kintsugi.runtime.digests import piece_digest
from kintsugi.training import recovery_adapter as adapter_module
from kintsugi.training import worker as worker_module
from kintsugi.training.initial_weights import load_model
from kintsugi.transport import Reply
from kintsugi.types import StreamSource
from kintsugi.weights.manifest import weights_sha256
from tests.unit.training.fakes import (
    BATCH,
    CONFIG,
    PPO_CONFIG,
    FakeSegments,
    FakeShell,
    Rank,
    bulk_of,
    grpo_call,
    half_call,
    holder,
    rebuild,
    sft_call,
    tokenizer,
)
from tests.unit.training.world import CPU, Batch, new_batch

FIVE = new_batch([(6, 2)] * 5)
"""The last of them is of a group that the small batch does not have."""


def test_a_call_leaves_the_rank_prepared_and_says_how_long_each_part_took() -> None:
    rank = Rank().start()
    done = rank.ask(grpo_call())
    assert isinstance(done, CallDone)
    assert (rank.state.prepared_step, done.state_digest) == (3, rank.state.digest())
    parts = {"fetch", "pack", "forward_backward", "reduce", "device", "snapshot_wait", "optimizer", "prepare"}
    assert parts == done.timing.keys()
    assert done.metrics["loss_tokens"] == 11.0
    assert rank.ask(CommitStep(3)) == Ok()
    assert rank.state.committed_step == 3


def test_a_repeated_call_of_a_prepared_step_gets_the_saved_result() -> None:
    rank = Rank().start()
    first = rank.ask(grpo_call())
    asked = len(rank.shell.asked)
    assert rank.ask(grpo_call()) is first
    assert len(rank.shell.asked) == asked


def test_calls_are_worked_off_in_the_graphs_order_however_they_arrive() -> None:
    expected = Rank(config=PPO_CONFIG).start().train(3)
    rank = Rank(config=PPO_CONFIG).start()
    rank.shell.replies.clear()
    rank.ask(*reversed(rank.calls(3)))
    answers = list(rank.shell.replies)
    assert all(isinstance(answer, CallDone) for answer in answers)
    assert len(answers) == len(rank.calls(3))
    assert rank.state.prepared_digest == expected


def test_a_repeated_training_call_is_not_made_twice() -> None:
    rank = Rank(config=PPO_CONFIG).start()
    calls = rank.calls(3)
    first = [rank.ask(call) for call in calls[:-1]]
    digest = rank.state.digest()
    assert [rank.ask(call) for call in calls[:-1]] == first
    assert rank.state.digest() == digest and rank.state.is_between_calls


def test_a_call_that_waits_for_another_is_refused_when_its_group_is_over() -> None:
    rank = Rank(config=PPO_CONFIG).start()
    rank.shell.replies.clear()
    rank.put(rank.calls(3)[-1])
    assert rank.shell.replies == []
    rank.put(DeviceStop(1, 2))
    kinds = {type(body) for body in rank.shell.replies}
    assert kinds == {RankReady, Failed}


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (grpo_call(5), "step 5 is not the next one: this rank has committed step 2"),
        (grpo_call(2), "step 2 is not the next one"),
        (grpo_call(3, generation=9), "expected a call of group generation 1, got one of 9"),
        (sft_call(3), "belongs to stage 'warmup', this rank is in 'grpo'"),
        (half_call(3), "rank 0 of 1 expected shards 0 to 3 of 4, got [0, 1]"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_with_its_reason(call: RunCall, reason: str) -> None:
    rank = Rank().start()
    before = rank.state.digest()
    assert reason in rank.refusal(call)
    assert rank.state.digest() == before


def test_a_fresh_rank_of_a_run_that_is_further_on_runs_nothing_until_it_is_repaired() -> None:
    rank = Rank()
    rank.ask(rebuild(1))
    assert isinstance(rank.ask(StartStage("grpo", 4)), RankReady)
    assert "this rank has committed step 0" in rank.refusal(grpo_call(5))


def test_a_source_whose_address_a_rank_does_not_have_is_no_file_and_the_refusal_says_so_by_its_type() -> None:
    rank = Rank()
    rank.ask(rebuild(1))
    refusal = rank.refusal(Repair(4, ("agent-1", "checkpoints/step-4"), 1))
    assert refusal.startswith("UnknownPeer: no source has the state of step 4: agent-1: agent-1 is not in")
    assert rank.refusal(Repair(4, ("checkpoints/step-4",), 2)).startswith("RefusedError: no source has")


def test_an_unknown_stage_is_refused_with_the_known_ones() -> None:
    assert "(warmup, grpo), got 'ppo'" in Rank().refusal(StartStage("ppo", 0))


def test_samples_are_fetched_once_per_step_from_each_holder() -> None:
    rank = Rank().start()
    rank.shell.asked.clear()
    rank.ask(grpo_call())
    (request,) = rank.shell.asked
    assert request[0] == "rollout-0"
    assert isinstance(request[1], FetchSamples)
    assert sorted(request[1].keys) == sorted(BATCH.trajectories)


def test_a_sample_whose_bytes_changed_is_refused_by_key_and_holder() -> None:
    rank = Rank().start()
    key = BATCH.items[1].key
    changed = msgspec.structs.replace(BATCH.trajectories[key], logprobs=bytes(48))
    damaged = Batch({**BATCH.trajectories, key: changed}, BATCH.items)
    rank.shell.peers["rollout-0"] = lambda body: holder(body, damaged)
    reason = rank.refusal(grpo_call())
    assert reason.startswith(f"IntegrityError: sample {key} from rollout-0: expected xxh3")
    assert rank.state.prepared_step is None


def relaying(call: RunCall) -> RunCall:
    """The call of a rank that fetches another sample for its neighbour."""
    return msgspec.structs.replace(call, routes=Routes(relay=FIVE.items[-1:]))


def test_a_neighbour_is_told_where_its_samples_lie_as_soon_as_they_do() -> None:
    segments = FakeSegments()
    rank = Rank(segments=segments).start()
    call = relaying(grpo_call())
    extra = {item.key: FIVE.trajectories[item.key] for item in call.routes.relay}
    whole = Batch({**BATCH.trajectories, **extra}, BATCH.items)
    rank.shell.peers["rollout-0"] = lambda body: holder(body, whole)
    rank.shell.replies.clear()
    rank.put(FetchRelayed(3, 1, tuple(extra)))
    assert rank.shell.replies == []
    rank.put(call)
    told, done = rank.shell.replies
    assert isinstance(told, Relayed) and told.places.keys() == extra.keys()
    assert isinstance(done, CallDone)
    assert told.segment in segments.names()
    rank.ask(CommitStep(3))
    assert told.segment not in segments.names()
    segments.close()


def test_a_rank_that_ends_within_a_step_leaves_no_samples_in_the_hosts_memory() -> None:
    segments = FakeSegments()
    rank = Rank(segments=segments).start()
    call = relaying(grpo_call())
    extra = {item.key: FIVE.trajectories[item.key] for item in call.routes.relay}
    whole = Batch({**BATCH.trajectories, **extra}, BATCH.items)
    rank.shell.peers["rollout-0"] = lambda body: holder(body, whole)
    rank.put(call)
    assert "samples-model-0" in segments.names()
    rank.worker.close()
    assert "samples-model-0" not in segments.names()
    segments.close()


@pytest.mark.parametrize(("step", "generation"), [(5, 1), (3, 9)], ids=["another step", "another group"])
def test_who_asks_for_samples_of_another_step_or_group_is_refused_at_once(step: int, generation: int) -> None:
    rank = Rank().start()
    assert "nothing was relayed" in rank.refusal(FetchRelayed(step, generation, ("a/0",)))


def test_a_neighbour_learns_that_nothing_is_relayed_in_this_step() -> None:
    rank = Rank().start()
    rank.ask(grpo_call())
    assert "nothing is relayed in step 3" in rank.refusal(FetchRelayed(3, 1, ("a/0",)))


def test_a_call_says_what_it_fetched() -> None:
    rank = Rank().start()
    done = rank.ask(grpo_call())
    assert isinstance(done, CallDone)
    assert [(each.source, each.requests) for each in done.transfers] == [("rollout-0", 1)]


def test_a_holders_fault_is_the_cause_of_the_refusal() -> None:
    rank = Rank().start()
    cause = fault_of(IntegrityError("gone"), process="rollout-0", time=0.0)

    def broken(body: Body) -> Reply:
        raise IntegrityError("no such sample", cause=cause)

    rank.shell.peers["rollout-0"] = broken
    answer = rank.ask(grpo_call())
    assert isinstance(answer, Failed)
    assert answer.fault.cause == cause


def test_a_request_that_failed_leaves_nothing_of_what_it_used_to_the_collector(
    no_collector: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank().start()
    used: list[weakref.ref[torch.Tensor]] = []

    def broken(*_: object, **__: object) -> None:
        tensor = torch.ones(3)
        used.append(weakref.ref(tensor))
        raise GroupBroken("model-1 is gone")

    monkeypatch.setattr(adapter_module, "join_groups", broken)
    assert "model-1 is gone" in rank.refusal(rebuild(2))
    assert [reference() for reference in used] == [None]


def test_being_told_to_end_ends_a_call() -> None:
    rank = Rank().start()
    rank.shell.arrive(grpo_call())
    rank.shell.shutting_down = True
    with pytest.raises(ShuttingDown):
        rank.worker.turn(0.0)


def test_weights_are_served_while_a_call_runs() -> None:
    rank = Rank().start()
    rank.ask(Publish(2, 2))
    rank.shell.replies.clear()
    rank.ask(grpo_call(), FetchWeights(2))
    assert [type(body) for body in rank.shell.replies] == [WeightsFetched, CallDone]


@pytest.mark.parametrize(("interval_s", "during_the_call"), [(0.0, True), (1000.0, False)])
def test_a_new_agent_gets_the_snapshots_during_a_long_call(
    interval_s: float, during_the_call: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "IDLE_WAIT_S", interval_s)
    rank = Rank().start()
    before = rank.num_renewed
    rank.ask(grpo_call())
    assert (rank.num_renewed > before + 1) == during_the_call


def test_a_saved_step_is_restored_exactly_and_loads_as_a_model_folder(tmp_path: Path) -> None:
    rank = Rank().start()
    rank.ask(grpo_call(), CommitStep(3))
    saved = rank.ask(Save(3, "grpo", str(tmp_path / "checkpoints")))
    assert isinstance(saved, Saved) and saved.step == 3
    resumed = Rank(seed=99)
    resumed.ask(rebuild(1), StartStage("grpo", 3))
    assert resumed.ask(Repair(3, (saved.path,), 2)) == RankReady(
        3, rank.state.digest(), generation=1, stage="grpo", source=saved.path
    )
    going_on = [member.ask(grpo_call(4)) for member in (rank, resumed)]
    assert isinstance(going_on[0], CallDone) and isinstance(going_on[1], CallDone)
    assert going_on[0].state_digest == going_on[1].state_digest
    folder = Path(saved.path)
    model = huggingface.load(folder)
    assert weights_sha256(dict(model.named_parameters())) == weights_sha256(rank.state.weights())
    assert Tokenizer.load(folder).encode("1+2=") == tokenizer().encode("1+2=")


def test_a_checkpoint_of_another_step_is_refused(tmp_path: Path) -> None:
    rank = Rank().start()
    saved = rank.ask(Save(2, "grpo", str(tmp_path)))
    assert isinstance(saved, Saved)
    assert "expected the state of step 4" in rank.refusal(Repair(4, (saved.path,), 2))
    assert "expected to save the committed step 2, got 3" in rank.refusal(Save(3, "grpo", str(tmp_path)))


def test_published_weights_are_the_committed_ones_and_can_be_streamed() -> None:
    rank = Rank().start()
    published = rank.ask(Publish(2, 2))
    assert isinstance(published, Published)
    assert published.sources == (StreamSource("model-0"),)
    fetched = rank.ask(FetchWeights(2))
    assert isinstance(fetched, WeightsFetched) and fetched.offer is not None
    server = FakeShell("server-0")
    server.bulk["model-0"] = rank.bulk
    client, received = bulk_of(server).client, 0
    for index, piece in enumerate(published.manifest.pieces):
        target = memoryview(bytearray(piece.size))
        client.fetch(fetched.offer, slices(index, piece.size), [target])
        assert piece_digest(target) == piece.digest
        received += len(target)
    assert received == sum(piece.size for piece in published.manifest.pieces) > 0
    assert "expected to publish the committed step 2, got 3" in rank.refusal(Publish(3, 3))


def test_the_hash_of_the_weights_is_that_of_the_committed_state() -> None:
    rank = Rank().start()
    assert rank.ask(HashWeights()) == WeightsHashed(weights_sha256(rank.state.weights()))


def test_a_message_that_is_not_for_a_model_worker_is_refused_by_name() -> None:
    assert "does not answer FetchSamples" in Rank().refusal(FetchSamples(()))


def test_the_same_seed_gives_the_same_new_model() -> None:
    first, second = (load_model(CONFIG, device=CPU) for _ in range(2))
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, dict(second.named_parameters())[name])


def test_a_bug_of_ours_is_answered_and_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank().start()

    def broken(step: int) -> None:
        raise AssertionError("a step was committed twice")

    monkeypatch.setattr(rank.state, "commit", broken)
    with pytest.raises(AssertionError, match="committed twice"):
        rank.ask(CommitStep(3))
    answer = rank.shell.replies[-1]
    assert isinstance(answer, Failed) and answer.fault.kind == "AssertionError"
