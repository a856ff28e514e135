"""The master's process against peers and a disk in the hands of the test."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from kintsugi.config.recipe import dump, load
from kintsugi.config.schema import Config
from kintsugi.control.failure_detector import FailureDetector
from kintsugi.control.pending import PendingRequests
from kintsugi.control.phases.table import Phase
from kintsugi.control.placement import plan_layout
from kintsugi.control.process import MasterShell
from kintsugi.control.protocol import Decision, RecordEvaluation, RecordStep, StopRequested, Suspected, Tick
from kintsugi.control.suspicion import HOST_LOST_S
from kintsugi.control.user_requests import UserRequests
from kintsugi.errors import DataError, Fault, FencedError, KintsugiError, RemoteError, StorageError
from kintsugi.journal.facts import (
    Fact,
    ProcessJoined,
    ProcessLost,
    ProcessRequested,
    RunEnded,
    ServersScaled,
    StepCommitted,
    TermStarted,
)
from kintsugi.journal.inputs import read_inputs
from kintsugi.journal.journal import read_facts, scan_facts
from kintsugi.protocol.agents import ProcessExited
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.membership import AddressBook, Register
from kintsugi.protocol.messages import Body
from kintsugi.run_folder.reader import read_faults, read_summary
from kintsugi.runtime.disk import SystemDisk, SystemFile
from kintsugi.runtime.waits import wait
from kintsugi.simulation.replay import replay
from kintsugi.telemetry.events import Alert, Note, read_events
from kintsugi.telemetry.process_reports import read_processes
from kintsugi.telemetry.verdict_files import HostNotice, give_notice
from kintsugi.transport import Endpoint, PendingReply, new_key_pair
from kintsugi.types import Peer, Role, Ticket
from tests.unit.control.driven import scored
from tests.unit.transport.harness import make_endpoint

RECIPE = Path(__file__).parents[3] / "kintsugi" / "recipes" / "grpo_arithmetic.yaml"


class FailingFile(SystemFile):
    def __init__(self, disk: FailingDisk, descriptor: int) -> None:
        super().__init__(descriptor)
        self._disk = disk

    def pwrite(self, data: bytes | memoryview, *, offset: int) -> None:
        self._disk.check()
        super().pwrite(data, offset=offset)

    def sync(self) -> None:
        self._disk.check()
        super().sync()


class FailingDisk(SystemDisk):
    """The machine's, except that some of the next writes fail."""

    def __init__(self) -> None:
        self.num_failures = 0
        self.code = errno.ENOSPC

    def fail(self, *, code: int, times: int = 1 << 30) -> None:
        self.num_failures, self.code = times, code

    def check(self) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(self.code, os.strerror(self.code))

    def open(self, path: Path, *, create: bool = False) -> FailingFile:
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o644)
        return FailingFile(self, descriptor)


class Run:
    """A master of a run, and the one agent that it knows."""

    def __init__(self, run_dir: Path, *, predecessor: Run | None = None) -> None:
        """With a predecessor: the master that takes the run over from that one."""
        self.run_dir = run_dir
        self.disk = FailingDisk()
        self.config: Config = load(RECIPE, [f"run_dir={run_dir}"]).config
        dump(self.config, run_dir / "config.yaml")
        self.agent: Endpoint = predecessor.agent if predecessor else make_endpoint("agent-0", term=1)
        public_key, secret_key = new_key_pair()
        incarnation = "2" if predecessor else "1"
        self._lifeline = list(os.pipe())
        bootstrap = Bootstrap(
            job="job",
            run_dir=str(run_dir),
            process="master-0",
            role=Role.MASTER,
            host="host-0",
            incarnation=incarnation,
            public_key=public_key,
            secret_key=secret_key,
            master=Peer("master-0", incarnation, "host-0", "", public_key),
            lifeline=self._lifeline[0],
            peers=(msgspec.structs.replace(self.agent.peer(host="host-0"), address=""),),
            adopting=predecessor is not None,
        )
        self.shell = MasterShell(bootstrap, self.config, disk=self.disk)
        self.endpoint: Endpoint = self.shell._endpoint
        self.agent.admit(self.endpoint.peer(host="host-0"))

    def ask(self, body: Body) -> PendingReply:
        """Let the agent ask the master until it is answered."""
        pending = self.agent.request("master-0", body, deadline_s=10.0)
        self.turn_until(lambda: pending.done)
        return pending

    def turn_until(self, condition: Callable[[], object]) -> None:
        def attempt(_: float) -> object | None:
            self.shell.turn()
            self.agent.turn(0.005)
            return condition() or None

        wait(attempt, whom="the master", what="the expected state", timeout_s=10.0)

    def register(self) -> Register:
        return Register(self.agent.peer(host="host-0"), Role.AGENT, os.getpid(), {})

    def joined(self) -> list[str]:
        facts = read_facts(self.run_dir / "journal")
        return [fact.peer.process for fact in facts if isinstance(fact, ProcessJoined)]

    def events(self, kind: type) -> list[str]:
        records = [record.event for record in read_events(self.run_dir)]
        return [
            event.message for event in records if isinstance(event, Alert | Note) and isinstance(event, kind)
        ]

    def end(self) -> None:
        """Let the master see that launcher and agent are gone."""
        os.close(self._lifeline.pop())

    def close(self) -> None:
        self.agent.close()
        self.let_go()

    def let_go(self) -> None:
        while self._lifeline:
            os.close(self._lifeline.pop())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    wakeup = signal.set_wakeup_fd(-1)
    with ExitStack() as stack:
        run = Run(tmp_path)
        stack.callback(run.close)
        yield run
    signal.set_wakeup_fd(wakeup)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def begun(run: Run) -> Iterator[Run]:
    run.shell.begin()
    yield run
    run.end()
    run.turn_until(lambda: run.shell._exit_code is not None)
    run.shell.close()
    run.endpoint.close()


def test_a_process_registers_under_its_own_name_and_key(begun: Run) -> None:
    assert begun.ask(begun.register()).error is None
    assert begun.joined() == ["agent-0"]


def forged(register: Register, **changes: object) -> Register:
    return msgspec.structs.replace(register, peer=msgspec.structs.replace(register.peer, **changes))


@pytest.mark.parametrize(
    "forge",
    [
        lambda register: forged(register, process="model-0"),
        lambda register: forged(register, public_key=new_key_pair()[0]),
        lambda register: forged(register, incarnation="other"),
        lambda register: msgspec.structs.replace(register, role=Role.MODEL),
    ],
    ids=["name", "key", "incarnation", "role"],
)
def test_nobody_registers_as_somebody_else(begun: Run, forge: Callable[[Register], Register]) -> None:
    known = dict(begun.endpoint.peers)
    refused = begun.ask(forge(begun.register()))
    assert isinstance(refused.error, RemoteError) and "can not register as" in str(refused.error)
    assert begun.joined() == []
    assert begun.endpoint.peers == known


def test_a_signal_stops_the_run_only_if_it_asks_for_that(begun: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    begun.shell._watch_signals()
    fed: list[object] = []
    with monkeypatch.context() as patched:
        patched.setattr(begun.shell, "_feed", fed.append)
        os.kill(os.getpid(), signal.SIGUSR1)
        begun.shell.turn()
        assert StopRequested("SIGTERM") not in fed
        os.kill(os.getpid(), signal.SIGTERM)
        begun.turn_until(lambda: StopRequested("SIGTERM") in fed)
    signal.signal(signal.SIGUSR1, before)


def test_a_death_is_the_agents_to_tell(begun: Run) -> None:
    begun.ask(begun.register())
    worker = make_endpoint("model-0", term=1)
    begun.endpoint.admit(worker.peer(host="host-0"))
    worker.admit(begun.endpoint.peer(host="host-0"))
    told = worker.request("master-0", ProcessExited("agent-0", "a", -9), deadline_s=10.0)
    begun.turn_until(lambda: worker.poll(0.005) == [] and told.done)
    assert isinstance(told.error, RemoteError) and "model-0 may not send" in str(told.error)
    worker.close()


def test_a_damaged_journal_ends_the_run_with_a_summary_that_names_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(facts: object) -> None:
        raise StorageError("journal is damaged at offset 128")

    monkeypatch.setattr(run.shell._journal, "append", damaged)
    assert run.shell.run() == 1
    summary = read_summary(run.run_dir)
    assert summary is not None and summary.outcome == "failed"
    assert [(fault.process, fault.kind) for fault in summary.faults] == [("master-0", "StorageError")]
    assert "journal is damaged" in summary.faults[0].message


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "No space left on device"),
        (errno.EFBIG, "File too large"),
        (errno.EIO, "Input/output error"),
        (errno.EPERM, "Operation not permitted"),
        (errno.EROFS, "Read-only file system"),
    ],
    ids=lambda value: value if isinstance(value, str) else errno.errorcode[value],
)
def test_a_disk_that_does_not_take_the_journal_pauses_the_run_with_one_alert_and_it_goes_on_by_itself(
    begun: Run, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    monkeypatch.setattr("kintsugi.control.process.PAUSE_S", 0.01)
    begun.disk.fail(code=code, times=7)
    assert begun.ask(begun.register()).error is None
    assert begun.disk.num_failures == 0
    assert begun.joined() == ["agent-0"]
    (alert,) = begun.events(Alert)
    assert alert.startswith("paused, cause disk:") and words in alert
    assert begun.events(Note) == ["the journal can be written again, the run continues"]


@pytest.mark.parametrize("code", [errno.EIO, errno.EPERM])
def test_a_step_whose_sync_fails_is_committed_once_the_disk_takes_it(
    begun: Run, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr("kintsugi.control.process.PAUSE_S", 0.01)
    before, committed = read_facts(begun.run_dir / "journal"), (StepCommitted(1, "state 1"),)
    append = begun.shell._journal.append

    def append_and_break(facts: tuple[StepCommitted, ...]) -> None:
        append(facts)
        begun.disk.fail(code=code, times=3)

    with monkeypatch.context() as breaking:
        breaking.setattr(begun.shell._journal, "append", append_and_break)
        begun.shell._append(committed)
    assert read_facts(begun.run_dir / "journal") == before + committed
    assert begun.disk.num_failures == 0
    assert len(begun.events(Alert)) == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EPERM])
def test_a_paused_run_ends_when_nobody_is_left_who_could_end_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr("kintsugi.control.process.PAUSE_S", 0.01)
    run.disk.fail(code=code)
    run.end()
    assert run.shell.run() == 1


def break_with(run: Run, error: Exception) -> None:
    """Let the next thing that the master does raise."""

    def raise_it() -> None:
        raise error

    run.shell.turn = raise_it  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (KeyError("a bug"), 1, [("KeyError", "'a bug'")]),
        (DataError("rows.jsonl: expected rows"), 2, [("DataError", "rows.jsonl: expected rows")]),
        (
            KintsugiError("save failed", cause=Fault("f", "StorageError", "model-0", "disk full", 1.0)),
            1,
            [("StorageError", "disk full"), ("KintsugiError", "save failed")],
        ),
    ],
)
def test_a_master_that_breaks_ends_the_run_and_tells_why_the_cause_first(
    run: Run, error: Exception, code: int, told: list[tuple[str, str]]
) -> None:
    break_with(run, error)
    assert run.shell.run() == code
    faults = read_faults(run.run_dir, since=0.0)
    assert [(fault.kind, fault.message) for fault in faults] == told
    ended = read_facts(run.run_dir / "journal")[-1]
    assert isinstance(ended, RunEnded) and ended.outcome == "failed" and ended.fault is not None
    assert ended.fault.message == told[0][1]


def test_without_room_for_a_summary_the_journal_tells_why(run: Run) -> None:
    (run.run_dir / f".summary.json.{os.getpid()}.new").symlink_to("/dev/full")
    break_with(run, KeyError("a bug"))
    assert run.shell.run() == 1
    assert read_summary(run.run_dir) is None
    assert [fault.message for fault in read_faults(run.run_dir, since=0.0)] == ["'a bug'"]


def test_files_for_people_that_can_not_be_written_are_an_alert_once_and_the_run_goes_on(
    begun: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(step: int, values: dict[str, float]) -> None:
        raise StorageError("metrics.jsonl: No space left on device")

    with monkeypatch.context() as full:
        full.setattr(begun.shell._records._metrics, "write", refuse)
        for step in (1, 2):
            begun.shell._act(RecordEvaluation(step, {"eval/accuracy": 0.5}))
    told = "metrics.jsonl: No space left on device"
    assert begun.events(Alert) == [f"metrics can not be written, the run goes on without it: {told}"]
    begun.shell._act(RecordEvaluation(3, {"eval/accuracy": 0.5}))
    assert begun.events(Note) == ["metrics is written again"]
    assert begun.ask(begun.register()).error is None


def test_what_every_process_does_is_written_about_once_a_second(begun: Run) -> None:
    begun.ask(begun.register())
    begun.turn_until(lambda: (reports := read_processes(begun.run_dir)) and len(reports.processes) > 1)
    reports = read_processes(begun.run_dir)
    assert reports is not None
    by_name = {report.process: report for report in reports.processes}
    assert (by_name["master-0"].pid, by_name["agent-0"].status) == (os.getpid(), "live")


def test_processes_that_can_not_be_written_do_not_end_the_run(
    begun: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, data: bytes, *, durable: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kintsugi.telemetry.process_reports.write_atomically", refuse)
    begun.turn_until(lambda: begun.events(Alert))
    assert begun.ask(begun.register()).error is None
    assert read_processes(begun.run_dir) is None


@pytest.fixture
def succession(run: Run) -> Iterator[tuple[Run, Run]]:
    """A master that was stopped after its agent had come, and the one that takes over from it."""
    run.shell.begin()
    run.ask(run.register())
    successor = Run(run.run_dir, predecessor=run)
    yield run, successor
    for one in (successor, run):
        if one.shell._exit_code is None:
            one.shell._exit_code = 1  # It is killed: what it still hears does not matter.
            one.endpoint.close()
        one.shell.close()
    successor.let_go()


def test_a_new_master_greets_everybody_of_its_journal_who_learns_that_there_is_one(
    succession: tuple[Run, Run],
) -> None:
    _, successor = succession
    successor.shell.begin()
    books: list[AddressBook] = []

    def attempt(_: float) -> object | None:
        successor.shell.turn()
        heard = [one for one in successor.agent.poll(0.005) if one.envelope.term == 2]
        books.extend(one.body for one in heard if isinstance(one.body, AddressBook))
        return books or None

    wait(attempt, whom="the new master", what="its address book", timeout_s=10.0)
    assert [peer.process for peer in books[0].peers] == ["master-0"]
    assert books[0].since is not None
    terms = [fact for fact in read_facts(successor.run_dir / "journal") if isinstance(fact, TermStarted)]
    assert [(fact.term, fact.adopting) for fact in terms] == [(1, False), (2, True)]


def test_a_master_that_was_replaced_while_it_did_not_run_ends_without_a_word(
    succession: tuple[Run, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kintsugi.control.process.GOODBYE_S", 0.0)
    stopped, successor = succession
    successor.shell.begin()
    known = read_facts(successor.run_dir / "journal")

    def go_on() -> None:
        stopped.shell._feed(StopRequested("SIGTERM"))

    stopped.shell.begin = lambda: None  # type: ignore[method-assign]
    stopped.shell.turn = go_on  # type: ignore[method-assign]
    assert stopped.shell.run() == 1
    assert read_summary(stopped.run_dir) is None
    assert read_facts(successor.run_dir / "journal") == known
    assert any("replaced while it did not run" in note for note in stopped.events(Note))


def test_a_successor_begins_with_the_journal_that_its_predecessor_compacted(
    succession: tuple[Run, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kintsugi.control.process.COMPACTION_SIZE", 1)
    _, successor = succession
    successor.shell.begin()
    known, state = read_facts(successor.run_dir / "journal"), successor.shell._master.state
    successor.shell._compact()
    assert (successor.run_dir / "journal.1").exists()
    assert read_facts(successor.run_dir / "journal") == known
    facts: list[Fact] = []
    scan_facts(successor.run_dir / "journal", facts.append)
    assert facts == [state.fold()]
    assert successor.shell._journaled_state().fold() == state.fold()


def test_a_journal_that_can_not_be_compacted_is_reported_and_the_run_goes_on(
    begun: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kintsugi.control.process.COMPACTION_SIZE", 1)
    known = read_facts(begun.run_dir / "journal")
    begun.disk.fail(code=errno.ENOSPC, times=1)
    begun.shell._compact()
    assert begun.disk.num_failures == 0, "the disk was full when the journal was compacted"
    assert any("a compacted journal can not be written" in alert for alert in begun.events(Alert))
    assert read_facts(begun.run_dir / "journal") == known
    begun.shell._compact()
    assert (begun.run_dir / "journal.1").exists()


def step_taken() -> Decision:
    ticket = Ticket("grpo:0:0:0", "grpo", 0, 0, 0, 2)
    metas = scored(ticket, version=0).samples
    record = RecordStep(1, "grpo", metas, {}, {}, {"loss": 0.5}, {}, ())
    return Decision((StepCommitted(1, "state 1"),), (record,), "")


def test_what_people_read_about_a_step_is_written_before_its_fact_and_cut_off_if_the_fact_never_came(
    succession: tuple[Run, Run],
) -> None:
    stopped, successor = succession
    with pytest.raises(FencedError):
        stopped.shell._carry_out(step_taken())
    written = [stopped.run_dir / name for name in ("metrics.jsonl", "samples.jsonl")]
    assert all(path.read_text() for path in written)
    assert not any(isinstance(fact, StepCommitted) for fact in read_facts(successor.run_dir / "journal"))
    successor.shell.begin()
    assert [path.read_text() for path in written] == ["", ""]


def test_an_input_whose_decision_a_dying_master_did_not_journal_is_left_out_of_a_replay(
    succession: tuple[Run, Run],
) -> None:
    stopped, successor = succession
    gone = Suspected("agent-0", "a", "nothing there speaks", "host", HOST_LOST_S)
    with pytest.raises(FencedError):
        stopped.shell._take(gone)
    successor.shell.begin()
    assert gone in [one.event for one in read_inputs(successor.run_dir / "inputs")]
    again, journaled = replay(successor.run_dir)
    assert again == journaled


class OneSuspicion(FailureDetector):
    """A watch that finds something once."""

    def __init__(self, suspected: Suspected) -> None:
        super().__init__()
        self._suspected = [suspected]

    def check(self, now: float, pending: PendingRequests) -> list[Suspected]:
        found, self._suspected = self._suspected, []
        return found


def test_what_the_watch_suspects_is_an_input_like_any_other_and_a_recorded_run_gives_the_same_facts(
    begun: Run,
) -> None:
    begun.ask(begun.register())
    gone = Suspected("agent-0", "a", "no process of it answers", "host", HOST_LOST_S)
    begun.shell._detector = OneSuspicion(gone)
    begun.turn_until(lambda: not begun.shell._master.state.members.is_live("agent-0"))
    recorded = [one.event for one in read_inputs(begun.run_dir / "inputs")]
    (event,) = [event for event in recorded if isinstance(event, Suspected)]
    assert msgspec.structs.replace(event, time=0.0) == gone and event.time > 0.0
    again, journaled = replay(begun.run_dir)
    assert again == journaled and any(isinstance(fact, ProcessLost) for fact in journaled)


def test_a_host_is_lost_at_once_when_the_host_manager_is_certain(begun: Run) -> None:
    begun.ask(begun.register())
    begun.shell._detector = OneSuspicion(Suspected("agent-0", "a", "its node is down", "host", certain=True))
    begun.turn_until(lambda: not begun.shell._master.state.members.is_live("agent-0"))
    faults = [fact.fault for fact in read_facts(begun.run_dir / "journal") if isinstance(fact, ProcessLost)]
    assert any(fault.kind == "HostLost" and "its node is down" in fault.message for fault in faults)


def test_a_notice_about_another_agent_of_a_host_is_dropped(begun: Run) -> None:
    begun.ask(begun.register())
    path = give_notice(begun.run_dir, HostNotice("agent-0", 10_000, 19_999, "an earlier ticket"))
    begun.turn_until(lambda: not path.exists())
    assert begun.shell._master.state.members.is_live("agent-0")


def test_time_that_leads_to_nothing_is_an_input_too(begun: Run) -> None:
    """Whom a request could not reach may be asked again after it: without it, a recorded run would ask others."""
    ticks = begun.shell._next_tick
    begun.turn_until(lambda: begun.shell._next_tick > ticks)
    assert any(isinstance(one.event, Tick) for one in read_inputs(begun.run_dir / "inputs"))


def test_a_request_lies_where_it_is_until_the_run_has_begun(begun: Run) -> None:
    name = UserRequests(begun.run_dir).submit(servers=3)
    ticks = begun.shell._next_tick
    begun.turn_until(lambda: begun.shell._next_tick > ticks)
    assert UserRequests(begun.run_dir).is_waiting(name)


def test_a_request_goes_only_when_the_answer_to_it_is_durable(begun: Run) -> None:
    begun.ask(begun.register())
    begun.shell._master.phase = Phase.COLLECTING
    name = UserRequests(begun.run_dir).submit(servers=3)
    begun.disk.fail(code=errno.ENOSPC, times=1)
    begun.turn_until(lambda: not UserRequests(begun.run_dir).is_waiting(name))
    assert begun.disk.num_failures == 0, "the disk was full when the answer was journaled"
    facts = read_facts(begun.run_dir / "journal")
    assert [fact for fact in facts if isinstance(fact, ServersScaled)] == [ServersScaled(name, 3)]
    assert {"server-2"} == {fact.process for fact in facts if isinstance(fact, ProcessRequested)} - {
        plan.process for plan in plan_layout(begun.config)
    }
