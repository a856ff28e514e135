"""The agent as arbiter of the devices that ranks and generation servers of its host share.

The agent is on the host, outlives the processes between which it arbitrates, observes their ends through the kernel,
and can end a process that does not release a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from kintsugi.cluster.child import STACK_DUMP_S, ChildProcess
from kintsugi.device_lease.service import LeaseService, LeaseUser
from kintsugi.process.membership import HEARTBEAT_S, Membership
from kintsugi.protocol.agents import Inspected, ProcessSuspected
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import Clock
from kintsugi.telemetry.events import EventLog
from kintsugi.transport import Delivery, Endpoint

SILENT_S = 3 * HEARTBEAT_S
"""Time without a recorded heartbeat after which the loop of a process does not turn."""


class DeviceArbiter:
    """Connects `device_lease.service` with the agent's children."""

    def __init__(
        self,
        children: Mapping[str, ChildProcess],
        endpoint: Endpoint,
        membership: Membership,
        *,
        own: Bootstrap,
        remember: Callable[[], bool],
        inspect: Callable[[str, str], Inspected],
        clock: Clock,
    ) -> None:
        """`inspect` returns the state of a process (name, incarnation) from outside."""
        self._children = children
        self._membership = membership
        self._inspect = inspect
        self._clock = clock
        self._recorded: dict[tuple[str, str], tuple[float, float]] = {}
        """Process and incarnation of a holder → its last recorded heartbeat, and when that was first seen."""
        self._service = LeaseService(
            send=endpoint.send,
            fence=self._fence,
            remember=remember,
            emit=EventLog(
                RunFolder(own.run_dir).events_file(own.process), process=own.process, clock=clock
            ).emit,
            is_kept=self._is_kept,
            clock=clock,
        )

    @property
    def users(self) -> tuple[LeaseUser, ...]:
        return self._service.users

    def succeed(self, users: Iterable[LeaseUser]) -> None:
        """Take over the holders that an earlier agent of this host has granted, as far as they live."""
        self._service.succeed(user for user in users if self._find(user.process, user.incarnation))

    def handle(self, delivery: Delivery) -> bool:
        """Handle a message about leases; False for any other, and for processes of other hosts."""
        peer = delivery.peer
        return self._find(peer.process, peer.incarnation) is not None and self._service.handle(delivery)

    def ended(self, child: ChildProcess) -> None:
        self._service.ended(child.process, child.incarnation)

    def tick(self, now: float) -> None:
        holders = {(user.process, user.incarnation) for user in self.users}
        found = {holder: self._inspect(*holder).recorded for holder in holders}
        self._recorded = {
            holder: known
            if (known := self._recorded.get(holder)) is not None and known[0] == recorded
            else (recorded, now)
            for holder, recorded in found.items()
        }
        self._service.tick(now)

    def _is_kept(self, process: str, incarnation: str) -> bool:
        """Whether one call keeps a holder: it has recorded heartbeats, records none now, and is not stopped."""
        recorded, since = self._recorded.get((process, incarnation), (0.0, math.inf))
        if recorded == 0.0 or self._clock.monotonic() - since < SILENT_S:
            return False
        found = self._inspect(process, incarnation)
        return found.state in {"R", "S", "D"} and not found.frozen

    def _fence(self, process: str, incarnation: str, why: str) -> None:
        """Kill a holder. The master gets the reason first, so that it does not take the process for crashed."""
        child = self._find(process, incarnation)
        if child is not None and not child.stopping:
            self._membership.send_to_master(ProcessSuspected(process, incarnation, why))
            has_dump = child.request_stack_dump(time=self._clock.wall())
            now = self._clock.monotonic()
            kill_at = now + (STACK_DUMP_S if has_dump else 0.0)
            child.stop(terminate_at=kill_at, kill_at=kill_at)
            child.send_due_signals(now)

    def _find(self, process: str, incarnation: str) -> ChildProcess | None:
        child = self._children.get(process)
        return child if child is not None and child.incarnation == incarnation else None
