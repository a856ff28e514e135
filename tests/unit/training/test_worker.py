"""A model worker between fakes: what it answers, what it refuses, and how it comes back to an agreed state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from kintsugi.config import AlgorithmSection, Config, ModelSection, NewModel, WarmupSection, stages
from kintsugi.errors import IntegrityError, fault_of
from kintsugi.messages import (
    Body,
    CallDone,
    CommitStep,
    DeviceClean,
    DeviceStop,
    Envelope,
    Failed,
    FetchSamples,
    FetchState,
    FetchWeights,
    HashWeights,
    MessageKind,
    Ok,
    PreLock,
    Publish,
    Published,
    RankReady,
    RebuildGroup,
    Repair,
    Rollback,
    RunCall,
    SamplesFetched,
    Save,
    Saved,
    StartStage,
    WeightsFetched,
    WeightsHashed,
)
from kintsugi.model import huggingface
from kintsugi.model.plan import plan_model
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.training.samples import Answer
from kintsugi.training.state import TrainingState
from kintsugi.training.worker import ModelWorker, load_model
from kintsugi.transport import Blob, Delivery, Reply
from kintsugi.types import Peer, StreamSource
from kintsugi.weights.manifest import weights_sha256
from kintsugi.weights.publish import Publisher
from kintsugi.worker import ShuttingDown
from tests.unit.training.world import CPU, Batch, new_batch

CONFIG = Config(
    name="test",
    seed=7,
    model=ModelSection(new=NewModel(hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=2)),
    algorithm=AlgorithmSection(steps=5),
    warmup=WarmupSection(steps=2),
)
GRPO = stages(CONFIG)[1]
BATCH = new_batch([(8, 3), (12, 7), (5, 1), (9, 0)])


class Done:
    """An answer that is there already, or an error."""

    done = True

    def __init__(self, answer: Callable[[], Reply]) -> None:
        self._answer = answer

    def result(self) -> Reply:
        return self._answer()


class FakeShell:
    """Requests are put in by the test, replies are taken out; other processes are functions."""

    def __init__(self, process: str) -> None:
        self.process = process
        self.arrivals: deque[Delivery] = deque()
        self.replies: list[tuple[Body, Sequence[Blob]]] = []
        self.peers: dict[str, Callable[[Body], Reply]] = {}
        self.asked: list[tuple[str, Body]] = []
        self.shutting_down = False

    def arrive(self, *bodies: Body) -> None:
        envelope = Envelope("job", 1, "master-0", "a", 1, MessageKind.REQUEST)
        peer = self.peer("master-0") or Peer("master-0", "a", "host-0", "", b"")
        self.arrivals.extend(Delivery(envelope, body, (), peer, b"") for body in bodies)

    def peer(self, process: str) -> Peer | None:
        return Peer(process, "a", "host-0", "", b"") if process in self.peers else None

    def next_request(self, timeout_s: float) -> Delivery | None:
        return self.arrivals.popleft() if self.arrivals else None

    def take_all(self) -> list[Delivery]:
        if self.shutting_down:
            raise ShuttingDown("the test says so")
        taken = list(self.arrivals)
        self.arrivals.clear()
        return taken

    def reply(self, delivery: Delivery, body: Body, *, blobs: Sequence[Blob] = ()) -> None:
        self.replies.append((body, blobs))

    def fail(self, delivery: Delivery, error: BaseException) -> None:
        self.replies.append((Failed(fault_of(error, process=self.process, time=0.0)), ()))

    def submit(self, process: str, body: Body, *, deadline_s: float) -> Answer:
        return Done(lambda: self.call(process, body, deadline_s=deadline_s))

    def call(self, process: str, body: Body, *, deadline_s: float) -> Reply:
        self.asked.append((process, body))
        return self.peers[process](body)


class Rank:
    """A worker with its fake shell."""

    def __init__(self, process: str = "model-0", *, batch: Batch = BATCH, seed: int = 7) -> None:
        config = msgspec.structs.replace(CONFIG, seed=seed)
        self.shell = FakeShell(process)
        self.shell.peers["rollout-0"] = lambda body: holder(body, batch)
        self.state = TrainingState(load_model(config, device=CPU))
        self.worker = ModelWorker(
            self.shell,
            self.state,
            config=CONFIG,
            tokenizer=tokenizer(),
            publisher=Publisher(process=process, host="host-0", segments=None),
            host="host-0",
        )

    def ask(self, *bodies: Body) -> Body:
        """Put requests in, let the worker handle everything, give the last reply."""
        self.shell.arrive(*bodies)
        while self.shell.arrivals or self.worker.has_backlog:
            self.worker.turn(0.0)
        return self.shell.replies[-1][0]

    def start(self) -> Rank:
        """Stand before the first step of the main stage: both warm-up steps are skipped over."""
        self.ask(rebuild(1), StartStage("warmup", 0))
        for step in (1, 2):
            self.ask(sft_call(step), CommitStep(step))
        assert self.ask(StartStage("grpo", 2)) == Ok()
        return self

    def refusal(self, body: Body) -> str:
        answer = self.ask(body)
        assert isinstance(answer, Failed), answer
        return f"{answer.fault.kind}: {answer.fault.message}"


def tokenizer() -> Tokenizer:
    return plan_model(CONFIG)[1]


def holder(body: Body, batch: Batch) -> Reply:
    assert isinstance(body, FetchSamples)
    return Reply(SamplesFetched(tuple(batch.trajectories[key] for key in body.keys)))


def rebuild(generation: int) -> RebuildGroup:
    return RebuildGroup(generation, ("model-0",), "", 1.0)


def sft_call(step: int) -> RunCall:
    stage = stages(CONFIG)[0]
    return BATCH.call(stage, step=step, rank=0, world_size=1, num_shards=4)


def grpo_call(step: int = 3, *, generation: int = 1) -> RunCall:
    call = BATCH.call(GRPO, step=step, rank=0, world_size=1, num_shards=4)
    return msgspec.structs.replace(call, generation=generation)


def half_call(step: int) -> RunCall:
    return BATCH.call(GRPO, step=step, rank=0, world_size=2, num_shards=4)


def test_a_call_leaves_the_rank_prepared_and_says_how_long_each_part_took() -> None:
    rank = Rank().start()
    done = rank.ask(grpo_call())
    assert isinstance(done, CallDone)
    assert (rank.state.prepared_step, done.state_digest) == (3, rank.state.digest())
    assert {"fetch", "forward_backward", "reduce", "optimizer"} <= done.timing.keys()
    assert done.metrics["loss_tokens"] == 11.0
    assert rank.ask(CommitStep(3)) == Ok()
    assert rank.state.committed_step == 3


def test_a_repeated_call_of_a_prepared_step_gets_the_saved_result() -> None:
    rank = Rank().start()
    first = rank.ask(grpo_call())
    asked = len(rank.shell.asked)
    assert rank.ask(grpo_call()) is first
    assert len(rank.shell.asked) == asked


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
    assert rank.ask(StartStage("grpo", 4)) == Ok()
    assert "this rank has committed step 0" in rank.refusal(grpo_call(5))


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


def test_a_holders_fault_is_the_cause_of_the_refusal() -> None:
    rank = Rank().start()
    cause = fault_of(IntegrityError("gone"), process="rollout-0", time=0.0)

    def broken(body: Body) -> Reply:
        raise IntegrityError("no such sample", cause=cause)

    rank.shell.peers["rollout-0"] = broken
    answer = rank.ask(grpo_call())
    assert isinstance(answer, Failed)
    assert answer.fault.cause == cause


def test_a_stop_that_arrives_during_a_call_ends_it_before_the_update() -> None:
    rank = Rank().start()
    before = rank.state.digest()
    rank.shell.replies.clear()
    rank.ask(grpo_call(), DeviceStop(1))
    (failed, _), (ready, _) = rank.shell.replies
    assert isinstance(failed, Failed) and failed.fault.kind == "GroupBroken"
    assert ready == RankReady(2, before, False)


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
    rank.ask(grpo_call(), FetchWeights(2, (0,)))
    assert [type(body) for body, _ in rank.shell.replies] == [WeightsFetched, CallDone]


def test_a_locked_rank_runs_nothing_until_it_is_rolled_back() -> None:
    rank = Rank().start()
    assert isinstance(rank.ask(PreLock(2)), RankReady)
    assert "locked after step 2" in rank.refusal(grpo_call())
    rank.ask(Rollback(2))
    assert isinstance(rank.ask(grpo_call()), CallDone)


def test_the_whole_protocol_brings_a_rank_back_to_the_agreed_step_with_equal_bits() -> None:
    undisturbed = Rank().start()
    expected = undisturbed.ask(grpo_call())
    assert isinstance(expected, CallDone)
    rank = Rank().start()
    before = rank.state.digest()
    rank.ask(grpo_call())
    for body in (PreLock(2), DeviceStop(1), DeviceClean(), rebuild(2), Rollback(2)):
        answer = rank.ask(body)
        assert isinstance(answer, RankReady) and answer.step == 2
    assert answer == RankReady(2, before, False)
    again = rank.ask(grpo_call(generation=2))
    assert isinstance(again, CallDone)
    assert (again.state_digest, again.metrics) == (expected.state_digest, expected.metrics)


def test_an_old_generation_cannot_be_joined_and_the_present_one_only_once() -> None:
    rank = Rank()
    rank.ask(rebuild(3))
    assert "generation 2 is over: this rank is in 3" in rank.refusal(rebuild(2))
    assert isinstance(rank.ask(rebuild(3)), RankReady)


def test_a_new_rank_takes_over_the_state_of_a_replica() -> None:
    replica, newcomer = Rank().start(), Rank("model-1", seed=99)

    def ask_replica(body: Body) -> Reply:
        answer = replica.ask(body)
        assert not isinstance(answer, Failed), answer
        return Reply(*copied(replica.shell.replies[-1]))

    newcomer.shell.peers["model-0"] = ask_replica
    ready = newcomer.ask(Repair(2, "model-0"))
    assert ready == RankReady(2, replica.state.digest(), False)
    assert newcomer.state.counters == replica.state.counters
    assert "has committed step 2, not 7" in replica.refusal(FetchState(7))


def copied(reply: tuple[Body, Sequence[Blob]]) -> tuple[Body, tuple[memoryview, ...]]:
    """As it would arrive on the other side of a socket."""
    body, blobs = reply
    return body, tuple(memoryview(bytes(blob)) for blob in blobs)


def test_a_saved_step_is_restored_exactly_and_loads_as_a_model_folder(tmp_path: Path) -> None:
    rank = Rank().start()
    rank.ask(grpo_call(), CommitStep(3))
    saved = rank.ask(Save(3, "grpo", str(tmp_path / "checkpoints")))
    assert isinstance(saved, Saved) and saved.step == 3
    resumed = Rank(seed=99)
    resumed.ask(rebuild(1), StartStage("grpo", 3))
    assert resumed.ask(Repair(3, saved.path)) == RankReady(3, rank.state.digest(), False)
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
    assert "expected the state of step 4" in rank.refusal(Repair(4, saved.path))
    assert "expected to save the committed step 2, got 3" in rank.refusal(Save(3, "grpo", str(tmp_path)))


def test_published_weights_are_the_committed_ones_and_can_be_streamed() -> None:
    rank = Rank().start()
    published = rank.ask(Publish(2, 2))
    assert isinstance(published, Published)
    assert published.sources == (StreamSource("model-0"),)
    assert isinstance(rank.ask(FetchWeights(2)), WeightsFetched)
    blobs = rank.shell.replies[-1][1]
    assert sum(len(blob) for blob in blobs) == sum(piece.size for piece in published.manifest.pieces)
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
