"""A process's lease, with the test as its arbiter and as its control thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kintsugi.device_lease.client import RENEW_S, SHORTEST_TURN, DeviceLease
from kintsugi.errors import DeviceError, GroupBroken
from kintsugi.protocol.device_lease import (
    LeaseAcknowledged,
    LeaseGranted,
    LeaseRecalled,
    LeaseReleased,
    LeaseRequested,
    ToArbiter,
    ToHolder,
)
from kintsugi.protocol.wire import Envelope, MessageKind
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.waits import wait
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.transport import Delivery
from kintsugi.types import Peer

AGENT = "agent-0"


class FakeMemory:
    def __init__(self) -> None:
        self.is_here = False
        self.error: Exception | None = None

    def leave(self) -> None:
        if self.error is not None:
            raise self.error
        self.is_here = False

    def enter(self) -> None:
        self.is_here = True


class SlowMemory(FakeMemory):
    """Takes a second to come."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def enter(self) -> None:
        super().enter()
        self._clock.advance(1.0)


class World:
    def __init__(self, memory: FakeMemory | None = None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.said: list[ToArbiter] = []
        self.lease = DeviceLease(
            "cpu",
            arbiter=AGENT,
            send=lambda process, body: self.said.append(body),
            memory=memory,
            clock=clock,
        )

    def hear(self, body: ToHolder, *, sender: str = AGENT) -> None:
        envelope = Envelope("job", 1, sender, "a", 1, MessageKind.ONE_WAY)
        assert self.lease.handle(Delivery(envelope, body, Peer(sender, "a", "host-0", "", b""), b"", {}))

    def grant(self, token: int, *, number: int = 1, until: float = 1e9) -> None:
        self.hear(LeaseGranted("cpu", token, number, until))

    def take_said(self) -> list[ToArbiter]:
        said, self.said = self.said, []
        return said


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    wait(
        lambda remaining_s: condition() or pause.wait(0.002) or None,
        whom="the lease",
        what="the expected state",
        timeout_s=10.0,
    )


def test_the_device_is_asked_for_and_used_when_it_is_granted() -> None:
    world = World()
    assert not world.lease.try_enter()
    assert world.take_said() == [LeaseRequested("cpu", 1)]
    world.grant(7)
    assert world.take_said() == [LeaseAcknowledged("cpu", 7)]
    assert world.lease.try_enter()


def test_it_is_kept_after_the_work_and_given_back_at_once_when_it_is_recalled() -> None:
    world = World()
    world.lease.try_enter()
    world.grant(7)
    world.lease.try_enter()
    world.lease.leave()
    assert LeaseReleased("cpu", 7) not in world.take_said()
    world.hear(LeaseRecalled("cpu", 7))
    assert LeaseReleased("cpu", 7) in world.take_said()


def test_a_recall_waits_for_what_runs() -> None:
    world = World()
    world.lease.try_enter()
    world.grant(7)
    world.lease.try_enter()
    world.take_said()
    world.hear(LeaseRecalled("cpu", 7))
    assert world.take_said() == [LeaseAcknowledged("cpu", 7, recalled=True)]
    world.lease.leave()
    assert world.take_said() == [LeaseReleased("cpu", 7)]


def test_who_is_recalled_before_it_began_still_does_what_it_asked_for() -> None:
    world = World()
    world.lease.try_enter()
    world.grant(7)
    world.hear(LeaseRecalled("cpu", 7))
    assert world.lease.try_enter()
    world.lease.leave(wants_more=True)
    assert LeaseReleased("cpu", 7) in world.take_said()
    assert not world.lease.try_enter()
    assert world.take_said() == [LeaseRequested("cpu", 2)]


def test_who_wants_nothing_any_more_gives_back_what_comes_late() -> None:
    world = World()
    world.lease.try_enter()
    world.lease.leave()
    world.take_said()
    world.grant(7)
    assert world.take_said() == [LeaseReleased("cpu", 7)]


def test_words_of_others_than_the_agent_are_not_believed() -> None:
    world = World()
    world.lease.try_enter()
    world.take_said()
    world.hear(LeaseGranted("cpu", 7, 1, 1e9), sender="server-0")
    assert world.take_said() == [] and not world.lease.try_enter()


def test_a_lease_that_nobody_extends_runs_out_and_nothing_more_begins() -> None:
    world = World()
    world.lease.try_enter()
    world.grant(7, until=5.0)
    world.lease.try_enter()
    world.lease.leave()
    world.lease.tick(4.9)
    world.take_said()
    world.lease.tick(5.0)
    assert LeaseReleased("cpu", 7) in world.take_said()
    assert not world.lease.try_enter()


def test_what_is_not_answered_is_said_again() -> None:
    world = World()
    world.lease.try_enter()
    world.take_said()
    world.lease.tick(1.0)
    world.lease.tick(1.0 + RENEW_S)
    assert world.take_said() == [LeaseRequested("cpu", 1)] * 2


def test_memory_comes_before_the_work_and_has_left_before_the_device_is_given_back() -> None:
    memory = FakeMemory()
    world = World(memory)
    world.lease.try_enter()
    world.grant(7)
    assert world.lease.try_enter() and memory.is_here
    world.lease.leave()
    world.take_said()
    world.hear(LeaseRecalled("cpu", 7))
    until(lambda: LeaseReleased("cpu", 7) in world.said)
    assert not memory.is_here


class StuckMemory(FakeMemory):
    """Does not leave before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def leave(self) -> None:
        self.let_go.wait(10.0)
        super().leave()


def test_who_wants_the_device_while_its_memory_leaves_waits_and_does_not_spin() -> None:
    memory = StuckMemory()
    world = World(memory)
    world.lease.try_enter()
    world.grant(7)
    world.lease.try_enter()
    world.lease.leave()
    world.hear(LeaseRecalled("cpu", 7))
    assert not world.lease.try_enter()
    since = SYSTEM_CLOCK.monotonic()
    world.lease.await_turn(0.02)
    assert SYSTEM_CLOCK.monotonic() - since >= 0.02
    memory.let_go.set()
    until(lambda: LeaseReleased("cpu", 7) in world.said)


def test_a_turn_is_not_much_shorter_than_coming_and_going_took() -> None:
    clock = VirtualClock(start=100.0)
    world = World(SlowMemory(clock), clock=clock)
    world.lease.try_enter()
    world.grant(7, until=150.0)
    world.lease.try_enter()
    world.hear(LeaseRecalled("cpu", 7))
    world.lease.leave(wants_more=True)
    assert world.lease.try_enter(), "it took a second to come, and is here since now"
    clock.advance(SHORTEST_TURN)
    world.lease.leave(wants_more=True)
    assert LeaseReleased("cpu", 7) in world.said
    assert not world.lease.try_enter()


def test_what_is_being_read_stays_where_it_is() -> None:
    memory = FakeMemory()
    world = World(memory)
    world.lease.try_enter()
    world.grant(7)
    world.lease.try_enter()
    world.lease.leave()
    with world.lease.still():
        world.hear(LeaseRecalled("cpu", 7))
        assert memory.is_here
    until(lambda: LeaseReleased("cpu", 7) in world.said)
    assert not memory.is_here


def test_a_device_that_can_not_be_left_is_not_given_back_and_its_process_ends() -> None:
    memory = FakeMemory()
    world = World(memory)
    world.lease.try_enter()
    world.grant(7)
    world.lease.try_enter()
    memory.error = DeviceError("lost")
    world.hear(LeaseRecalled("cpu", 7))
    world.lease.leave()
    assert not any(isinstance(body, LeaseReleased) for body in world.take_said())
    with pytest.raises(DeviceError):
        world.lease.try_enter()
    world.lease.tick(1e6)
    assert world.take_said() == []


def test_waiting_for_the_device_ends_when_the_work_is_not_wanted_any_more() -> None:
    world = World()

    def check() -> None:
        if world.said:
            raise GroupBroken("the group is over")

    with pytest.raises(GroupBroken), world.lease.entered(check=check):
        raise AssertionError("it was never granted")
    world.take_said()
    world.grant(7)
    assert world.take_said() == [LeaseReleased("cpu", 7)]


def test_work_within_work_asks_for_nothing() -> None:
    world = World()
    world.lease.try_enter()
    world.grant(7)
    with world.lease.entered(order=3), world.lease.entered(order=0):
        world.hear(LeaseRecalled("cpu", 7))
        assert not any(isinstance(body, LeaseReleased) for body in world.said)
    assert LeaseReleased("cpu", 7) in world.said
