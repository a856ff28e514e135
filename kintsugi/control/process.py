"""The master process: turns messages into events, journals the facts of each decision, and carries out its effects.

One loop consumes registrations, heartbeats, exits, answers and signals; it produces requests and files of the run
folder; it waits on its endpoint only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kintsugi.checkpoint.store import latest
from kintsugi.config.recipe import load_config
from kintsugi.config.schema import COMPARE_SAMPLES, LEARN_PAIRS, Config
from kintsugi.control.book_sharing import BookSharing
from kintsugi.control.failure_detector import FailureDetector, event_of_report
from kintsugi.control.master import Master
from kintsugi.control.phases.table import Phase
from kintsugi.control.placement import plan_layout
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
    Suspected,
    Tell,
    Tick,
)
from kintsugi.control.records import Records, own_report, report_of
from kintsugi.control.state import MasterState
from kintsugi.control.summary import summarize_run
from kintsugi.control.user_requests import UserRequests
from kintsugi.data.dataset import open_data
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
from kintsugi.journal.facts import CheckpointSaved, Fact, RunEnded, StepCommitted, TermStarted
from kintsugi.journal.journal import Journal, is_disk_error, scan_facts
from kintsugi.process.exit_codes import EXIT_ERROR, EXIT_USER_ERROR
from kintsugi.process.membership import ORPHANED, open_endpoint, watch_lifeline
from kintsugi.protocol.agents import AskTime, ChipFault, ProcessExited, ProcessSuspected, TimeTold
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.membership import Heartbeat, Ok, Ping, Register, Registered, Shutdown
from kintsugi.recovery.liveness import SuspicionKind
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.reader import living_launcher
from kintsugi.runtime.clock import SYSTEM_CLOCK, WorkingClock
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.disk import SYSTEM_DISK, Disk
from kintsugi.runtime.shortages import EXIT_NO_MEMORY, EXIT_UNFIT, shortage_code
from kintsugi.runtime.signals import Signals
from kintsugi.runtime.waits import wait
from kintsugi.telemetry.events import (
    Alert,
    EventLog,
    FaultSeen,
    JournalPaused,
    Note,
    OperationFailed,
    RunFinished,
    Transition,
)
from kintsugi.telemetry.process_reports import Activity, ProcessReports
from kintsugi.transport import Delivery, PendingReply
from kintsugi.types import role_of

TICK_S = 0.2
LONGEST_TURN_S = 1.0
"""A turn that is later than this shows that the process itself did not run, and no message could reach it."""
PAUSE_S = 0.5
LONGEST_PAUSE_S = 7 * 24 * 3600.0
"""Longest pause for a disk that does not accept the journal: an operator may take days to respond."""
LONGEST_STAY_S = 120.0
"""Time that a host which has to leave is kept for the end of a step."""
REPORT_S = 0.5
GOODBYE_S = 1.0
DURABLE = (TermStarted, StepCommitted, CheckpointSaved, RunEnded)
"""Facts that are fsynced before their effects; the others only have to survive the process."""
COMPACTED_AFTER = (StepCommitted, CheckpointSaved)
"""Facts after which the journal may be compacted: a run without checkpoints compacts its journal too."""
COMPACTION_SIZE = 2 << 20
"""Bytes of facts that a new master replays at most, or as many as the folded state has: 14,000 samples, a quarter of a
second."""


class MasterShell:
    """All input and output of the master.

    The journal is the run: while the disk does not accept it, the run pauses; when it is damaged, the run ends. All
    other files are for users: when one cannot be written, an alert is emitted once and the run continues.
    """

    def __init__(self, bootstrap: Bootstrap, config: Config, *, disk: Disk = SYSTEM_DISK) -> None:
        self._disk = disk
        self._bootstrap, self._config, self._run_dir = bootstrap, config, Path(bootstrap.run_dir)
        self._clock = WorkingClock(SYSTEM_CLOCK)
        self._log = EventLog(
            RunFolder(self._run_dir).events_file(bootstrap.process), process=bootstrap.process
        )
        self._journal, self._master, self._first = self._open_run()
        job = self._master.state.job or bootstrap.job
        self._records = Records(self._run_dir, self._log, config=config, job=job)
        self._requests = UserRequests(self._run_dir)
        self._detector = FailureDetector()
        self._endpoint = open_endpoint(bootstrap)
        own = self._endpoint.peer(host=bootstrap.host)
        self._sharing = BookSharing(self._master.state.members, master=own)
        self._noticed_at: dict[Path, float] = {}
        """Notice of the host manager → when it was first seen."""
        self._processes: dict[str, list[int]] = {}
        self._events: deque[Event] = deque()
        self._next_tick = self._next_report = self._clock.monotonic()
        self._exit_code: int | None = None

    def _open_run(self) -> tuple[Journal, Master, Began]:
        """Create a journal, or restore the state from an existing one and the newest good checkpoint."""
        own, path, state = self._bootstrap, RunFolder(self._run_dir).journal_file, new_state(self._config)
        owner, adopting = f"{own.process} pid {os.getpid()}", own.adopting
        began = Began(own.job, config_digest(self._config), own.incarnation, time=self._clock.wall())
        if self._disk.exists(path):
            journal = Journal.restore(
                path, owner=owner, take=state.apply, take_over=adopting, disk=self._disk
            )
            if adopting:
                began = msgspec.structs.replace(began, adopting=True, restore_step=state.step)
            else:
                # A later checkpoint belongs to steps that were undone: its completion was never journaled.
                checkpoint = latest(RunFolder(self._run_dir).checkpoints_folder, at_most=state.step)
                step, source = (checkpoint.step, str(checkpoint.path)) if checkpoint else (0, None)
                refusal = state.can_return_to(step)
                if refusal is not None:
                    raise StorageError(f"no readable checkpoint of steps {state.saved_steps}: {refusal}")
                began = msgspec.structs.replace(began, resumed=True, restore_step=step, restore_path=source)
        else:
            journal = Journal.create(path, owner=owner, disk=self._disk)
        return journal, new_master(self._config, state, run_dir=self._run_dir), began

    def run(self) -> int:
        """Run until the run has ended; return the exit code of the process.

        What the host does not give (memory, descriptors) ends this process only: its agent starts another one, which
        continues by the journal. Any other error ends the run with its cause.
        """
        try:
            self._watch_signals()
            self.begin()
            while self._exit_code is None:
                self.turn()
        except FencedError as error:
            # Another master owns the run: any message or record of this one would interfere with it.
            self._log.emit(Note(f"replaced while it did not run: {error}"))
            self._exit_code = EXIT_ERROR
        except MemoryError:
            os._exit(EXIT_NO_MEMORY)  # Anything else would need memory.
        except Exception as error:  # noqa: BLE001 - the run's outermost boundary: recorded with its cause, then reported.
            self._exit_code = shortage_code(error)
            if self._exit_code is None:
                self._fail_run(error)
            else:
                record_fault(self._log, error, process=self._bootstrap.process)
        self._endpoint.close(flush_s=GOODBYE_S)
        assert self._exit_code is not None
        return self._exit_code

    def begin(self) -> None:
        """Take the run over."""
        watch_lifeline(self._endpoint, self._bootstrap.lifeline, self._orphaned)
        self._records.truncate_after(self._first.restore_step)
        self._endpoint.term = self._endpoint.seen_term = self._master.state.term + 1
        self._feed(self._first)
        self._detector.adopt(self._master.state.members, self._clock.monotonic())
        assert self._endpoint.term == self._master.state.term or self._exit_code is not None

    def turn(self) -> None:
        """Wait for messages, at most until the next tick, and act on them."""
        for delivery in self._poll():
            self._handle(delivery)
        self._clock.skip(self._clock.monotonic() - self._next_tick - LONGEST_TURN_S)
        now = self._clock.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._answer_user_requests()
            self._feed(Tick(self._master.state.members.queue()))
            for found in self._detector.check(now, self._master.pending):
                self._feed(msgspec.structs.replace(found, time=self._clock.wall()))
        for book, processes in self._sharing.due(now):
            self._endpoint.send_to_all(processes, book)
        if now >= self._next_report:
            self._next_report = now + REPORT_S
            self._records.processes(self._reports())

    def _answer_user_requests(self) -> None:
        """Answer the requests of users. A request stays in its folder until the answer is durable."""
        for verdict in self._requests.verdicts():
            self._feed(verdict)
        self._act_on_notices(self._clock.monotonic())
        for request in self._requests.waiting():
            self._feed(request)
            if request.request in self._master.state.answered:
                self._write_or_pause(self._journal.sync)
                self._requests.remove(request.request)
                self._log.emit(Note(f"answered request {request.request} for {request.servers} servers"))

    def _act_on_notices(self, now: float) -> None:
        """Declare hosts lost of which the host manager has given notice: those that leave in order between two steps,
        when nothing of a step is lost with them."""
        notices = self._requests.host_notices()
        self._noticed_at = {path: self._noticed_at.get(path, now) for path, _ in notices}
        for path, notice in notices:
            may_wait = notice.leaves and now - self._noticed_at[path] < LONGEST_STAY_S
            if may_wait and self._master.phase is not Phase.COLLECTING:
                continue
            member = self._master.state.members.members.get(notice.agent)
            if member is not None and notice.covers(member.incarnation):
                self._feed(
                    Suspected(
                        notice.agent,
                        member.incarnation,
                        notice.why,
                        SuspicionKind.HOST,
                        certain=True,
                        time=self._clock.wall(),
                    )
                )
            with contextlib.suppress(OSError):
                path.unlink()

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
                self._master.state.members.on_heartbeat(sender, heartbeat, now)
                self._detector.on_heartbeat(sender, incarnation, heartbeat, now)
                lacking = self._sharing.after_heartbeat(sender, heartbeat.book, now)
                if lacking is not None:
                    self._endpoint.send(sender, lacking)
            case Register() as register if delivery.wants_reply:
                self._register(delivery, register)
            case ProcessExited() | ProcessSuspected() | ChipFault() as seen:
                self._feed(event_of_report(delivery.peer, seen, time=self._clock.wall()))
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

    def _register(self, delivery: Delivery, register: Register) -> None:
        """Admit a process under the name, incarnation and key that its connection proved, and no other."""
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
        self._detector.joined(peer.process, peer.incarnation, self._clock.monotonic(), host=peer.host)
        joined = Joined(
            peer, register.role, register.pid, register.capabilities, register.children, self._clock.wall()
        )
        self._feed(joined)
        self._endpoint.reply(delivery, Registered(self._master.state.term))
        self._processes = self._master.state.members.pids()

    def _feed(self, event: Event) -> None:
        """Process an event. An effect that fails immediately gives another event, which waits for the current one.

        After the end of the run events are ignored: processes exit because they were shut down.
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
        """Pass one event through the pure core: decide, journal, act."""
        now, before, was_saving = self._clock.monotonic(), self._master.phase, self._master.is_saving
        # A tick without effects is recorded too: it makes unreachable workers eligible again.
        self._records.input(event, now, wall=self._clock.wall(), after=self._journal.sequence)
        decision = self._master.decide(event, now)
        if self._master.phase is not before:
            self._log.emit(Transition("master", "run", before, self._master.phase, decision.reason))
        if self._master.is_saving is not was_saving:
            names = ("saving", "idle") if was_saving else ("idle", "saving")
            self._log.emit(Transition("master", "save", *names, decision.reason))
        self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        """Journal facts first, then carry out effects. Only the metrics and samples of a step are written before its
        fact: a master that dies in between leaves a record too many, which its successor removes, never one too few."""
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
        """Journal facts. While the disk does not accept them, the run pauses."""
        self._write_or_pause(lambda: self._journal.append(facts))
        if any(isinstance(fact, DURABLE) for fact in facts):
            self._write_or_pause(self._journal.sync)
        # Before the journal is compacted: then its facts say nothing of them any more.
        self._records.old_incidents(self._master.state.incidents.take_dropped())
        if any(isinstance(fact, COMPACTED_AFTER) for fact in facts):
            self._compact()

    def _compact(self) -> None:
        """Fold the journal, when enough was appended since. The run does not depend on it: a journal that cannot be
        compacted now only grows."""
        if not self._journal.is_compaction_due(min_size=COMPACTION_SIZE):
            return

        def compact() -> None:
            try:
                self._journal.compact(self._master.state.fold())
            except RefusedError as error:
                if isinstance(error, FencedError):
                    raise
                # A successor is opening the journal: the next append will find it.

        self._records.attempt("a compacted journal", compact)

    def _write_or_pause(self, write: Callable[[], None]) -> None:
        """Write, or wait until the disk accepts it. A journal that is damaged or owned by another master ends the
        run. At a limit of this process waiting would not help: another one takes its place."""
        try:
            write()
        except StorageError as error:
            if not _may_pass(error):
                raise
            message = f"paused, cause disk: {error}; the run continues when the disk accepts it"
            self._log.emit(JournalPaused(message, error=str(error)))
            since = self._clock.monotonic()
            wait(
                lambda remaining_s: self._try_again(write, remaining_s),
                whom="the disk",
                what="the journal to be written",
                timeout_s=LONGEST_PAUSE_S,
            )
            self._clock.skip(self._clock.monotonic() - since)
            self._log.emit(Note("the journal can be written again, the run continues"))

    def _try_again(self, write: Callable[[], None], remaining_s: float) -> bool | None:
        """Retry a write. Messages that arrive meanwhile stay in their queue, so that no decision builds on facts that
        are not journaled.

        Without agent and launcher no process is left that could end this one.
        """
        self._endpoint.turn(min(PAUSE_S, remaining_s))
        if self._exit_code is not None:
            raise WorldError("agent and launcher are gone while the journal can not be written")
        try:
            write()
        except StorageError as error:
            if _may_pass(error):
                return None
            raise
        return True

    def _act(self, effect: Effect) -> None:
        match effect:
            case Request():
                self._request(effect)
            case Tell(to=to, body=body):
                self._share_before(to)
                self._endpoint.send(to, body)
            case Admit(peer=peer):
                self._endpoint.admit(peer)
            case Forget(process=process, fault=fault):
                self._records.lost(fault)
                self._detector.forget(process)
                self._endpoint.forget(process, fault)
            case ShareBook(lacking=lacking):
                self._sharing.changed(lacking=lacking)
            case RecordStep():
                pass  # Written before its fact.
            case RecordEvaluation():
                self._records.evaluation(effect)
            case Raise(message=message, values=values, event=alert):
                self._log.emit(alert or Alert(message, values))
            case Finish():
                self._finish(effect, self._master.state)

    def _share_before(self, process: str) -> None:
        """Send a process the changed address book before a request that may name processes in it."""
        book = self._sharing.before_request(process, self._clock.monotonic())
        if book is not None:
            self._endpoint.send(process, book)

    def _request(self, request: Request) -> None:
        self._share_before(request.to)
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
                self._detector.answered(request.to, peer.incarnation, body, self._clock.monotonic())
            self._feed(Replied(request.token, request.to, body))
            return
        error = pending.error
        fault = error.cause or fault_of(error, process=request.to, time=self._clock.wall())
        self._feed(RequestFailed(request.token, request.to, fault))

    def _reports(self) -> ProcessReports:
        """Return the latest report of every process, and that of the master."""
        now = self._clock.monotonic()
        own = own_report(self._bootstrap, waits=self._master.pending.waits())
        others = (report_of(member, now) for member in self._master.state.members.members.values())
        master = self._master
        wall = self._clock.wall()
        done, total, unit = master.progress
        activity = Activity(
            since=wall - (now - master.phase_since),
            done=done,
            total=total,
            unit=unit,
            awaits=tuple(dict.fromkeys(wait.whom for wait in master.pending.waits())),
            is_stopping=master.state.stop_reason is not None,
            saving_step=master.saving_step,
        )
        return ProcessReports(wall, (own, *others), master.phase.value, master.recovery_state.value, activity)

    def _fail_run(self, error: Exception) -> None:
        """End the run because of an error of this process, and record it in journal, summary and workers as far as
        possible.

        Only journaled facts count: a decision that is not in the journal is not reported.
        """
        if not isinstance(error, KintsugiError):
            self._records.attempt("the log", lambda: traceback.print_exception(error))
        fault = fault_of(error, process=self._bootstrap.process, time=self._clock.wall())
        faults = tuple(root_first([fault]))
        ended = RunEnded("failed", faults[0], wall_s=self._master.session_s(self._clock.monotonic()))
        state = self._master.state
        try:
            state = self._journaled_state()
            self._journal.append([ended])
            self._journal.sync()
        except StorageError as second:
            message = f"the end of the run is not in the journal: {second}"
            self._log.emit(OperationFailed(message, operation="journal", error=str(second)))
        state.apply(ended)
        self._finish(Finish("failed", faults), state)
        self._exit_code = EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_ERROR

    def _journaled_state(self) -> MasterState:
        state = new_state(self._config)
        scan_facts(RunFolder(self._run_dir).journal_file, state.apply, disk=self._disk)
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
        message = f"the run {finish.outcome} at step {state.step}"
        self._log.emit(RunFinished(message, outcome=finish.outcome, step=state.step))
        self.close()
        self._exit_code = 1 if finish.outcome == "failed" else 0
        for process in list(self._endpoint.peers):
            self._endpoint.send(process, Shutdown(f"the run {finish.outcome}", self._exit_code))

    def close(self) -> None:
        """Close the files of the run folder."""
        self._records.close()
        self._journal.close()

    def _pids(self) -> dict[str, list[int]]:
        """Return role → pids, including the launcher and this process, which do not register."""
        try:
            launcher = living_launcher(self._run_dir)
        except (
            UserError
        ):  # Its file is another user's, or another host's: the end of a run does not fail for it.
            launcher = None
        own = {"launcher": [launcher.pid] if launcher else [], "master": [os.getpid()]}
        return {**own, **self._processes}

    def _watch_signals(self) -> None:
        """Let SIGTERM request a clean stop: it arrives on a descriptor that the loop watches."""
        signals = Signals(signal.SIGTERM)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

        def stop() -> None:
            # Other signals make the descriptor readable too, and request nothing.
            if signals.received():
                self._log.emit(Note("asked to stop after this step"))
                self._feed(StopRequested("SIGTERM"))

        self._endpoint.watch(signals.fileno(), stop)

    def _orphaned(self) -> None:
        """End the run: without agent and launcher no process can be started or stopped."""
        gone = ProcessDied(ORPHANED)
        fault = fault_of(gone, process=self._bootstrap.process, time=self._clock.wall())
        self._log.emit(FaultSeen(fault))
        self._exit_code = 1


def new_state(config: Config) -> MasterState:
    """Return the state before the first fact. Where samples are compared with each other, a group needs two valid
    ones."""
    min_valid = 2 if config.algorithm.name in COMPARE_SAMPLES | LEARN_PAIRS else 1
    return MasterState(min_valid=min_valid, keep_checkpoints=config.checkpoint.keep)


def new_master(config: Config, state: MasterState, *, run_dir: Path) -> Master:
    """Return the pure core for a run, with the sizes of its data."""
    data = open_data(config, run_dir=run_dir)
    return Master(
        config,
        state=state,
        layout=plan_layout(config),
        num_rows=data.num_positions,
        num_eval_rows=data.num_held_out,
        checkpoint_folder=str(RunFolder(run_dir).checkpoints_folder),
    )


def config_digest(config: Config) -> str:
    return hashlib.sha256(msgspec.json.encode(config)).hexdigest()


def _may_pass(error: StorageError) -> bool:
    """Return whether the disk may accept the same write later from this process."""
    return is_disk_error(error) and shortage_code(error) == EXIT_UNFIT


def record_fault(log: EventLog, error: BaseException, *, process: str) -> None:
    """Record an error for which this process is replaced, as far as that is possible."""
    log.try_emit(FaultSeen(fault_of(error, process=process, time=SYSTEM_CLOCK.wall())))


def main(bootstrap: Bootstrap) -> int:
    """Run the master. One that cannot begin because of the host leaves with an exit code for which its agent waits and
    starts another one. After any other error that is not ours to name the agent tries some times and then reports it; a
    damaged journal or a mistake of the user would stay."""
    try:
        config = load_config(RunFolder(bootstrap.run_dir).config_file)
        shell = MasterShell(bootstrap, config)
    except Exception as error:  # The process's outermost boundary: recorded below, or raised again.
        code = shortage_code(error)
        if code is None and isinstance(error, KintsugiError):
            raise
        path = RunFolder(bootstrap.run_dir).events_file(bootstrap.process)
        log = EventLog(path, process=bootstrap.process)
        record_fault(log, error, process=bootstrap.process)
        log.close()
        traceback.print_exception(error)
        return EXIT_ERROR if code is None else code
    return shell.run()
