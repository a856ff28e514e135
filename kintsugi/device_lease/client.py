"""A process's lease on its device, which the main thread enters before it computes.

The control thread exchanges the messages, so that the lease is extended while the main thread computes. The lease is
kept after the work is done, in case more follows, and released when the other side requests the device: immediately if
nothing runs, otherwise when the running work has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Protocol

from kintsugi.config.schema import ShareDevice
from kintsugi.device_lease import holder as holding
from kintsugi.device_lease.holder import Holder
from kintsugi.device_lease.states import Hold
from kintsugi.process.shell import Shell
from kintsugi.protocol.device_lease import ToArbiter, ToHolder
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.waits import wait
from kintsugi.telemetry.events import Event, Span
from kintsugi.transport import Delivery

RESEND_S = 0.25
RENEW_S = 1.0
POLL_S = 0.01
"""Interval of checks for other requests while waiting for the device."""
SHORTEST_TURN = 4.0
"""Minimum duration of a turn with more work to do, as a multiple of the time to move memory on and off the device."""
TURN_TIMEOUT_S = 600.0
"""Deadline of a wait for the device; covers the other side's longest piece of work."""

Check = Callable[[], object]


class DeviceMemory(Protocol):
    """Memory of the process on the device. Both methods may be called by any thread, never while work runs."""

    def leave(self) -> None:
        """Wait until nothing of this process runs on the device, and offload memory as the policy demands."""
        ...

    def enter(self) -> None:
        """Restore the offloaded memory."""
        ...


class LeaseHandle(Protocol):
    """The right to compute on a device."""

    def try_enter(self) -> bool: ...

    def await_turn(self) -> None: ...

    def entered(self, *, order: int, check: Check) -> AbstractContextManager[None]: ...

    def still(self) -> AbstractContextManager[None]: ...

    def leave(self, *, wants_more: bool = False) -> None: ...


class Unshared:
    """Lease of a device that is not shared."""

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


UNSHARED: LeaseHandle = Unshared()


def open_lease(shell: Shell, *, policy: ShareDevice, device: str, memory: DeviceMemory | None) -> LeaseHandle:
    """Open the lease of a process on a device, by `cluster.share_device`."""
    if policy == "no" or not shell.bootstrap.agent:
        return UNSHARED
    lease = DeviceLease(
        device, arbiter=shell.bootstrap.agent, send=shell.send, memory=memory, emit=shell.events.emit
    )
    if memory is not None:
        memory.leave()  # No lease has been granted yet.
    shell.add_service(lease)
    return lease


@dataclass(slots=True)
class _Turn:
    """Times of one turn, on the host's monotonic clock, which all processes that share the device use."""

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
    """Lease of one process on one device."""

    def __init__(
        self,
        device: str,
        *,
        arbiter: str,
        send: Callable[[str, ToArbiter], object],
        memory: DeviceMemory | None = None,
        emit: Callable[[Event], object] = lambda event: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`arbiter` is the agent of this host. `memory` is None if nothing has to be done between two turns. `emit`
        gets a span for every finished turn."""
        self._arbiter = arbiter
        self._send = send
        self._memory = memory
        self._emit = emit
        self._clock = clock
        self._turn = _Turn()
        self._lock = threading.Lock()
        self._holder = Holder(device)
        self._busy = False
        """Whether work of this process may be running on the device."""
        self._wanted = False
        """Whether the main thread is about to start work."""
        self._leaving = False
        """Whether a thread is offloading the memory of this process."""
        self._readers = 0
        """Number of readers; while there are any, memory is neither offloaded nor restored."""
        self._failure: Exception | None = None
        self._idle = threading.Event()
        """Never set; used for short waits."""
        self._granted = threading.Event()
        self._send_at = 0.0
        self._entering_s = self._leaving_s = 0.0
        """Durations of the last `enter` and `leave` of the memory."""

    # Methods for the main thread.

    def try_enter(self, *, order: int = -1) -> bool:
        """Whether this process may use the device now, until `leave`; if not, the device is requested."""
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
        """End the use of the device, on which nothing of this process runs; release it if it was recalled."""
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
        """Whether the turn, though recalled, would be short compared to moving memory; never beyond its lease."""
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
        """Keep the memory where it is, on the device or off it, while a caller only reads it."""
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
        """Wait shortly, or until the device has been granted, for a caller with other things to do."""
        wait(
            lambda remaining_s: self._granted.wait(remaining_s) or True,
            whom=self._arbiter,
            what=f"a lease of {self._holder.device}",
            timeout_s=timeout_s,
        )

    # Methods for the control thread.

    def handle(self, delivery: Delivery) -> bool:
        """Handle a message of the arbiter; False if it is another kind of message."""
        body = delivery.body
        if not isinstance(body, ToHolder):
            return False
        if delivery.peer.process == self._arbiter and body.device == self._holder.device:
            with self._lock:
                self._step(holding.receive(self._holder, body))
            self._give_back_if_due()
        return True

    def tick(self, now: float) -> None:
        """Send messages again that may be lost; end a lease that was not extended."""
        with self._lock:
            if self._failure is not None:
                return  # A process that cannot leave the device is silent, so that its arbiter kills it.
            if self._holder.hold is Hold.HOLDING and now >= self._holder.until:
                COUNTERS.add("lease.expired")
                self._step(holding.expire(self._holder))
            elif now >= self._send_at:
                for body in holding.resend(self._holder):
                    self._send(self._arbiter, body)
                self._send_at = now + (RESEND_S if self._holder.hold is Hold.WAITING else RENEW_S)
        self._give_back_if_due()

    def _give_back_if_due(self) -> None:
        with self._lock:
            if not self._is_due():
                return
            self._leaving = True
        if self._memory is None:
            self._take_off()
        else:
            # In a thread, because moving memory takes longer than heartbeats may pause.
            threading.Thread(target=self._take_off, name="leave-device", daemon=True).start()

    # Methods for both threads.

    def _is_due(self) -> bool:
        holder = self._holder
        about_to_begin = self._wanted and holder.may_begin
        in_use = self._busy or self._readers > 0 or about_to_begin
        return holder.hold is Hold.YIELDING and not (in_use or self._leaving)

    def _take_off(self) -> None:
        """Offload the memory, then release the lease."""
        since = self._clock.monotonic()
        try:
            if self._memory is not None:
                self._memory.leave()
        except Exception as error:  # noqa: BLE001 - the boundary of a thread; the main thread raises it.
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
