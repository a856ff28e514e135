"""Recovery of ranks that hold parts of the state: a lost part comes from where that part is, and from nowhere else."""

from __future__ import annotations

import pytest

from kintsugi.config.schema import AlgorithmSection, Config, ModelSection, NewModel
from kintsugi.config.stages import stages
from kintsugi.control.phases.adopt import AdoptedGroup, JournaledStep, find_group
from kintsugi.errors import Fault, IntegrityError, WorldError
from kintsugi.graph.algorithms import build_graph
from kintsugi.graph.executor import GraphExecution
from kintsugi.model.seats import Mesh, joined, seat_of, sources_of, without_holder
from kintsugi.protocol.messages import Body
from kintsugi.protocol.recovery import RankReady, RankStanding, Repair
from kintsugi.protocol.training import CallDone, StartStage
from kintsugi.recovery.rank import Flow, Operation, Processor
from kintsugi.recovery.rank_protocol import RankOrders, RankProtocol, RankSet
from kintsugi.recovery.states import RecoveryState
from kintsugi.recovery.strategy import FaultSituation, Strategy, plan
from kintsugi.simulation.replay_adapter import ReplayAdapter, ReplaySnapshot, Snapshots
from kintsugi.types import Role, ShardItem

RANKS = ("model-0", "model-1", "model-2", "model-3")


class Cluster:
    """Ranks of two replicas of two boxes, and the protocol that recovers them."""

    def __init__(self, *, shards: int = 2) -> None:
        self.mesh = Mesh(shards)
        self.snapshots: Snapshots = {}
        self.living = list(RANKS)
        self.adapters = {name: self._new(name) for name in RANKS}
        self.processors = {name: Processor(adapter) for name, adapter in self.adapters.items()}
        self.protocol = RankProtocol()
        self.step, self.digest = 0, ""
        self.repairs: dict[str, Repair] = {}
        self.sources: dict[str, tuple[str, ...]] = {}

    def _new(self, name: str) -> ReplayAdapter:
        box = seat_of(name, self.mesh).box
        return ReplayAdapter(name, self.snapshots, flow=Flow.ROLLBACK, fetch=self._fetch, box=box)

    def _fetch(self, source: str, step: int) -> ReplaySnapshot:
        assert self.adapters[source].committed.step == step
        return self.adapters[source].committed

    def view(self) -> RankSet:
        return RankSet(
            living=tuple(self.living),
            missing=tuple(name for name in RANKS if name not in self.living),
            stores={},
            sources=self.sources,
            step=self.step,
            digest=self.digest,
            stage="grpo",
            next_stage="grpo",
            mesh=self.mesh,
        )

    def start(self) -> Cluster:
        self.recover()
        for adapter in self.adapters.values():
            adapter.start_stage("grpo")
        return self

    def train(self, step: int) -> None:
        digests = {name: adapter.train(step, ["a", "b"]) for name, adapter in self.adapters.items()}
        self.step, self.digest = step, joined(digests, self.mesh)
        for adapter in self.adapters.values():
            adapter.commit(step)

    def lose(self, *names: str) -> None:
        """New processes in place of these, whose memory is gone."""
        for name in names:
            self.snapshots.pop(name, None)
            self.adapters[name] = self._new(name)
            self.processors[name] = Processor(self.adapters[name])

    def recover(self) -> RankOrders:
        orders = self.protocol.begin(self.view(), 0.0, term=1)
        while orders.bodies:
            following: RankOrders | None = None
            for name, body in orders.bodies.items():
                following = self._answer(name, body)
            assert following is not None
            orders = following
        return orders

    def _answer(self, name: str, body: Body) -> RankOrders | None:
        if isinstance(body, Repair):
            self.repairs[name] = body
        if isinstance(body, StartStage):
            self.adapters[name].start_stage(body.stage)
            return self.protocol.answered(name, self.adapters[name].standing(), self.view(), 0.0)
        assert isinstance(body, Operation)
        try:
            ready = self.processors[name].carry_out(body)
        except WorldError:
            return self.protocol.repair_failed(name, self.view(), 0.0)
        return self.protocol.answered(name, ready, self.view(), 0.0)


def test_a_lost_box_comes_from_the_replica_that_holds_it() -> None:
    cluster = Cluster().start()
    cluster.train(1)
    before = {name: adapter.committed for name, adapter in cluster.adapters.items()}
    cluster.lose("model-1")
    assert not cluster.recover().problem
    assert cluster.protocol.state is RecoveryState.NORMAL
    assert cluster.repairs.keys() == {"model-1"}
    assert cluster.repairs["model-1"].sources == ("model-3",)
    assert cluster.repairs["model-1"].digest == cluster.digest.split(".")[1]
    assert cluster.adapters["model-1"].committed == before["model-1"]


def test_a_box_that_no_rank_holds_is_a_problem_though_others_hold_theirs() -> None:
    cluster = Cluster().start()
    cluster.train(1)
    cluster.lose("model-1", "model-3")
    orders = cluster.recover()
    assert orders.problem == "no source has the state of step 1 for model-1, model-3"


@pytest.mark.parametrize("finder", ["model-1", "model-3"])
def test_a_rank_without_a_source_gets_its_box_from_one_that_found_it_in_the_same_round(finder: str) -> None:
    cluster = Cluster().start()
    cluster.train(1)
    left = cluster.snapshots[finder]
    cluster.lose("model-1", "model-3")
    cluster.snapshots[finder] = left
    cluster.sources = {finder: (f"snapshot:{finder}",)}
    assert not cluster.recover().problem
    (other,) = {"model-1", "model-3"} - {finder}
    assert cluster.repairs[other].sources == (finder,)
    assert cluster.adapters[other].committed == cluster.adapters[finder].committed


def test_without_replicas_a_rank_is_offered_no_other_ranks_state() -> None:
    cluster = Cluster(shards=4).start()
    cluster.train(1)
    cluster.lose("model-2")
    assert "for model-2" in cluster.recover().problem
    assert cluster.repairs["model-2"].sources == ()


def test_a_snapshot_of_another_box_is_refused_by_the_rank() -> None:
    cluster = Cluster().start()
    cluster.train(1)
    with pytest.raises(
        IntegrityError, match="expected box '0/2' of the state from snapshot:model-1, got '1/2'"
    ):
        cluster.adapters["model-0"].repair(1, source="snapshot:model-1", digest="")


def test_replicas_that_differ_after_a_recovery_are_named() -> None:
    cluster = Cluster().start()
    cluster.train(1)
    adapter = cluster.adapters["model-2"]
    adapter._committed = adapter.committed._replace(digest="damaged")
    orders = cluster.recover()
    assert "expected every rank at state" in orders.problem
    assert orders.culprits == ("model-2",)
    assert orders.divergence is not None


def standing(name: str, digest: str) -> RankStanding:
    return RankStanding(RankReady(3, digest, generation=2, stage="grpo"), RANKS, is_normal=True)


def test_a_new_master_takes_over_ranks_whose_parts_make_up_the_committed_state() -> None:
    journal = JournaledStep(3, "a.b", "grpo", "grpo", has_batch=False, mesh=Mesh(2))
    standings = {name: standing(name, "ab"[index % 2]) for index, name in enumerate(RANKS)}
    assert find_group(standings, journal=journal) == AdoptedGroup(RANKS, 2, "grpo", (), None)
    standings["model-3"] = standing("model-3", "a")
    assert find_group(standings, journal=journal) == "model-3 has state a of step 3, committed was b"


@pytest.mark.parametrize(("uncovered", "strategy"), [((), Strategy.ELASTIC), (("1/2",), Strategy.DUMP)])
def test_a_group_becomes_smaller_only_while_each_part_has_a_rank(
    uncovered: tuple[str, ...], strategy: Strategy
) -> None:
    situation = FaultSituation(
        faults=(Fault("f", "ProcessDied", "model-1", "killed", 0.0),),
        num_faults=0,
        unrecoverable="",
        lost=("model-1",),
        missing=("model-1",),
        living=("model-0",),
        attempts=0,
        most_deaths=1,
        replacements_fail=True,
        start_s=1.0,
        step_s=1.0,
        uncovered=uncovered,
    )
    chosen = plan(situation)
    assert chosen.strategy is strategy
    assert ("elastic: not possible, no rank is left for part 1/2 of the state" in chosen.reason) == bool(
        uncovered
    )


@pytest.mark.parametrize(
    ("ranks", "shards", "expected"),
    [
        ((0, 1, 2, 3), 2, [[0, 1], [0, 1], [2, 3], [2, 3]]),
        ((0, 3), 2, [[0, 1], [0, 1]]),
        ((1, 2, 3), 2, [[1, 0], [1, 2], [1, 2]]),
        ((0, 1, 2), 1, [[0], [1], [2]]),
    ],
)
def test_a_rank_takes_the_parts_from_its_replica_where_it_is_whole(
    ranks: tuple[int, ...], shards: int, expected: list[list[int]]
) -> None:
    names = tuple(f"model-{rank}" for rank in ranks)
    mesh = Mesh(shards)
    assert sources_of(names, mesh) == expected
    assert without_holder(names, mesh) == ()
    assert without_holder([], mesh) == tuple(mesh.seat(shard).box for shard in range(shards))


def answered(boxes: int, *digests: str) -> tuple[str | None, GraphExecution]:
    config = Config(name="t", model=ModelSection(new=NewModel()), algorithm=AlgorithmSection(name="sft"))
    stage = stages(config)[-1]
    items = [ShardItem(f"t:{index}/0", "rollout-0", "d", 4, 2, {}) for index in range(4)]
    ranks = [f"model-{index}" for index in range(len(digests))]
    walk = GraphExecution(
        build_graph(stage),
        items,
        workers={Role.MODEL: ranks},
        num_shards=4,
        compute=lambda interface, items: {},
        mesh=Mesh(boxes),
    )
    (call,) = {dispatch.call.name for dispatch in walk.ready(now=0.0)}
    problem: str | None = None
    for rank, digest in zip(ranks, digests, strict=True):
        problem = walk.answered(call, rank, CallDone(1, digest, {}), now=1.0)
    return problem, walk


def test_only_ranks_with_the_same_part_have_to_agree_after_a_step() -> None:
    problem, walk = answered(2, "a", "b", "a", "b")
    assert problem is None
    assert walk.state_digest == "a.b"
    problem, walk = answered(2, "a", "b", "a", "c")
    assert problem is not None and "model-1 b, model-3 c" in problem
    problem, walk = answered(1, "a", "b")
    assert problem is not None
