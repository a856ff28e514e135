"""A back end on virtual time (`cluster/backends/contract.py`): machines that come up, are taken, and are lost.

It has as many machines as it is given; a host that is replaced gets a machine that no other host has. Machines that
were lost come back after `REPAIR_S`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kintsugi.cluster.backends.contract import HostCame, HostEvent, HostLeaves, HostOrder, HostWent
from kintsugi.simulation.world import World

START_S = (0.2, 3.0)
"""Time from the order to the start of a supervisor."""
NOTICE_S = (0.05, 12.0)
"""Time after which the engine tells of a lost machine; engines take from a moment to half a minute."""
REPAIR_S = 60.0


class SimulatedBackend:
    """An engine with a number of machines."""

    def __init__(self, world: World, *, num_machines: int) -> None:
        self._world = world
        self._free = [f"machine-{index}" for index in range(num_machines)]
        self._taken: dict[str, str] = {}
        """Host → machine on which its supervisor runs or is being started."""
        self._numbers: dict[str, int] = {}
        """Host → number of its orders: the start of an earlier one is void."""
        self._events: list[HostEvent] = []

    @property
    def running(self) -> dict[str, str]:
        """Host → machine that it has."""
        return dict(self._taken)

    def start(self, orders: Sequence[HostOrder]) -> None:
        for order in orders:
            self._start(order)

    def _start(self, order: HostOrder) -> None:
        number = self._numbers[order.host] = self._numbers.get(order.host, 0) + 1
        if not self._free:
            self._events.append(HostWent(order.host, "no machine is free"))
            return
        self._taken[order.host] = self._free.pop(0)
        self._world.after(self._world.random.uniform(*START_S), self._came, order.host, number)

    def _came(self, host: str, number: int) -> None:
        if self._numbers[host] == number and host in self._taken:
            self._events.append(HostCame(host, self._taken[host]))

    def poll(self) -> list[HostEvent]:
        events, self._events = self._events, []
        return events

    def lose(self, host: str) -> None:
        """Power off the machine of a host; the engine tells of it later."""
        machine = self._taken.pop(host)
        self._world.after(REPAIR_S, self._free.append, machine)
        self._world.after(self._world.random.uniform(*NOTICE_S), self._went, host, self._numbers[host])

    def _went(self, host: str, number: int) -> None:
        if self._numbers[host] == number:
            self._events.append(HostWent(host, "the machine does not answer"))

    def replace(self, order: HostOrder) -> None:
        if (machine := self._taken.pop(order.host, None)) is not None:
            self._free.append(machine)
        self._start(order)

    def asked_to_end(self, host: str, why: str) -> None:
        self._events.append(HostLeaves(host, why))

    def give_back(self, *, timeout_s: float) -> None:
        self._free += self._taken.values()
        self._taken.clear()
        for host in self._numbers:
            self._numbers[host] += 1
