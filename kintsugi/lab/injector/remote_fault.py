"""Handle of a fault on another machine: the process that carries it out is on the host of its target."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from itertools import count

import msgspec

from kintsugi.errors import UserError
from kintsugi.lab.injector.fault_process import PreparedFault
from kintsugi.lab.injector.injection import Injection
from kintsugi.lab.injector.reports import InjectorReport
from kintsugi.lab.testbed.remote_hosts import RemoteHosts
from kintsugi.lab.testbed.remote_orders import FaultAnswer, FaultOrder
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.waits import join

_NUMBERS = count(1)


class RemoteFault(PreparedFault):
    """One fault on a host; its orders are answered before the next one."""

    longest_hold_s = 0.4
    """An order travels to the host and back; a master that is held for a second is found to be stopped."""

    def __init__(
        self,
        remote: RemoteHosts,
        host: str,
        injection: Injection,
        *,
        pid: int,
        peer_pid: int | None = None,
        ports: Collection[int] | None = None,
    ) -> None:
        """Prepare it. UserError with the reason if it can not be done there."""
        super().__init__()
        self._remote, self._host = remote, host
        self._name = f"{os.getpid()}-{next(_NUMBERS)}"
        self._answers: list[InjectorReport | None] = []
        self._beginning: threading.Thread | None = None
        self._is_over = False
        answer = self._order(
            FaultOrder(
                do="prepare",
                fault=self._name,
                injection=injection,
                pid=pid,
                peer_pid=peer_pid,
                ports=None if ports is None else tuple(sorted(ports)),
            )
        )
        if answer.why:
            raise UserError(f"on {host}: {answer.why}")
        self.mechanism = answer.mechanism

    def _order(self, order: FaultOrder) -> FaultAnswer:
        """Carry out an order; what the host reports has the times of this machine's clocks."""
        asked = SYSTEM_CLOCK.monotonic(), SYSTEM_CLOCK.wall()
        answer = self._remote.order_fault(self._host, order)
        if order.do == "ports":
            return answer
        report = answer.report
        if answer.why:
            report = InjectorReport("failed", why=answer.why)
        elif report is not None:
            # A fault has an effect from the order on at the earliest; it ends before the answer.
            monotonic, wall = (
                asked if order.do == "begin" else (SYSTEM_CLOCK.monotonic(), SYSTEM_CLOCK.wall())
            )
            ended = report.target_ended
            report = msgspec.structs.replace(
                report,
                wall=wall,
                monotonic=monotonic,
                target_ended=None if ended is None else ended - report.wall + wall,
            )
        self._answers.append(report)
        return answer

    @property
    def is_target_alive(self) -> bool:
        """The host tells why it could not do what it was told to."""
        return True

    @property
    def has_ended(self) -> bool:
        return False

    def go(self) -> None:
        order = FaultOrder(do="begin", fault=self._name)
        self._beginning = threading.Thread(
            target=self._order, args=(order,), name=f"begin {self._name}", daemon=True
        )
        self._beginning.start()

    def end(self) -> None:
        self._is_over = True
        self._order(FaultOrder(do="end", fault=self._name))

    def tell_ports(self, ports: Collection[int]) -> None:
        self._order(FaultOrder(do="ports", fault=self._name, ports=tuple(sorted(ports))))

    def receive(self, *, timeout_s: float) -> InjectorReport | None:
        if self._beginning is not None:
            join(self._beginning, whom=self._host, what="the begin of the fault", timeout_s=timeout_s)
            self._beginning = None
        return self._answers.pop(0) if self._answers else None

    def close(self) -> None:
        super().close()
        if not self._is_over:
            self.end()
