"""Births, with the test as the template: it answers, or does not."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest

from kintsugi.bootstrap import Bootstrap
from kintsugi.cluster.children import Kept
from kintsugi.cluster.handover import Programs
from kintsugi.cluster.nursery import FORK_S, IMPORT_S, Nursery
from kintsugi.cluster.placement import Start
from kintsugi.cluster.template import Forked, Imported
from kintsugi.errors import StartFailed, StartKilled
from kintsugi.runtime import Child, SystemProcesses, VirtualClock
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

    def template_changed(self) -> None:
        pass

    def born(self, kept: Kept) -> None:
        raise AssertionError(f"{kept.process} was born")

    def started(self, kept: Kept) -> None:
        raise AssertionError(f"{kept.process} was started")

    def start_failed(self, kept: Kept, error: StartFailed) -> None:
        self.failures.append(error)


class World:
    """A nursery that has adopted a template, whose end of the connection is `template`; it is its loop, too."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._callbacks: dict[int, Callable[[], None]] = {}
        self.clock, self.parent = VirtualClock(), Parent()
        name = f"kintsugi-test-{uuid4().hex}"
        self.nursery = Nursery(
            self,
            parent=self.parent,
            programs=Programs(entries={}, preload=("json",), forked=(Role.MODEL,)),
            processes=GoneAtOnce(),
            own=self._bootstrap("agent-0", Role.AGENT),
            num_spares=0,
            template_name=name,
            lifeline=-1,
            clock=self.clock,
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0{name}")
            listener.listen()
            self.nursery.adopt_template(SystemProcesses().spawn(["sleep", "60"]))
            (self._spoken_to,) = self._callbacks
            self.template, _ = listener.accept()

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        self._callbacks[descriptor] = callback

    def unwatch(self, descriptor: int) -> None:
        del self._callbacks[descriptor]

    def say(self, answer: Imported | Forked) -> None:
        self.template.send(msgspec.msgpack.encode(answer))
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

    def order(self) -> Kept:
        bootstrap = self._bootstrap("model-0", Role.MODEL)
        start = Start(program="module:main", placement=Placement(), bootstrap=bootstrap, report=-1)
        kept = Kept.ordered(start, request=None)
        self.nursery.bring_up(kept)
        return kept

    def is_late(self) -> bool:
        return self.nursery.template_is_late(self.clock.monotonic())


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.nursery.close()
    world.template.close()


def test_a_child_that_is_gone_before_it_can_be_held_has_failed_to_start(world: World) -> None:
    kept = world.order()
    world.say(Forked(pid=os.getpid()))
    (error,) = world.parent.failures
    assert isinstance(error, StartKilled)
    assert not world.nursery.is_forking
    world.nursery.let_go(kept)


def test_a_template_that_is_asked_and_says_nothing_is_late(world: World) -> None:
    world.clock.advance(10 * IMPORT_S)
    assert not world.is_late(), "nobody has asked it"
    world.order()
    world.clock.advance(IMPORT_S - 1)
    assert not world.is_late()
    world.say(Imported())
    world.clock.advance(FORK_S - 1)
    assert not world.is_late(), "it was busy importing until a moment ago"
    world.clock.advance(2)
    assert world.is_late()


def test_a_template_that_never_ends_importing_is_late(world: World) -> None:
    world.order()
    world.clock.advance(IMPORT_S + 1)
    assert world.is_late()
