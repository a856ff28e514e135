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

from kintsugi.bootstrap import Bootstrap
from kintsugi.config import Config
from kintsugi.control.journal import read_facts
from kintsugi.control.protocol import RecordEvaluation
from kintsugi.control.shell import MasterShell
from kintsugi.disk import SystemDisk, SystemFile
from kintsugi.errors import DataError, Fault, KintsugiError, RemoteError, StorageError
from kintsugi.facts import ProcessJoined, RunEnded
from kintsugi.messages import Body, ProcessExited, Register
from kintsugi.observe.events import Alert, Note, read_events
from kintsugi.observe.processes import read_processes
from kintsugi.recipe import dump, load
from kintsugi.runs import read_faults, read_summary
from kintsugi.runtime import wait
from kintsugi.transport import Endpoint, PendingReply, new_key_pair
from kintsugi.types import Peer, Role
from tests.unit.transport.harness import make_endpoint

RECIPE = Path(__file__).parents[3] / "recipes" / "grpo_arithmetic.yaml"


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
    """The machine's, until it is full."""

    def __init__(self) -> None:
        self.full = False

    def check(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open(self, path: Path, *, create: bool = False) -> FailingFile:
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o644)
        return FailingFile(self, descriptor)


class Run:
    """A master of a new run, and the one agent that it knows."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.disk = FailingDisk()
        self.config: Config = load(RECIPE, [f"run_dir={run_dir}"]).config
        dump(self.config, run_dir / "config.yaml")
        self.agent = make_endpoint("agent-0", epoch=1)
        public_key, secret_key = new_key_pair()
        self._lifeline = list(os.pipe())
        bootstrap = Bootstrap(
            job="job",
            run_dir=str(run_dir),
            process="master-0",
            role=Role.MASTER,
            host="host-0",
            incarnation="m",
            public_key=public_key,
            secret_key=secret_key,
            master=Peer("master-0", "m", "host-0", "", public_key),
            lifeline=self._lifeline[0],
            peers=(msgspec.structs.replace(self.agent.peer(host="host-0"), address=""),),
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
        return [event.message for event in records if isinstance(event, Alert | Note) and type(event) is kind]

    def end(self) -> None:
        """Let the master see that launcher and agent are gone."""
        os.close(self._lifeline.pop())

    def close(self) -> None:
        self.agent.close()
        for descriptor in self._lifeline:
            os.close(descriptor)


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


def test_a_death_is_the_agents_to_tell(begun: Run) -> None:
    begun.ask(begun.register())
    worker = make_endpoint("model-0", epoch=1)
    begun.endpoint.admit(worker.peer(host="host-0"))
    worker.admit(begun.endpoint.peer(host="host-0"))
    told = worker.request("master-0", ProcessExited("agent-0", "a", -9), deadline_s=10.0)
    begun.turn_until(lambda: worker.poll(0.005) == [] and told.done)
    assert isinstance(told.error, RemoteError) and "does not answer ProcessExited" in str(told.error)
    worker.close()


def test_a_journal_that_can_not_be_written_ends_the_run_with_a_summary_that_names_the_disk(run: Run) -> None:
    run.disk.full = True
    assert run.shell.run() == 1
    summary = read_summary(run.run_dir)
    assert summary is not None and summary.outcome == "failed"
    assert [(fault.process, fault.kind) for fault in summary.faults] == [("master-0", "StorageError")]
    assert "journal on disk" in summary.faults[0].message and "No space left" in summary.faults[0].message


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
    (run.run_dir / "summary.tmp").symlink_to("/dev/full")
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
        full.setattr(begun.shell._metrics, "write", refuse)
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


def test_processes_that_can_not_be_written_do_not_end_the_run(begun: Run) -> None:
    (begun.run_dir / "processes.new").symlink_to("/dev/full")
    begun.turn_until(lambda: begun.events(Alert))
    assert begun.ask(begun.register()).error is None
    assert read_processes(begun.run_dir) is None
