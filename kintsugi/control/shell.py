"""The master process: turns what arrives into events, journals the facts of each decision, carries out its effects.

One loop consumes registrations, heartbeats, exits, answers and signals; it produces requests and files of the run
folder; it waits on its endpoint only.
"""

from __future__ import annotations

import hashlib
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kintsugi.bootstrap import Bootstrap
from kintsugi.checkpoint.store import latest
from kintsugi.config import COMPARE_SAMPLES, LEARN_PAIRS, Config
from kintsugi.control.journal import Journal, is_of_the_disk, read_facts
from kintsugi.control.layout import plan_layout
from kintsugi.control.lookout import Lookout, told_by
from kintsugi.control.master import Master
from kintsugi.control.protocol import (
    Admit,
    Began,
    Decision,
    Effect,
    Event,
    Finish,
    Forget,
    Joined,
    Raise,
    RecordEvaluation,
    RecordStep,
    Replied,
    Request,
    RequestFailed,
    ShareBook,
    StopRequested,
    Tell,
    Tick,
)
from kintsugi.control.records import Records, own_report, report_of
from kintsugi.control.requests import Requests
from kintsugi.control.state import MasterState
from kintsugi.control.summary import summarize_run
from kintsugi.data.source import open_data
from kintsugi.disk import SYSTEM_DISK, Disk
from kintsugi.errors import (
    DeadlineExceeded,
    FencedError,
    KintsugiError,
    ProcessDied,
    RefusedError,
    StorageError,
    UserError,
    WorldError,
    fault_of,
    root_first,
)
from kintsugi.facts import (
    CheckpointSaved,
    EpochStarted,
    Fact,
    RolledBack,
    RunEnded,
    StepCommitted,
)
from kintsugi.messages import AddressBook, Heartbeat, Ok, Ping, Register, Registered, Shutdown
from kintsugi.observe.events import Alert, EventLog, FaultSeen, Note, Transition, events_path
from kintsugi.observe.processes import ProcessReports
from kintsugi.recipe import load_config
from kintsugi.runs import living_launcher
from kintsugi.runtime import COUNTERS, SYSTEM_CLOCK, WorkingClock, wait
from kintsugi.signals import Signals
from kintsugi.supervision import AskTime, ChipFault, ProcessExited, ProcessSuspected, TimeTold
from kintsugi.transport import Delivery, PendingReply
from kintsugi.types import role_of
from kintsugi.worker import EXIT_ERROR, EXIT_USER_ERROR, open_endpoint

TICK_S = 0.2
LONGEST_TURN_S = 1.0
"""Longer than this behind its tick, the master did not run, and nobody could reach it."""
PAUSE_S = 0.5
LONGEST_PAUSE_S = 7 * 24 * 3600.0
"""For a disk that does not take the journal: people may be asleep."""
REPORT_S = 0.5
GOODBYE_S = 1.0
DURABLE = (EpochStarted, StepCommitted, CheckpointSaved, RunEnded)
"""Facts that are fsynced before their effects; the others only have to survive the process."""
CHECKPOINTS = "checkpoints"


class MasterShell:
    """Everything of the master that touches the world.

    The journal is the run: while the disk does not take it, the run pauses; when it is damaged, the run ends.
    Everything else it writes is for people: when that fails, people are told once and the run goes on.
    """

    def __init__(self, bootstrap: Bootstrap, config: Config, *, disk: Disk = SYSTEM_DISK) -> None:
        self._disk = disk
        self._bootstrap, self._config, self._run_dir = bootstrap, config, Path(bootstrap.run_dir)
        self._clock = WorkingClock(SYSTEM_CLOCK)
        self._began = self._clock.monotonic()
        self._log = EventLog(events_path(self._run_dir, bootstrap.process), process=bootstrap.process)
        self._journal, self._master, self._first = self._open_run()
        job = self._master.state.job or bootstrap.job
        self._records = Records(self._run_dir, self._log, config=config, job=job)
        self._requests = Requests(self._run_dir)
        self._lookout = Lookout()
        self._endpoint = open_endpoint(bootstrap)
        self._processes: dict[str, list[int]] = {}
        self._events: deque[Event] = deque()
        self._next_tick = self._next_report = self._clock.monotonic()
        self._exit_code: int | None = None

    def _open_run(self) -> tuple[Journal, Master, Began]:
        """A new journal, or the state that an old one and the newest good checkpoint leave us with."""
        own, path, state = self._bootstrap, self._run_dir / "journal", new_state(self._config)
        owner, adopting = f"{own.process} pid {os.getpid()}", own.adopting
        began = Began(own.job, config_digest(self._config), own.incarnation, time=self._clock.wall())
        if self._disk.exists(path):
            journal, facts = Journal.open(path, owner=owner, take_over=adopting, disk=self._disk)
            for fact in facts:
                state.apply(fact)
            if adopting:
                began = msgspec.structs.replace(began, adopting=True, restore_step=state.step)
            else:
                # A later one is of steps that were undone: it was complete before anybody knew, and nobody does now.
                checkpoint = latest(self._run_dir / CHECKPOINTS, at_most=state.step)
                step, source = (checkpoint.step, str(checkpoint.path)) if checkpoint else (0, None)
                refusal = state.ledger.accepts(RolledBack(step, ""))
                if refusal is not None:
                    raise StorageError(f"no readable checkpoint of steps {state.saved_steps}: {refusal}")
                began = msgspec.structs.replace(began, resumed=True, restore_step=step, restore_path=source)
        else:
            journal = Journal.create(path, owner=owner, disk=self._disk)
        return journal, new_master(self._config, state, run_dir=self._run_dir), began

    def run(self) -> int:
        """Until the run has ended; gives the exit code of the process. Whatever breaks ends the run with its cause."""
        try:
            self._watch_signals()
            self.begin()
            while self._exit_code is None:
                self.turn()
        except FencedError as error:
            # Another master has the run: whatever this one still said or wrote would be in its way.
            self._log.emit(Note(f"replaced while it did not run: {error}"))
            self._exit_code = EXIT_ERROR
        except Exception as error:  # noqa: BLE001 - the run's outermost boundary: recorded with its cause, then reported.
            self._break_off(error)
        self._endpoint.close(flush_s=GOODBYE_S)
        assert self._exit_code is not None
        return self._exit_code

    def begin(self) -> None:
        """Take the run over."""
        self._endpoint.watch(self._bootstrap.lifeline, self._orphaned)
        self._records.truncate_after(self._first.restore_step)
        self._endpoint.epoch = self._endpoint.seen_epoch = self._master.state.epoch + 1
        self._feed(self._first)
        self._lookout.adopt(self._master.state.members, self._clock.monotonic())
        assert self._endpoint.epoch == self._master.state.epoch or self._exit_code is not None

    def turn(self) -> None:
        """Wait for what comes, at most until the next tick, and act on it."""
        for delivery in self._poll():
            self._handle(delivery)
        self._clock.skip(self._clock.monotonic() - self._next_tick - LONGEST_TURN_S)
        now = self._clock.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._take_requests()
            self._feed(Tick(self._master.state.members.queue()))
            for found in self._lookout.check(now, self._master.talk):
                self._feed(msgspec.structs.replace(found, time=self._clock.wall()))
        if now >= self._next_report:
            self._next_report = now + REPORT_S
            self._records.processes(self._reports())

    def _take_requests(self) -> None:
        """What people ask for lies where it is until the answer is durable."""
        for verdict in self._requests.verdicts():
            self._feed(verdict)
        for request in self._requests.waiting():
            self._feed(request)
            if request.request in self._master.state.answered:
                self._with_patience(self._journal.sync)
                self._requests.take_away(request.request)
                self._log.emit(Note(f"answered request {request.request} for {request.servers} servers"))

    def _poll(self) -> list[Delivery]:
        try:
            return wait(
                lambda remaining_s: self._endpoint.poll(remaining_s) or None,
                whom="anyone",
                what="an event",
                timeout_s=max(0.0, self._next_tick - self._clock.monotonic()),
            )
        except DeadlineExceeded:
            return []

    def _handle(self, delivery: Delivery) -> None:
        sender = delivery.envelope.sender
        match delivery.body:
            case Heartbeat() as heartbeat:
                now, incarnation = self._clock.monotonic(), delivery.envelope.incarnation
                self._master.state.members.heard(sender, heartbeat, now)
                self._lookout.heard(sender, incarnation, heartbeat, now)
                if heartbeat.book < self._master.state.members.book_number:
                    self._endpoint.send(sender, self._book())
            case Register() as register if delivery.wants_reply:
                self._take_in(delivery, register)
            case ProcessExited() | ProcessSuspected() | ChipFault() as seen:
                self._feed(told_by(delivery.peer, seen, time=self._clock.wall()))
            case Ping() if delivery.wants_reply:
                self._endpoint.reply(delivery, Ok())
            case AskTime() if delivery.wants_reply:
                self._endpoint.reply(delivery, TimeTold(self._clock.wall()))
            case other if delivery.wants_reply:
                self._endpoint.fail(
                    delivery, RefusedError(f"the master does not answer {type(other).__name__}")
                )
            case _:
                COUNTERS.add("ignored_messages")

    def _take_in(self, delivery: Delivery, register: Register) -> None:
        """Everybody registers for itself only: under the name, incarnation and key that its connection proved."""
        peer, proven = register.peer, delivery.peer
        claim = (peer.process, peer.incarnation, peer.public_key, register.role)
        if claim != (proven.process, proven.incarnation, proven.public_key, role_of(proven.process)):
            why = f"{proven.process} can not register as {register.role.value} {peer.process} {peer.incarnation}"
            self._endpoint.fail(delivery, RefusedError(why))
            return
        if self._master.state.members.replaced(peer, register.role):
            why = f"{peer.process} {peer.incarnation} was replaced"
            self._endpoint.fail(delivery, RefusedError(why))
            return
        self._endpoint.admit(peer)
        self._lookout.joined(peer.process, peer.incarnation, self._clock.monotonic(), host=peer.host)
        joined = Joined(
            peer, register.role, register.pid, register.capabilities, register.children, self._clock.wall()
        )
        self._feed(joined)
        self._endpoint.reply(delivery, Registered(self._master.state.epoch))
        self._processes = self._master.state.members.pids()

    def _feed(self, event: Event) -> None:
        """Take an event in turn; an effect that fails at once gives an event too, which waits for the current one.

        After the end of the run nothing matters any more: processes end because they were told to.
        """
        if self._exit_code is not None:
            return
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            self._take(self._events[0])
            self._events.popleft()

    def _take(self, event: Event) -> None:
        """One event through the pure core: decide, journal, act."""
        now, before = self._clock.monotonic(), self._master.phase
        # A tick that leads to nothing counts too: whom a request could not reach may be asked again after it.
        self._records.input(event, now, wall=self._clock.wall(), after=self._journal.sequence)
        decision = self._master.decide(event, now)
        if self._master.phase is not before:
            self._log.emit(Transition("master", "run", before, self._master.phase, decision.reason))
        self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        """Facts first, then effects. Only what is written for people about a step comes before its fact: a master that
        dies in between leaves a line too many, which its successor cuts off, never one too few."""
        for effect in decision.effects:
            if isinstance(effect, RecordStep):
                self._records.step(effect, self._clock.monotonic())
        if decision.facts:
            self._append(decision.facts)
        for fact in decision.facts:
            self._records.fact(fact)
        for effect in decision.effects:
            self._act(effect)

    def _append(self, facts: Sequence[Fact]) -> None:
        """Journal facts. While the disk does not take them, be it full or broken, the run pauses."""
        self._with_patience(lambda: self._journal.append(facts))
        if any(isinstance(fact, DURABLE) for fact in facts):
            self._with_patience(self._journal.sync)

    def _with_patience(self, write: Callable[[], None]) -> None:
        """Write, or wait until the disk takes it. A journal that is damaged, or another's, no patience would mend."""
        try:
            write()
        except StorageError as error:
            if not is_of_the_disk(error):
                raise
            alert = Alert(f"paused, cause disk: {error}; the run goes on by itself when the disk takes it")
            self._log.emit(alert)
            since = self._clock.monotonic()
            wait(
                lambda remaining_s: self._try_again(write, remaining_s),
                whom="the disk",
                what="the journal to be written",
                timeout_s=LONGEST_PAUSE_S,
            )
            self._clock.skip(self._clock.monotonic() - since)
            self._log.emit(Note("the journal can be written again, the run goes on"))

    def _try_again(self, write: Callable[[], None], remaining_s: float) -> bool | None:
        """What arrives meanwhile stays in its queue, so that nothing is decided on what is not yet a fact.

        Without agent and launcher nobody would ever end this process.
        """
        self._endpoint.turn(min(PAUSE_S, remaining_s))
        if self._exit_code is not None:
            raise WorldError("agent and launcher are gone while the journal can not be written")
        try:
            write()
        except StorageError as error:
            if is_of_the_disk(error):
                return None
            raise
        return True

    def _act(self, effect: Effect) -> None:
        match effect:
            case Request():
                self._request(effect)
            case Tell(to=to, body=body):
                self._endpoint.send(to, body)
            case Admit(peer=peer):
                self._endpoint.admit(peer)
            case Forget(process=process, fault=fault):
                self._records.lost(fault)
                self._lookout.forget(process)
                self._endpoint.forget(process, fault)
            case ShareBook():
                self._share_book()
            case RecordStep():
                pass  # Written before its fact.
            case RecordEvaluation():
                self._records.evaluation(effect)
            case Raise(message=message, values=values):
                self._log.emit(Alert(message, values))
            case Finish():
                self._finish(effect, self._master.state)

    def _request(self, request: Request) -> None:
        self._endpoint.request(
            request.to,
            request.body,
            deadline_s=request.deadline_s,
            on_done=lambda pending: self._answered(request, pending),
        )

    def _answered(self, request: Request, pending: PendingReply) -> None:
        if pending.error is None:
            body, peer = pending.result().body, self._endpoint.peers.get(request.to)
            if peer is not None:
                self._lookout.answered(request.to, peer.incarnation, body, self._clock.monotonic())
            self._feed(Replied(request.token, request.to, body))
            return
        error = pending.error
        fault = error.cause or fault_of(error, process=request.to, time=self._clock.wall())
        self._feed(RequestFailed(request.token, request.to, fault))

    def _book(self) -> AddressBook:
        master = self._endpoint.peer(host=self._bootstrap.host)
        return self._master.state.members.address_book(master)

    def _share_book(self) -> None:
        book = self._book()
        for peer in book.peers:
            if peer.process != self._bootstrap.process:
                self._endpoint.send(peer.process, book)

    def _reports(self) -> ProcessReports:
        """What every process said last; this one speaks for itself."""
        now = self._clock.monotonic()
        own = own_report(self._bootstrap, waits=self._master.talk.waits())
        others = (report_of(member, now) for member in self._master.state.members.members.values())
        master = self._master
        return ProcessReports(
            self._clock.wall(), (own, *others), master.phase.value, master.recovery_state.value
        )

    def _break_off(self, error: Exception) -> None:
        """End the run because of an error of this process: journal, summary and workers learn of it as far as possible.

        What the journal holds is what happened: decisions of which it knows nothing are not told as facts.
        """
        if not isinstance(error, KintsugiError):
            self._records.attempt("the log", lambda: traceback.print_exception(error))
        fault = fault_of(error, process=self._bootstrap.process, time=self._clock.wall())
        faults = tuple(root_first([fault]))
        wall_s = self._clock.monotonic() - self._began
        ended = RunEnded("failed", faults[0], wall_s=wall_s)
        state = self._master.state
        try:
            state = self._journaled_state()
            self._journal.append([ended])
            self._journal.sync()
        except StorageError as second:
            self._log.emit(Alert(f"the end of the run is not in the journal: {second}"))
        state.apply(ended)
        self._finish(Finish("failed", faults), state)
        self._exit_code = EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_ERROR

    def _journaled_state(self) -> MasterState:
        state = new_state(self._config)
        for fact in read_facts(self._run_dir / "journal", disk=self._disk):
            state.apply(fact)
        return state

    def _finish(self, finish: Finish, state: MasterState) -> None:
        for fault in finish.faults:
            self._log.emit(FaultSeen(fault))
        summary = summarize_run(
            self._config,
            state,
            run_dir=str(self._run_dir),
            processes=self._pids(),
            rest=self._master.timing,
            faults=finish.faults,
        )
        self._records.summary(summary)
        self._log.emit(Note(f"the run {finish.outcome} at step {state.step}"))
        self.close()
        self._exit_code = 1 if finish.outcome == "failed" else 0
        for process in list(self._endpoint.peers):
            self._endpoint.send(process, Shutdown(f"the run {finish.outcome}", self._exit_code))

    def close(self) -> None:
        """Let go of the run folder."""
        self._records.close()
        self._journal.close()

    def _pids(self) -> dict[str, list[int]]:
        """Role → pids, those included that do not register: the launcher and this process."""
        launcher = living_launcher(self._run_dir)
        own = {"launcher": [launcher.pid] if launcher else [], "master": [os.getpid()]}
        return {**own, **self._processes}

    def _watch_signals(self) -> None:
        """SIGTERM asks for a clean stop: it arrives on a descriptor that the loop watches."""
        signals = Signals(signal.SIGTERM)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

        def stop() -> None:
            # Whatever else the interpreter handles makes it readable too, and asks for nothing.
            if signals.received():
                self._log.emit(Note("asked to stop after this step"))
                self._feed(StopRequested("SIGTERM"))

        self._endpoint.watch(signals.fileno(), stop)

    def _orphaned(self) -> None:
        """Agent and launcher are gone: nobody is left to start or stop a process, so the run can not go on."""
        self._endpoint.unwatch(self._bootstrap.lifeline)
        gone = ProcessDied("agent and launcher are gone")
        fault = fault_of(gone, process=self._bootstrap.process, time=self._clock.wall())
        self._log.emit(FaultSeen(fault))
        self._exit_code = 1


def new_state(config: Config) -> MasterState:
    """The state before the first fact. Where samples are compared with each other, a group needs two valid ones."""
    min_valid = 2 if config.algorithm.name in COMPARE_SAMPLES | LEARN_PAIRS else 1
    return MasterState(min_valid=min_valid, keep_checkpoints=config.checkpoint.keep)


def new_master(config: Config, state: MasterState, *, run_dir: Path) -> Master:
    """The pure core with what it must know of the data."""
    data = open_data(config, run_dir=run_dir)
    return Master(
        config,
        state=state,
        layout=plan_layout(config),
        num_rows=data.num_positions,
        num_eval_rows=data.num_held_out,
        checkpoint_folder=str(run_dir / CHECKPOINTS),
    )


def config_digest(config: Config) -> str:
    return hashlib.sha256(msgspec.json.encode(config)).hexdigest()


def main(bootstrap: Bootstrap) -> int:
    config = load_config(Path(bootstrap.run_dir) / "config.yaml")
    return MasterShell(bootstrap, config).run()
