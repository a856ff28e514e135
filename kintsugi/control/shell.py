"""The master process: turns what arrives into events, journals the facts of each decision, carries out its effects.

One loop consumes registrations, heartbeats, exits, answers and signals; it produces requests and files of the run
folder; it waits on its endpoint only.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections import deque
from pathlib import Path

import msgspec

from kintsugi.bootstrap import Bootstrap
from kintsugi.checkpoint.store import latest
from kintsugi.config import Config
from kintsugi.control.inputs import InputRecorder
from kintsugi.control.journal import Journal
from kintsugi.control.layout import plan_layout
from kintsugi.control.master import Master
from kintsugi.control.protocol import (
    Admit,
    Began,
    Decision,
    Effect,
    Event,
    Exited,
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
from kintsugi.control.state import MasterState
from kintsugi.control.summary import stage_seconds, summarize_run
from kintsugi.data.source import open_source
from kintsugi.errors import DeadlineExceeded, Fault, RefusedError, fault_of
from kintsugi.facts import CheckpointSaved, EpochStarted, RunEnded, StepCommitted
from kintsugi.messages import Heartbeat, Ok, Ping, ProcessExited, Register, Registered, Shutdown
from kintsugi.observe.events import Alert, EventLog, FaultSeen, Note, Span, Transition, events_path
from kintsugi.observe.metrics import MetricsWriter, SamplesWriter, step_metrics
from kintsugi.recipe import load_config
from kintsugi.runs import living_launcher
from kintsugi.runtime import COUNTERS, SYSTEM_CLOCK, wait
from kintsugi.transport import Delivery, PendingReply
from kintsugi.worker import open_endpoint

TICK_S = 0.2
GOODBYE_S = 1.0
DURABLE = (EpochStarted, StepCommitted, CheckpointSaved, RunEnded)
"""Facts that are fsynced before their effects; the others only have to survive the process."""
CHECKPOINTS = "checkpoints"
STEP_PARTS = ("data", "generate", "reward", "train", "commit", "weights")
"""What a step's time consists of; evaluations and saves come beside it."""


class MasterShell:
    """Everything of the master that touches the world."""

    def __init__(self, bootstrap: Bootstrap, config: Config) -> None:
        self._bootstrap, self._config, self._run_dir = bootstrap, config, Path(bootstrap.run_dir)
        self._clock = SYSTEM_CLOCK
        self._began = self._clock.monotonic()
        self._log = EventLog(events_path(self._run_dir, bootstrap.process), process=bootstrap.process)
        self._journal, self._master, self._first = self._open_run()
        self._inputs = InputRecorder(self._run_dir / "inputs")
        self._metrics = MetricsWriter(self._run_dir, wandb=config.logging.wandb)
        self._samples = SamplesWriter(self._run_dir)
        self._endpoint = open_endpoint(bootstrap)
        self._processes: dict[str, list[int]] = {}
        self._events: deque[Event] = deque()
        self._next_tick = 0.0
        self._exit_code: int | None = None

    def _open_run(self) -> tuple[Journal, Master, Began]:
        """A new journal, or the state that an old one and the newest good checkpoint leave us with."""
        path, owner = self._run_dir / "journal", f"{self._bootstrap.process} pid {os.getpid()}"
        state = new_state(self._config)
        began = Began(self._bootstrap.job, config_digest(self._config), self._bootstrap.incarnation)
        if path.exists():
            journal, facts = Journal.open(path, owner=owner)
            for fact in facts:
                state.apply(fact)
            checkpoint = latest(self._run_dir / CHECKPOINTS)
            step, source = (checkpoint.step, str(checkpoint.path)) if checkpoint else (0, None)
            began = msgspec.structs.replace(began, resumed=True, restore_step=step, restore_path=source)
        else:
            journal = Journal.create(path, owner=owner)
        return journal, new_master(self._config, state, run_dir=self._run_dir), began

    def run(self) -> int:
        """Until the run has ended; gives the exit code of the process."""
        self._watch_signals()
        self._endpoint.watch(self._bootstrap.lifeline, self._orphaned)
        self._metrics.truncate_after(self._first.restore_step)
        self._samples.truncate_after(self._first.restore_step)
        self._feed(self._first)
        self._endpoint.epoch = self._endpoint.seen_epoch = self._master.state.epoch
        while self._exit_code is None:
            for delivery in self._poll():
                self._handle(delivery)
            now = self._clock.monotonic()
            if now >= self._next_tick:
                self._next_tick = now + TICK_S
                self._feed(Tick())
        self._endpoint.close(flush_s=GOODBYE_S)
        return self._exit_code

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
                self._master.state.members.heard(sender, heartbeat, self._clock.monotonic())
            case Register(peer=peer, role=role, pid=pid, capabilities=capabilities):
                self._endpoint.admit(peer)
                self._feed(Joined(peer, role, pid, capabilities))
                self._endpoint.reply(delivery, Registered(self._master.state.epoch))
                self._processes = self._master.state.members.pids()
            case ProcessExited(process=process, incarnation=incarnation, status=status, last_output=output):
                self._feed(Exited(process, incarnation, status, output, self._clock.wall()))
            case Ping():
                self._endpoint.reply(delivery, Ok())
            case other if delivery.wants_reply:
                self._endpoint.fail(
                    delivery, RefusedError(f"the master does not answer {type(other).__name__}")
                )
            case _:
                COUNTERS.add("ignored_messages")

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
        decision = self._master.decide(event, now)
        if decision.facts or decision.effects or not isinstance(event, Tick):
            self._inputs.write(event, now)
        if self._master.phase is not before:
            self._log.emit(Transition("master", "run", before, self._master.phase, decision.reason))
        self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        if decision.facts:
            self._journal.append(decision.facts)
            if any(isinstance(fact, DURABLE) for fact in decision.facts):
                self._journal.sync()
        for effect in decision.effects:
            self._act(effect)

    def _act(self, effect: Effect) -> None:
        match effect:
            case Request():
                self._request(effect)
            case Tell(to=to, body=body):
                self._endpoint.send(to, body)
            case Admit(peer=peer):
                self._endpoint.admit(peer)
            case Forget(process=process, fault=fault):
                self._log.emit(FaultSeen(fault))
                self._endpoint.forget(process, fault)
            case ShareBook():
                self._share_book()
            case RecordStep():
                self._record_step(effect)
            case RecordEvaluation(step=step, metrics=metrics):
                self._metrics.write(step, metrics)
            case Raise(message=message, values=values):
                self._log.emit(Alert(message, values))
            case Finish():
                self._finish(effect)

    def _request(self, request: Request) -> None:
        self._endpoint.request(
            request.to,
            request.body,
            deadline_s=request.deadline_s,
            on_done=lambda pending: self._answered(request, pending),
        )

    def _answered(self, request: Request, pending: PendingReply) -> None:
        if pending.error is None:
            self._feed(Replied(request.token, request.to, pending.result().body))
            return
        error = pending.error
        fault = error.cause or fault_of(error, process=request.to, time=self._clock.wall())
        self._feed(RequestFailed(request.token, request.to, fault))

    def _share_book(self) -> None:
        master = self._endpoint.peer(host=self._bootstrap.host)
        book = self._master.state.members.address_book(master)
        for peer in book.peers:
            if peer.process != self._bootstrap.process:
                self._endpoint.send(peer.process, book)

    def _record_step(self, record: RecordStep) -> None:
        advantages = {
            key: values["advantage"] for key, values in record.values.items() if "advantage" in values
        }
        timing = stage_seconds(record.timing)
        timing["step"] = sum(timing.get(name, 0.0) for name in STEP_PARTS)
        values = step_metrics(
            record.metas, advantages=advantages, call_metrics=record.call_metrics, timing=timing
        )
        self._metrics.write(record.step, values)
        self._samples.write(record.step, record.metas, texts=record.texts, advantages=advantages)
        attributes = {"step": str(record.step), "stage": record.stage}
        now = self._clock.monotonic()
        self._log.emit(Span("step", now - timing["step"], timing["step"], attributes))
        for span in record.spans:
            self._log.emit(
                Span(
                    span.call, span.start, span.duration_s, {**attributes, "workers": ",".join(span.workers)}
                )
            )
        COUNTERS.add("steps")

    def _finish(self, finish: Finish) -> None:
        state = self._master.state
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
        _write_atomically(self._run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
        self._log.emit(Note(f"the run {finish.outcome} at step {state.step}"))
        self._metrics.close()
        self._samples.close()
        self._inputs.close()
        self._journal.close()
        for process in list(self._endpoint.peers):
            self._endpoint.send(process, Shutdown(f"the run {finish.outcome}"))
        self._exit_code = 1 if finish.outcome == "failed" else 0

    def _pids(self) -> dict[str, list[int]]:
        """Role → pids, those included that do not register: the launcher and this process."""
        launcher = living_launcher(self._run_dir)
        own = {"launcher": [launcher.pid] if launcher else [], "master": [os.getpid()]}
        return {**own, **self._processes}

    def _watch_signals(self) -> None:
        """SIGTERM asks for a clean stop: it arrives as a byte on a pipe that the loop watches."""
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_end)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

        def stop() -> None:
            os.read(read_end, 64)
            self._log.emit(Note("asked to stop after this step"))
            self._feed(StopRequested("SIGTERM"))

        self._endpoint.watch(read_end, stop)

    def _orphaned(self) -> None:
        """Agent and launcher are gone: nobody is left to start or stop a process, so the run can not go on."""
        self._endpoint.unwatch(self._bootstrap.lifeline)
        fault = Fault(
            "orphaned",
            "ProcessDied",
            self._bootstrap.process,
            "agent and launcher are gone",
            self._clock.wall(),
        )
        self._log.emit(FaultSeen(fault))
        self._exit_code = 1


def new_state(config: Config) -> MasterState:
    """The state before the first fact. A group needs two valid samples to say anything about each other."""
    min_valid = 2 if config.algorithm.group_size > 1 else 1
    return MasterState(min_valid=min_valid, keep_checkpoints=config.checkpoint.keep)


def new_master(config: Config, state: MasterState, *, run_dir: Path) -> Master:
    """The pure core with what it must know of the data."""
    return Master(
        config,
        state=state,
        layout=plan_layout(config),
        num_rows=len(open_source(config.data, split="train")),
        num_eval_rows=len(open_source(config.data, split="eval")),
        checkpoint_folder=str(run_dir / CHECKPOINTS),
    )


def config_digest(config: Config) -> str:
    return hashlib.sha256(msgspec.json.encode(config)).hexdigest()


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def main(bootstrap: Bootstrap) -> int:
    config = load_config(Path(bootstrap.run_dir) / "config.yaml")
    return MasterShell(bootstrap, config).run()
