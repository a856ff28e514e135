from __future__ import annotations

from collections.abc import Mapping, Sequence

from kintsugi.config.schema import AlgorithmName, AlgorithmSection, Config, RewardModelSection
from kintsugi.config.stages import Stage, stages
from kintsugi.dataplane.plan import TransferPlan, in_order
from kintsugi.errors import StatesDiverged
from kintsugi.graph.advantages import MASTER_CALLS
from kintsugi.graph.algorithms import build_graph
from kintsugi.graph.dfg import Graph
from kintsugi.graph.executor import CallDispatch, GraphExecution, Planner
from kintsugi.graph.mfc import Call, Key, Per
from kintsugi.protocol.sample_transfer import Routes, Transfer
from kintsugi.protocol.training import CallDone
from kintsugi.types import Role, ShardItem

RANKS = {Role.MODEL: ["model-0", "model-1"]}
ITEMS = [
    ShardItem(f"t:0:{i}:0/{j}", "rollout-0", "", 5 + i, 3, {"reward": float(j), "mask": 1.0})
    for i in range(4)
    for j in range(2)
]


def stage_of(
    name: AlgorithmName, *, beta: float = 0.0, reward_model: RewardModelSection | None = None
) -> Stage:
    config = Config(name="a", algorithm=AlgorithmSection(name=name, beta=beta), reward_model=reward_model)
    return stages(config)[-1]


def walk_of(
    stage: Stage,
    *,
    ranks: Sequence[str] = RANKS[Role.MODEL],
    shuffled: bool = False,
    planner: Planner = lambda shards, ranks: in_order(len(ranks)),
) -> GraphExecution:
    return GraphExecution(
        build_graph(stage),
        ITEMS[::-1] if shuffled else ITEMS,
        workers={Role.MODEL: ranks},
        num_shards=4,
        compute=lambda interface, items: MASTER_CALLS[interface](stage, items),
        planner=planner,
    )


def walk(*, beta: float = 0.0, shuffled: bool = False) -> GraphExecution:
    return walk_of(stage_of("grpo", beta=beta), shuffled=shuffled)


def nothing(interface: str, items: Sequence[ShardItem]) -> Mapping[str, Mapping[str, float]]:
    raise AssertionError(f"nobody asked for {interface}")


def done(digest: str = "d", **outputs: dict[str, float]) -> CallDone:
    return CallDone(1, digest, {}, outputs=outputs)


def names(dispatches: Sequence[CallDispatch]) -> list[str]:
    return list(dict.fromkeys(dispatch.call.name for dispatch in dispatches))


def answer_all(batch: GraphExecution, dispatches: Sequence[CallDispatch], *, now: float = 1.0) -> None:
    """Every worker does what it was sent; scalars are 0.5."""
    for dispatch in dispatches:
        keys = [item.key for shard in dispatch.shards for item in shard.items]
        outputs = {key.name: dict.fromkeys(keys, 0.5) for key in dispatch.call.outputs if not key.shape}
        metrics = {f"{dispatch.call.name}_loss": 1.0}
        answer = CallDone(1, "same" if dispatch.prepares else dispatch.worker, metrics, outputs=outputs)
        assert batch.answered(dispatch.call.name, dispatch.worker, answer, now=now) is None


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
    assert batch.divergence == StatesDiverged("actor_train", {"model-0": "here", "model-1": "there"})
    assert batch.culprit == ""


def valued_walk() -> GraphExecution:
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
    return GraphExecution(graph, ITEMS, workers=RANKS, num_shards=4, compute=nothing)


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
        batch = walk_of(stage_of("grpo"), ranks=ranks)
        batch.ready(now=0.0)
        answers = [
            batch.answered("actor_train", rank, done(digest), now=1.0)
            for rank, digest in zip(ranks, digests, strict=True)
        ]
        assert answers[:2] == [None, None] and answers[2] is not None
        assert (batch.culprit, batch.finished) == (culprit, False)


def test_calls_without_an_edge_between_them_are_sent_out_at_once_in_one_order() -> None:
    batch = walk_of(stage_of("ppo"))
    sent: list[list[str]] = []
    while dispatches := batch.ready(now=0.0):
        sent.append(names(dispatches))
        answer_all(batch, dispatches)
    assert sent == [["critic_inference"], ["token_advantage"], ["actor_train", "critic_train"]]
    assert batch.finished


def test_a_worker_is_told_what_it_was_sent_before_and_which_training_call_is_the_last() -> None:
    batch = walk_of(stage_of("ppo", beta=0.1))
    sent: list[CallDispatch] = []
    while dispatches := batch.ready(now=0.0):
        sent += dispatches
        answer_all(batch, dispatches)
    for rank in RANKS[Role.MODEL]:
        mine = [dispatch for dispatch in sent if dispatch.worker == rank]
        order = [dispatch.call.name for dispatch in mine]
        assert order[-2:] == ["actor_train", "critic_train"]
        assert [dispatch.after for dispatch in mine] == [tuple(order[:i]) for i in range(len(order))]
        assert [dispatch.call.name for dispatch in mine if dispatch.prepares] == ["critic_train"]


def test_a_call_never_overtakes_one_that_precedes_it_in_the_order() -> None:
    a, b, c = Key("a", "float32"), Key("b", "float32", ("tokens",)), Key("c", "float32", ("state",))
    tokens = Key("tokens", "int32", ("tokens",))
    graph = Graph(
        [
            Call("slow", Role.MODEL, Per.BATCH, "slow", (tokens,), (a,)),
            Call("waits", Role.MODEL, Per.BATCH, "waits", (a,), (b,)),
            Call("trains", Role.MODEL, Per.BATCH, "trains", (b,), (c,)),
        ],
        sources=(tokens,),
        wanted=("c",),
    )
    graph.order = ["waits", "slow", "trains"]
    assert GraphExecution(graph, ITEMS, workers=RANKS, num_shards=4, compute=nothing).ready(now=0.0) == []


def test_every_call_of_a_step_has_the_same_cut() -> None:
    batch, cuts = walk_of(stage_of("ppo")), []
    while dispatches := batch.ready(now=0.0):
        for dispatch in dispatches:
            shards = tuple(tuple(item.key for item in shard.items) for shard in dispatch.shards)
            cuts.append((dispatch.worker, shards))
        answer_all(batch, dispatches)
    assert len(set(cuts)) == len(RANKS[Role.MODEL])


def test_states_are_compared_after_the_last_training_call_only() -> None:
    batch = walk_of(stage_of("ppo"))
    for _ in range(2):
        answer_all(batch, batch.ready(now=0.0))
    batch.ready(now=0.0)
    for call, digests in (("actor_train", ("x", "y")), ("critic_train", ("z", "z"))):
        for rank, digest in zip(RANKS[Role.MODEL], digests, strict=True):
            assert batch.answered(call, rank, done(digest), now=1.0) is None
    assert batch.state_digest == "z"


def test_the_answers_may_come_in_any_order() -> None:
    batch = walk_of(stage_of("ppo"))
    for _ in range(2):
        answer_all(batch, batch.ready(now=0.0))
    answer_all(batch, batch.ready(now=0.0)[::-1])
    assert batch.finished
    assert [span.call for span in batch.spans[-2:]] == ["critic_train", "actor_train"]


def test_metrics_of_all_calls_are_told_together() -> None:
    batch = walk_of(stage_of("ppo"))
    while dispatches := batch.ready(now=0.0):
        answer_all(batch, dispatches)
    assert {"actor_train_loss", "critic_train_loss", "critic_inference_loss"} <= batch.metrics.keys()


def test_what_the_master_computes_is_there_when_the_call_that_reads_it_is_sent() -> None:
    dispatches = walk().ready(now=0.0)
    values = {item.key: item.values for d in dispatches for shard in d.shards for item in shard.items}
    assert {key: known["advantage"] > 0 for key, known in values.items()} == {
        item.key: item.values["reward"] > 0 for item in ITEMS
    }


def test_the_master_computes_after_a_model_call_whose_scalars_it_needs() -> None:
    stage = stage_of("rloo", beta=0.1, reward_model=RewardModelSection("folder"))
    batch = walk_of(stage)
    first = batch.ready(now=0.0)
    assert names(first) == ["reward_inference", "ref_inference"]
    assert "advantage" not in batch.values[ITEMS[0].key]
    for dispatch in first:
        keys = [item.key for shard in dispatch.shards for item in shard.items]
        scores = {key: 2.0 * (key == ITEMS[0].key) for key in keys}
        output = {"score": scores} if dispatch.call.name == "reward_inference" else {"reference_kl": scores}
        batch.answered(dispatch.call.name, dispatch.worker, done("", **output), now=1.0)
    assert names(batch.ready(now=1.0)) == ["actor_train"]
    # Reward 0 + score 2 − 0.1 × KL 2 = 1.8 against the other sample's reward 1.
    assert abs(batch.values[ITEMS[0].key]["advantage"] - 0.8) < 1e-12


def test_pairs_stay_on_one_worker() -> None:
    stage = stage_of("dpo", beta=0.1)
    batch = GraphExecution(
        build_graph(stage), ITEMS, workers=RANKS, num_shards=4, compute=nothing, keep_groups=True
    )
    for dispatch in batch.ready(now=0.0):
        for shard in dispatch.shards:
            tickets = [item.key.partition("/")[0] for item in shard.items]
            assert all(tickets.count(ticket) == 2 for ticket in tickets)


def test_shards_are_where_the_plan_wants_them_in_every_call_and_samples_are_fetched_by_the_first() -> None:
    routes = (Routes(via={"rollout-0": "model-1"}), Routes(relay=tuple(ITEMS[:1])))
    batch = walk_of(stage_of("ppo"), planner=lambda shards, ranks: TransferPlan("turned", (1, 0), routes))
    first = batch.ready(now=0.0)
    assert [dispatch.routes for dispatch in first] == list(routes)
    answer_all(batch, first)
    sent = [*first]
    while dispatches := batch.ready(now=0.0):
        assert all(dispatch.routes == Routes() for dispatch in dispatches)
        sent += dispatches
        answer_all(batch, dispatches)
    for dispatch in sent:
        assert dispatch.blocks == (1, 0)
        assert [shard.index for shard in dispatch.shards] == ([2, 3] if dispatch.rank == 0 else [0, 1])
    assert batch.finished


def test_what_the_ranks_fetched_is_told_together() -> None:
    batch = walk_of(stage_of("grpo"))
    transfers = {rank: Transfer("rollout-0", 1, 100, 0.1, 0.2) for rank in RANKS[Role.MODEL]}
    for dispatch in batch.ready(now=0.0):
        answer = CallDone(1, "same", {}, transfers=(transfers[dispatch.worker],))
        batch.answered(dispatch.call.name, dispatch.worker, answer, now=1.0)
    assert batch.transfers == {rank: [transfer] for rank, transfer in transfers.items()}
