from kintsugi.config import AlgorithmSection
from kintsugi.graph.algorithms import grpo
from kintsugi.graph.dfg import Graph
from kintsugi.graph.executor import Walk
from kintsugi.graph.mfc import Call, Key, Per
from kintsugi.messages import CallDone
from kintsugi.types import Role, ShardItem

RANKS = {Role.MODEL: ["model-0", "model-1"]}
ITEMS = [ShardItem(f"t:0:{i}:0/0", "rollout-0", "", 5 + i, 3, {"advantage": 1.0}) for i in range(8)]


def walk(*, beta: float = 0.0, shuffled: bool = False) -> Walk:
    items = ITEMS[::-1] if shuffled else ITEMS
    return Walk(grpo(AlgorithmSection(beta=beta)), items, workers=RANKS, num_shards=4)


def done(digest: str = "d", **outputs: dict[str, float]) -> CallDone:
    return CallDone(1, digest, {}, outputs=outputs)


def test_every_sample_goes_to_exactly_one_worker() -> None:
    dispatches = walk().ready(now=0.0)
    keys = [item.key for d in dispatches for shard in d.shards for item in shard.items]
    assert sorted(keys) == sorted(item.key for item in ITEMS)


def test_workers_get_about_the_same_number_of_tokens() -> None:
    loads = [sum(i.num_tokens for s in d.shards for i in s.items) for d in walk().ready(now=0.0)]
    assert max(loads) - min(loads) <= max(item.num_tokens for item in ITEMS)


def test_the_cut_does_not_depend_on_the_order_of_arrival() -> None:
    assert [d.shards for d in walk().ready(now=0.0)] == [d.shards for d in walk(shuffled=True).ready(now=0.0)]


def test_a_call_begins_only_when_its_parents_are_done() -> None:
    batch = walk(beta=0.1)
    assert {d.call.name for d in batch.ready(now=0.0)} == {"ref_inference"}
    batch.answered("ref_inference", "model-0", done(), now=1.0)
    assert batch.ready(now=1.0) == []
    batch.answered("ref_inference", "model-1", done(), now=1.0)
    assert {d.call.name for d in batch.ready(now=1.0)} == {"actor_train"}


def test_the_walk_is_finished_when_every_worker_of_every_call_answered() -> None:
    batch = walk()
    batch.ready(now=0.0)
    after_each = []
    for worker, now in (("model-0", 1.0), ("model-1", 2.5)):
        batch.answered("actor_train", worker, done(), now=now)
        after_each.append(batch.finished)
    assert after_each == [False, True]
    assert batch.spans[0].duration_s == 2.5


def test_a_repeated_answer_changes_nothing() -> None:
    batch = walk()
    batch.ready(now=0.0)
    batch.answered("actor_train", "model-0", done("first"), now=1.0)
    assert batch.answered("actor_train", "model-0", done("second"), now=1.0) is None
    assert not batch.finished


def test_ranks_that_end_in_different_states_are_reported() -> None:
    batch = walk()
    batch.ready(now=0.0)
    batch.answered("actor_train", "model-0", done("here"), now=1.0)
    problem = batch.answered("actor_train", "model-1", done("there"), now=1.0)
    assert problem is not None and "model-0 here, model-1 there" in problem
    assert batch.culprit == ""


def valued_walk() -> Walk:
    """A graph whose call gives a scalar per sample, which the training call reads."""
    value = Key("value", "float32")
    tokens, update = Key("tokens", "int32", ("tokens",)), Key("update", "float32", ("state",))
    graph = Graph(
        [
            Call("critic_inference", Role.MODEL, Per.BATCH, "value", (tokens,), (value,)),
            Call("actor_train", Role.MODEL, Per.BATCH, "train", (tokens, value), (update,)),
        ],
        sources=(tokens,),
        wanted=("update",),
    )
    return Walk(graph, ITEMS, workers=RANKS, num_shards=4)


def test_an_output_must_cover_exactly_the_workers_own_samples() -> None:
    batch = valued_walk()
    batch.ready(now=0.0)
    for outputs in ({}, {"nobody/0": 1.0}):
        problem = batch.answered("critic_inference", "model-0", done(value=outputs), now=1.0)
        assert problem is not None and "model-0 answered critic_inference with 'value'" in problem


def test_scalars_of_one_call_travel_with_the_samples_to_the_next() -> None:
    batch = valued_walk()
    for dispatch in batch.ready(now=0.0):
        values = {item.key: 0.5 for shard in dispatch.shards for item in shard.items}
        assert batch.answered("critic_inference", dispatch.worker, done(value=values), now=1.0) is None
    items = [item for d in batch.ready(now=1.0) for shard in d.shards for item in shard.items]
    assert len(items) == len(ITEMS)
    assert all(item.values["value"] == 0.5 for item in items)


def test_whoever_stands_alone_against_the_others_is_to_blame_and_nobody_where_none_is_more() -> None:
    for digests, culprit in (("aba", "model-1"), ("baa", "model-0"), ("abc", ""), ("aab", "model-2")):
        ranks = ["model-0", "model-1", "model-2"]
        batch = Walk(grpo(AlgorithmSection()), ITEMS, workers={Role.MODEL: ranks}, num_shards=4)
        batch.ready(now=0.0)
        answers = [
            batch.answered("actor_train", rank, done(digest), now=1.0)
            for rank, digest in zip(ranks, digests, strict=True)
        ]
        assert answers[:2] == [None, None] and answers[2] is not None
        assert (batch.culprit, batch.finished) == (culprit, False)
