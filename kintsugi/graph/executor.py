"""Walks one batch through the graph's batch calls. Pure: it is told what happened and says what to send.

A call is ready when all its parents are done; ready calls run at the same time. Each call is cut into logical shards,
balanced by tokens, and the shards are spread over the workers of its role. A call is done when every worker answered
and the answers were validated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from kintsugi.buffer.packing import logical_shards, shards_of_rank
from kintsugi.graph.dfg import Graph
from kintsugi.graph.mfc import Call, Per
from kintsugi.messages import CallDone
from kintsugi.types import LogicalShard, Role, ShardItem


class Dispatch(msgspec.Struct, frozen=True):
    """Send this part of a call to this worker."""

    call: Call
    worker: str
    rank: int
    shards: tuple[LogicalShard, ...]


class CallSpan(msgspec.Struct, frozen=True):
    """When a call ran, for the record."""

    call: str
    start: float
    duration_s: float
    workers: tuple[str, ...]


class Walk:
    """One batch on its way through the batch calls.

    >>> walk = Walk(graph, items, workers={Role.MODEL: ["model-0", "model-1"]}, num_shards=4)   # doctest: +SKIP
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
    ) -> None:
        self._graph, self._workers = graph, workers
        self._items = {item.key: item for item in items}
        self._shards = logical_shards(items, num_shards=num_shards)
        self._open: dict[str, dict[str, CallDone | None]] = {}
        self._started: dict[str, float] = {}
        self._keys_of: dict[str, dict[str, set[str]]] = {}
        self._done = {name for name, call in graph.calls.items() if call.per is Per.GROUP}
        self._done |= {name for name, call in graph.calls.items() if call.role is Role.MASTER}
        self.answers: dict[str, dict[str, CallDone]] = {}
        self.culprit = ""
        """Who is to blame for the problem that `answered` gave; empty when nobody can be told."""
        self.spans: list[CallSpan] = []

    @property
    def finished(self) -> bool:
        return self._done >= set(self._graph.calls)

    def ready(self, *, now: float) -> list[Dispatch]:
        """Start every call whose parents are done and that is not running yet."""
        dispatches: list[Dispatch] = []
        for name in self._graph.order:
            if name in self._done or name in self._open or not self._graph.parents[name] <= self._done:
                continue
            call = self._graph.calls[name]
            workers = self._workers[call.role]
            assert len(workers) >= call.min_workers, f"{name}: {len(workers)} workers of {call.role}"
            self._open[name] = dict.fromkeys(workers)
            self._started[name] = now
            for rank, worker in enumerate(workers):
                mine = shards_of_rank(len(self._shards), rank=rank, world_size=len(workers))
                shards = tuple(self._shards[i] for i in mine)
                self._keys_of.setdefault(name, {})[worker] = {i.key for shard in shards for i in shard.items}
                dispatches.append(Dispatch(call, worker, rank, shards))
        return dispatches

    def answered(self, call: str, worker: str, answer: CallDone, *, now: float) -> str | None:
        """Take a worker's answer; returns what is wrong with it, or None. A repeated answer changes nothing."""
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
            problem = self._disagreement(call, answers)
            if problem:
                return problem
            self.answers[call] = answers
            del self._open[call]
            self._done.add(call)
            self.spans.append(CallSpan(call, self._started[call], now - self._started[call], tuple(waiting)))
            self._take_outputs(call)
        return None

    def _validate(self, call: Call, worker: str, answer: CallDone) -> str | None:
        mine = self._keys_of[call.name][worker]
        for name in (key.name for key in call.outputs if not key.shape):
            found = answer.outputs.get(name, {}).keys()
            if found != mine:
                some = sorted(found ^ mine)[:3]
                return f"{worker} answered {call.name} with '{name}' for other samples than its own: {some}"
        return None

    def _disagreement(self, call: str, answers: Mapping[str, CallDone]) -> str | None:
        """All workers must stand at the same state afterwards; whoever stands alone against the others is named."""
        counts = Counter(done.state_digest for done in answers.values())
        if len(counts) == 1:
            return None
        (right, most), (_, second), *_ = counts.most_common(2)
        if most > second:
            self.culprit = next(name for name, done in answers.items() if done.state_digest != right)
        held = ", ".join(f"{name} {done.state_digest}" for name, done in answers.items())
        return f"different states after {call}: {held}"

    def _take_outputs(self, call: str) -> None:
        """Per-sample scalars that a call gave travel with the samples to the calls that read them."""
        for answer in self.answers[call].values():
            for name, values in answer.outputs.items():
                for key, value in values.items():
                    item = self._items[key]
                    self._items[key] = msgspec.structs.replace(item, values={**item.values, name: value})
        self._shards = tuple(
            LogicalShard(shard.index, tuple(self._items[item.key] for item in shard.items))
            for shard in self._shards
        )
