"""The master's decisions: what the run does next. Pure; the shell around it journals facts and carries out effects.

A step goes through these phases:

    COLLECTING   tickets are issued, rollout workers generate and score   → the oldest groups fill a batch
    TRAINING     the batch walks the graph's model calls on every rank    → every rank is prepared, states agree
    COMMITTING   the step is journaled, the ranks adopt it                → every rank acknowledged
    PUBLISHING   the new weights are laid out                             → they are; servers load beside what follows
    EVALUATING   held-out problems at this version, when due              → every answer is in
    SAVING       a durable checkpoint, when due                           → saved, or failed loudly

Rollout goes on beside all of it, as far ahead as the staleness bound lets it. With a bound of 0 nothing can be sampled
until the version is current, and PUBLISHING lasts so long.

Before: STARTING (processes join), PREPARING (ranks form a group). After: ENDING (one last number to compare), ENDED.
A rank that is lost or fails, and a master that takes over, lead to RECOVERING from anywhere, and from there to
PUBLISHING; every other process is replaced beside the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kintsugi.config import Config
from kintsugi.control import agenda
from kintsugi.control.collecting import Collecting
from kintsugi.control.draft import Conversation, Draft
from kintsugi.control.episodes import Episodes, episode_of
from kintsugi.control.evaluating import Evaluating
from kintsugi.control.failure import Failure
from kintsugi.control.layout import ProcessPlan
from kintsugi.control.mending import DUMP, OPERATION, Mending
from kintsugi.control.phases import ROLLING, Phase
from kintsugi.control.protocol import (
    Began,
    Decision,
    Event,
    Exited,
    Finish,
    Joined,
    Replied,
    RequestFailed,
    ScaleRequested,
    StopRequested,
    Suspected,
    Tick,
)
from kintsugi.control.publication import AGAIN, LOAD, Publication
from kintsugi.control.saving import Failed, Saving
from kintsugi.control.scaling import Scaling
from kintsugi.control.staff import RETIRE, START, STOP, Arrival, Staff
from kintsugi.control.state import MasterState
from kintsugi.control.suspicion import INSPECT, Suspicions
from kintsugi.control.takeover import begin_epoch, clear_the_past, greet_the_living, predecessor_lost
from kintsugi.control.training import CALL, Training
from kintsugi.errors import Fault, StartKilled
from kintsugi.facts import RunEnded, StageStarted, StopAccepted
from kintsugi.messages import (
    CallDone,
    CommitStep,
    EpisodesDone,
    HashWeights,
    Ok,
    StartStage,
    WeightsHashed,
    WeightsLoaded,
)
from kintsugi.recovery.states import RecoveryState
from kintsugi.stages import Stage, next_stage
from kintsugi.supervision import Inspected, ProcessStarted
from kintsugi.types import Role


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
        self._num_eval_rows = num_eval_rows
        draft = self._draft = Draft(state)
        self._failure = failure = Failure(state)
        self._fail, self._fault = failure.begin, failure.new_fault
        limit_s = config.cluster.start_timeout_s
        talk = self.talk = Conversation(draft, first_s=limit_s)
        talk.num_tokens = agenda.most_tokens(config, num_eval_rows=num_eval_rows)
        self._staff = staff = Staff(layout, draft=draft, talk=talk, start_timeout_s=limit_s)
        self._episodes = episodes = Episodes(config, draft=draft, talk=talk, num_rows=num_rows)
        disagree, go_on, evaluates = self._disagree, self._continue, num_eval_rows > 0
        self._publication = Publication(
            config,
            draft=draft,
            talk=talk,
            staff=staff,
            needs=lambda version: agenda.needs_version(config, state, version=version, evaluates=evaluates),
            go_on=go_on,
            roll=self._roll,
            wrong=disagree,
        )
        self._training = Training(
            config, draft=draft, talk=talk, episodes=episodes, prepared=self._commit, wrong=disagree
        )
        self._mending = Mending(
            config,
            draft=draft,
            talk=talk,
            staff=staff,
            checkpoint_folder=checkpoint_folder,
            mended=self._begin_publishing,
            give_up=self._fail,
            rolled_back=episodes.void,
        )
        self._evaluating = Evaluating(
            config, num_eval_rows, draft=draft, talk=talk, episodes=episodes, done=go_on, wrong=disagree
        )
        self._collecting = Collecting(
            config, draft=draft, episodes=episodes, failure=failure, complete=self._begin_training
        )
        self._saving = Saving(config, checkpoint_folder, draft=draft, talk=talk, done=go_on)
        mending = self._mending
        self._scaling = Scaling(config, draft=draft, staff=staff, staffed=mending.joined)
        self._suspicions = Suspicions(draft=draft, talk=talk, staff=staff, explain=mending.explain)
        self._ready_stage = ""
        self._timing: dict[str, float] = {}
        self._since = self._began = 0.0

    def decide(self, event: Event, now: float) -> Decision:
        """Take one event; the facts of the decision are already in `state`, its effects have not happened yet."""
        if self.phase is Phase.ENDED:
            return Decision((), (), "the run has ended")
        match event:
            case Replied():
                self._on_replied(event, now)
            case Tick():
                self._on_tick(event, now)
            case Joined():
                self._on_joined(event, now)
            case Exited():
                self._on_exited(event, now)
            case RequestFailed():
                self._on_request_failed(event, now)
            case Suspected():
                for process, fault in self._suspicions.suspected(event, now):
                    self._lost(process, fault, now)
            case StopRequested():
                self._on_stop_requested(event, now)
            case ScaleRequested():
                self._scaling.requested(event, now, phase=self.phase, failed=self._failure.begun)
            case Began():
                self._on_began(event, now)
        return self._draft.take()

    @property
    def stage(self) -> Stage:
        """The stage that the next step belongs to (the last stage when all steps are done)."""
        return next_stage(self.config, step=self.state.step)

    @property
    def timing(self) -> dict[str, float]:
        """Seconds per phase since the last committed step."""
        return dict(self._timing)

    @property
    def recovery_state(self) -> RecoveryState:
        return self._mending.controller.state

    @property
    def _begins(self) -> bool:  # What does not start now would not start again, if nothing else has broken.
        return self.phase is Phase.STARTING and self.state.step == 0 and not self.state.open_incident

    # The phases, in their order.

    def _begin_preparing(self, now: float) -> None:
        """The ranks form a group, take over a checkpoint if there is one, and begin the stage that it belongs to."""
        self._mending.started_in(now - self._since)
        self._enter(Phase.PREPARING, now, f"{len(self._staff.plans)} processes are there")
        self._mending.begin(now)

    def _begin_publishing(self, now: float) -> None:
        """After a step, and whenever the ranks have come together."""
        if self.phase is Phase.COMMITTING:
            self._episodes.let_go()
        else:
            self._ready_stage = agenda.carried_stage(self.config, step=self.state.step).name
        self._enter(Phase.PUBLISHING, now, f"{len(self._mending.ranks)} ranks hold version {self.state.step}")
        self._publication.begin(self._mending.ranks, now)

    def _continue(self, now: float) -> None:
        """The version is current: evaluate and save if due, then end, stop, change the stage, or take the next step."""
        stopping = self.state.stop_reason is not None
        if self._num_eval_rows and agenda.evaluation_is_due(self.config, self.state):
            self._begin_evaluating(now)
        elif agenda.save_is_due(self.config, self.state, stopping=stopping):
            self._begin_saving(now)
        elif agenda.is_last(self.config, step=self.state.step):
            self._begin_ending("finished", now)
        elif stopping:
            self._begin_ending("stopped", now)
        elif self._mending.can_grow:
            self._recover(now, "the group can grow back")
        elif self._ready_stage != self.stage.name:
            self._begin_stage(now)
        else:
            self._begin_collecting(now)

    def _begin_stage(self, now: float) -> None:
        body = StartStage(self.stage.name, self.state.step)
        self._ready_stage = body.stage
        self._enter(Phase.PREPARING, now, f"stage {body.stage} begins after step {body.step}")
        self.talk.ask_all(dict.fromkeys(self._mending.ranks, body), now, then=self._begin_collecting)

    def _begin_collecting(self, now: float) -> None:
        if self.state.stage != self.stage.name:
            self._draft.fact(StageStarted(self.stage.name, self.state.step + 1))
        self._enter(Phase.COLLECTING, now, f"collecting for step {self.state.step + 1}")
        self._collecting.begin(self.stage, now)

    def _begin_training(self, batch: tuple[str, ...], now: float) -> None:
        ranks, generation = self._mending.ranks, self._mending.controller.generation
        self._enter(Phase.TRAINING, now, f"step {self.state.step + 1} on {len(ranks)} ranks")
        self._training.begin(batch, now, stage=self.stage, ranks=ranks, generation=generation)

    def _commit(self, now: float) -> None:
        """Every rank is prepared and stands at the same state: the step becomes a fact, then the ranks adopt it."""
        self._enter(Phase.COMMITTING, now, "every rank is prepared")
        self._training.commit(self._timing)
        self._collecting.committed(self.stage, self._timing)
        training_s, step_s = self._timing.get(Phase.TRAINING, 0.0), sum(self._timing.values())
        self._timing = {}
        self._mending.committed(now, training_s=training_s, step_s=step_s)
        body = CommitStep(self.state.step)
        self.talk.ask_all(dict.fromkeys(self._mending.ranks, body), now, then=self._begin_publishing)

    def _begin_evaluating(self, now: float) -> None:
        self._enter(Phase.EVALUATING, now, f"evaluating version {self.state.version}")
        self._evaluating.begin(now, ranks=self._mending.ranks)

    def _begin_saving(self, now: float) -> None:
        self._enter(Phase.SAVING, now, f"saving step {self.state.step}")
        self._saving.begin(self._mending.ranks[0], now, stage=self._ready_stage)

    def _begin_ending(self, outcome: str, now: float) -> None:
        self._enter(Phase.ENDING, now, f"{outcome} after step {self.state.step}")
        self.talk.ask_all({self._mending.ranks[0]: HashWeights()}, now, then=partial(self._end, outcome))

    def _end(self, outcome: str, now: float) -> None:
        faults = self._failure.causes
        outcome = "failed" if faults else outcome
        hashes = (a.sha256 for a in self.talk.answers.values() if isinstance(a, WeightsHashed))
        self._mending.close(now)
        self._draft.fact(RunEnded(outcome, next(iter(faults), None), next(hashes, ""), now - self._began))
        self._enter(Phase.ENDED, now, f"{outcome} at step {self.state.step}")
        self._draft.do(Finish(outcome, faults))

    # When something breaks.

    def _recover(self, now: float, why: str) -> None:
        self._give_up_step(now, why)
        self._mending.begin(now)

    def _give_up_step(self, now: float, why: str) -> None:
        """What the ranks were doing ends; groups that run elsewhere go on. A step that is a fact stays one."""
        if self.phase is Phase.COMMITTING:
            self._episodes.let_go()
        self.talk.abandon_round()
        for part in (self._training, self._publication, self._saving):
            part.abandon()
        if self.phase is not Phase.PREPARING:
            self._enter(Phase.RECOVERING, now, why)

    def _rank_failed(self, process: str, fault: Fault, now: float) -> None:
        """A rank that lives could not do what was asked of it."""
        if self._failure.begun:
            self._failure.note(fault)
            return
        phase = self.phase
        self._give_up_step(now, f"{process}: {fault.message}")
        self._mending.failed(process, fault, now, phase=phase)

    def _lost(self, process: str, fault: Fault, now: float) -> None:
        """A process that was there is gone: note it, order it anew, and mend what it was part of."""
        role, phase = self._staff.plans[process].role, self.phase
        self._mending.note(fault, now, phase=phase, lost=process)
        if role is Role.ROLLOUT:
            self._episodes.worker_lost(process)
        if self._failure.begun or (role is not Role.MODEL and self._mending.beyond_help()):
            if self.recovery_state is not RecoveryState.DUMPING:  # Which ends by itself, with its own cause.
                self._fail(fault, now)
            return
        self._staff.order(process, now)
        if role is Role.MODEL and phase is not Phase.STARTING:
            self._recover(now, fault.message)
        else:
            self._after_episodes(now)

    def _disagree(self, process: str, problem: str, now: float) -> None:
        """What should be equal is not: the ranks have to agree again before anything goes on."""
        self._rank_failed(process, self._fault("IntegrityError", problem, process=process), now)

    # The events.

    def _on_began(self, event: Began, now: float) -> None:
        """Take the run over: nobody of an earlier session lives, unless the last master died in the middle of it."""
        self._since = self._began = now
        if event.adopting and self.state.outcome is not None:  # It died when the run had ended.
            greet_the_living(self._draft)
            self.phase = Phase.ENDED
            self._draft.do(Finish(self.state.outcome, self.state.faults))
            return
        begin_epoch(event, self._draft)
        if event.restore_path is not None:
            self._mending.restore_paths[event.restore_step] = event.restore_path
        if event.adopting:
            self._adopt(event, now)
        else:
            clear_the_past(event, self._draft)

    def _adopt(self, event: Began, now: float) -> None:
        """Whoever the journal says is there is believed to be, until its agent or its silence says otherwise; the
        ranks come together at the last committed step, and the run goes on."""
        fault = predecessor_lost(self.state.epoch - 1, time=event.time)
        self._mending.adopt(now)
        self._mending.note(fault, now, phase=Phase.RECOVERING, lost=fault.process)
        greet_the_living(self._draft)
        self._staff.adjust(now, first=self.state.step == 0)
        self._episodes.adopt(now)
        if self.state.step == 0 and self._staff.missing():
            return  # As at the start: the ranks come together when everybody is there.
        self._recover(now, fault.message)

    def _on_joined(self, event: Joined, now: float) -> None:
        arrival = self._staff.joined(event)
        if arrival is Arrival.REFUSED:
            return
        self._suspicions.joined(event, now)
        if event.role is Role.AGENT:
            for process in self._staff.reconcile(event, now):
                self._suspicions.missed(process, now, time=event.time)
            self._staff.adjust(now, first=self.phase is Phase.STARTING and self.state.step == 0)
        if arrival is Arrival.AGAIN:
            return
        if event.role is Role.MANAGER:
            self._publication.manager_joined(now)
        self._mending.joined(now)
        if self.phase is Phase.STARTING and not self._staff.missing():
            self._begin_preparing(now)
        elif self.phase in ROLLING and event.role is Role.ROLLOUT:
            self._episodes.rebalance(now)

    def _on_exited(self, event: Exited, now: float) -> None:
        """What a process says with its exit code before the run begins, it would say again: that ends the run."""
        was_live = self.state.members.is_live(event.process)
        fault = self._staff.exited(event)
        if fault is None:
            return
        by_itself = event.status is not None and event.status > 0
        if was_live:
            self._lost(event.process, fault, now)
        elif by_itself and self._begins:
            self._fail(fault, now)
        else:
            self._start_failed(event.process, fault, now)

    def _start_failed(self, process: str, fault: Fault, now: float) -> None:
        if self.state.open_incident:
            self._mending.note(fault, now, phase=self.phase)
        self._staff.order_later(process, now)
        role = self._staff.plans[process].role
        if (
            (self._begins or role is not Role.MODEL)
            and not self.state.members.live(role)
            and self._staff.do_not_come(role)
        ):
            self._fail(fault, now)

    def _on_replied(self, event: Replied, now: float) -> None:
        asked = self.talk.close(event.token, event.sender)
        if asked is None:
            return
        self.talk.observed(asked[0], now - asked[1])
        if self.talk.in_round(event.token):
            self.talk.answered(event.token, event.sender, event.body, now)
            return
        match event.body:
            case EpisodesDone():
                problem = self._episodes.done(event.body, event.sender)
                if problem is not None:
                    self._fail(self._fault("EpisodesFailed", problem), now)
                self._after_episodes(now)
            case CallDone():
                self._training.answered(event.token, event.sender, event.body, now)
            case WeightsLoaded() if event.token.startswith(f"{LOAD}:"):
                self._publication.loaded(event.body, now)
            case ProcessStarted():
                self._staff.started(event.body)
            case Inspected():
                for process, fault in self._suspicions.inspected(event.token, event.body, now):
                    self._lost(process, fault, now)
            case body if event.token.startswith(f"{OPERATION}:"):
                self._mending.answered(event.sender, body, now)
            case Ok() if event.token.startswith(f"{STOP}:"):
                for process, fault, was_live in self._staff.stopped(event.token):
                    (self._lost if was_live else self._start_failed)(process, fault, now)
            case Ok() if event.token.startswith(f"{RETIRE}:"):
                self._staff.given_back(event.token, now)
            case body if event.token.startswith(f"{DUMP}:"):
                self._saving.note(body)
                self._mending.dumped(now)

    def _on_request_failed(self, event: RequestFailed, now: float) -> None:
        if self.talk.close(event.token, event.sender) is None:
            return
        fault, purpose = event.fault, event.token.partition(":")[0]
        self._draft.because(f"{event.token} failed at {event.sender}: {fault.message}")
        episode = episode_of(event.token)
        if episode is not None:
            fatal = self._episodes.failed(episode, fault, worker=event.sender)
            if fatal is not None:
                self._fail(fatal, now)
            self._after_episodes(now)
        elif purpose == START:
            process = self._staff.start_failed(event.token, fault, now)
            if process is not None and self._begins and fault.kind != StartKilled.__name__:
                self._fail(fault, now)
            elif process is not None:
                self._start_failed(process, fault, now)
        elif purpose == DUMP:
            self._mending.dumped(now)
        elif purpose == INSPECT:
            self._suspicions.not_inspected(event.token)
        elif purpose == STOP:
            self._staff.stop_failed(event.token, now)
        elif purpose == RETIRE:
            self._staff.given_back(event.token, now)
        elif purpose in (AGAIN, LOAD):
            if not self._publication.failed(fault, now):
                self._fail(fault, now)
        elif purpose in (OPERATION, CALL):
            self._rank_failed(event.sender, fault, now)
        elif self.talk.in_round(event.token):
            self._round_failed(event, now)

    def _round_failed(self, event: RequestFailed, now: float) -> None:
        """A failed save is told and survived, except where no later one would come."""
        failed = self._saving.failed(event.fault, now) if self.phase is Phase.SAVING else Failed.OTHERWISE
        if failed is Failed.OTHERWISE:
            self._rank_failed(event.sender, event.fault, now)
        elif failed is Failed.FOR_GOOD:
            self._fail(event.fault, now)
        elif failed is Failed.THIS_TIME:
            self._continue(now)

    def _after_episodes(self, now: float) -> None:
        if self.phase is Phase.COLLECTING:
            self._collecting.go_on(self.stage, now)
            return
        if self.phase is Phase.EVALUATING:
            self._evaluating.go_on(now)
        self._roll(now)

    def _roll(self, now: float) -> None:
        if self.phase in ROLLING:
            self._collecting.roll(self.stage, now)

    def _on_stop_requested(self, event: StopRequested, now: float) -> None:
        self._draft.because(f"stop requested: {event.reason}")
        if self.state.version < 0 and not self.state.open_incident:  # Nothing of this session is trained.
            self._end("stopped", now)
        elif self.state.stop_reason is None:
            self._draft.fact(StopAccepted(event.reason))

    def _on_tick(self, event: Tick, now: float) -> None:
        if self._failure.begun:
            if self._failure.is_due(now):
                self._end("failed", now)
            return
        for part in (self._staff, self._mending, self._publication, self._saving):
            part.tick(now)
        self._collecting.tick(self.stage, queue=event.queue)
        self._episodes.tick(now, rolling=self.phase in ROLLING)
        if self.phase is Phase.STARTING:
            overdue = self._staff.overdue(now - self._since, retries=not self._begins)
            if overdue is not None:
                self._fail(self._fault("StartFailed", overdue), now)

    # What the phases have in common.

    def _enter(self, phase: Phase, now: float, reason: str) -> None:
        self._timing[self.phase.value] = self._timing.get(self.phase.value, 0.0) + now - self._since
        self.phase, self._since = phase, now
        self._draft.because(reason)
