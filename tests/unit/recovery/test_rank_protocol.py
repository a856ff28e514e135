"""The protocol by itself: ranks that answer as the real ones do, in any order, with faults in between."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kintsugi.protocol.messages import Body
from kintsugi.protocol.recovery import (
    DeviceClean,
    DeviceStop,
    NotifyNormal,
    PreLock,
    RankReady,
    RebuildGroup,
    Repair,
)
from kintsugi.protocol.training import StartStage
from kintsugi.recovery.rank import FLOWS, Flow, Operation, Processor
from kintsugi.recovery.rank_protocol import SEQUENCES_PER_TERM, RankOrders, RankProtocol, RankSet
from kintsugi.recovery.states import STEPS, RecoveryState
from kintsugi.simulation.replay_adapter import ReplayAdapter, ReplaySnapshot, Snapshots

_S = RecoveryState
RANKS = ("model-0", "model-1", "model-2")
BATCHES = {1: ["a", "b"], 2: ["c", "d"]}


class Rank:
    """The real rank's side, beside the others of its cluster."""

    def __init__(self, name: str, cluster: Cluster) -> None:
        self._cluster = cluster
        self.adapter = ReplayAdapter(name, cluster.snapshots, flow=cluster.flow, fetch=self._fetch)
        self._processor = Processor(self.adapter)

    def serve(self, body: Body) -> RankReady:
        if isinstance(body, StartStage):
            self.adapter.start_stage(body.stage)
            return self.adapter.standing()
        assert isinstance(body, Operation)
        return self._processor.carry_out(body)

    def _fetch(self, source: str, step: int) -> ReplaySnapshot:
        adapter = self._cluster.ranks[source].adapter
        if adapter.standing().prepared_step == step:
            adapter.commit(step)
        assert adapter.committed.step == step
        return adapter.committed


class Cluster:
    """Three ranks, the protocol, and the orders that are not carried out yet."""

    def __init__(self, flow: Flow = Flow.ROLLBACK) -> None:
        self.flow = flow
        self.snapshots: Snapshots = {}
        self.ranks = {name: Rank(name, self) for name in RANKS}
        self.protocol = RankProtocol()
        self.step, self.digest = 0, ""
        self.stage, self.next_stage = "sft", "sft"
        self.now = 0.0
        self.open: dict[str, Body] = {}
        self.asked: list[tuple[str, Body]] = []

    def view(self) -> RankSet:
        living = tuple(name for name in RANKS if name in self.ranks)
        return RankSet(
            living=living,
            missing=tuple(name for name in RANKS if name not in self.ranks),
            stores={name: f"{name}:1" for name in living},
            sources={name: (f"snapshot:{name}", "agent-1", "checkpoints/step-1") for name in living},
            step=self.step,
            digest=self.digest,
            stage=self.stage,
            next_stage=self.next_stage,
            flow=self.flow.value,
        )

    def begin(self, *, term: int = 1) -> RankOrders:
        self.open = {}
        orders = self.protocol.begin(self.view(), self.now, term=term)
        self.follow(orders)
        return orders

    def follow(self, orders: RankOrders | None) -> None:
        if orders is not None:
            self.open = dict(orders.bodies)
            self.asked += orders.bodies.items()

    def answer(self, name: str) -> RankOrders | None:
        self.now += 1.0
        ready = self.ranks[name].serve(self.open.pop(name))
        orders = self.protocol.answered(name, ready, self.view(), self.now)
        self.follow(orders)
        return orders

    def lose(self, name: str) -> None:
        del self.ranks[name]
        self.begin()

    def replace(self, name: str) -> None:
        self.ranks[name] = Rank(name, self)
        self.follow(self.protocol.check(self.view(), self.now))

    def run(self) -> RankOrders | None:
        """Answer until nobody is asked any more; gives the last orders."""
        orders = None
        while self.open:
            orders = self.answer(next(iter(self.open)))
        return orders

    def train(self, step: int, *, commit: Iterable[str] = RANKS) -> None:
        """Every rank is prepared; these hear of the commit."""
        digests = {rank.adapter.train(step, BATCHES[step]) for rank in self.ranks.values()}
        (self.digest,), self.step = digests, step
        for name in commit:
            self.ranks[name].adapter.commit(step)

    def state(self) -> RecoveryState:
        return self.protocol.state

    def kinds(self, name: str = "") -> list[type]:
        return [type(body) for to, body in self.asked if name in ("", to)]


def started(flow: Flow = Flow.ROLLBACK, *, step: int = 1) -> Cluster:
    """A cluster that is normal at a step, with nothing asked so far."""
    cluster = Cluster(flow)
    cluster.begin()
    cluster.run()
    for number in range(1, step + 1):
        cluster.train(number)
    cluster.asked = []
    return cluster


def test_at_the_start_fresh_ranks_begin_the_first_stage_and_need_no_repair() -> None:
    cluster = Cluster()
    cluster.begin()
    cluster.run()
    assert cluster.state() is _S.NORMAL
    assert Repair not in cluster.kinds() and cluster.kinds().count(StartStage) == len(RANKS)


@pytest.mark.parametrize("flow", Flow)
def test_survivors_go_through_the_operations_of_their_flow_in_order(flow: Flow) -> None:
    cluster = started(flow)
    cluster.lose("model-1")
    cluster.run()
    cluster.replace("model-1")
    cluster.run()
    assert cluster.state() is _S.NORMAL
    expected = [kind for kind in FLOWS[flow] if flow is Flow.RESTORE or kind is not Repair]
    assert cluster.kinds("model-0") == cluster.kinds("model-2") == expected
    newcomer = [PreLock, DeviceStop, DeviceClean]
    assert cluster.kinds("model-1") == [kind for kind in FLOWS[flow] if kind not in newcomer]


@pytest.mark.parametrize("flow", Flow)
def test_after_a_recovery_every_rank_holds_the_state_of_the_commit(flow: Flow) -> None:
    for commit in ((), ("model-0",), RANKS):
        cluster = started(flow)
        cluster.train(2, commit=commit)
        cluster.lose("model-2")
        cluster.run()
        cluster.replace("model-2")
        cluster.run()
        standing = {(r.adapter.committed.step, r.adapter.committed.digest) for r in cluster.ranks.values()}
        assert standing == {(2, cluster.digest)}


def test_a_prepared_step_that_is_not_a_fact_is_dropped_by_all() -> None:
    cluster = started()
    digest = cluster.digest
    cluster.train(2, commit=())
    cluster.step, cluster.digest = 1, digest
    cluster.begin()
    cluster.run()
    assert {rank.adapter.standing().prepared_step for rank in cluster.ranks.values()} == {-1}
    assert {rank.adapter.committed.digest for rank in cluster.ranks.values()} == {digest}


def test_nothing_is_rebuilt_until_every_rank_is_there() -> None:
    cluster = started()
    cluster.lose("model-0")
    cluster.run()
    assert cluster.state() is _S.WAITING and not cluster.open
    assert cluster.protocol.check(cluster.view(), cluster.now) is None
    cluster.replace("model-0")
    assert cluster.state() is _S.REBUILDING and set(cluster.open) == set(RANKS)


def test_an_operation_follows_only_when_every_rank_has_answered_the_one_before() -> None:
    cluster = started()
    cluster.begin()
    for name in RANKS[:-1]:
        assert cluster.answer(name) is None
        assert cluster.state() is _S.PRE_LOCKING
    assert cluster.protocol.waits_for == {RANKS[-1]}
    assert cluster.answer(RANKS[-1]) is not None
    assert cluster.state() is _S.DEVICE_STOPPING


@pytest.mark.parametrize("state", [state for state, _ in STEPS if state is not _S.STAGING])
def test_a_fault_in_any_state_begins_again_with_higher_sequences(state: RecoveryState) -> None:
    cluster = started()
    cluster.lose("model-1")
    if state not in (_S.PRE_LOCKING, _S.DEVICE_STOPPING, _S.DEVICE_CLEANING, _S.WAITING):
        cluster.run()
        cluster.replace("model-1")
    while cluster.state() is not state:
        cluster.answer(next(iter(cluster.open)))
    before = max(body.sequence for _, body in cluster.asked if isinstance(body, Operation))
    cluster.lose("model-2")
    assert cluster.state() is _S.PRE_LOCKING
    assert all(isinstance(body, PreLock) and body.sequence > before for body in cluster.open.values())
    cluster.run()
    for name in cluster.view().missing:
        cluster.replace(name)
    cluster.run()
    assert cluster.state() is _S.NORMAL


def test_sequences_grow_with_every_round_and_over_terms() -> None:
    cluster = started()
    cluster.begin(term=1)
    cluster.run()
    cluster.protocol = RankProtocol()
    cluster.begin(term=2)
    cluster.run()
    assert cluster.state() is _S.NORMAL
    rounds = list(dict.fromkeys(b.sequence for _, b in cluster.asked if isinstance(b, Operation)))
    assert rounds == sorted(rounds) and rounds[-1] > 2 * SEQUENCES_PER_TERM


def test_late_answers_change_nothing() -> None:
    cluster = started()
    cluster.begin()
    late = RankReady(9, "other", generation=99, stage="sft")
    assert cluster.protocol.answered("model-9", late, cluster.view(), 0.0) is None
    cluster.answer("model-0")
    assert cluster.protocol.answered("model-0", late, cluster.view(), 0.0) is None
    cluster.run()
    assert cluster.state() is _S.NORMAL and cluster.protocol.generation < 99
    assert cluster.protocol.answered("model-0", late, cluster.view(), 0.0) is None
    assert cluster.state() is _S.NORMAL


def test_a_newcomer_is_repaired_from_its_snapshot_then_replicas_then_keepers_then_the_checkpoint() -> None:
    cluster = started()
    cluster.lose("model-1")
    cluster.run()
    cluster.replace("model-1")
    cluster.run()
    ((to, repair),) = [(to, body) for to, body in cluster.asked if isinstance(body, Repair)]
    assert to == "model-1" and isinstance(repair, Repair)
    assert repair.sources == ("snapshot:model-1", "model-0", "model-2", "agent-1", "checkpoints/step-1")
    assert (repair.step, repair.digest) == (1, cluster.digest)
    assert cluster.protocol.repaired_from == {"model-1": "snapshot:model-1"}


def test_a_rank_that_lacks_the_step_is_no_source_for_others() -> None:
    cluster = started()
    cluster.lose("model-0")
    cluster.lose("model-1")
    cluster.run()
    cluster.replace("model-0")
    cluster.replace("model-1")
    cluster.run()
    repairs = {to: body for to, body in cluster.asked if isinstance(body, Repair)}
    assert set(repairs) == {"model-0", "model-1"}
    for repair in repairs.values():
        assert set(repair.sources) & set(RANKS) == {"model-2"}


def test_generations_grow_beyond_what_ranks_report() -> None:
    cluster = started()
    for rank in cluster.ranks.values():
        rank.adapter.stop(41)
    cluster.protocol = RankProtocol()
    cluster.begin(term=2)
    cluster.run()
    (rebuilt,) = {body.generation for _, body in cluster.asked if isinstance(body, RebuildGroup)}
    assert rebuilt == cluster.protocol.generation == 42


def test_the_first_rank_serves_the_store_of_the_next_generation_whoever_it_is() -> None:
    cluster = started()
    cluster.lose("model-0")
    cluster.protocol.smaller = True
    cluster.run()
    stores = {body.store for _, body in cluster.asked if isinstance(body, RebuildGroup)}
    assert stores == {"model-1:1"}


def test_going_on_smaller_leaves_out_who_is_missing_and_the_next_recovery_takes_it_in_again() -> None:
    cluster = started()
    cluster.lose("model-1")
    cluster.run()
    cluster.protocol.smaller = True
    cluster.follow(cluster.protocol.check(cluster.view(), cluster.now))
    cluster.run()
    assert (cluster.state(), cluster.protocol.ranks) == (_S.NORMAL, ("model-0", "model-2"))
    cluster.replace("model-1")
    assert not cluster.open, "a group that trains is not disturbed"
    cluster.begin()
    cluster.run()
    assert (cluster.state(), cluster.protocol.ranks) == (_S.NORMAL, RANKS)


def test_without_any_living_rank_even_a_smaller_group_waits() -> None:
    cluster = started()
    for name in RANKS:
        cluster.lose(name)
    cluster.protocol.smaller = True
    assert cluster.protocol.check(cluster.view(), cluster.now) is None
    assert cluster.state() is _S.WAITING


def damaged(cluster: Cluster, name: str, **changes: object) -> RankOrders | None:
    """Go through a recovery in which one rank says something else after the rollback."""
    cluster.begin()
    while cluster.state() is not _S.ROLLING_BACK:
        cluster.answer(next(iter(cluster.open)))
    orders = None
    for other in list(cluster.open):
        if other == name:
            ready = cluster.ranks[name].serve(cluster.open.pop(name))
            wrong = msgspec.structs.replace(ready, **changes)
            orders = cluster.protocol.answered(name, wrong, cluster.view(), cluster.now)
        else:
            orders = cluster.answer(other)
    return orders


@pytest.mark.parametrize("changes", [{"state_digest": "other"}, {"step": 0}, {"half_updated": True}])
@pytest.mark.parametrize("name", RANKS)
def test_a_rank_that_does_not_hold_the_agreed_state_is_found_before_training_goes_on(
    name: str, changes: dict[str, object]
) -> None:
    cluster = started()
    orders = damaged(cluster, name, **changes)
    assert orders is not None and orders.problem and orders.bodies == {}
    assert orders.culprits == (name,)
    assert NotifyNormal not in cluster.kinds() and cluster.state() is _S.NOTIFYING


def test_ranks_that_agree_with_each_other_but_not_with_the_journal_are_all_wrong() -> None:
    cluster = started()
    cluster.digest = "what the journal says"
    cluster.begin()
    orders = cluster.run()
    assert orders is not None and orders.culprits == RANKS
    assert "what the journal says" in orders.problem


def test_a_stage_that_one_rank_has_begun_is_begun_by_all_who_have_not() -> None:
    cluster = started()
    cluster.next_stage = "grpo"
    cluster.ranks["model-1"].adapter.start_stage("grpo")
    cluster.begin()
    cluster.run()
    assert cluster.state() is _S.NORMAL
    begun = [to for to, body in cluster.asked if isinstance(body, StartStage)]
    assert begun == ["model-0", "model-2"]
    assert {rank.adapter.committed.stage for rank in cluster.ranks.values()} == {"grpo"}


def test_a_stage_that_nobody_has_begun_is_not_begun_by_a_recovery() -> None:
    cluster = started()
    cluster.next_stage = "grpo"
    cluster.lose("model-0")
    cluster.run()
    cluster.replace("model-0")
    cluster.run()
    assert cluster.state() is _S.NORMAL and StartStage not in cluster.kinds()
    assert {rank.adapter.committed.stage for rank in cluster.ranks.values()} == {"sft"}


def test_given_up_it_asks_nobody_and_stays_so() -> None:
    cluster = started()
    cluster.begin()
    cluster.protocol.give_up(cluster.now)
    assert cluster.state() is _S.DUMPING and not cluster.protocol.waits_for
    cluster.protocol.dumped(cluster.now)
    assert cluster.state() is _S.GIVEN_UP and not cluster.protocol.active
    assert cluster.begin().bodies == {}
    assert cluster.state() is _S.GIVEN_UP


ORDERS_OF_A_RECOVERY = len(STEPS) * len(RANKS)


@settings(max_examples=150, deadline=None)
@given(
    flow=st.sampled_from(Flow),
    committed=st.sets(st.sampled_from(RANKS)),
    begun=st.sets(st.sampled_from(RANKS)),
    happenings=st.lists(
        st.tuples(st.sampled_from(["answer", "lose", "replace", "begin"]), st.integers(0, 2))
    ),
)
def test_once_faults_stop_any_recovery_ends_normal_in_a_bounded_number_of_orders(
    flow: Flow, committed: set[str], begun: set[str], happenings: list[tuple[str, int]]
) -> None:
    cluster = started(flow)
    if begun:
        cluster.next_stage = "grpo"
        for name in begun:
            cluster.ranks[name].adapter.start_stage("grpo")
    else:
        cluster.train(2, commit=committed)
    cluster.begin()
    for what, index in happenings:
        if what == "answer" and cluster.open:
            cluster.answer(list(cluster.open)[index % len(cluster.open)])
        elif what == "lose" and RANKS[index] in cluster.ranks:
            cluster.lose(RANKS[index])
        elif what == "replace" and RANKS[index] not in cluster.ranks:
            cluster.replace(RANKS[index])
        elif what == "begin":
            cluster.begin()
    cluster.asked = []
    for name in cluster.view().missing:
        cluster.replace(name)
    cluster.run()
    assert cluster.state() is _S.NORMAL
    assert len(cluster.asked) <= ORDERS_OF_A_RECOVERY
    assert cluster.protocol.ranks == RANKS
    assert {rank.adapter.committed.step for rank in cluster.ranks.values()} == {cluster.step}
    assert len({rank.adapter.committed.digest for rank in cluster.ranks.values()}) == 1


def test_a_second_recovery_has_no_times_of_the_first() -> None:
    cluster = started()
    cluster.begin()
    cluster.run()
    assert set(cluster.protocol.since) >= {state for state, _ in STEPS}
    cluster.now += 5.0
    cluster.begin()
    assert cluster.protocol.since == {_S.PRE_LOCKING: cluster.now}
    assert cluster.protocol.repaired_from == {}


def test_a_group_of_ranks_of_which_none_was_there_when_it_was_begun_has_a_number_too() -> None:
    cluster = Cluster()
    ranks, cluster.ranks = cluster.ranks, {}
    cluster.begin()
    assert cluster.state() is _S.WAITING
    cluster.ranks = ranks
    cluster.follow(cluster.protocol.check(cluster.view(), 1.0))
    generations = {body.generation for body in cluster.open.values() if isinstance(body, RebuildGroup)}
    assert generations == {1}, "a rank of generation 0 is in no group"
