"""Handles of prepared faults: of the processes that carry them out, on this machine or elsewhere."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

import msgspec

from kintsugi.errors import DeadlineExceeded
from kintsugi.lab.faults.mechanism import FaultContext
from kintsugi.lab.injector.injector_process import PORTS
from kintsugi.lab.injector.reports import InjectorReport
from kintsugi.runtime.processes import Child, SystemProcesses
from kintsugi.runtime.waits import join, wait

END_TIMEOUT_S = 15.0
PORTS_S = 0.5
"""Interval between two look-ups of the ports of the other end on another host."""
PORTS_TIMEOUT_S = 30.0


class PreparedFault(ABC):
    """A fault that begins when it is told to, and is undone at its end."""

    longest_hold_s = 20.0
    """How long the master may be held while the fault begins."""

    def __init__(self) -> None:
        self._follower: PeerPorts | None = None

    def follow(self, look: Callable[[], Collection[int] | None]) -> None:
        """Keep the fault on the ports of an other end on another host; `look` returns None if that does not answer."""
        self._follower = PeerPorts(look, self.tell_ports)

    @property
    @abstractmethod
    def is_target_alive(self) -> bool:
        """Whether the target still runs, as far as is known."""

    @property
    @abstractmethod
    def has_ended(self) -> bool: ...

    @abstractmethod
    def go(self) -> None: ...

    @abstractmethod
    def end(self) -> None: ...

    @abstractmethod
    def tell_ports(self, ports: Collection[int]) -> None:
        """Tell it the ports of the other end."""

    @abstractmethod
    def receive(self, *, timeout_s: float) -> InjectorReport | None:
        """Return its next report; None when there will be none."""

    def close(self) -> None:
        """End it, with everything undone."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None


class FaultProcess(PreparedFault):
    """The process that carries out one fault on this machine (`injector_process.py`)."""

    def __init__(self, context: FaultContext) -> None:
        super().__init__()
        self._target = context.target
        orders, self._orders = os.pipe2(os.O_CLOEXEC)
        self._reports, reports = os.pipe2(os.O_CLOEXEC)
        try:
            self.child: Child = SystemProcesses().spawn(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "kintsugi.lab.injector.injector_process",
                    str(orders),
                    str(reports),
                ],
                pass_fds=(orders, reports),
                new_session=True,
            )
        finally:
            os.close(orders)
            os.close(reports)
        self._unread = b""
        self._order(msgspec.json.encode(context))

    @property
    def is_target_alive(self) -> bool:
        return self._target.alive

    @property
    def has_ended(self) -> bool:
        return self.child.ended()

    def _order(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._orders, line + b"\n")

    def go(self) -> None:
        self._order(b"go")

    def end(self) -> None:
        self._order(b"end")

    def tell_ports(self, ports: Collection[int]) -> None:
        self._order(PORTS + msgspec.json.encode(sorted(ports)))

    def receive(self, *, timeout_s: float) -> InjectorReport | None:
        poller = select.poll()
        poller.register(self._reports, select.POLLIN)

        def attempt(remaining_s: float) -> tuple[InjectorReport | None] | None:
            line, newline, rest = self._unread.partition(b"\n")
            if newline:
                self._unread = rest
                return (msgspec.json.decode(line, type=InjectorReport),)
            if not poller.poll(remaining_s * 1000):
                return None
            content = os.read(self._reports, 1 << 16)
            self._unread += content
            return None if content else (None,)

        return wait(attempt, whom=f"injector {self.child.pid}", what="its report", timeout_s=timeout_s)[0]

    def close(self) -> None:
        """Close its orders: it then undoes what there is to undo, and exits."""
        super().close()
        os.close(self._orders)
        try:
            self.child.wait_ended(whom="injector", timeout_s=END_TIMEOUT_S)
        except DeadlineExceeded:
            self.kill()
        self.child.close()
        os.close(self._reports)

    def kill(self) -> None:
        """Kill the process; what it has changed is still to be undone."""
        self.child.send_signal(signal.SIGKILL)
        self.child.wait_ended(whom="injector", timeout_s=END_TIMEOUT_S)


class PeerPorts:
    """Thread that tells a fault the ports of an other end on another host, when they change."""

    def __init__(
        self, look: Callable[[], Collection[int] | None], tell: Callable[[Collection[int]], None]
    ) -> None:
        self._look, self._tell = look, tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peer-ports", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Loop: consumes the ports of the other end, waits for the next look, and ends with `close`."""
        known: Collection[int] | None = None
        while not self._over.is_set():
            ports = self._look()
            if ports is not None and ports != known and not self._over.is_set():
                known = ports
                self._tell(ports)
            with contextlib.suppress(DeadlineExceeded):
                wait(
                    lambda remaining_s: self._over.wait(remaining_s) or None,
                    whom="timer",
                    what="the next look at the other end",
                    timeout_s=PORTS_S,
                )

    def close(self) -> None:
        self._over.set()
        with contextlib.suppress(DeadlineExceeded):  # It is told nothing by then, and ends with its look.
            join(self._thread, whom="peer-ports", what="its end", timeout_s=PORTS_TIMEOUT_S)
