"""Supervisors as processes of this machine: hosts that share its cores and its disk, and nothing else."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from kintsugi.cluster.backends.command import EngineCommand
from kintsugi.cluster.backends.contract import HostCame, HostEvent, HostLeaves, HostOrder, HostWent


class LocalBackend:
    """Starts `command` for each host as a child of this process."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._running: dict[str, EngineCommand] = {}
        self._events: list[HostEvent] = []

    def start(self, orders: Sequence[HostOrder]) -> None:
        for order in orders:
            self._start(order)

    def _start(self, order: HostOrder) -> None:
        try:
            command = self._running[order.host] = EngineCommand(self._command, secret=order.ticket)
        except OSError as error:
            self._events.append(HostWent(order.host, f"{self._command[0]}: {error.strerror}"))
            return
        self._events.append(HostCame(order.host, f"process {command.pid}"))

    def poll(self) -> list[HostEvent]:
        for host, command in list(self._running.items()):
            if command.ended:
                why = command.explain()
                command.close(timeout_s=0.0)
                del self._running[host]
                self._events.append(HostWent(host, why))
        events, self._events = self._events, []
        return events

    def replace(self, order: HostOrder) -> None:
        if (left := self._running.pop(order.host, None)) is not None:
            left.end(number=signal.SIGKILL)
            left.close(timeout_s=1.0)
        self._start(order)

    def asked_to_end(self, host: str, why: str) -> None:
        self._events.append(HostLeaves(host, why))

    def give_back(self, *, timeout_s: float) -> None:
        running, self._running = self._running, {}
        for command in running.values():
            command.end()
        for command in running.values():
            command.close(timeout_s=timeout_s / max(1, len(running)))
