"""How a rank gets its samples: from holders of the test's making, and through memory that two ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import pytest

from kintsugi.dataplane.demand import estimated_bytes
from kintsugi.errors import DeadlineExceeded, GroupBroken, IntegrityError, ProcessDied, RefusedError
from kintsugi.process.shell import ReplyHandle
from kintsugi.protocol.messages import Body
from kintsugi.protocol.rollout import FetchSamples, SamplesFetched
from kintsugi.protocol.sample_transfer import FetchRelayed, Routes
from kintsugi.telemetry.events import BytesDamaged, Note
from kintsugi.training import sample_fetch as samples_module
from kintsugi.training.sample_fetch import StepSamples
from kintsugi.transport import Reply
from kintsugi.types import LogicalShard, Trajectory
from tests.unit.training.fakes import Done, FakeSegments
from tests.unit.training.world import new_batch

BATCH = new_batch([(8, 3), (12, 7), (5, 1), (9, 2)])
NEAR = LogicalShard(0, BATCH.items[:2])
FAR = LogicalShard(1, BATCH.items[2:])
KEYS = [item.key for item in BATCH.items]
VIA = Routes(via={"rollout-0": "model-0"})
RELAYING = Routes(relay=FAR.items)


class Holder:
    """Answers for rollout-0, and can be told to answer wrongly."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.wrong: list[set[str]] = []
        """Per request to come: the keys whose bytes are changed."""

    def __call__(self, body: Body) -> Reply:
        assert isinstance(body, FetchSamples)
        self.asked.append(body.keys)
        wrong = self.wrong.pop(0) if self.wrong else set()
        return Reply(SamplesFetched(tuple(self._sample(key, wrong=key in wrong) for key in body.keys)))

    def _sample(self, key: str, *, wrong: bool) -> Trajectory:
        sample = BATCH.trajectories[key]
        return msgspec.structs.replace(sample, logprobs=bytes(len(sample.logprobs))) if wrong else sample


class Pair:
    """Two ranks of one host: model-0 fetches for model-1."""

    def __init__(self, segments: FakeSegments) -> None:
        self.segments, self.holder = segments, Holder()
        self.notes: list[Note] = []
        self.leader = self.rank("model-0")
        self.neighbour = self.rank("model-1")

    def rank(self, process: str) -> StepSamples:
        return StepSamples(
            self._submit,
            check=lambda: None,
            process=process,
            segments=self.segments,
            emit=self.notes.append,
        )

    def _submit(self, process: str, body: Body, *, deadline_s: float) -> ReplyHandle:
        if process == "rollout-0":
            return Done(partial(self.holder, body))
        assert isinstance(body, FetchRelayed)
        return Done(lambda: Reply(self.leader.relayed(body)))


@pytest.fixture
def pair() -> Iterator[Pair]:
    segments = FakeSegments()
    yield Pair(segments)
    segments.close()


def test_small_samples_share_a_request_and_large_ones_are_cut(pair: Pair) -> None:
    for batch_bytes, requests in ((1 << 20, 1), (600, 2), (1, 4)):
        rank = pair.rank("model-0")
        pair.holder.asked.clear()
        rank.of_shards([NEAR, FAR], routes=Routes(batch_bytes=batch_bytes))
        assert len(pair.holder.asked) == requests
        assert [key for keys in pair.holder.asked for key in keys] == KEYS
        assert rank.trajectories == BATCH.trajectories


def test_a_limited_holder_is_asked_no_faster_than_its_bytes_may_come(pair: Pair) -> None:
    size = sum(estimated_bytes(item) for item in BATCH.items[:3])
    routes = Routes(batch_bytes=1, limits={"rollout-0": size / 0.06})
    pair.leader.of_shards([NEAR, FAR], routes=routes)
    (transfer,) = pair.leader.take_transfers()
    assert transfer.requests == 4 and transfer.seconds >= 0.06


def test_who_is_kept_waiting_by_its_own_limit_blames_nobody(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples_module, "FETCH_TIMEOUT_S", 0.01)
    routes = Routes(batch_bytes=1, limits={"rollout-0": estimated_bytes(BATCH.items[0]) / 0.05})
    pair.leader.of_shards([NEAR], routes=routes)
    assert pair.leader.trajectories.keys() == set(KEYS[:2])


def test_what_was_fetched_is_told_once(pair: Pair) -> None:
    pair.leader.of_shards([NEAR, FAR], routes=Routes(batch_bytes=600))
    (transfer,) = pair.leader.take_transfers()
    assert (transfer.source, transfer.requests, transfer.repeated) == ("rollout-0", 2, 0)
    assert transfer.size == sum(len(msgspec.msgpack.encode(each)) for each in BATCH.trajectories.values())
    assert 0 < transfer.first_s <= transfer.seconds
    pair.leader.of_shards([NEAR, FAR])
    assert pair.leader.take_transfers() == ()


def test_a_sample_with_wrong_bytes_is_asked_for_again_alone(pair: Pair) -> None:
    pair.holder.wrong = [{KEYS[1]}]
    pair.leader.of_shards([NEAR])
    assert pair.holder.asked == [tuple(KEYS[:2]), (KEYS[1],)]
    assert pair.leader.take_transfers()[0].repeated == 1
    assert pair.leader.trajectories[KEYS[1]] == BATCH.trajectories[KEYS[1]]
    (said,) = pair.notes
    assert isinstance(said, BytesDamaged) and said.origin == "rollout-0" and KEYS[1] in said.message


def test_samples_with_the_right_bytes_are_no_news(pair: Pair) -> None:
    pair.leader.of_shards([NEAR, FAR])
    assert pair.notes == []


def test_a_sample_that_stays_wrong_is_refused_by_name(pair: Pair) -> None:
    pair.holder.wrong = [{KEYS[1]}, {KEYS[1]}]
    with pytest.raises(IntegrityError, match=f"sample {KEYS[1]} from rollout-0: expected xxh3"):
        pair.leader.of_shards([NEAR])


def test_a_sample_that_the_holder_leaves_out_is_refused_by_name(pair: Pair) -> None:
    rank = StepSamples(
        lambda process, body, *, deadline_s: Done(lambda: Reply(SamplesFetched(()))), check=lambda: None
    )
    with pytest.raises(IntegrityError, match=f"rollout-0 answered without sample {KEYS[0]}"):
        rank.of_shards([NEAR])


def test_one_rank_fetches_for_both_and_the_other_reads_it_from_the_hosts_memory(pair: Pair) -> None:
    pair.leader.of_shards([NEAR], step=3, routes=RELAYING)
    samples = pair.neighbour.of_shards([FAR], step=3, routes=VIA)
    assert pair.holder.asked == [tuple(KEYS)]
    assert [sample.key for sample in samples[1]] == KEYS[2:]
    assert pair.neighbour.trajectories == {key: BATCH.trajectories[key] for key in KEYS[2:]}
    (transfer,) = pair.neighbour.take_transfers()
    assert (transfer.source, transfer.requests) == ("model-0", 1) and transfer.size > 0


def test_the_memory_is_given_back_when_the_step_has_ended(pair: Pair) -> None:
    pair.leader.of_shards([NEAR], step=3, routes=RELAYING)
    assert pair.segments.names() == ["samples-model-0"]
    pair.leader.forget()
    assert pair.segments.names() == []
    with pytest.raises(RefusedError):
        pair.leader.relayed(FetchRelayed(3, 1, (KEYS[2],)))


def test_the_memory_is_given_back_though_a_later_call_failed(pair: Pair) -> None:
    pair.leader.of_shards([NEAR], step=3, routes=RELAYING)
    pair.holder.wrong = [{KEYS[0]}, {KEYS[0]}]
    del pair.leader.trajectories[KEYS[0]]
    with pytest.raises(IntegrityError):
        pair.leader.of_shards([NEAR], step=3)
    pair.leader.forget()
    assert pair.segments.names() == []


def damage_memory(pair: Pair) -> None:
    descriptor = pair.segments.open("samples-model-0")
    with open(descriptor, "r+b", buffering=0) as memory:
        memory.seek(20)
        memory.write(b"\xff" * 8)


def leave_out(pair: Pair) -> None:
    pair.leader.forget()
    pair.leader.of_shards([NEAR], step=3)


def lose_memory(pair: Pair) -> None:
    pair.segments.remove("samples-model-0")


@pytest.mark.parametrize("break_it", [damage_memory, leave_out, lose_memory])
def test_what_the_relay_does_not_have_right_is_fetched_from_the_holder(
    pair: Pair, break_it: Callable[[Pair], None]
) -> None:
    pair.leader.of_shards([NEAR], step=3, routes=RELAYING)
    break_it(pair)
    pair.holder.asked.clear()
    pair.neighbour.of_shards([FAR], step=3, routes=VIA)
    assert pair.neighbour.trajectories == {key: BATCH.trajectories[key] for key in KEYS[2:]}
    assert pair.holder.asked and KEYS[2] in pair.holder.asked[0]
    assert pair.notes
    origins = {said.origin for said in pair.notes if isinstance(said, BytesDamaged)}
    assert origins == ({"model-0"} if break_it is damage_memory else set())


class Silent:
    """A request that nobody answers."""

    done = False

    def result(self) -> Reply:
        raise AssertionError("nobody answered")


def test_a_relay_that_says_nothing_is_not_waited_for_for_ever(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples_module, "RELAY_TIMEOUT_S", 0.01)
    rank = StepSamples(
        lambda process, body, *, deadline_s: (
            Silent() if process == "model-0" else Done(partial(pair.holder, body))
        ),
        check=lambda: None,
        segments=pair.segments,
    )
    rank.of_shards([FAR], step=3, routes=VIA)
    assert rank.trajectories.keys() == set(KEYS[2:])


def test_a_holder_that_never_answers_is_named(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "FETCH_TIMEOUT_S", 0.01)
    rank = StepSamples(lambda process, body, *, deadline_s: Silent(), check=lambda: None)
    with pytest.raises(DeadlineExceeded, match="for rollout-0: trajectories"):
        rank.of_shards([NEAR])


def test_a_call_that_is_given_up_is_not_taken_for_a_relay_that_failed(pair: Pair) -> None:
    def check() -> None:
        raise GroupBroken("the generation is over")

    rank = StepSamples(lambda process, body, *, deadline_s: Silent(), check=check, emit=pair.notes.append)
    with pytest.raises(GroupBroken):
        rank.of_shards([FAR], step=3, routes=VIA)
    assert pair.notes == []


def test_neighbours_of_a_rank_that_could_not_fetch_are_told_why(pair: Pair) -> None:
    def gone(body: Body) -> Reply:
        raise ProcessDied("rollout-0 is gone")

    rank = StepSamples(
        lambda process, body, *, deadline_s: Done(partial(gone, body)),
        check=lambda: None,
        segments=pair.segments,
    )
    before = rank.is_fetching
    with pytest.raises(ProcessDied):
        rank.of_shards([NEAR], step=3, routes=RELAYING)
    assert (before, rank.is_fetching) == (True, False)
    with pytest.raises(RefusedError, match="rollout-0 is gone"):
        rank.relayed(FetchRelayed(3, 1, (KEYS[2],)))


def test_where_the_hosts_memory_is_full_everybody_asks_for_himself(pair: Pair) -> None:
    pair.segments.gone = True
    pair.leader.of_shards([NEAR], step=3, routes=RELAYING)
    pair.neighbour.of_shards([FAR], step=3, routes=VIA)
    assert pair.neighbour.trajectories == {key: BATCH.trajectories[key] for key in KEYS[2:]}
