"""A process's own lease on its device: what the main thread asks before it computes.

The control thread hears and speaks, so that a lease is kept while the main thread computes. The device is kept after
the work is done, in case there is more, and given back when the other side wants it: at once if nothing runs, otherwise
when what runs has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Protocol

from kintsugi.bootstrap import Bootstrap
from kintsugi.config import ShareDevice
from kintsugi.lease import holder as holding
from kintsugi.lease.holder import Holder
from kintsugi.lease.states import Hold
from kintsugi.leasing import ToArbiter, ToHolder
from kintsugi.observe.events import Event, EventLog, Span
from kintsugi.runtime import COUNTERS, SYSTEM_CLOCK, Clock, wait
from kintsugi.transport import Delivery
from kintsugi.worker import Attendant

RESEND_S = 0.25
RENEW_S = 1.0
POLL_S = 0.01
"""Between two looks at what else has arrived, while waiting for the device."""
SHORTEST_TURN = 4.0
"""Times as long as the process took to come and go: who has more to do is not made to leave before."""
TURN_TIMEOUT_S = 600.0
"""For the other side's longest piece of work."""

Check = Callable[[], object]


class Memory(Protocol):
    """What the process has on the device. Both may be called by any thread, never while anything runs."""

    def leave(self) -> None:
        """Wait until nothing of this process runs on the device, and take off what the policy says."""
        ...

    def enter(self) -> None:
        """Bring back what was taken off."""
        ...


class Lease(Protocol):
    """The right to compute on a device."""

    def try_enter(self) -> bool: ...

    def await_turn(self) -> None: ...

    def entered(self, *, order: int, check: Check) -> AbstractContextManager[None]: ...

    def still(self) -> AbstractContextManager[None]: ...

    def leave(self, *, wants_more: bool = False) -> None: ...


class Unshared:
    """The lease of a device that nobody else uses."""

    def try_enter(self) -> bool:
        return True

    @contextmanager
    def entered(self, *, order: int = -1, check: Check = lambda: None) -> Iterator[None]:
        yield

    @contextmanager
    def still(self) -> Iterator[None]:
        yield

    def await_turn(self) -> None:
        pass

    def leave(self, *, wants_more: bool = False) -> None:
        pass


UNSHARED: Lease = Unshared()


class Speaker(Protocol):
    """What a lease needs of a `worker.Shell`."""

    bootstrap: Bootstrap
    events: EventLog

    def attend(self, attendant: Attendant) -> None: ...

    def send(self, process: str, body: ToArbiter) -> None: ...


def open_lease(shell: Speaker, *, policy: ShareDevice, device: str, memory: Memory | None) -> Lease:
    """The lease of a process on the device of this identity, as `cluster.share_device` says."""
    if policy == "no" or not shell.bootstrap.agent:
        return UNSHARED
    lease = DeviceLease(
        device, arbiter=shell.bootstrap.agent, send=shell.send, memory=memory, emit=shell.events.emit
    )
    if memory is not None:
        memory.leave()  # Nobody has granted anything yet.
    shell.attend(lease)
    return lease


@dataclass(slots=True)
class _Turn:
    """When what happened, on the monotonic clock of the host, which all who share the device go by."""

    wanted_at: float = 0.0
    granted_at: float = 0.0
    begun_at: float = 0.0
    recalled_at: float = 0.0

    def moved(self, to: Hold, *, now: float) -> None:
        match to:
            case Hold.WAITING:
                self.wanted_at = now
            case Hold.HOLDING:
                self.granted_at = now
            case Hold.YIELDING:
                self.recalled_at = now
            case Hold.IDLE:
                pass

    def span(self, *, device: str, left_at: float) -> Span:
        times = {**asdict(self), "left_at": left_at}
        attributes = {"device": device, **{name: f"{time:.6f}" for name, time in times.items()}}
        return Span("device_turn", self.granted_at, left_at - self.granted_at, attributes)


class DeviceLease:
    """One process's lease on one device."""

    def __init__(
        self,
        device: str,
        *,
        arbiter: str,
        send: Callable[[str, ToArbiter], object],
        memory: Memory | None = None,
        emit: Callable[[Event], object] = lambda event: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`arbiter` is the agent of this host. `memory` is None where nothing has to be done between two turns. `emit`
        is told of every turn when it is over."""
        self._arbiter = arbiter
        self._send = send
        self._memory = memory
        self._emit = emit
        self._clock = clock
        self._turn = _Turn()
        self._lock = threading.Lock()
        self._holder = Holder(device)
        self._busy = False
        """Something of this process may be running on the device."""
        self._wanted = False
        """The main thread is about to begin something."""
        self._leaving = False
        """Somebody is taking this process off the device."""
        self._readers = 0
        """While there are any, what the process has on the device stays."""
        self._failure: Exception | None = None
        self._idle = threading.Event()
        """Never set; to wait for a moment."""
        self._granted = threading.Event()
        self._say_at = 0.0
        self._entering_s = self._leaving_s = 0.0
        """As it was the last time."""

    # For the main thread.

    def try_enter(self, *, order: int = -1) -> bool:
        """Whether the device is ours now; if not, it is asked for. Until `leave` it stays ours."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._busy:
                return True
            self._wanted = True
            if self._leaving or not self._holder.may_begin:
                self._granted.clear()
            if self._leaving:
                return False
            self._step(holding.want(self._holder, order=order))
            if not self._holder.may_begin:
                return False
            self._holder = holding.begin(self._holder)
            self._busy, self._wanted = True, False
        if not self._turn.begun_at:
            since = self._clock.monotonic()
            if self._memory is not None:
                self._memory.enter()
            self._turn.begun_at = self._clock.monotonic()
            self._entering_s = self._turn.begun_at - since
        return True

    def leave(self, *, wants_more: bool = False) -> None:
        """Nothing of ours runs now. Given back here if it was asked back meanwhile."""
        with self._lock:
            self._busy = False
            if not wants_more:
                self._wanted = False
                self._holder = holding.withdraw(self._holder)
            elif self._is_too_soon():
                self._wanted = True
                self._holder = holding.prolong(self._holder)
            if not self._is_due():
                return
            self._leaving = True
        self._take_off()

    def _is_too_soon(self) -> bool:
        """Whether it was asked back, but coming and going would take most of its turn. Never beyond its lease."""
        shortest_s = SHORTEST_TURN * (self._entering_s + self._leaving_s)
        until = min(self._holder.until, self._turn.begun_at + shortest_s)
        return self._holder.hold is Hold.YIELDING and self._clock.monotonic() < until

    @contextmanager
    def entered(self, *, order: int = -1, check: Check = lambda: None) -> Iterator[None]:
        """Wait for the device and use it. `check` is called while waiting, and may raise to give up."""
        with self._lock:
            nested = self._busy
        if nested:
            yield
            return
        try:
            wait(
                lambda remaining_s: self._attempt(remaining_s, order=order, check=check),
                whom=self._arbiter,
                what=f"a lease of {self._holder.device}",
                timeout_s=TURN_TIMEOUT_S,
            )
            yield
        finally:
            self.leave()

    @contextmanager
    def still(self) -> Iterator[None]:
        """For who only reads what the process has: it stays where it is meanwhile, on the device or off it."""
        wait(self._attempt_still, whom="the device", what="memory to arrive", timeout_s=TURN_TIMEOUT_S)
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1
            self._give_back_if_due()

    def _attempt_still(self, remaining_s: float) -> bool | None:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if not self._leaving:
                self._readers += 1
                return True
        self._idle.wait(min(POLL_S, remaining_s))
        return None

    def _attempt(self, remaining_s: float, *, order: int, check: Check) -> bool | None:
        check()
        if self.try_enter(order=order):
            return True
        self._granted.wait(min(POLL_S, remaining_s))
        return None

    def await_turn(self, timeout_s: float = POLL_S) -> None:
        """A moment, or until the device has been granted, for who has other things to look after."""
        wait(
            lambda remaining_s: self._granted.wait(remaining_s) or True,
            whom=self._arbiter,
            what=f"a lease of {self._holder.device}",
            timeout_s=timeout_s,
        )

    # In the control thread.

    def handle(self, delivery: Delivery) -> bool:
        """Take what the arbiter says; False if it is someone else's business."""
        body = delivery.body
        if not isinstance(body, ToHolder):
            return False
        if delivery.peer.process == self._arbiter and body.device == self._holder.device:
            with self._lock:
                self._step(holding.hear(self._holder, body))
            self._give_back_if_due()
        return True

    def tick(self, now: float) -> None:
        """Say again what may not have been heard; give up what nobody extended."""
        with self._lock:
            if self._failure is not None:
                return  # Who can not leave the device says nothing more: its arbiter ends it.
            if self._holder.hold is Hold.HOLDING and now >= self._holder.until:
                COUNTERS.add("lease.expired")
                self._step(holding.expire(self._holder))
            elif now >= self._say_at:
                for body in holding.say_again(self._holder):
                    self._send(self._arbiter, body)
                self._say_at = now + (RESEND_S if self._holder.hold is Hold.WAITING else RENEW_S)
        self._give_back_if_due()

    def _give_back_if_due(self) -> None:
        with self._lock:
            if not self._is_due():
                return
            self._leaving = True
        if self._memory is None:
            self._take_off()
        else:
            # Memory moves for longer than heartbeats may pause.
            threading.Thread(target=self._take_off, name="leave-device", daemon=True).start()

    # In either.

    def _is_due(self) -> bool:
        holder = self._holder
        about_to_begin = self._wanted and holder.may_begin
        in_use = self._busy or self._readers > 0 or about_to_begin
        return holder.hold is Hold.YIELDING and not (in_use or self._leaving)

    def _take_off(self) -> None:
        """Leave the device, then say so."""
        since = self._clock.monotonic()
        try:
            if self._memory is not None:
                self._memory.leave()
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: the main thread raises it.
            self._failure = error
            return
        with self._lock:
            self._leaving = False
            self._leaving_s = self._clock.monotonic() - since
            turn, self._turn = self._turn, _Turn()
            self._step(holding.yielded(self._holder))
        COUNTERS.add("lease.handed_over")
        self._emit(turn.span(device=self._holder.device, left_at=self._clock.monotonic()))

    def _step(self, step: holding.Step) -> None:
        before, (self._holder, bodies) = self._holder.hold, step
        if self._holder.hold is not before:
            self._turn.moved(self._holder.hold, now=self._clock.monotonic())
        if self._holder.may_begin:
            self._granted.set()
        for body in bodies:
            self._send(self._arbiter, body)
