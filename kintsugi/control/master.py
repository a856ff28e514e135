"""The master's decisions: the next phase of the run, and every reaction to an event. Pure: the process around it
(`process.py`) journals the facts of a decision and carries out its effects.

Phases and transitions are a table (`phases/table.py`, printed in `docs/master.md`). Each phase that takes more than one
request has a class in `phases/`. It reports a result to the master, which looks up the next phase in the table. Parts
that work in every phase (processes, suspicions, scaling, dispatch of episodes) return what they found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

from kintsugi.config.schema import Config
from kintsugi.config.stages import Stage, next_stage
from kintsugi.control import due
from kintsugi.control.decision import DecisionBuilder
from kintsugi.control.dispatch import EpisodeDispatch
from kintsugi.control.mesh_choice import mesh_in_force
from kintsugi.control.pending import PendingRequests, Purpose
from kintsugi.control.phases.adopt import AdoptPhase
from kintsugi.control.phases.collect import CollectPhase
from kintsugi.control.phases.evaluate import EvaluatePhase
from kintsugi.control.phases.publish import PublishPhase
from kintsugi.control.phases.recover import RecoveryCoordinator
from kintsugi.control.phases.save import SavePhase
from kintsugi.control.phases.table import (
    AFTER_STEP,
    DONE,
    ROLLOUT_PHASES,
    TRANSITIONS,
    Due,
    Next,
    Phase,
    PhaseReport,
    PhaseResult,
)
from kintsugi.control.phases.train import TrainPhase
from kintsugi.control.placement import ProcessPlan, hosts_without_slots
from kintsugi.control.processes import Arrival, ProcessManager
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
from kintsugi.control.scaling import Scaling
from kintsugi.control.state import MasterState
from kintsugi.control.suspicion import Suspicions
from kintsugi.errors import Fault, StartKilled, is_shortage, root_first
from kintsugi.journal.facts import (
    RolledBack,
    RunEnded,
    RunStarted,
    StageStarted,
    StopAccepted,
    TermStarted,
)
from kintsugi.model.seats import STATE_FORMAT
from kintsugi.protocol.agents import Inspected, ProcessStarted
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.rollout import EpisodesDone
from kintsugi.protocol.training import CallDone, CommitStep, HashWeights, StartStage, WeightsHashed
from kintsugi.protocol.weights import WeightsLoaded
from kintsugi.recovery.states import RecoveryState
from kintsugi.types import Role

FAULT_GRACE_S = 1.0
"""Time between an unrecoverable fault and the end of the run, in which its root cause may still be reported."""


class Master:
    """`decide(event, now)` is the only entry. It never blocks, reads no clock and touches nothing outside itself."""

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
        self.config, self.state = config, state
        self.phase = Phase.STARTING
        self._evaluates = num_eval_rows > 0
        self._failure = Failure()
        decision = self._decision = DecisionBuilder(state)
        limit_s = config.cluster.start_timeout_s
        pending = self.pending = PendingRequests(decision, first_s=limit_s)
        pending.num_tokens = due.most_tokens(config, num_eval_rows=num_eval_rows)
        processes = self._processes = ProcessManager(
            layout,
            decision=decision,
            pending=pending,
            start_timeout_s=limit_s,
            no_slots=hosts_without_slots(config),
            is_cut=config.actor.layout.boxes > 1,
        )
        dispatch = self._dispatch = EpisodeDispatch(
            config, decision=decision, pending=pending, num_rows=num_rows
        )
        self._takeover = AdoptPhase(config, decision=decision, pending=pending, processes=processes)
        self._scaling = Scaling(config, decision=decision, processes=processes)
        self._suspicions = Suspicions(decision=decision, pending=pending, processes=processes)
        self._collect = CollectPhase(config, decision=decision, dispatch=dispatch)
        self._train = TrainPhase(config, decision=decision, pending=pending, dispatch=dispatch)
        self._publish = PublishPhase(
            config, decision=decision, pending=pending, processes=processes, evaluates=self._evaluates
        )
        self._evaluate = EvaluatePhase(
            config, num_eval_rows, decision=decision, pending=pending, dispatch=dispatch
        )
        self._save = SavePhase(config, checkpoint_folder, decision=decision, pending=pending)
        self._recovery = RecoveryCoordinator(
            config,
            decision=decision,
            pending=pending,
            processes=processes,
            dispatch=dispatch,
            checkpoint_folder=checkpoint_folder,
        )
        self._ready_stage = ""
        """Stage that the ranks have started."""
        self._has_committed = False
        """Whether this master has committed a step."""
        self._timing: dict[str, float] = {}
        self._began: float | None = None
        self._since = 0.0
        """When the current phase began."""

    def decide(self, event: Event, now: float) -> Decision:
        """Take one event. The facts of the decision are already in `state`; its effects have not happened yet."""
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
                self._on_suspected(event, now)
            case StopRequested():
                self._on_stop_requested(event, now)
            case ScaleRequested():
                self._on_scale_requested(event, now)
            case Began():
                self._on_began(event, now)
        return self._decision.take()

    def _advance(self, report: PhaseReport, now: float) -> None:
        """Enter the phase that follows from a report, by the table."""
        if report.result is PhaseResult.RUNNING:
            return
        if report.result is PhaseResult.UNRECOVERABLE:
            assert report.fault is not None
            self._fail(report.fault, now)
            return
        following = TRANSITIONS[self.phase, report.result]
        if following is Next.DUE:
            following = AFTER_STEP[self._next_due()]
        assert isinstance(following, Phase)
        self._entries[following](self, report, now)

    @property
    def stage(self) -> Stage:
        """Stage that the next step belongs to (the last stage when all steps are done)."""
        return next_stage(self.config, step=self.state.step)

    @property
    def timing(self) -> dict[str, float]:
        """Seconds per phase since the last committed step."""
        return dict(self._timing)

    def session_s(self, now: float) -> float:
        """Return how long this session lasts so far, the time of the masters before this one included."""
        return now - self._began if self._began is not None else 0.0

    @property
    def recovery_state(self) -> RecoveryState:
        return self._recovery.protocol.state

    @property
    def is_saving(self) -> bool:
        """Whether a rank writes a checkpoint, in whatever phase the run is."""
        return self._save.is_under_way

    @property
    def saving_step(self) -> int:
        """Step whose checkpoint is being written; 0 if none is."""
        return self._save.step if self._save.is_under_way else 0

    @property
    def phase_since(self) -> float:
        """Begin of the current phase."""
        return self._since

    @property
    def progress(self) -> tuple[int, int, str]:
        """Done and total work of the current phase, and its unit; zeros where nothing is counted. For display."""
        match self.phase:
            case Phase.STARTING:
                planned = len(self._processes.plans)
                return planned - len(self._processes.missing()), planned, "processes"
            case Phase.COLLECTING:
                return self._dispatch.num_ready(self.stage), self.stage.algorithm.batch_size, "groups"
            case Phase.EVALUATING if (evaluation := self._dispatch.evaluation) is not None:
                return evaluation.num_answered, len(evaluation.tasks), "problems"
            case _:
                return 0, 0, ""

    @property
    def _is_first_start(self) -> bool:
        """Whether the run starts for the first time and nothing has failed: a process that cannot start now never
        will."""
        return self.phase is Phase.STARTING and self.state.step == 0 and not self.state.open_incident

    def _next_due(self) -> Due:
        return due.next_due(
            self.config,
            self.state,
            evaluates=self._evaluates,
            can_grow=self._recovery.can_grow,
            carried=self._ready_stage,
            is_saving=self.is_saving,
        )

    # One method per phase to enter it, in the order of a step.

    def _enter_adopting(self, report: PhaseReport, now: float) -> None:
        """Ask the ranks of the last master where they stand, before anything is interrupted."""
        assert report.fault is not None
        self._enter(Phase.ADOPTING, now, report.fault.message)
        hopeless = self._recovery.unrecoverable()  # The last master was about to end the run.
        if hopeless:
            self._advance(PhaseReport(PhaseResult.BROKEN, problem=hopeless), now)
        else:
            self._advance(self._takeover.begin(now), now)

    def _enter_preparing(self, report: PhaseReport, now: float) -> None:
        """Form the first group, restoring a checkpoint if there is one, or start the next stage."""
        if self.phase is Phase.PREPARING:
            self._enter_recovering(report, now)
        elif self.phase is Phase.STARTING:
            self._recovery.observe_start(now - self._since)
            self._enter(Phase.PREPARING, now, f"{len(self._processes.plans)} processes are there")
            self._advance(self._recovery.begin(now), now)
        else:
            body = StartStage(self.stage.name, self.state.step)
            self._ready_stage = body.stage
            self._enter(Phase.PREPARING, now, f"stage {body.stage} begins after step {body.step}")
            self.pending.ask_all(dict.fromkeys(self._recovery.ranks, body), now)

    def _enter_collecting(self, report: PhaseReport, now: float) -> None:
        if self.state.stage != self.stage.name:
            self._decision.add_fact(StageStarted(self.stage.name, self.state.step + 1))
        self._enter(Phase.COLLECTING, now, f"collecting for step {self.state.step + 1}")
        self._collect.begin(self.stage)
        self._continue_collecting(now)

    def _enter_training(self, report: PhaseReport, now: float) -> None:
        if self.phase is Phase.ADOPTING:
            self._take_group()
        ranks, generation = self._recovery.ranks, self._recovery.protocol.generation
        self._enter(Phase.TRAINING, now, f"step {self.state.step + 1} on {len(ranks)} ranks")
        self._train.begin(
            report.batch, now, stage=self.stage, ranks=ranks, generation=generation, blocks=report.blocks
        )

    def _take_group(self) -> None:
        """Take over the process group that the ranks are in."""
        group = self._takeover.group
        assert group is not None, "the ranks have said that they are one group"
        self._ready_stage = group.stage
        self._recovery.continue_group(group.ranks, generation=group.generation)

    def _enter_committing(self, report: PhaseReport, now: float) -> None:
        """Journal the step, which every rank has prepared with the same state; then the ranks adopt it."""
        self._enter(Phase.COMMITTING, now, "every rank is prepared")
        self._train.commit(self._timing)
        self._has_committed = True
        self._collect.committed(self.stage, self._timing)
        training_s, step_s = self._timing.get(Phase.TRAINING, 0.0), sum(self._timing.values())
        self._timing = {}
        self._recovery.committed(now, training_s=training_s, step_s=step_s)
        self.pending.ask_all(dict.fromkeys(self._recovery.ranks, CommitStep(self.state.step)), now)

    def _enter_publishing(self, report: PhaseReport, now: float) -> None:
        """After a step, and whenever the ranks have formed a group."""
        if self.phase is Phase.COMMITTING:
            self._dispatch.release_trained()
        elif self.phase is Phase.ADOPTING:
            self._take_group()
        else:
            self._ready_stage = due.carried_stage(self.config, step=self.state.step).name
        ranks = self._recovery.ranks
        self._enter(Phase.PUBLISHING, now, f"{len(ranks)} ranks hold version {self.state.step}")
        self._advance(self._publish.begin(ranks, now), now)

    def _enter_evaluating(self, report: PhaseReport, now: float) -> None:
        self._enter(Phase.EVALUATING, now, f"evaluating version {self.state.version}")
        self._advance(self._evaluate.begin(now, ranks=self._recovery.ranks), now)

    def _enter_saving(self, report: PhaseReport, now: float) -> None:
        self._enter(Phase.SAVING, now, f"saving step {self.state.step}")
        self._advance(self._save.begin(self._recovery.ranks[0], now, stage=self._ready_stage), now)

    def _enter_recovering(self, report: PhaseReport, now: float) -> None:
        """Interrupt the ranks and bring them back to the last committed step. Groups that are running continue, and a
        step that is journaled stays committed."""
        interrupted, fault = self.phase, report.fault
        if report.result is PhaseResult.DIVERGED:
            fault = self._decision.new_fault(
                "IntegrityError", report.problem, process=report.process, detail=report.divergence
            )
        is_live = report.result in (PhaseResult.DIVERGED, PhaseResult.RANK_FAILED)
        if is_live and self._failure.begun:
            assert fault is not None
            self._failure.note(fault)
            return
        if interrupted is Phase.COMMITTING:
            self._dispatch.release_trained()
        self.pending.abandon_round()
        for part in (self._train, self._publish, self._save):
            part.abandon()
        if interrupted is not Phase.PREPARING:
            reason = fault.message if fault is not None else report.problem or "the group can grow back"
            self._enter(Phase.RECOVERING, now, f"{report.process}: {reason}" if report.process else reason)
        if is_live:
            assert fault is not None
            self._advance(self._recovery.failed(report.process, fault, now, phase=interrupted), now)
        else:
            self._advance(self._recovery.begin(now), now)

    def _enter_ending(self, report: PhaseReport, now: float) -> None:
        self._enter(Phase.ENDING, now, f"{self._outcome()} after step {self.state.step}")
        mesh, ranks = mesh_in_force(self.config, self.state), self._recovery.ranks
        # They hash one model together.
        together = ranks if self.config.actor.layout.gathers_layers else ranks[: mesh.model_ranks]
        self.pending.ask_all({rank: HashWeights() for rank in together}, now)

    def _enter_ended(self, report: PhaseReport, now: float) -> None:
        faults = self._failure.causes
        outcome = (
            "failed" if faults else "stopped" if report.result is PhaseResult.STOPPED else self._outcome()
        )
        hashes = (
            a.sha256 for a in self.pending.answers.values() if isinstance(a, WeightsHashed) and a.sha256
        )
        self._recovery.close(now)
        self._decision.add_fact(
            RunEnded(outcome, next(iter(faults), None), next(hashes, ""), self.session_s(now))
        )
        self._enter(Phase.ENDED, now, f"{outcome} at step {self.state.step}")
        self._decision.add_effect(Finish(outcome, faults))

    _entries: ClassVar[dict[Phase, Callable[[Master, PhaseReport, float], None]]] = {
        Phase.ADOPTING: _enter_adopting,
        Phase.PREPARING: _enter_preparing,
        Phase.COLLECTING: _enter_collecting,
        Phase.TRAINING: _enter_training,
        Phase.COMMITTING: _enter_committing,
        Phase.PUBLISHING: _enter_publishing,
        Phase.EVALUATING: _enter_evaluating,
        Phase.SAVING: _enter_saving,
        Phase.RECOVERING: _enter_recovering,
        Phase.ENDING: _enter_ending,
        Phase.ENDED: _enter_ended,
    }

    def _enter(self, phase: Phase, now: float, reason: str) -> None:
        self._timing[self.phase.value] = self._timing.get(self.phase.value, 0.0) + now - self._since
        self.phase, self._since = phase, now
        self._decision.explain(reason)

    def _outcome(self) -> str:
        return "finished" if due.is_last(self.config, step=self.state.step) else "stopped"

    # Rollout, which continues in most phases.

    def _continue_collecting(self, now: float) -> None:
        """Look for a complete batch, unless the run is about to end with a fault."""
        if not self._failure.begun:
            self._advance(self._collect.advance(self.stage, now), now)

    def _after_episodes(self, now: float) -> None:
        """A group was scored, or its worker was lost."""
        if self.phase is Phase.COLLECTING:
            self._continue_collecting(now)
            return
        if self.phase is Phase.EVALUATING:
            self._advance(self._evaluate.advance(now), now)
        self._roll(now)

    def _roll(self, now: float) -> None:
        if self.phase in ROLLOUT_PHASES and not self._failure.begun:
            self._collect.roll(self.stage, now)

    # Faults.

    def _fail(self, fault: Fault, now: float) -> None:
        self._failure.begin(fault, now)

    def _lost(self, process: str, fault: Fault, now: float) -> None:
        """Order a lost process again, and recover the ranks if it was one of them."""
        role, phase = self._processes.plans[process].role, self.phase
        self._recovery.note(fault, now, phase=phase, lost=process)
        if role is Role.ROLLOUT:
            self._dispatch.worker_lost(process)
        if self._failure.begun or (role is not Role.MODEL and self._recovery.unrecoverable()):
            if self.recovery_state is not RecoveryState.DUMPING:  # The dump ends the run with its own cause.
                self._fail(fault, now)
            return
        self._processes.order_again(process, fault, now)
        if role is Role.MODEL and phase is not Phase.STARTING and not self._recovery.goes_on_without(process):
            self._advance(PhaseReport(PhaseResult.RANK_LOST, fault=fault), now)
        else:
            self._after_episodes(now)

    def _start_failed(self, process: str, fault: Fault, now: float) -> None:
        """Order a process again that did not start; the run ends if its role cannot be started at all."""
        if self.state.open_incident:
            self._recovery.note(fault, now, phase=self.phase)
        self._processes.order_later(process, fault, now)
        role = self._processes.plans[process].role
        if (
            (self._is_first_start or role is not Role.MODEL)
            and not self.state.members.live(role)
            and self._processes.cannot_start(role)
        ):
            self._fail(fault, now)

    # Events.

    def _on_began(self, event: Began, now: float) -> None:
        """Take the run over. No process of an earlier session is live, unless the last master died in mid-run."""
        self._since = self._began = now
        if event.adopting and self.state.session_began:
            self._began -= max(0.0, event.time - self.state.session_began)
        if event.adopting and self.state.outcome is not None:  # It died when the run had ended.
            self._processes.readmit()
            self.phase = Phase.ENDED
            self._decision.add_effect(Finish(self.state.outcome, self.state.faults))
            return
        if not self.state.job:
            self._decision.add_fact(RunStarted(event.job, event.config_digest))
        self._decision.add_fact(
            TermStarted(self.state.term + 1, event.incarnation, event.adopting, event.time, STATE_FORMAT)
        )
        self._decision.explain(f"term {self.state.term} begins at step {self.state.step}")
        if event.restore_path is not None:
            self._recovery.restore_paths[event.restore_step] = event.restore_path
        if event.adopting:
            self._adopt(event, now)
            return
        self._processes.lose_all()
        if event.resumed:
            reason = f"resumed from {event.restore_path or 'the beginning'}"
            self._decision.add_fact(RolledBack(event.restore_step, reason))

    def _adopt(self, event: Began, now: float) -> None:
        """Continue the run of a master that died. A process that the journal lists counts as live until its agent or
        its silence proves otherwise; the ranks go on with the step that they are in, or return to the last committed
        one."""
        term = self.state.term - 1
        message = f"the master of term {term} is gone, its agent started another"
        fault = Fault(f"master-0@{term}", "ProcessDied", "master-0", message, event.time)
        self._recovery.adopt(now)
        self._recovery.note(fault, now, phase=Phase.RECOVERING, lost=fault.process)
        self._processes.readmit()
        self._processes.adjust(now, first=self.state.step == 0)
        self._dispatch.adopt(now)
        if self.state.step == 0 and self._processes.missing():
            return  # As at the start: the ranks form a group when every process is there.
        self._advance(PhaseReport(PhaseResult.ADOPTED, fault=fault), now)

    def _on_joined(self, event: Joined, now: float) -> None:
        arrival = self._processes.joined(event)
        if arrival is Arrival.REFUSED:
            return
        self._suspicions.joined(event, now)
        if event.role is Role.AGENT:
            for process in self._processes.reconcile(event, now):
                self._suspicions.missed(process, now, time=event.time)
            self._processes.adjust(now, first=self.phase is Phase.STARTING and self.state.step == 0)
        if arrival is Arrival.AGAIN:
            return
        if event.role is Role.MANAGER:
            self._publish.manager_joined(now)
        self._advance(self._recovery.joined(now), now)
        if self.phase is Phase.STARTING and not self._processes.missing():
            self._advance(DONE, now)
        elif self.phase in ROLLOUT_PHASES and event.role is Role.ROLLOUT:
            self._dispatch.rebalance(now)

    def _on_exited(self, event: Exited, now: float) -> None:
        """An exit with an error code at the first start would repeat itself, so it ends the run."""
        was_live = self.state.members.is_live(event.process)
        fault = self._processes.exited(event)
        if fault is None:
            return
        has_error_code = event.status is not None and event.status > 0
        if was_live:
            self._lost(event.process, fault, now)
        elif has_error_code and self._is_first_start and not is_shortage(fault):
            self._fail(fault, now)
        else:
            self._start_failed(event.process, fault, now)

    def _on_replied(self, event: Replied, now: float) -> None:
        request = self.pending.close(event.token, event.sender)
        if request is None:
            return
        self.pending.observed(request.kind, now - request.since, now)
        subject = request.id.subject
        match request.id.purpose, event.body:
            case Purpose.ROUND, body:
                if self.pending.answered(event.token, event.sender, body):
                    self._advance(self._round_done(now), now)
            case Purpose.EPISODE, EpisodesDone() as done:
                self._on_episodes_done(done, event.sender, now)
            case Purpose.CALL, CallDone() as done:
                self._advance(self._train.answered(subject, event.sender, done, now), now)
            case Purpose.LOAD, WeightsLoaded() as loaded:
                self._on_weights_loaded(loaded, now)
            case Purpose.OPERATION, body:
                self._advance(self._recovery.answered(event.sender, body, now), now)
            case Purpose.SAVE | Purpose.DUMP as purpose, body:
                report = self._save.saved(body)
                self._advance(report if purpose is Purpose.SAVE else self._recovery.dumped(now), now)
            case Purpose.START, ProcessStarted() as started:
                self._processes.started(started)
            case Purpose.INSPECT, Inspected() as inspected:
                for process, fault in self._suspicions.inspected(subject, inspected, now):
                    self._lost(process, fault, now)
            case Purpose.STOP, Ok():
                for process, fault, was_live in self._processes.stopped(subject):
                    (self._lost if was_live else self._start_failed)(process, fault, now)
            case Purpose.RETIRE, Ok():
                self._processes.requests_moved(subject, now)

    def _on_episodes_done(self, done: EpisodesDone, worker: str, now: float) -> None:
        problem = self._dispatch.done(done, worker)
        if problem is not None:
            self._fail(self._decision.new_fault("EpisodesFailed", problem), now)
        self._after_episodes(now)

    def _round_done(self, now: float) -> PhaseReport:
        """Every process has answered the round that the current phase began."""
        match self.phase:
            case Phase.ADOPTING:
                return self._takeover.answered(now)
            case Phase.PUBLISHING:
                return self._publish.laid_out(now)
            case Phase.EVALUATING:
                return self._evaluate.ranked()
            case _:
                return DONE

    def _on_weights_loaded(self, loaded: WeightsLoaded, now: float) -> None:
        """The version is current. If no phase waits for it, only more groups may be sampled."""
        was_awaited = self._publish.is_awaited
        report = self._publish.loaded(loaded, now)
        self._advance(report, now)
        if report.result is PhaseResult.RUNNING and not was_awaited:
            self._roll(now)

    def _on_request_failed(self, event: RequestFailed, now: float) -> None:
        request = self.pending.close(event.token, event.sender)
        if request is None:
            return
        fault, subject = event.fault, request.id.subject
        self._decision.explain(f"{event.token} failed at {event.sender}: {fault.message}")
        match request.id.purpose:
            case Purpose.EPISODE:
                fatal = self._dispatch.failed(subject, fault, worker=event.sender)
                if fatal is not None:
                    self._fail(fatal, now)
                self._after_episodes(now)
            case Purpose.START:
                process = self._processes.start_failed(subject, fault, now)
                if process is not None and self._is_first_start and fault.kind != StartKilled.__name__:
                    self._fail(fault, now)
                elif process is not None:
                    self._start_failed(process, fault, now)
            case Purpose.DUMP:
                self._advance(self._recovery.dumped(now), now)
            case Purpose.INSPECT:
                self._suspicions.not_inspected(subject)
            case Purpose.STOP:
                self._processes.stop_failed(subject, now)
            case Purpose.RETIRE:
                self._processes.requests_moved(subject, now)
            case Purpose.LOAD | Purpose.RELOAD:
                self._advance(self._publish.failed(fault, now), now)
            case Purpose.SAVE:
                self._advance(self._save.failed(event.sender, fault, now), now)
            case Purpose.ROUND | Purpose.OPERATION | Purpose.CALL:
                report = PhaseReport(PhaseResult.RANK_FAILED, process=event.sender, fault=fault)
                self._advance(report, now)

    def _on_suspected(self, event: Suspected, now: float) -> None:
        if event.chip is not None:
            cause = self._suspicions.accelerator_reported(event, event.chip, now)
            if cause is not None:
                self._recovery.attribute_device_errors(cause, host=event.chip.host)
            return
        for process, fault in self._suspicions.suspected(event, now):
            self._lost(process, fault, now)

    def _on_scale_requested(self, event: ScaleRequested, now: float) -> None:
        if self._scaling.requested(event, now, phase=self.phase, failed=self._failure.begun):
            self._advance(self._recovery.joined(now), now)

    def _on_stop_requested(self, event: StopRequested, now: float) -> None:
        self._decision.explain(f"stop requested: {event.reason}")
        has_trained = self.state.version >= 0 or self.state.open_incident or self._has_committed
        if not has_trained:
            self._advance(PhaseReport(PhaseResult.STOPPED), now)
        elif self.state.stop_reason is None:
            self._decision.add_fact(StopAccepted(event.reason))

    def _on_tick(self, event: Tick, now: float) -> None:
        if self._failure.begun:
            if self._failure.is_due(now):
                self._advance(PhaseReport(PhaseResult.FAILED), now)
            return
        self._processes.tick(now)
        self._advance(self._recovery.tick(now), now)
        self._publish.tick(now)
        self._save.tick(now)
        self._collect.tick(self.stage, queue=event.queue)
        self._dispatch.tick(now, rolling=self.phase in ROLLOUT_PHASES)
        if self.phase is Phase.STARTING:
            overdue = self._processes.overdue(now - self._since, retries=not self._is_first_start)
            if overdue is not None:
                self._fail(self._decision.new_fault("StartFailed", overdue), now)


class Failure:
    """Unrecoverable faults, and the grace period that begins with the first of them."""

    def __init__(self) -> None:
        self._faults: dict[str, Fault] = {}
        self._end_at = math.inf

    @property
    def begun(self) -> bool:
        """Whether the run is about to end, so that nothing is recovered any more."""
        return self._end_at < math.inf

    @property
    def causes(self) -> tuple[Fault, ...]:
        """All faults, the root cause first."""
        return tuple(root_first(self._faults.values()))

    def begin(self, fault: Fault, now: float) -> None:
        self.note(fault)
        self._end_at = min(self._end_at, now + FAULT_GRACE_S)

    def note(self, fault: Fault) -> None:
        self._faults[fault.id] = fault

    def is_due(self, now: float) -> bool:
        return now >= self._end_at
