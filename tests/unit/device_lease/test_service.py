"""The arbiter in the agent, on a clock that stands still: who is named, who is ended, and what a successor does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kintsugi.device_lease.arbiter import GRACE_S, LEASE_S
from kintsugi.device_lease.service import KEPT_S, UNANSWERED_S, LeaseService, LeaseUser
from kintsugi.protocol.device_lease import (
    LeaseAcknowledged,
    LeaseExtended,
    LeaseGranted,
    LeaseRecalled,
    LeaseReleased,
    LeaseRequested,
    ToArbiter,
    ToHolder,
)
from kintsugi.protocol.wire import Envelope, MessageKind
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.events import Alert, Event, LeaseUnanswered, Note
from kintsugi.transport import Delivery
from kintsugi.types import Peer

RANK, SERVER = "model-0", "server-0"


class Host:
    """A service, and everything that it did."""

    def __init__(self, *, clock: VirtualClock | None = None, disk_is_full: bool = False) -> None:
        self.clock = clock or VirtualClock(start=1000.0)
        self.sent: list[tuple[str, ToHolder]] = []
        self.fenced: list[tuple[str, str, str]] = []
        self.events: list[Event] = []
        self.kept: set[tuple[str, str]] = set()
        """Processes that one call keeps."""
        self.disk_is_full = disk_is_full
        self.remembered: tuple[LeaseUser, ...] = ()
        self.service = LeaseService(
            send=lambda process, body: self.sent.append((process, body)),
            fence=lambda process, incarnation, why: self.fenced.append((process, incarnation, why)),
            remember=self._remember,
            emit=self.events.append,
            is_kept=lambda process, incarnation: (process, incarnation) in self.kept,
            clock=self.clock,
        )

    def _remember(self) -> bool:
        if not self.disk_is_full:
            self.remembered = self.service.users
        return not self.disk_is_full

    def say(self, process: str, body: ToArbiter) -> None:
        envelope = Envelope("job", 1, process, "a", 1, MessageKind.ONE_WAY)
        peer = Peer(process, "a", "host-0", "", b"")
        assert self.service.handle(Delivery(envelope, body, peer, b"", {}))

    def tick(self, seconds: float) -> None:
        """In steps of the agent's loop."""
        for _ in range(round(seconds / 0.25)):
            self.clock.advance(0.25)
            self.service.tick(self.clock.monotonic())

    def take_sent(self) -> list[tuple[str, ToHolder]]:
        sent, self.sent = self.sent, []
        return sent

    def grant(self, process: str) -> LeaseGranted:
        """Ask in its name, and acknowledge what it is given."""
        self.say(process, LeaseRequested("cpu", 1))
        (granted,) = [body for _, body in self.take_sent() if isinstance(body, LeaseGranted)]
        self.say(process, LeaseAcknowledged("cpu", granted.token))
        self.take_sent()
        return granted

    def alerts(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Alert)]

    def notes(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Note)]


def kinds(sent: Sequence[tuple[str, ToHolder]]) -> set[tuple[str, type[ToHolder]]]:
    return {(process, type(body)) for process, body in sent}


def test_a_device_that_nobody_has_is_granted_at_once_and_extended_with_every_word() -> None:
    host = Host()
    granted = host.grant(RANK)
    assert granted.until == 1000.0 + LEASE_S
    host.tick(2.0)
    host.say(RANK, LeaseAcknowledged("cpu", granted.token))
    assert host.take_sent() == [(RANK, LeaseExtended("cpu", granted.token, 1002.0 + LEASE_S))]


def test_the_device_is_recalled_for_the_other_side_and_granted_when_it_was_given_back() -> None:
    host = Host()
    granted = host.grant(RANK)
    host.say(SERVER, LeaseRequested("cpu", 1))
    assert host.take_sent() == [(RANK, LeaseRecalled("cpu", granted.token))]
    host.say(RANK, LeaseReleased("cpu", granted.token))
    assert kinds(host.take_sent()) == {(SERVER, LeaseGranted)}


def test_devices_do_not_concern_each_other() -> None:
    host = Host()
    host.grant(RANK)
    host.say(SERVER, LeaseRequested("GPU-1", 1))
    assert kinds(host.take_sent()) == {(SERVER, LeaseGranted)}


def test_who_does_not_answer_a_recall_is_named_with_what_and_since_when_and_who_waits() -> None:
    host = Host()
    granted = host.grant(RANK)
    host.say(SERVER, LeaseRequested("cpu", 1))
    host.tick(UNANSWERED_S + 1.0)
    (alert,) = host.alerts()
    assert f"model-0 has not answered LeaseRecalled {granted.token} of cpu for 1.0 s" in alert
    assert "waiting for it: server-0 (for 1.0 s)" in alert
    (event,) = [event for event in host.events if isinstance(event, LeaseUnanswered)]
    assert (event.of, event.device, event.request, event.is_fenced) == (RANK, "cpu", "LeaseRecalled", False)
    assert host.fenced == []
    host.say(RANK, LeaseReleased("cpu", granted.token))
    host.tick(0.25)
    assert host.notes() == [f"model-0 has answered LeaseRecalled {granted.token} after all"]


def test_who_does_not_answer_until_its_lease_is_long_over_is_ended_and_the_device_given_on() -> None:
    host = Host()
    host.grant(RANK)
    host.say(SERVER, LeaseRequested("cpu", 1))
    host.tick(LEASE_S + GRACE_S - 0.5)
    assert host.fenced == []
    host.tick(1.0)
    process, incarnation, why = host.fenced[0]
    assert (process, incarnation) == (RANK, "a") and "has not answered LeaseRecalled" in why
    events = [event for event in host.events if isinstance(event, LeaseUnanswered)]
    assert [event.is_fenced for event in events] == [False, True]
    host.take_sent()
    host.tick(1.0)
    assert (SERVER, LeaseGranted) not in kinds(host.take_sent()), "it may still be computing"
    host.service.ended(RANK, "a")
    assert kinds(host.take_sent()) == {(SERVER, LeaseGranted)}


def test_a_holder_that_one_call_keeps_is_given_the_time_of_a_long_call() -> None:
    host = Host()
    granted = host.grant(RANK)
    host.kept.add((RANK, "a"))
    host.say(SERVER, LeaseRequested("cpu", 1))
    host.tick(30.0)
    assert host.fenced == [] and len(host.alerts()) == 1
    host.kept.clear()
    host.say(RANK, LeaseReleased("cpu", granted.token))
    host.tick(0.25)
    assert host.fenced == []
    assert (SERVER, LeaseGranted) in kinds(host.take_sent())


def test_a_holder_that_one_call_keeps_for_ever_is_ended() -> None:
    host = Host()
    host.grant(RANK)
    host.kept.add((RANK, "a"))
    host.say(SERVER, LeaseRequested("cpu", 1))
    host.tick(LEASE_S + KEPT_S - 0.5)
    assert host.fenced == []
    host.tick(1.0)
    assert {process for process, *_ in host.fenced} == {RANK}


def test_who_knows_that_it_is_recalled_may_take_its_time() -> None:
    host = Host()
    granted = host.grant(RANK)
    host.say(SERVER, LeaseRequested("cpu", 1))
    for _ in range(60):
        host.say(RANK, LeaseAcknowledged("cpu", granted.token, recalled=True))
        host.tick(1.0)
    assert host.fenced == [] and host.alerts() == []


def test_words_that_show_no_knowledge_of_the_recall_do_not_extend_the_lease() -> None:
    host = Host()
    granted = host.grant(RANK)
    host.say(SERVER, LeaseRequested("cpu", 1))
    for _ in range(10):
        host.say(RANK, LeaseAcknowledged("cpu", granted.token))
        host.tick(1.0)
    assert (RANK, LeaseExtended) not in kinds(host.sent)
    assert host.fenced


def test_a_silent_holder_for_whom_nobody_waits_is_left_alone() -> None:
    host = Host()
    host.grant(RANK)
    host.tick(60.0)
    assert host.fenced == [] and host.alerts() == []


def test_a_successor_grants_nothing_before_those_have_answered_whom_its_predecessor_let_in() -> None:
    host = Host()
    granted = host.grant(RANK)
    host.clock.advance(1.0)
    successor = Host(clock=host.clock)
    successor.service.succeed(host.remembered)
    ((process, recalled),) = successor.take_sent()
    assert process == RANK and isinstance(recalled, LeaseRecalled) and recalled.token > granted.token
    successor.say(SERVER, LeaseRequested("cpu", 1))
    successor.say(RANK, LeaseRequested("cpu", 1))  # As old as what it holds, for all that is known.
    assert successor.take_sent() == []
    successor.say(RANK, LeaseReleased("cpu", recalled.token))
    ((process, body),) = successor.take_sent()
    assert process == SERVER and isinstance(body, LeaseGranted) and body.token > recalled.token


def test_nobody_is_let_in_whom_a_successor_would_not_know() -> None:
    host = Host(disk_is_full=True)
    host.say(RANK, LeaseRequested("cpu", 1))
    assert host.sent == [] and host.service.users == ()
    host.disk_is_full = False
    host.say(RANK, LeaseRequested("cpu", 1))
    assert kinds(host.sent) == {(RANK, LeaseGranted)}
    assert host.remembered == (LeaseUser("cpu", RANK, "a"),)


@pytest.mark.parametrize("body", [LeaseAcknowledged("cpu", 7), LeaseReleased("cpu", 7)])
def test_what_a_stranger_says_is_nothing(body: ToArbiter) -> None:
    host = Host()
    host.say(RANK, body)
    assert host.sent == [] and host.service.users == ()
