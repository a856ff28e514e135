"""Process that carries out one fault.

    python -m kintsugi.lab.injector.injector_process ORDERS REPORTS

It reads a `FaultContext` from the pipe ORDERS, prepares the fault, writes `ready` to REPORTS, and begins on `go`. A
line `ports […]` has the ports of the other end of the link, where that is on another host. It undoes the fault on
`end`, after the fault's duration, and when the pipe ends because the laboratory has ended. If this process is killed,
the reaper undoes the fault.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from kintsugi.errors import DeadlineExceeded, KintsugiError
from kintsugi.lab.faults.catalogue import mechanism_named
from kintsugi.lab.faults.mechanism import FaultContext, FaultImpossible, FaultMechanism
from kintsugi.lab.injector.reports import InjectorReport
from kintsugi.lab.injector.undo_log import ProcessIdentity, UndoJournal
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.waits import wait

ORDERS_TIMEOUT_S = 3600.0
PORTS = b"ports "
"""Begin of the line with the ports of the other end."""


class InjectorOrders:
    """Reader of the lines of the pipe; the end of the pipe counts as the order to end."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._unread = b""
        self.over = False
        os.set_blocking(descriptor, False)

    def attempt_line(self) -> bytes | None:
        """Return the next line, if one is complete."""
        try:
            content = os.read(self.descriptor, 1 << 16)
            self.over = not content
            self._unread += content
        except BlockingIOError:
            pass
        line, newline, rest = self._unread.partition(b"\n")
        if not newline:
            return None
        self._unread = rest
        return line

    def next(self, *, what: str) -> bytes | None:
        """Wait for a line; None when the pipe has ended."""
        poller = select.poll()
        poller.register(self.descriptor, select.POLLIN)

        def attempt(remaining_s: float) -> tuple[bytes | None] | None:
            if (line := self.attempt_line()) is not None:
                return (line,)
            if self.over:
                return (None,)
            poller.poll(remaining_s * 1000)
            return None

        return wait(attempt, whom="laboratory", what=what, timeout_s=ORDERS_TIMEOUT_S)[0]


class InjectorProcess:
    def __init__(self, orders: InjectorOrders, send: Callable[[InjectorReport], None]) -> None:
        self._orders = orders
        self._send = send
        self._target_ended: float | None = None

    def run(self) -> int:
        plan = self._orders.next(what="what to do")
        if plan is None:
            return 0
        context = msgspec.json.decode(plan, type=FaultContext)
        mechanism = mechanism_named(context.injection.ability, context.mechanism)
        fault = mechanism(context, UndoJournal(Path(context.journal)))
        try:
            try:
                fault.prepare()
                self._send(InjectorReport("ready"))
                while (line := self._orders.next(what="to begin")) != b"go":
                    if line is None or not _took_ports(fault, line):
                        return 0
                self._run_fault(fault)
            finally:
                fault.end()
        except (OSError, KintsugiError) as error:
            self._send(InjectorReport("failed", why=str(error)))
            return 1
        ended = SYSTEM_CLOCK.wall()
        if self._target_ended is None and fault.lasts and not context.target.alive:
            self._target_ended = ended
        self._send(InjectorReport("ended", ended, measured=fault.measured, target_ended=self._target_ended))
        return 0

    def _run_fault(self, fault: FaultMechanism) -> None:
        """Run the fault from its beginning until it must be undone."""
        _check_alive(fault.context.target)
        fault.begin()
        wall, began = SYSTEM_CLOCK.wall(), SYSTEM_CLOCK.monotonic()
        self._send(InjectorReport("began", wall, began))
        if not fault.lasts:
            return
        poller = select.poll()
        for descriptor in (self._orders.descriptor, *fault.descriptors):
            poller.register(descriptor, select.POLLIN)
        until = began + fault.injection.duration_s
        while (now := SYSTEM_CLOCK.monotonic()) < until:
            if self._target_ended is None and not fault.context.target.alive:
                self._target_ended = SYSTEM_CLOCK.wall()
            ramp_s = fault.injection.ramp_s
            strength = min(1.0, (now - began) / ramp_s) if ramp_s > 0 else 1.0
            pause_s = min(fault.tick(strength), until - now)
            try:
                wait(
                    lambda remaining_s: poller.poll(remaining_s * 1000) or None,
                    whom="laboratory",
                    what="the fault's end",
                    timeout_s=max(0.0, pause_s),
                )
            except DeadlineExceeded:
                continue
            while (line := self._orders.attempt_line()) is not None:
                if line == b"end":
                    return
                _took_ports(fault, line)
            if self._orders.over:
                return


def _took_ports(fault: FaultMechanism, line: bytes) -> bool:
    """Take the ports of the other end; False for another line."""
    if not line.startswith(PORTS):
        return False
    fault.set_peer_ports(msgspec.json.decode(line.removeprefix(PORTS), type=list[int]))
    return True


def _check_alive(target: ProcessIdentity) -> None:
    """Raise when the target has ended, or another process has its pid by now: the trigger may have taken long."""
    if not target.alive:
        raise FaultImpossible(f"process {target.pid} ended before the fault could begin")


def main(arguments: list[str]) -> int:
    orders, reports = map(int, arguments)
    # Ctrl-C in the laboratory's terminal must not kill this process: the end of the pipe undoes the fault.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def send(report: InjectorReport) -> None:
        try:
            os.write(reports, msgspec.json.encode(report) + b"\n")
        except BrokenPipeError:
            return

    try:
        return InjectorProcess(InjectorOrders(orders), send).run()
    except Exception as error:  # noqa: BLE001 - the outermost boundary: the laboratory reports it.
        # The laboratory reports the error; this process does not write to the terminal.
        send(InjectorReport("failed", why=f"the injector failed: {type(error).__name__}: {error}"))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
