"""Births, with the test as the template: it answers, or does not."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest

from kintsugi.cluster.child import ChildProcess
from kintsugi.cluster.fork_server import Forked, ImportsDone
from kintsugi.cluster.handover import Programs
from kintsugi.cluster.process_factory import FORK_S, IMPORT_S, ProcessFactory
from kintsugi.cluster.spawn import StartOrder
from kintsugi.errors import StartFailed, StartKilled
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.runtime.processes import Child, SystemProcesses
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.types import Peer, Placement, Role


class GoneAtOnce(SystemProcesses):
    """Every process has ended, and its remains are gone, before it can be held."""

    def adopt(self, pid: int) -> Child:
        raise ProcessLookupError(pid)


class Parent:
    def __init__(self) -> None:
        self.failures: list[StartFailed] = []

    def known_pids(self) -> set[int]:
        return set()

    def fork_server_changed(self) -> None:
        pass

    def on_spawned(self, child: ChildProcess) -> None:
        raise AssertionError(f"{child.process} was born")

    def on_started(self, child: ChildProcess) -> None:
        raise AssertionError(f"{child.process} was started")

    def on_start_failed(self, child: ChildProcess, error: StartFailed) -> None:
        self.failures.append(error)


class World:
    """A nursery that has adopted a template, whose end of the connection is `template`; it is its loop, too."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._callbacks: dict[int, Callable[[], None]] = {}
        self.clock, self.parent = VirtualClock(), Parent()
        name = f"kintsugi-test-{uuid4().hex}"
        self.factory = ProcessFactory(
            self,
            parent=self.parent,
            programs=Programs(entries={}, preload=("json",), forked=(Role.MODEL,)),
            processes=GoneAtOnce(),
            own=self._bootstrap("agent-0", Role.AGENT),
            num_spares=0,
            fork_server_name=name,
            lifeline=-1,
            clock=self.clock,
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0{name}")
            listener.listen()
            self.factory.adopt_fork_server(SystemProcesses().spawn(["sleep", "60"]))
            (self._spoken_to,) = self._callbacks
            self.fork_server, _ = listener.accept()

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        self._callbacks[descriptor] = callback

    def unwatch(self, descriptor: int) -> None:
        del self._callbacks[descriptor]

    def say(self, answer: ImportsDone | Forked) -> None:
        self.fork_server.send(msgspec.msgpack.encode(answer))
        self._callbacks[self._spoken_to]()

    def _bootstrap(self, process: str, role: Role) -> Bootstrap:
        return Bootstrap(
            job="job",
            run_dir=str(self._run_dir),
            process=process,
            role=role,
            host="host-0",
            incarnation="a",
            public_key=b"",
            secret_key=b"",
            master=Peer("master-0", "a", "host-0", "", b""),
            lifeline=-1,
        )

    def order(self) -> ChildProcess:
        bootstrap = self._bootstrap("model-0", Role.MODEL)
        start = StartOrder(program="module:main", placement=Placement(), bootstrap=bootstrap, report=-1)
        child = ChildProcess.ordered(start, request=None)
        self.factory.start_child(child)
        return child

    def is_late(self) -> bool:
        return self.factory.fork_server_is_late(self.clock.monotonic())


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.factory.close()
    world.fork_server.close()


def test_a_child_that_is_gone_before_it_can_be_held_has_failed_to_start(world: World) -> None:
    child = world.order()
    world.say(Forked(pid=os.getpid()))
    (error,) = world.parent.failures
    assert isinstance(error, StartKilled)
    assert not world.factory.is_forking
    world.factory.close_report(child)


def test_a_template_that_is_asked_and_says_nothing_is_late(world: World) -> None:
    world.clock.advance(10 * IMPORT_S)
    assert not world.is_late(), "nobody has asked it"
    world.order()
    world.clock.advance(IMPORT_S - 1)
    assert not world.is_late()
    world.say(ImportsDone())
    world.clock.advance(FORK_S - 1)
    assert not world.is_late(), "it was busy importing until a moment ago"
    world.clock.advance(2)
    assert world.is_late()


def test_a_template_that_never_ends_importing_is_late(world: World) -> None:
    world.order()
    world.clock.advance(IMPORT_S + 1)
    assert world.is_late()
