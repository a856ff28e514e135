"""The master's decisions: what the run does next. Pure; the shell around it journals facts and carries out effects.

A step goes through these phases:

    COLLECTING   tickets are issued, rollout workers generate and score   → the oldest groups fill a batch
    TRAINING     the batch walks the graph's model calls on every rank    → every rank is prepared, states agree
    COMMITTING   the step is journaled, the ranks adopt it                → every rank acknowledged
    PUBLISHING   the new weights are laid out, servers load and verify    → the version is current
    EVALUATING   held-out problems at this version, when due              → every answer is in
    SAVING       a durable checkpoint, when due                           → saved, or failed loudly

Before the first step: STARTING (processes join), PREPARING (group, stage, restored state). At the end: ENDING
(one last number for people to compare), ENDED.
"""

from __future__ import annotations

from collections.abc import Sequence

from kintsugi.config import Config, Stage, next_stage
from kintsugi.control.agenda import (
    alerts,
    carried_stage,
    commit_record,
    evaluation_is_due,
    is_last,
    most_tokens,
    save_is_due,
    slowest,
)
from kintsugi.control.draft import Conversation, Draft
from kintsugi.control.episodes import Episodes, episode_of
from kintsugi.control.evaluation import Evaluation
from kintsugi.control.layout import ProcessPlan
from kintsugi.control.phases import Phase
from kintsugi.control.protocol import (
    Began,
    Decision,
    Event,
    Exited,
    Finish,
    Joined,
    Raise,
    RecordEvaluation,
    RecordStep,
    Replied,
    RequestFailed,
    StopRequested,
    Tell,
    Tick,
)
from kintsugi.control.staff import Staff
from kintsugi.control.state import MasterState
from kintsugi.errors import Fault, root_first
from kintsugi.facts import (
    BatchFormed,
    CheckpointFailed,
    CheckpointSaved,
    EpochStarted,
    EvaluationDone,
    ProcessLost,
    RolledBack,
    RunEnded,
    RunStarted,
    StageStarted,
    StepCommitted,
    TicketFiltered,
    VersionCurrent,
)
from kintsugi.graph.algorithms import batch_totals, build_graph, sample_values
from kintsugi.graph.executor import Walk
from kintsugi.messages import (
    Body,
    CallDone,
    CommitStep,
    Drop,
    EpisodesDone,
    HashWeights,
    LoadWeights,
    ProcessStarted,
    Publish,
    Published,
    RebuildGroup,
    Repair,
    RunCall,
    Save,
    Saved,
    StartStage,
    WeightsHashed,
    WeightsLoaded,
)
from kintsugi.types import Role, SampleMeta, ShardItem

FAULT_GRACE_S = 1.0
"""After a request failed, how long to listen for the death that explains it before the run is called failed."""
REPLACED_ROLES = frozenset({Role.ROLLOUT, Role.SERVER})
"""Processes without state of their own: a lost one is replaced while the run goes on."""


class Master:
    """`decide(event, now)` is the only entry; it never blocks, reads no clock and touches nothing outside itself."""

    def __init__(
        self,
        config: Config,
        *,
        state: MasterState,
        layout: Sequence[ProcessPlan],
        num_rows: int,
        num_eval_rows: int,
        checkpoint_folder: str,
    ) -> None:
        self.config, self.state, self.phase = config, state, Phase.STARTING
        self._num_eval_rows, self._folder = num_eval_rows, checkpoint_folder
        self._restore_path: str | None = None
        self._draft = Draft(state)
        self._talk = Conversation(self._draft, first_s=config.cluster.start_timeout_s)
        self._talk.num_tokens = most_tokens(config, num_eval_rows=num_eval_rows)
        self._staff = Staff(layout, draft=self._draft, talk=self._talk)
        self._episodes = Episodes(config, draft=self._draft, talk=self._talk, num_rows=num_rows)
        self._walk: Walk | None = None
        self._batch: tuple[SampleMeta, ...] = ()
        self._values: dict[str, dict[str, float]] = {}
        self._published: Published | None = None
        self._generation = 0
        self._dropped_before = 0
        self._ready_stage = ""
        self._stop_reason: str | None = None
        self._faults: dict[str, Fault] = {}
        self._fail_at: float | None = None
        self._timing: dict[str, float] = {}
        self._since = self._began = 0.0

    def decide(self, event: Event, now: float) -> Decision:
        """Take one event; the facts of the decision are already in `state`, its effects have not happened yet."""
        if self.phase is Phase.ENDED:
            return Decision((), (), "the run has ended")
        match event:
            case Began():
                self._on_began(event, now)
            case Joined():
                self._on_joined(event, now)
            case Exited():
                self._on_exited(event, now)
            case Replied():
                self._on_replied(event, now)
            case RequestFailed():
                self._on_request_failed(event, now)
            case StopRequested():
                self._stop_reason = event.reason
                self._draft.because(f"stop requested: {event.reason}")
                if self.state.version < 0:  # Nothing of this session is trained yet.
                    self._end("stopped", now)
            case Tick():
                self._on_tick(now)
        return self._draft.take()

    @property
    def stage(self) -> Stage:
        """The stage that the next step belongs to (the last stage when all steps are done)."""
        return next_stage(self.config, step=self.state.step)

    @property
    def timing(self) -> dict[str, float]:
        """Seconds per phase since the last committed step."""
        return dict(self._timing)

    # The phases, in their order.

    def _begin_preparing(self, now: float) -> None:
        """Ranks build their group, set up the stage that the state belongs to, and restore a checkpoint if given."""
        ranks, step = self.state.members.live(Role.MODEL), self.state.step
        stage = carried_stage(self.config, step=step)
        self._generation += 1
        store = self.state.members.members[ranks[0]].capabilities.get("store", "")
        bodies: list[Body] = [
            RebuildGroup(self._generation, tuple(ranks), store),
            StartStage(stage.name, max(step, stage.first_step - 1)),
        ]
        if self._restore_path is not None:
            bodies.append(Repair(step, self._restore_path))
        self._ready_stage = stage.name
        self._enter(Phase.PREPARING, now, f"{len(ranks)} ranks form group generation {self._generation}")
        self._talk.ask_in_turn(ranks, bodies, now, then=self._begin_publishing)

    def _begin_publishing(self, now: float) -> None:
        publishers = self.state.members.first_per_host(Role.MODEL)
        self._enter(Phase.PUBLISHING, now, f"{', '.join(publishers)} lay out version {self.state.step}")
        body = Publish(self.state.step, self.state.step)
        self._talk.ask_all(dict.fromkeys(publishers, body), now, then=self._load_published)

    def _load_published(self, now: float) -> None:
        published = [answer for answer in self._talk.answers.values() if isinstance(answer, Published)]
        digests = sorted({answer.manifest.digest for answer in published})
        if len(digests) != 1:
            self._fail(self._fault("IntegrityError", f"ranks published different weights: {digests}"), now)
            return
        sources = tuple(source for answer in published for source in answer.sources)
        self._published = Published(published[0].manifest, sources)
        body = LoadWeights(self._published.manifest, sources)
        (manager,) = self.state.members.live(Role.MANAGER)
        self._talk.ask_all({manager: body}, now, then=self._version_loaded)

    def _version_loaded(self, now: float) -> None:
        (loaded,) = self._talk.answers.values()
        assert isinstance(loaded, WeightsLoaded) and self._published is not None
        manifest = self._published.manifest
        if (loaded.version, loaded.digest) != (manifest.version, manifest.digest):
            held = f"servers hold version {loaded.version} with digest {loaded.digest}"
            wrong = f"{held}, published was {manifest.version} with {manifest.digest}"
            self._fail(self._fault("IntegrityError", wrong), now)
            return
        self._draft.fact(
            VersionCurrent(loaded.version, manifest.digest, self._published.sources, loaded.servers)
        )
        self._continue(now)

    def _continue(self, now: float) -> None:
        """The version is current: evaluate and save if due, then end, stop, change the stage, or take the next step."""
        if self._num_eval_rows and evaluation_is_due(self.config, self.state):
            self._begin_evaluating(now)
        elif save_is_due(self.config, self.state, stopping=self._stop_reason is not None):
            self._begin_saving(now)
        elif is_last(self.config, step=self.state.step):
            self._begin_ending("finished", now)
        elif self._stop_reason is not None:
            self._begin_ending("stopped", now)
        elif self._ready_stage != self.stage.name:
            self._begin_stage(now)
        else:
            self._begin_collecting(now)

    def _begin_stage(self, now: float) -> None:
        self._ready_stage = self.stage.name
        self._enter(Phase.PREPARING, now, f"stage {self.stage.name} begins after step {self.state.step}")
        body = StartStage(self.stage.name, self.state.step)
        ranks = self.state.members.live(Role.MODEL)
        self._talk.ask_all(dict.fromkeys(ranks, body), now, then=self._begin_collecting)

    def _begin_collecting(self, now: float) -> None:
        if self.state.stage != self.stage.name:
            self._draft.fact(StageStarted(self.stage.name, self.state.step + 1))
        self._dropped_before = self.state.ledger.num_dropped(self.stage.name)
        self._enter(Phase.COLLECTING, now, f"collecting for step {self.state.step + 1}")
        self._collect(now)

    def _collect(self, now: float) -> None:
        """Keep groups coming, and train when the oldest ones are complete.

        A group that was set aside is replaced by the next prompt, but not for ever: a step that loses more groups
        than it needs will not get better by taking more.
        """
        ledger, stage = self.state.ledger, self.stage
        for ticket in ledger.unusable_tickets():
            self._draft.fact(TicketFiltered(ticket, "too few of its samples could be scored"))
        dropped = ledger.num_dropped(stage.name) - self._dropped_before
        if dropped > stage.algorithm.batch_size and self._fail_at is None:
            why = f"{dropped} groups of step {self.state.step + 1} were set aside, more than its batch_size"
            self._fail(self._fault("EpisodesFailed", f"{why}; the last: {self._episodes.last_reason}"), now)
            return
        self._episodes.collect(stage, now)
        batch = ledger.next_batch(stage.algorithm.batch_size)
        if batch:
            self._begin_training(batch, now)

    def _begin_training(self, tickets: tuple[str, ...], now: float) -> None:
        step, stage = self.state.step + 1, self.stage
        self._draft.fact(BatchFormed(step, tickets))
        self._batch = tuple(meta for ticket in tickets for meta in self.state.ledger.metas(ticket))
        self._values = sample_values(stage, self._batch)
        items = [
            ShardItem(m.key, m.holder, m.digest, m.num_tokens, m.num_loss_tokens, self._values[m.key])
            for m in self._batch
        ]
        ranks = {Role.MODEL: self.state.members.live(Role.MODEL)}
        self._walk = Walk(build_graph(stage), items, workers=ranks, num_shards=stage.actor.logical_shards)
        self._enter(Phase.TRAINING, now, f"step {step}: {len(items)} samples of {len(tickets)} groups")
        self._dispatch_calls(now)

    def _dispatch_calls(self, now: float) -> None:
        assert self._walk is not None
        stage, step = self.stage, self.state.step + 1
        totals = batch_totals(stage, self._batch, max_new_tokens=self.config.sampling.max_new_tokens)
        for dispatch in self._walk.ready(now=now):
            body = RunCall(
                call=dispatch.call.name,
                interface=dispatch.call.interface,
                step=step,
                shards=dispatch.shards,
                num_shards=stage.actor.logical_shards,
                totals=totals,
                generation=self._generation,
                arguments={"temperature": self.config.sampling.temperature},
                stage=stage.name,
            )
            self._talk.ask(f"call:{step}:{dispatch.call.name}:{dispatch.worker}", dispatch.worker, body, now)
        if self._walk.finished:
            self._commit(now)

    def _commit(self, now: float) -> None:
        """Every rank is prepared and stands at the same state: the step becomes a fact, then the ranks adopt it."""
        assert self._walk is not None
        answers, step, stage = self._walk.answers["actor_train"], self.state.step + 1, self.stage.name
        first = next(iter(answers.values()))
        for alert in alerts(first.metrics):
            self._draft.do(alert)
        self._enter(Phase.COMMITTING, now, f"{len(answers)} ranks prepared step {step}")
        episodes = {f"episode_{name}": seconds for name, seconds in self._episodes.timing.items()}
        timing = {**self._timing, **episodes, **slowest(answers)}
        self._draft.fact(StepCommitted(step, first.state_digest, commit_record(self._batch, answers, timing)))
        self._draft.do(
            RecordStep(
                step,
                stage,
                self._batch,
                self._episodes.take_texts(self._batch),
                self._values,
                first.metrics,
                timing,
                tuple(self._walk.spans),
            )
        )
        self._timing = {}
        self._episodes.timing.clear()
        self._talk.ask_all(dict.fromkeys(answers, CommitStep(step)), now, then=self._after_commit)

    def _after_commit(self, now: float) -> None:
        tickets = tuple(dict.fromkeys(meta.ticket for meta in self._batch))
        for worker in self.state.members.live(Role.ROLLOUT):
            self._draft.do(Tell(worker, Drop(tickets)))
        self._begin_publishing(now)

    def _begin_evaluating(self, now: float) -> None:
        state, count = self.state, self._num_eval_rows
        evaluation = Evaluation(self.config, step=state.step, version=state.version, num_problems=count)
        self._enter(Phase.EVALUATING, now, f"{len(evaluation.tasks)} questions at version {state.version}")
        self._episodes.evaluate(evaluation, now)

    def _finish_evaluation(self, now: float) -> None:
        evaluation = self._episodes.evaluation
        if evaluation is None or not evaluation.finished:
            self._episodes.hand_out(now)
            return
        self._episodes.evaluation = None
        self._episodes.timing.clear()
        metrics = evaluation.metrics()
        self._draft.fact(EvaluationDone(self.state.step, self.state.version, self.stage.name, metrics))
        self._draft.do(RecordEvaluation(self.state.step, metrics))
        self._continue(now)

    def _begin_saving(self, now: float) -> None:
        self._enter(Phase.SAVING, now, f"saving step {self.state.step}")
        writer = self.state.members.live(Role.MODEL)[0]
        body = Save(self.state.step, self._ready_stage, self._folder)
        self._talk.ask_all({writer: body}, now, then=self._saved)

    def _saved(self, now: float) -> None:
        (answer,) = self._talk.answers.values()
        assert isinstance(answer, Saved)
        self._draft.fact(CheckpointSaved(answer.step, answer.path, answer.digest))
        self._continue(now)

    def _begin_ending(self, outcome: str, now: float) -> None:
        self._enter(Phase.ENDING, now, f"{outcome} after step {self.state.step}")
        rank = self.state.members.live(Role.MODEL)[0]
        self._talk.ask_all({rank: HashWeights()}, now, then=lambda at: self._end(outcome, at))

    def _end(self, outcome: str, now: float) -> None:
        faults = tuple(root_first(self._faults.values()))
        outcome = "failed" if faults else outcome
        hashes = [a.sha256 for a in self._talk.answers.values() if isinstance(a, WeightsHashed)]
        fault, sha256 = faults[0] if faults else None, hashes[0] if hashes else ""
        self._draft.fact(RunEnded(outcome, fault, sha256, now - self._began))
        self._enter(Phase.ENDED, now, f"{outcome} at step {self.state.step}")
        self._draft.do(Finish(outcome, faults))

    # The events.

    def _on_began(self, event: Began, now: float) -> None:
        """Take the run over: nobody of an earlier session lives, and steps that were not restored are undone."""
        state, draft = self.state, self._draft
        if not state.job:
            draft.fact(RunStarted(event.job, event.config_digest))
        draft.fact(EpochStarted(state.epoch + 1, event.incarnation))
        gone = Fault("resumed", "Stopped", "master-0", "the run was stopped and is resumed", 0.0)
        for member in list(state.members.members.values()):
            lost = ProcessLost(member.process, member.incarnation, gone)
            if state.members.accepts(lost) is None:
                draft.fact(lost)
        if event.resumed:
            draft.fact(
                RolledBack(event.restore_step, f"resumed from {event.restore_path or 'the beginning'}")
            )
            self._restore_path = event.restore_path
        self._since = self._began = now
        draft.because(f"epoch {state.epoch} begins at step {state.step}")

    def _on_joined(self, event: Joined, now: float) -> None:
        if not self._staff.joined(event, now):
            return
        if self.phase is Phase.STARTING and self._staff.complete:
            self._begin_preparing(now)
        elif self.phase in (Phase.COLLECTING, Phase.EVALUATING) and event.role is Role.ROLLOUT:
            self._episodes.rebalance(now)

    def _on_exited(self, event: Exited, now: float) -> None:
        """A lost process is replaced if it has no state of its own; any other loss ends the run."""
        was_live = self.state.members.is_live(event.process)
        fault = self._staff.exited(event)
        if fault is None:
            return
        role = self._staff.plans[event.process].role
        if role not in REPLACED_ROLES or not was_live:
            self._fail(fault, now)
            return
        self._draft.do(Raise(f"{event.process} is lost and will be replaced: {fault.message}"))
        if role is Role.ROLLOUT:
            self._episodes.worker_lost(event.process)
        self._staff.order(event.process, now)
        if self.phase in (Phase.COLLECTING, Phase.EVALUATING):
            self._episodes.hand_out(now)

    def _on_replied(self, event: Replied, now: float) -> None:
        asked = self._talk.close(event.token, event.sender)
        if asked is None:
            return
        self._talk.observed(asked[0], now - asked[1])
        match event.body:
            case ProcessStarted():
                self._staff.started(event.body)
            case EpisodesDone():
                problem = self._episodes.done(event.body, event.sender)
                if problem is not None:
                    self._fail(self._fault("EpisodesFailed", problem), now)
                self._after_episodes(now)
            case CallDone():
                assert self._walk is not None
                call = event.token.split(":")[2]
                problem = self._walk.answered(call, event.sender, event.body, now=now)
                if problem:
                    self._fail(self._fault("IntegrityError", problem), now)
                else:
                    self._dispatch_calls(now)
            case body:
                self._talk.answered(event.token, event.sender, body, now)

    def _on_request_failed(self, event: RequestFailed, now: float) -> None:
        if self._talk.close(event.token, event.sender) is None:
            return
        self._draft.because(f"{event.token} failed at {event.sender}: {event.fault.message}")
        episode = episode_of(event.token)
        if episode is not None:
            fatal = self._episodes.failed(episode, event.fault)
            if fatal is not None:
                self._fail(fatal, now)
            self._after_episodes(now)
        elif self.phase is Phase.SAVING and self._talk.in_round(event.token):
            self._draft.fact(CheckpointFailed(self.state.step, event.fault))
            self._draft.do(Raise(f"checkpoint of step {self.state.step} failed: {event.fault.message}"))
            self._talk.abandon_round()
            if is_last(self.config, step=self.state.step) or self._stop_reason is not None:
                self._fail(
                    event.fault, now
                )  # There is no later save: what was learned would be lost in silence.
            else:
                self._continue(now)
        else:
            self._fail(event.fault, now)

    def _after_episodes(self, now: float) -> None:
        if self.phase is Phase.COLLECTING:
            self._collect(now)
        elif self.phase is Phase.EVALUATING:
            self._finish_evaluation(now)

    def _on_tick(self, now: float) -> None:
        if self._fail_at is not None:
            if now >= self._fail_at:
                self._end("failed", now)
        elif self.phase is Phase.STARTING and now - self._since > self.config.cluster.start_timeout_s:
            missing = ", ".join(self._staff.missing())
            waited = f"after {now - self._since:.0f} s (cluster.start_timeout_s)"
            self._fail(self._fault("StartFailed", f"not registered {waited}: {missing}"), now)

    # What the phases have in common.

    def _fail(self, fault: Fault, now: float) -> None:
        """Note a fault that the run can not survive; it ends after a moment in which the real cause may still show."""
        self._faults[fault.id] = fault
        if self._fail_at is None:
            self._fail_at = now + FAULT_GRACE_S

    def _fault(self, kind: str, message: str, *, process: str = "master-0", time: float = 0.0) -> Fault:
        number = f"{self.state.epoch}.{self.state.num_incarnations}.{len(self._faults)}"
        return Fault(f"{number}.{process}", kind, process, message, time)

    def _enter(self, phase: Phase, now: float, reason: str) -> None:
        self._timing[self.phase.value] = self._timing.get(self.phase.value, 0.0) + now - self._since
        self.phase, self._since = phase, now
        self._draft.because(reason)
