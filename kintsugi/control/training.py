"""One batch on its way through the model calls of a step, until every rank is prepared and the step is a fact."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kintsugi.config import LEARN_PAIRS, Config
from kintsugi.control.agenda import (
    alerts,
    commit_record,
    end_metrics,
    group_counts,
    slowest,
    staleness_metrics,
    with_final_rewards,
)
from kintsugi.control.draft import Conversation, Draft
from kintsugi.control.episodes import Episodes
from kintsugi.control.protocol import RecordStep
from kintsugi.dataplane.plan import Plan
from kintsugi.dataplane.plane import DataPlane
from kintsugi.facts import BatchFormed, StepCommitted
from kintsugi.graph.advantages import MASTER_CALLS, batch_totals, initial_values
from kintsugi.graph.algorithms import build_graph
from kintsugi.graph.executor import Walk
from kintsugi.messages import CallDone, RunCall
from kintsugi.stages import Stage
from kintsugi.types import LogicalShard, Role, SampleMeta, ShardItem

CALL = "call"


class Training:
    """The walk of the current batch; `abandon` forgets it, and the same batch can be begun again."""

    def __init__(
        self,
        config: Config,
        *,
        draft: Draft,
        talk: Conversation,
        episodes: Episodes,
        prepared: Callable[[float], None],
        wrong: Callable[[str, str, float], None],
    ) -> None:
        """`prepared`: every rank finished the step. `wrong`: a process answered what can not be right."""
        self._config, self._draft, self._talk, self._episodes = config, draft, talk, episodes
        self._prepared, self._wrong = prepared, wrong
        self._walk: Walk | None = None
        self._stage: Stage | None = None
        self._generation = 0
        self._plane = DataPlane(bytes_per_s=config.cluster.bandwidth.samples)
        self.batch: tuple[SampleMeta, ...] = ()

    def begin(
        self, tickets: tuple[str, ...], now: float, *, stage: Stage, ranks: Sequence[str], generation: int
    ) -> None:
        """Form the batch, unless it was formed before a fault, and send out its first calls."""
        state = self._draft.state
        step = state.step + 1
        if not state.ledger.in_batch(step):
            self._draft.fact(BatchFormed(step, tickets))
        self._stage, self._generation = stage, generation
        self.batch = tuple(meta for ticket in tickets for meta in state.ledger.metas(ticket))
        limit = self._config.sampling.max_new_tokens
        values = initial_values(stage, self.batch, max_new_tokens=limit, version=state.step)
        items = [
            ShardItem(m.key, m.holder, m.digest, m.num_tokens, m.num_loss_tokens, values[m.key])
            for m in self.batch
        ]
        self._walk = Walk(
            build_graph(stage),
            items,
            workers={Role.MODEL: list(ranks)},
            num_shards=stage.actor.logical_shards,
            compute=lambda interface, items: MASTER_CALLS[interface](stage, items),
            keep_groups=stage.algorithm.name in LEARN_PAIRS,
            planner=self._plan,
        )
        self._draft.because(f"{len(items)} samples of {len(tickets)} groups")
        self._dispatch(now)

    def _plan(self, shards: Sequence[LogicalShard], ranks: Sequence[str]) -> Plan:
        members = self._draft.state.members
        processes = {*ranks, *(item.holder for shard in shards for item in shard.items)}
        hosts = {process: members.host_of(process) for process in sorted(processes)}
        plan, changed = self._plane.plan(shards, ranks=ranks, hosts=hosts)
        if changed:
            self._draft.because(f"samples go {plan.reason}")
        return plan

    def answered(self, token: str, sender: str, done: CallDone, now: float) -> None:
        """A rank finished its part of a call."""
        if self._walk is None:
            return
        problem = self._walk.answered(token.split(":")[1], sender, done, now=now)
        if problem:
            self._wrong(self._walk.culprit, problem, now)
            return
        self._dispatch(now)
        if self._walk.finished:
            self._prepared(now)

    def abandon(self) -> None:
        """The step is given up; late answers to its calls change nothing."""
        self._walk = None
        self._talk.withdraw_all(f"{CALL}:")

    def commit(self, timing: dict[str, float]) -> None:
        """Every rank is prepared and stands at the same state: the step becomes a fact."""
        assert self._walk is not None and self._stage is not None
        walk, stage, step = self._walk, self._stage, self._draft.state.step + 1
        another = stage.asynchrony.max_staleness > 0 or all(meta.version < 0 for meta in self.batch)
        for alert in alerts(walk.metrics, off_policy=another):
            self._draft.do(alert)
        counts = group_counts(stage, walk.values, ledger=self._draft.state.ledger, step=step)
        metrics = {**walk.metrics, **counts, **staleness_metrics(self.batch, version=step - 1)}
        transfers = self._plane.learn(walk.plan, walk.transfers)
        metas = with_final_rewards(stage, self.batch, walk.values)
        episodes = {f"episode_{name}": seconds for name, seconds in self._episodes.timing.items()}
        timing = {**timing, **episodes, **slowest(walk.answers.values())}
        texts = self._episodes.take_texts(self.batch)
        self._draft.do(
            RecordStep(
                step,
                stage.name,
                metas,
                texts,
                walk.values,
                {**metrics, **transfers, **end_metrics(self._draft.state.ledger)},
                timing,
                tuple(walk.spans),
            )
        )
        self._draft.fact(StepCommitted(step, walk.state_digest, commit_record(metas, metrics, timing)))
        self._episodes.timing.clear()
        self._walk = None

    def _dispatch(self, now: float) -> None:
        assert self._walk is not None and self._stage is not None
        stage, step = self._stage, self._draft.state.step + 1
        totals = batch_totals(stage, self.batch, max_new_tokens=self._config.sampling.max_new_tokens)
        for dispatch in self._walk.ready(now=now):
            body = RunCall(
                call=dispatch.call.name,
                interface=dispatch.call.interface,
                step=step,
                shards=dispatch.shards,
                num_shards=stage.actor.logical_shards,
                totals=totals,
                generation=self._generation,
                arguments={"temperature": self._config.sampling.temperature},
                stage=stage.name,
                after=dispatch.after,
                prepares=dispatch.prepares,
                blocks=dispatch.blocks,
                routes=dispatch.routes,
            )
            name = f"{CALL}:{dispatch.call.name}:{step}.{self._generation}:{dispatch.worker}"
            self._talk.ask(name, dispatch.worker, body, now)
