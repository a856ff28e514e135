"""Faults on a host of other machines: what is changed there is undone there, whatever is killed meanwhile."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from kintsugi.config.schema import ClusterSection, Config
from kintsugi.errors import DeadlineExceeded, UserError
from kintsugi.lab.injector.fault_process import PeerPorts
from kintsugi.lab.injector.host_faults import FOLDERS
from kintsugi.lab.injector.injection import Ability, Injection
from kintsugi.lab.injector.remote_fault import RemoteFault
from kintsugi.lab.testbed import remote_hosts
from kintsugi.lab.testbed.remote_hosts import RemoteHosts, refusals
from kintsugi.lab.testbed.remote_orders import PROGRAM, FaultOrder
from kintsugi.run_folder.layout import RunFolder
from tests.cluster.tiny_runs import until
from tests.unit.lab.test_remote_hosts import Machine

HOST = "host-2"
FULL = Injection(ability=Ability.DEVICE_MEMORY, target="model-0", amount={"share": 1.0}, duration_s=30.0)
CONFIG = Config(name="lab", cluster=ClusterSection(on="hosts.txt", hosts=3))


class Bench:
    """A machine of a run, and the laboratory's connection to the program on it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine = Machine(folder / "scratch")
        command = [sys.executable, *PROGRAM, HOST, str(self.machine.scratch)]
        monkeypatch.setattr(remote_hosts, "commands_of", lambda config: {HOST: command})
        hosts = RunFolder(folder).hosts_file
        hosts.parent.mkdir(parents=True, exist_ok=True)
        hosts.write_bytes(msgspec.json.encode({"job": "run1"}))
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        monkeypatch.setenv("TMPDIR", str(self.temporary))
        self.usual = self.limit
        self.remote = RemoteHosts(CONFIG, run_dir=folder)

    @property
    def limit(self) -> int:
        """Limit of the data of the target, which the fault lowers."""
        return resource.prlimit(self.machine.child, resource.RLIMIT_DATA)[0]

    def begin(self) -> RemoteFault:
        fault = RemoteFault(self.remote, HOST, FULL, pid=self.machine.child)
        fault.go()
        assert [
            report and report.what
            for report in (fault.receive(timeout_s=20.0), fault.receive(timeout_s=20.0))
        ] == [
            "ready",
            "began",
        ]
        assert self.limit != self.usual, "the fault has fired"
        return fault

    def until_undone(self) -> None:
        until(lambda: self.limit == self.usual, "the usual limit")

    def programs(self, text: str) -> list[psutil.Process]:
        """Processes below this one with a text in their command."""
        found = []
        for each in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                found += [each] if text in " ".join(each.cmdline()) else []
        return found

    def reapers(self) -> list[int]:
        """Pids of the reapers of this machine; one that has lost its program is the child of another process."""
        found = []
        for each in psutil.process_iter():
            with suppress(psutil.Error):
                found += [each.pid] if str(self.temporary) in " ".join(each.cmdline()) else []
        return found

    def journals(self) -> list[Path]:
        return list(self.temporary.glob(f"{FOLDERS}-*"))

    def close(self) -> None:
        self.remote.close()
        self.machine.close()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(tmp_path, monkeypatch)
    yield made
    made.close()


def test_a_fault_begins_on_its_host_and_is_undone_and_measured_at_its_end(bench: Bench) -> None:
    fault = bench.begin()
    fault.end()
    report = fault.receive(timeout_s=20.0)
    assert report is not None and report.what == "ended" and report.measured["limit_bytes"] > 0
    assert bench.limit == bench.usual
    fault.close()
    bench.remote.close()
    assert bench.journals() == []


def test_a_process_of_another_run_gets_no_fault(bench: Bench) -> None:
    with pytest.raises(UserError, match=r"on host-2: process \d+ has ended, or belongs to another run"):
        RemoteFault(bench.remote, HOST, FULL, pid=os.getpid())


def test_what_a_killed_injector_did_is_undone_on_its_host(bench: Bench) -> None:
    bench.begin()
    (injector,) = bench.programs("injector_process")
    injector.kill()
    bench.until_undone()


def test_a_killed_program_and_injector_leave_the_undo_to_the_reaper_of_the_host(bench: Bench) -> None:
    bench.begin()
    for text in ("injector_process", "host-signals"):
        for process in bench.programs(text):
            process.kill()
    bench.until_undone()


def test_a_lost_connection_undoes_everything_and_the_fault_says_so(bench: Bench) -> None:
    fault = bench.begin()
    bench.remote._connections[HOST].close(timeout_s=10.0)
    del bench.remote._connections[HOST]
    assert bench.limit == bench.usual
    assert bench.journals() == []
    fault.end()
    report = fault.receive(timeout_s=20.0)
    assert report is not None and "the connection to this host was lost" in report.why


def test_the_next_program_removes_the_journal_of_one_that_was_killed(bench: Bench) -> None:
    bench.begin()
    (program,) = bench.programs("host-signals")
    (journal,) = bench.journals()
    program.kill()
    bench.until_undone()
    until(lambda: not bench.reapers(), "the end of the reaper")
    assert bench.journals() == [journal]
    fault = bench.begin()
    assert journal not in bench.journals()
    fault.close()


def test_ports_are_told_of_processes_of_the_run_only(bench: Bench) -> None:
    assert bench.remote.ports_of(HOST, bench.machine.child) == frozenset()
    assert bench.remote.ports_of(HOST, os.getpid()) == frozenset()


def test_a_fault_that_a_host_can_not_inject_is_refused_with_its_reason(bench: Bench) -> None:
    assert refusals(CONFIG, [(HOST, FULL)]) == {}
    slow = msgspec.structs.replace(FULL, mechanism="magic")
    (why,) = refusals(CONFIG, [(HOST, slow)]).values()
    assert why.startswith("mechanism: device_memory has none named 'magic'")
    killed = Injection(ability=Ability.KILL, target="model-0", mechanism="magic")
    assert refusals(CONFIG, [(HOST, killed)]) == {}, "a signal needs no question"


def test_a_host_that_does_not_answer_is_named(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(remote_hosts, "commands_of", lambda config: {HOST: ["false"]})
    silent = RemoteHosts(CONFIG, run_dir=tmp_path)
    answer = silent.order_fault(HOST, FaultOrder(do="probe", injection=FULL))
    assert answer.why == "host-2 does not answer"
    silent.close()


def test_changed_ports_of_the_other_end_are_told_and_unknown_ones_are_not() -> None:
    looks = iter([{80}, {80}, None, {81}])
    told: list[list[int]] = []
    ports = PeerPorts(lambda: next(looks, {81}), lambda found: told.append(sorted(found)))
    until(lambda: len(told) == 2, "both sets of ports")
    ports.close()
    assert told == [[80], [81]]


def test_a_host_that_begins_a_fault_late_does_not_hold_the_laboratory(bench: Bench) -> None:
    """The master is held meanwhile, and one that is held for a second is found to be stopped."""
    fault = RemoteFault(bench.remote, HOST, FULL, pid=bench.machine.child)
    assert fault.receive(timeout_s=20.0) is not None
    (program,) = bench.programs("host-signals")
    program.suspend()
    fault.go()
    with pytest.raises(DeadlineExceeded):
        fault.receive(timeout_s=fault.longest_hold_s)
    program.resume()
    report = fault.receive(timeout_s=20.0)
    assert report is not None and report.what == "began" and bench.limit != bench.usual
    fault.close()
