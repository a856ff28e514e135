"""Processes that wait for a part: who takes them, who makes new ones, and that none is ever left."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kintsugi.cluster.child import ChildProcess
from kintsugi.cluster.orphans import children_of
from kintsugi.cluster.restart_policy import MOST_RESTARTS
from kintsugi.cluster.spares import MOST_FAILURES, PREPARE_S, RESTOCK_S, Spares
from kintsugi.cluster.spawn import PREPARED, StartOrder
from kintsugi.errors import StartFailed
from kintsugi.protocol.agents import ProcessStarted
from kintsugi.runtime.proc import process_start_time
from kintsugi.runtime.processes import Child, SystemProcesses
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.events import Alert, read_events
from kintsugi.types import Placement
from tests.unit.cluster.conftest import bootstrap_of_an_agent, until

MakeHost = Callable[..., Any]


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def prepared_spare(host: Any, *, number: int = 1) -> int:
    """Pid of the only spare there is, once so many have been prepared."""
    until(
        lambda: host.turn() and host.counters.get("agent.spares_prepared", 0) >= number,
        f"{number} prepared spares",
    )
    (pid,) = [pid for pid in children_of(host.agent.pid) if name_of(pid).startswith("spare-")]
    return pid


def test_a_spare_becomes_what_is_ordered_and_another_one_takes_its_place(make_host: MakeHost) -> None:
    host = make_host(preload=("json",), spares=1, model="describe_itself")
    spare = prepared_spare(host)
    started = host.start("model-0", placement=Placement(nice=3, limits={"NOFILE": 512}))
    assert started.pid == spare
    seen = host.wrote("model-0", "placement")
    assert (seen["name"], seen["nice"], seen["open_files"]) == ("model-0", 3, [512, 512])
    assert seen["session"] and seen["parent"] == host.agent.pid
    assert not [target for target in seen["descriptors"].values() if "logs/spare" in target]
    kinds = sorted(target.partition(":")[0] for target in seen["descriptors"].values() if ":" in target)
    assert kinds == ["pipe"], "of all that it was given it keeps the lifeline"
    assert prepared_spare(host, number=2) != spare
    os.kill(started.pid, signal.SIGKILL)
    exited = host.exit_of("model-0")
    assert (exited.incarnation, exited.status) == (started.incarnation, -signal.SIGKILL)


@pytest.mark.slow
def test_a_spare_knows_no_key_before_it_is_taken(make_host: MakeHost) -> None:
    host = make_host(preload=("json",), spares=1, model="idle")
    spare = prepared_spare(host)
    environment = Path(f"/proc/{spare}/environ").read_bytes() + Path(f"/proc/{spare}/cmdline").read_bytes()
    started = host.start("model-0")
    assert started.pid == spare
    after = Path(f"/proc/{spare}/environ").read_bytes() + Path(f"/proc/{spare}/cmdline").read_bytes()
    assert after == environment and started.public_key not in environment


def test_what_a_running_process_can_not_take_on_is_started_anew(make_host: MakeHost) -> None:
    host = make_host(preload=("json",), spares=1, model="describe_itself", rollout="idle")
    spare = prepared_spare(host)
    started = host.start("model-0", placement=Placement(environment={"FLAVOUR": "sweet"}))
    assert host.wrote("model-0", "placement")["flavour"] == "sweet"
    assert spare not in (started.pid, host.start("rollout-0").pid), "rollout workers need no device"
    assert host.start("model-1").pid == spare


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)],
    ids=["killed", "stopped"],
)
def test_a_spare_that_is_lost_is_replaced(make_host: MakeHost, number: int) -> None:
    host = make_host(preload=("json",), spares=1, model="idle")
    first = prepared_spare(host)
    os.kill(first, number)
    second = prepared_spare(host, number=2)
    assert second != first and process_start_time(first) is None
    assert host.start("model-0").pid == second


@pytest.mark.slow
def test_spares_end_with_their_agent_and_its_successor_makes_new_ones(make_host: MakeHost) -> None:
    host = make_host(preload=("json",), spares=1, model="idle")
    taken, spare = host.start("model-0"), prepared_spare(host)
    host.replace_agent()
    until(lambda: process_start_time(spare) is None, "the end of the first agent's spare")
    host.counters = {}
    until(
        lambda: host.turn() and host.counters.get("agent.spares_prepared", 0) >= 1,
        "a spare of the second agent",
    )
    assert process_start_time(taken.pid) is not None
    assert host.start("model-1").pid != spare


@pytest.mark.slow
def test_spares_that_can_not_be_prepared_hinder_nobody(make_host: MakeHost) -> None:
    host = make_host(preload=("json",), spares=1, prepare="prepare_in_vain", model="idle")
    until(lambda: host.turn() and host.counters.get("agent.spares_lost", 0) >= 1, "a spare that ended")
    assert isinstance(host.start("model-0"), ProcessStarted)
    assert "spare-0 can not be prepared" in (host.run_dir / "logs" / "spare-0.log").read_text()


class Births:
    """Gives every spare a process that sleeps; its end of the socket is the test's."""

    def __init__(self) -> None:
        self.spares: Spares | None = None
        self.orders: list[socket.socket] = []
        self.children: list[Child] = []
        self.starts: list[StartOrder] = []
        self.unwilling = False

    def start_child(self, child: ChildProcess) -> None:
        assert self.spares is not None and child.start is not None
        self.starts.append(child.start)
        self.orders.append(socket.socket(fileno=os.dup(child.start.orders)))
        if self.unwilling:
            self.spares.on_start_failed(
                child, StartFailed(process=child.process, phase="starting", why="no processes left")
            )
            return
        pid = os.posix_spawnp("sleep", ["sleep", "60"], os.environ)
        child.handle = SystemProcesses().adopt(pid)
        self.children.append(SystemProcesses().adopt(pid))
        self.spares.on_spawned(child)

    def close_report(self, child: ChildProcess) -> None:
        pass


class World:
    """A pool of one spare, with the test as its loop and its clock."""

    def __init__(self, run_dir: Path, *, number: int = 1) -> None:
        self.callbacks: dict[int, Callable[[], None]] = {}
        self.clock, self.factory = VirtualClock(), Births()
        self.bootstrap = bootstrap_of_an_agent(run_dir)
        self.spares = Spares(
            self, number=number, own=self.bootstrap, program="a:b", factory=self.factory, clock=self.clock
        )
        self.factory.spares = self.spares

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        assert descriptor not in self.callbacks
        self.callbacks[descriptor] = callback

    def unwatch(self, descriptor: int) -> None:
        del self.callbacks[descriptor]

    def _turn(self) -> None:
        poller = select.poll()
        for descriptor in self.callbacks:
            poller.register(descriptor, select.POLLIN)
        for descriptor, _ in poller.poll(0):
            self.callbacks[descriptor]()

    def maintain(self, *stopped: int, seconds: float = 0.0, can_start: bool = True) -> None:
        self.clock.advance(seconds)
        self.spares.maintain(stopped, self.clock.monotonic(), can_start=can_start)

    def prepare(self) -> None:
        self.factory.orders[-1].send(PREPARED)
        self._turn()

    def end(self, child: Child) -> None:
        child.send_signal(signal.SIGKILL)
        until(child.ended, "the end of a spare")
        self._turn()

    def start(self) -> StartOrder:
        return StartOrder(program="a:b", placement=Placement(), bootstrap=self.bootstrap, report=-1)

    def close(self) -> None:
        self.spares.close()
        assert self.callbacks == {}
        for orders in self.factory.orders:
            orders.close()
        for child in self.factory.children:
            child.send_signal(signal.SIGKILL)
            child.wait_ended(whom="spare", timeout_s=10.0)
            child.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def test_a_spare_is_given_only_when_it_is_prepared_and_only_once(world: World) -> None:
    world.maintain()
    assert world.spares.take(world.start()) is None
    world.prepare()
    given = world.spares.take(world.start())
    assert given is not None and world.spares.pids == set()
    content, _, _, _ = socket.recv_fds(world.factory.orders[0], 65536, 8)
    assert msgspec.msgpack.decode(content, type=StartOrder) == world.start()
    assert world.spares.take(world.start()) is None
    given.close()


def test_a_spare_is_told_no_secret_when_it_is_made(world: World) -> None:
    world.maintain()
    (start,) = world.factory.starts
    assert world.bootstrap.secret_key not in msgspec.msgpack.encode(start)


def test_a_new_spare_waits_until_the_start_that_took_the_last_had_its_moment(world: World) -> None:
    world.maintain()
    world.prepare()
    world.spares.postpone()
    given = world.spares.take(world.start())
    assert given is not None
    world.maintain(seconds=RESTOCK_S / 2)
    assert len(world.factory.children) == 1
    world.maintain(seconds=RESTOCK_S)
    assert len(world.factory.children) == 2
    given.close()


def test_none_is_made_while_nobody_could_be_forked(world: World) -> None:
    world.maintain(can_start=False)
    assert world.factory.children == []


def test_a_spare_that_is_never_prepared_or_stands_still_is_ended(world: World) -> None:
    world.maintain()
    world.maintain(seconds=PREPARE_S + 1, can_start=False)
    until(world.factory.children[0].ended, "the end of a spare that hangs")
    world.end(world.factory.children[0])
    world.maintain(seconds=RESTOCK_S)
    world.prepare()
    world.maintain(world.factory.children[1].pid, can_start=False)
    until(world.factory.children[1].ended, "the end of a spare that stands still")


def test_spares_that_always_end_once_prepared_are_made_at_a_bounded_rate(world: World) -> None:
    for _ in range(10 * MOST_RESTARTS):
        world.maintain(seconds=RESTOCK_S / 10)
        if world.spares.pids:
            world.prepare()
            world.end(world.factory.children[-1])
    assert MOST_FAILURES < len(world.factory.orders) <= MOST_RESTARTS + 1


def test_spares_that_can_not_be_prepared_are_given_up_and_people_are_told_once(world: World) -> None:
    world.factory.unwilling = True
    for _ in range(10 * MOST_FAILURES):
        world.maintain(seconds=RESTOCK_S)
    assert len(world.factory.orders) == MOST_FAILURES
    told = [record.event for record in read_events(Path(world.bootstrap.run_dir))]
    why = f"{MOST_FAILURES} in a row could not be prepared; see logs/spare-{MOST_FAILURES - 1}.log"
    assert told == [Alert(f"no more spares are started: {why}")]


def test_spares_that_fail_now_and_then_are_made_on(world: World) -> None:
    for number in range(1, 2 * MOST_FAILURES):
        world.maintain(seconds=60.0)
        if number % (MOST_FAILURES - 1) == 0:
            world.prepare()
        world.end(world.factory.children[-1])
    assert len(world.factory.children) == 2 * MOST_FAILURES - 1


def test_spares_that_may_hold_a_broken_chip_end(world: World) -> None:
    world.maintain()
    world.prepare()
    world.spares.avoid(("uuid",))
    until(world.factory.children[0].ended, "the end of the spare")
    world.end(world.factory.children[0])
    world.maintain(seconds=RESTOCK_S)
    assert world.factory.starts[1].bootstrap.broken_chips == ("uuid",)
    world.spares.avoid(("uuid",))
    assert not world.factory.children[1].ended(), "it keeps off that one already"
