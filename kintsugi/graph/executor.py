"""Execution of one batch by the batch calls of a graph. Pure: it receives answers and returns what to send.

A call is ready when all its parents are done; ready calls are sent out at the same time, in the graph's order. Each is
cut into logical shards, balanced by tokens, and the shards go to the workers of its role by plan (`dataplane/`). Cut
and plan are the same for all calls, so results that a worker keeps of a sample are there for the calls that read them.
A call is done when every worker has answered and the answers were validated. Calls of the master are computed as soon
as they are ready.

A worker is never sent a call before one that precedes it in the graph's order, and each dispatch lists the calls that
were sent before (`CallDispatch.after`): ranks that execute their calls in this one order never meet in different
collectives. The last training call of the order leaves every rank prepared; only then their states have to agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kintsugi.dataplane.plan import TransferPlan, in_order
from kintsugi.errors import StatesDiverged
from kintsugi.graph.dfg import Graph
from kintsugi.graph.mfc import Call, Per
from kintsugi.model.seats import UNCUT, Mesh, joined, seat_of, speakers
from kintsugi.protocol.sample_transfer import Routes, Transfer
from kintsugi.protocol.training import CallDone
from kintsugi.samples.sharding import logical_shards, shards_of_rank
from kintsugi.types import LogicalShard, Role, ShardItem

Compute = Callable[[str, Sequence[ShardItem]], Mapping[str, Mapping[str, float]]]
"""(interface, items of the batch) → output → sample → value: a call of the master, from scalars."""
Planner = Callable[[Sequence[LogicalShard], Sequence[str]], TransferPlan]
"""(shards, ranks) → the block of shards of each rank, and the way of their samples to it."""


class CallDispatch(msgspec.Struct, frozen=True):
    """Part of a call to be sent to one worker."""

    call: Call
    worker: str
    rank: int
    shards: tuple[LogicalShard, ...]
    after: tuple[str, ...] = ()
    """Calls that the worker was sent before this one."""
    prepares: bool = False
    """Whether it is the last training call, after which every rank is prepared."""
    blocks: tuple[int, ...] = ()
    routes: Routes = Routes()


class CallSpan(msgspec.Struct, frozen=True):
    """Time at which a call ran, for the record."""

    call: str
    start: float
    duration_s: float
    workers: tuple[str, ...]


class GraphExecution:
    """Progress of one batch through the batch calls.

    >>> ranks = {Role.MODEL: ["model-0", "model-1"]}                                            # doctest: +SKIP
    >>> walk = GraphExecution(graph, items, workers=ranks, num_shards=4, compute=compute)       # doctest: +SKIP
    >>> for dispatch in walk.ready(now=0.0): ...                                                # doctest: +SKIP
    >>> walk.answered("actor_train", "model-0", answer, now=1.0)                                # doctest: +SKIP
    """

    def __init__(
        self,
        graph: Graph,
        items: Sequence[ShardItem],
        *,
        workers: Mapping[Role, Sequence[str]],
        num_shards: int,
        compute: Compute,
        keep_groups: bool = False,
        planner: Planner | None = None,
        mesh: Mesh = UNCUT,
    ) -> None:
        """`keep_groups`: a group's samples are compared with each other, so they stay on one worker. `planner` places
        the shards once, for all calls. `mesh`: the parts into which the workers' state and models are cut."""
        self._mesh = mesh
        self._graph, self._workers, self._compute = graph, workers, compute
        self._items = {item.key: item for item in items}
        self._shards = logical_shards(items, num_shards=num_shards, keep_groups=keep_groups)
        ranks = workers[Role.MODEL]
        in_turn = in_order(len(ranks), model_ranks=mesh.model_ranks)
        self.plan = in_turn if planner is None else planner(self._shards, ranks)
        self._speakers = speakers(ranks, mesh)
        self._open: dict[str, dict[str, CallDone | None]] = {}
        self._started: dict[str, float] = {}
        self._keys_of: dict[str, dict[str, set[str]]] = {}
        self._done = {name for name, call in graph.calls.items() if call.per is Per.GROUP}
        self._sent: list[str] = []
        """Calls that were sent out, in their order."""
        self._last_training = [name for name in graph.order if graph.calls[name].trains][-1]
        self.answers: dict[str, dict[str, CallDone]] = {}
        """Call → worker → answer, for the calls that are done."""
        self.culprit = ""
        """Worker that caused the problem that `answered` returned; empty when that is unknown."""
        self.divergence: StatesDiverged | None = None
        """Ranks computed different states in the last training call."""
        self.spans: list[CallSpan] = []

    @property
    def finished(self) -> bool:
        """Whether every call is done: every rank is prepared, and their states agree."""
        return self._done >= set(self._graph.calls)

    @property
    def state_digest(self) -> str:
        """Digest of the state that all ranks together have prepared."""
        answers = self.answers[self._last_training]
        return joined({name: done.state_digest for name, done in answers.items()}, self._mesh)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of all calls together; all workers report the same values, and no two calls the same name."""
        merged: dict[str, float] = {}
        for name in self._sent:
            merged |= next(iter(self.answers[name].values())).metrics
        return merged

    @property
    def transfers(self) -> dict[str, list[Transfer]]:
        """Worker → its transfers for the calls that are done."""
        fetched: dict[str, list[Transfer]] = {}
        for answers in self.answers.values():
            for worker, answer in answers.items():
                fetched.setdefault(worker, []).extend(answer.transfers)
        return fetched

    @property
    def values(self) -> dict[str, dict[str, float]]:
        """Sample → its values so far, including the outputs of calls."""
        return {key: item.values for key, item in self._items.items()}

    def ready(self, *, now: float) -> list[CallDispatch]:
        """Start every call whose parents are done, in the graph's order, and return the messages to send."""
        dispatches: list[CallDispatch] = []
        blocked: set[Role] = set()
        for name in self._graph.order:
            call = self._graph.calls[name]
            if name in self._done or name in self._open or call.role in blocked:
                continue
            if not self._graph.parents[name] <= self._done:
                if call.role is not Role.MASTER:
                    blocked.add(call.role)
            elif call.role is Role.MASTER:
                self._merge(self._compute(call.interface, tuple(self._items.values())))
                self._done.add(name)
            else:
                dispatches += self._send_out(call, now=now)
        return dispatches

    def _send_out(self, call: Call, *, now: float) -> list[CallDispatch]:
        workers = self._workers[call.role]
        assert len(workers) >= call.min_workers, f"{call.name}: {len(workers)} workers of {call.role}"
        self._open[call.name] = dict.fromkeys(workers)
        self._started[call.name] = now
        dispatches = []
        num_blocks = len(self.plan.blocks)
        for rank, worker in enumerate(workers):
            block = self.plan.blocks[self._mesh.data_index(rank)]
            mine = shards_of_rank(len(self._shards), rank=block, world_size=num_blocks)
            shards = tuple(self._shards[i] for i in mine)
            self._keys_of.setdefault(call.name, {})[worker] = {i.key for shard in shards for i in shard.items}
            prepares = call.name == self._last_training
            # Later calls of the step find the samples that the first one fetched.
            routes = Routes() if self._sent else self.plan.routes[rank]
            after = tuple(self._sent)
            blocks = () if list(self.plan.blocks) == list(range(num_blocks)) else self.plan.blocks
            dispatches.append(CallDispatch(call, worker, rank, shards, after, prepares, blocks, routes))
        self._sent.append(call.name)
        return dispatches

    def answered(self, call: str, worker: str, answer: CallDone, *, now: float) -> str | None:
        """Take a worker's answer; return the problem with it, or None. A repeated answer changes nothing."""
        waiting = self._open.get(call)
        if waiting is None or waiting.get(worker) is not None:
            return None
        problem = self._validate(self._graph.calls[call], worker, answer)
        if problem:
            self.culprit = worker
            return problem
        waiting[worker] = answer
        if all(waiting.values()):
            answers = {name: done for name, done in waiting.items() if done is not None}
            problem = self._disagreement(call, answers) if call == self._last_training else None
            if problem:
                return problem
            self.answers[call] = answers
            del self._open[call]
            self._done.add(call)
            self.spans.append(CallSpan(call, self._started[call], now - self._started[call], tuple(waiting)))
            for done in answers.values():
                self._merge(done.outputs)
        return None

    def _validate(self, call: Call, worker: str, answer: CallDone) -> str | None:
        mine = self._keys_of[call.name][worker] if worker in self._speakers else set[str]()
        for name in (key.name for key in call.outputs if not key.shape):
            found = answer.outputs.get(name, {}).keys()
            if found != mine:
                some = sorted(found ^ mine)[:3]
                return f"{worker} answered {call.name} with '{name}' for other samples than its own: {some}"
        return None

    def _disagreement(self, call: str, answers: Mapping[str, CallDone]) -> str | None:
        """Return the problem if workers with the same box ended in different states; a single deviating worker becomes
        the culprit."""
        by_box: dict[str, dict[str, CallDone]] = {}
        for name, done in answers.items():
            by_box.setdefault(seat_of(name, self._mesh).box, {})[name] = done
        return next((problem for same in by_box.values() if (problem := self._difference(call, same))), None)

    def _difference(self, call: str, answers: Mapping[str, CallDone]) -> str | None:
        counts = Counter(done.state_digest for done in answers.values())
        if len(counts) == 1:
            return None
        (right, most), (_, second), *_ = counts.most_common(2)
        if most > second:
            self.culprit = next(name for name, done in answers.items() if done.state_digest != right)
        states = {name: done.state_digest for name, done in answers.items()}
        self.divergence = StatesDiverged(call, states)
        held = ", ".join(f"{name} {state}" for name, state in states.items())
        return f"different states after {call}: {held}"

    def _merge(self, outputs: Mapping[str, Mapping[str, float]]) -> None:
        """Add per-sample scalars of a call to the items, so that later calls receive them."""
        for name, values in outputs.items():
            for key, value in values.items():
                item = self._items[key]
                self._items[key] = msgspec.structs.replace(item, values={**item.values, name: value})
        self._shards = tuple(
            LogicalShard(shard.index, tuple(self._items[item.key] for item in shard.items))
            for shard in self._shards
        )
