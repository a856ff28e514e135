"""The devices of a host that ranks and servers share: the agent as their arbiter.

It is the right place for one: it is on the host, outlives the processes that it arbitrates between, hears of their ends
from the kernel, and can end one that does not give a device back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kintsugi.bootstrap import Bootstrap
from kintsugi.cluster.children import Kept
from kintsugi.lease.service import LeaseService, LeaseUser
from kintsugi.observe.events import EventLog, events_path
from kintsugi.runtime import Clock
from kintsugi.supervision import ProcessSuspected
from kintsugi.transport import Delivery, Endpoint
from kintsugi.worker import Membership


class Sharing:
    """Knows which processes of the host live; for what it decides, see `lease/`."""

    def __init__(
        self,
        kept: Mapping[str, Kept],
        endpoint: Endpoint,
        membership: Membership,
        *,
        own: Bootstrap,
        remember: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self._kept = kept
        self._membership = membership
        self._clock = clock
        self._service = LeaseService(
            send=endpoint.send,
            fence=self._fence,
            remember=remember,
            emit=EventLog(events_path(own.run_dir, own.process), process=own.process, clock=clock).emit,
            clock=clock,
        )

    @property
    def users(self) -> tuple[LeaseUser, ...]:
        return self._service.users

    def succeed(self, users: Iterable[LeaseUser]) -> None:
        """Those that another agent of this host has let in, as far as they live."""
        self._service.succeed(user for user in users if self._find(user.process, user.incarnation))

    def handle(self, delivery: Delivery) -> bool:
        """Take what is said about leases; nobody answers who does not live here."""
        peer = delivery.peer
        return self._find(peer.process, peer.incarnation) is not None and self._service.handle(delivery)

    def ended(self, kept: Kept) -> None:
        self._service.ended(kept.process, kept.incarnation)

    def tick(self, now: float) -> None:
        self._service.tick(now)

    def _fence(self, process: str, incarnation: str, why: str) -> None:
        """The master hears first why: it replaces the process for that reason and not because it was killed."""
        kept = self._find(process, incarnation)
        if kept is not None and not kept.stopping:
            self._membership.tell(ProcessSuspected(process, incarnation, why))
            now = self._clock.monotonic()
            kept.stop(terminate_at=now, kill_at=now)
            kept.send_due_signals(now)

    def _find(self, process: str, incarnation: str) -> Kept | None:
        kept = self._kept.get(process)
        return kept if kept is not None and kept.incarnation == incarnation else None
