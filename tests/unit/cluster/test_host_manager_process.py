"""The launcher's handle of the host manager: everything that its successors start with is made once."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from kintsugi.cluster import host_manager_process
from kintsugi.cluster.handover import PROGRAMS
from kintsugi.cluster.host_manager import open_backend
from kintsugi.cluster.host_manager_process import HostManagerProcess, ManagerHandover
from kintsugi.config.schema import ClusterSection, Config
from kintsugi.errors import ConfigError
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.runtime.processes import SystemProcesses
from kintsugi.types import Peer, Role

LINES = "b 203.0.113.2 gpus=8\nc me@203.0.113.3\n"
"""Two machines, at addresses that are reserved for documentation."""


def agent(number: int) -> Bootstrap:
    master = Peer("", "", "", "", b"")
    return Bootstrap("job", "run", f"agent-{number}", Role.AGENT, f"host-{number}", "0", b"", b"", master, -1)


class Ended:
    """A host manager that has ended for lack of something."""

    pid = 2**22 - 1

    def ended(self) -> bool:
        return True

    def wait_ended(self, **given: object) -> None:
        """It has."""

    def status(self) -> int:
        return 2

    def close(self) -> None:
        """There is nothing to release."""


class Run:
    """A run on the hosts of a file, whose host managers end as soon as they are started."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hosts_file = folder / "hosts.txt"
        self.hosts_file.write_text(LINES)
        self.config = Config(name="a", cluster=ClusterSection(on=str(self.hosts_file)))
        self.started: list[ManagerHandover] = []
        self._opened: list[HostManagerProcess] = []
        self._folder = folder
        self._lifeline = os.pipe2(os.O_CLOEXEC)
        monkeypatch.setattr(host_manager_process, "execute", self._execute)

    def open(self, *, num_hosts: int = 2) -> HostManagerProcess:
        process = HostManagerProcess(
            self.config,
            run_dir=self._folder,
            agents=tuple(agent(number + 1) for number in range(num_hosts)),
            programs=PROGRAMS,
            address="127.0.0.1",
            lifeline=self._lifeline[0],
            processes=SystemProcesses(),
        )
        self._opened.append(process)
        return process

    def _execute(self, processes: object, program: Sequence[str], **given: object) -> Ended:
        with open(os.dup(int(program[1])), "rb") as handed_over:
            self.started.append(msgspec.msgpack.decode(handed_over.read(), type=ManagerHandover))
        return Ended()

    def close(self) -> None:
        for process in self._opened:
            process.close()
        for descriptor in self._lifeline:
            os.close(descriptor)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    made = Run(tmp_path, monkeypatch)
    try:
        yield made
    finally:
        made.close()


def no_names(*given: object, **named: object) -> object:
    raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


@pytest.mark.parametrize(
    "happens",
    [
        lambda file, patch: file.write_text("x 203.0.113.9\n"),
        lambda file, patch: file.unlink(),
        lambda file, patch: patch.setattr(socket, "getaddrinfo", no_names),
    ],
    ids=["the file is changed", "the file is removed", "names do not resolve"],
)
def test_a_successor_goes_on_with_the_machines_of_its_predecessor(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[Path, pytest.MonkeyPatch], object],
) -> None:
    manager = run.open()
    assert manager.ensure_running(0.0)
    happens(run.hosts_file, monkeypatch)
    for now in (1.0, 100.0):
        assert manager.ensure_running(now)
    first, successor = run.started[0], run.started[-1]
    assert len(run.started) > 1 and successor.machines == first.machines
    _, needs, names = open_backend(run.config, job="job", machines=successor.machines)
    assert names == {"host-1": "b, 203.0.113.2", "host-2": "c, me@203.0.113.3"}
    assert needs["host-1"].gpus == 8


def test_a_hosts_file_with_fewer_machines_than_the_run_has_is_refused_and_further_ones_are_left_out(
    run: Run,
) -> None:
    with pytest.raises(ConfigError, match=r"expected 3 machines besides this one, .* found 2"):
        run.open(num_hosts=3)
    run.open(num_hosts=1).ensure_running(0.0)
    assert [machine.name for machine in run.started[0].machines] == ["b"]


def test_an_engine_places_the_hosts_without_a_file(run: Run) -> None:
    run.config = Config(name="a", cluster=ClusterSection(on="k8s"))
    run.open().ensure_running(0.0)
    assert run.started[0].machines == ()
