"""TRAINING and the commit: one batch passes through the model calls of a step on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from kintsugi.config.schema import LEARN_PAIRS, Config
from kintsugi.config.stages import Stage
from kintsugi.control.decision import DecisionBuilder
from kintsugi.control.dispatch import EpisodeDispatch
from kintsugi.control.mesh_choice import mesh_in_force
from kintsugi.control.pending import PendingRequests, Purpose, RequestId
from kintsugi.control.phases.table import DONE, RUNNING, PhaseReport, PhaseResult
from kintsugi.control.protocol import RecordStep, Tell
from kintsugi.control.step_metrics import (
    alerts,
    commit_record,
    end_metrics,
    group_counts,
    slowest,
    staleness_metrics,
    with_final_rewards,
)
from kintsugi.dataplane.plan import TransferPlan
from kintsugi.dataplane.planner import TransferPlanner
from kintsugi.graph.advantages import batch_totals, initial_values, master_call
from kintsugi.graph.algorithms import build_graph
from kintsugi.graph.executor import GraphExecution
from kintsugi.journal.facts import BatchFormed, StepCommitted
from kintsugi.protocol.recovery import ForgetStates
from kintsugi.protocol.sample_transfer import Routes
from kintsugi.protocol.training import CallDone, RunCall
from kintsugi.types import LogicalShard, Role, SampleMeta, ShardItem

FORGET_EVERY = 4
"""Committed steps after which agents are told to forget earlier states. Each keeps the latest ones of a box anyway;
this is for boxes of other meshes, and for states of ranks that run elsewhere now. After a lost message the next one
does the same."""


class TrainPhase:
    """Execution of the current batch. After `abandon` the same batch can be begun again."""

    def __init__(
        self,
        config: Config,
        *,
        decision: DecisionBuilder,
        pending: PendingRequests,
        dispatch: EpisodeDispatch,
    ) -> None:
        self._config, self._decision, self._pending, self._dispatch = config, decision, pending, dispatch
        self._walk: GraphExecution | None = None
        self._stage: Stage | None = None
        self._generation = 0
        self._blocks: tuple[int, ...] | None = None
        self._plane = TransferPlanner(bytes_per_s=config.cluster.bandwidth.samples)
        self.batch: tuple[SampleMeta, ...] = ()

    def begin(
        self,
        tickets: tuple[str, ...],
        now: float,
        *,
        stage: Stage,
        ranks: Sequence[str],
        generation: int,
        blocks: tuple[int, ...] | None = None,
    ) -> None:
        """Form the batch, unless it was formed before a fault, and send its first calls. `blocks`: the shards of each
        rank, where the ranks have begun the step under the last master."""
        state = self._decision.state
        step = state.step + 1
        if not state.ledger.in_batch(step):
            self._decision.add_fact(BatchFormed(step, tickets))
        self._stage, self._generation, self._blocks = stage, generation, blocks
        self.batch = tuple(meta for ticket in tickets for meta in state.ledger.metas(ticket))
        limit = self._config.sampling.max_new_tokens
        values = initial_values(stage, self.batch, max_new_tokens=limit, version=state.step)
        items = [
            ShardItem(m.key, m.holder, m.digest, m.num_tokens, m.num_loss_tokens, values[m.key])
            for m in self.batch
        ]
        self._walk = GraphExecution(
            build_graph(stage),
            items,
            workers={Role.MODEL: list(ranks)},
            num_shards=stage.actor.num_shards,
            compute=lambda interface, items: master_call(stage, interface, items),
            keep_groups=stage.algorithm.name in LEARN_PAIRS,
            planner=self._plan,
            mesh=mesh_in_force(self._config, state),
        )
        self._decision.explain(f"{len(items)} samples of {len(tickets)} groups")
        self._send_calls(now)

    def _plan(self, shards: Sequence[LogicalShard], ranks: Sequence[str]) -> TransferPlan:
        members = self._decision.state.members
        processes = {*ranks, *(item.holder for shard in shards for item in shard.items)}
        hosts = {process: members.host_of(process) for process in sorted(processes)}
        if self._blocks is not None:
            # Ranks that have begun know their routes; one that has not received the first call fetches directly.
            return TransferPlan("as begun", self._blocks, (Routes(),) * len(ranks), hosts)
        model_ranks = mesh_in_force(self._config, self._decision.state).model_ranks
        plan, changed = self._plane.plan(shards, ranks=ranks, hosts=hosts, model_ranks=model_ranks)
        if changed:
            self._decision.explain(f"samples go {plan.reason}")
        return plan

    def answered(self, call: str, sender: str, done: CallDone, now: float) -> PhaseReport:
        """Take the result of a model call from one rank, and send the calls that depend on it."""
        if self._walk is None:
            return RUNNING
        problem = self._walk.answered(call, sender, done, now=now)
        if problem:
            return PhaseReport(
                PhaseResult.DIVERGED,
                process=self._walk.culprit,
                problem=problem,
                divergence=self._walk.divergence,
            )
        self._send_calls(now)
        return DONE if self._walk.finished else RUNNING

    def abandon(self) -> None:
        """Give the step up; late answers to its calls are ignored."""
        self._walk = None
        self._pending.withdraw_all(Purpose.CALL)

    def commit(self, timing: dict[str, float]) -> None:
        """Make the step a fact: every rank has prepared it with the same state."""
        assert self._walk is not None and self._stage is not None
        walk, stage, step = self._walk, self._stage, self._decision.state.step + 1
        another = stage.asynchrony.max_staleness > 0 or all(meta.version < 0 for meta in self.batch)
        for alert in alerts(walk.metrics, off_policy=another):
            self._decision.add_effect(alert)
        counts = group_counts(stage, walk.values, ledger=self._decision.state.ledger, step=step)
        metrics = {**walk.metrics, **counts, **staleness_metrics(self.batch, version=step - 1)}
        transfers = self._plane.learn(walk.plan, walk.transfers)
        metas = with_final_rewards(stage, self.batch, walk.values)
        episodes = {f"episode_{name}": seconds for name, seconds in self._dispatch.timing.items()}
        timing = {**timing, **episodes, **slowest(walk.answers.values())}
        texts = self._dispatch.take_texts(self.batch)
        self._decision.add_effect(
            RecordStep(
                step,
                stage.name,
                metas,
                texts,
                walk.values,
                {**metrics, **transfers, **end_metrics(self._decision.state.ledger)},
                timing,
                tuple(walk.spans),
            )
        )
        self._decision.add_fact(StepCommitted(step, walk.state_digest, commit_record(metas, metrics, timing)))
        self._dispatch.timing.clear()
        self._walk = None
        agents = self._decision.state.members.live(Role.AGENT)
        for agent in agents if step % FORGET_EVERY == 0 else ():
            self._decision.add_effect(
                Tell(agent, ForgetStates(step - 1))
            )  # A lost step is undone to this one.

    def _send_calls(self, now: float) -> None:
        assert self._walk is not None and self._stage is not None
        stage, step = self._stage, self._decision.state.step + 1
        totals = batch_totals(stage, self.batch, max_new_tokens=self._config.sampling.max_new_tokens)
        for dispatch in self._walk.ready(now=now):
            body = RunCall(
                call=dispatch.call.name,
                interface=dispatch.call.interface,
                step=step,
                shards=dispatch.shards,
                num_shards=stage.actor.num_shards,
                totals=totals,
                generation=self._generation,
                arguments={"temperature": self._config.sampling.temperature},
                stage=stage.name,
                after=dispatch.after,
                prepares=dispatch.prepares,
                blocks=dispatch.blocks,
                routes=dispatch.routes,
            )
            name, worker = dispatch.call.name, dispatch.worker
            request_id = RequestId(Purpose.CALL, name, step, self._generation, worker)
            self._pending.ask(request_id, worker, body, now)
