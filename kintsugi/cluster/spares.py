"""Spares: processes that are started before anybody needs them, and take the place of one that was lost.

    ordered ─► born (forked from the template) ─► prepared (its device is ready) ─► given to a start: no spare any more
                 └──────────── ends, stands still, or is not prepared in time: another one is made ─┘

When several in a row could not be prepared, no more are made: whatever is wrong, a run goes on without spares.

What the template saves is the imports; a spare saves the fork as well, and what must not be done before a fork: the
context on the accelerator. It knows nothing until it is taken: no name, no key, no address. Then the `Start` of the
process that it becomes reaches it on a socket that it inherited; whose other end the agent alone holds, so that spares
end with their agent, and its successor makes new ones.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Collection
from typing import Protocol

import msgspec

from kintsugi.bootstrap import Bootstrap
from kintsugi.cluster.children import Kept
from kintsugi.cluster.orphans import kill_group
from kintsugi.cluster.placement import PREPARED, Start
from kintsugi.cluster.restarts import RestartLimit
from kintsugi.cluster.segments import Loop
from kintsugi.errors import StartFailed
from kintsugi.observe.events import Alert, EventLog, events_path
from kintsugi.runtime import COUNTERS, Child, Clock
from kintsugi.types import Placement, Role, process_id

RESTOCK_S = 2.0
"""After a start nobody is made for so long: the new process needs the processor more than a spare does."""
END_TIMEOUT_S = 2.0
"""For something that was killed to be gone."""
PREPARE_S = 60.0
"""For a spare to be born and prepared; one that takes longer is taken for hung."""
MOST_FAILURES = 5
"""Spares in a row that may end before they are prepared."""


class _Spare:
    """One spare, from its order to its end or its part."""

    def __init__(self, kept: Kept, orders: socket.socket, *, since: float) -> None:
        self.kept, self.since = kept, since
        self.prepared = False
        self.in_vain = False
        """It is ended by us for nothing that it did."""
        self.speaks = True
        """It may still say that it is prepared."""
        self._socket = orders
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def listen(self) -> None:
        """That it is prepared is all it says; nothing at all when it has ended, which the kernel tells as well."""
        self.speaks = False
        with contextlib.suppress(ConnectionResetError):
            self.prepared = self._socket.recv(len(PREPARED)) == PREPARED

    def become(self, start: Start) -> bool:
        """Tell it who it is; False when it can not be told any more."""
        try:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(start)], start.descriptors)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return False
        return True

    def close(self) -> None:
        self._socket.close()


class Births(Protocol):
    """Who brings spares to life (the nursery); it tells of it by `born`, `started` and `start_failed`."""

    def bring_up(self, kept: Kept) -> None: ...

    def let_go(self, kept: Kept) -> None: ...


class Spares:
    """Keeps so many prepared processes at hand. Consumes their words and ends, by the agent's loop; never waits."""

    def __init__(
        self,
        loop: Loop,
        *,
        number: int,
        own: Bootstrap,
        program: str,
        births: Births,
        clock: Clock,
    ) -> None:
        """`own` is the agent's, whose host and run folder a spare shares; `program` prepares one."""
        self._loop, self._births, self._clock = loop, births, clock
        self._number = number
        self._program = program
        nobody = msgspec.structs.replace(own, role=Role.SPARE, public_key=b"", secret_key=b"", lifeline=-1)
        self._nobody = msgspec.structs.replace(nobody, listener=-1, incarnation="", peers=())
        self._spares: dict[str, _Spare] = {}
        self._made = 0
        self._make_at = clock.monotonic()
        self._limit = RestartLimit()
        self._num_failures = 0
        """Since one was prepared."""
        self._log = EventLog(events_path(own.run_dir, own.process), process=own.process)

    @property
    def pids(self) -> set[int]:
        return {spare.kept.child.pid for spare in self._spares.values() if spare.kept.child is not None}

    def look_after(self, stopped: Collection[int], now: float, *, can_make: bool) -> None:
        """End who stands still, and make one if one is missing; called several times a second."""
        for spare in self._spares.values():
            child = spare.kept.child
            late = not spare.prepared and now - spare.since > PREPARE_S
            if child is not None and (late or child.pid in stopped):
                child.send_signal(signal.SIGKILL)
        missing = len(self._spares) < self._number
        if can_make and missing and now >= self._make_at and self._limit.allows(now):
            self._make(now)

    def _make(self, now: float) -> None:
        """One at a time: the next is made when this one is prepared, or has failed."""
        self._make_at = now + PREPARE_S
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        bootstrap = msgspec.structs.replace(self._nobody, process=process_id(Role.SPARE, self._made))
        self._made += 1
        start = Start(
            program=self._program,
            placement=Placement(),
            bootstrap=bootstrap,
            report=-1,
            orders=theirs.fileno(),
        )
        kept = Kept.ordered(start, request=None)
        spare = self._spares[kept.process] = _Spare(kept, ours, since=now)
        self._loop.watch(spare.fileno(), lambda: self._heard(spare))
        with theirs:
            self._births.bring_up(kept)
        COUNTERS.add("agent.spares_made")

    def _heard(self, spare: _Spare) -> None:
        # The socket of one that has ended would be readable for ever.
        self._loop.unwatch(spare.fileno())
        spare.listen()
        if spare.prepared:
            COUNTERS.add("agent.spares_prepared")
            self._num_failures = 0
            self._make_at = self._clock.monotonic()

    def postpone(self) -> None:
        """A process is being started: make no spare beside it."""
        self._make_at = max(self._make_at, self._clock.monotonic() + RESTOCK_S)

    def give(self, start: Start) -> Child | None:
        """A spare that becomes what `start` says; None when none is prepared. Its end is the caller's to see now."""
        for spare in [spare for spare in self._spares.values() if spare.prepared]:
            child = spare.kept.child
            if child is None or child.ended() or not spare.become(start):
                continue
            self._loop.unwatch(child.pidfd)
            self._remove(spare)
            COUNTERS.add("agent.spares_taken")
            return child
        return None

    def _remove(self, spare: _Spare) -> None:
        del self._spares[spare.kept.process]
        self._births.let_go(spare.kept)
        if spare.speaks:
            self._loop.unwatch(spare.fileno())
        spare.close()
        self._make_at = min(self._make_at, self._clock.monotonic() + RESTOCK_S)

    # What the nursery tells of their births.

    def born(self, kept: Kept) -> None:
        assert kept.child is not None
        self._loop.watch(kept.child.pidfd, lambda: self._ended(kept))

    def started(self, kept: Kept) -> None:
        """Its preparation has begun."""

    def start_failed(self, kept: Kept, error: StartFailed) -> None:
        self._lose(self._spares[kept.process])

    def _lose(self, spare: _Spare) -> None:
        """It had no part yet, so nobody has to be told, unless no other one is made."""
        self._remove(spare)
        if spare.prepared or spare.in_vain:
            return
        self._num_failures += 1
        if self._num_failures == MOST_FAILURES:
            self._number = 0
            COUNTERS.add("agent.spares_given_up")
            why = f"{MOST_FAILURES} in a row could not be prepared; see logs/{spare.kept.process}.log"
            self._log.emit(Alert(f"no more spares are made: {why}"))

    def _ended(self, kept: Kept) -> None:
        child = kept.child
        assert child is not None
        if not child.ended():
            return
        if child.is_ours():
            kill_group(child.pid)
        child.status()
        self._loop.unwatch(child.pidfd)
        child.close()
        self._lose(self._spares[kept.process])
        COUNTERS.add("agent.spares_lost")

    def avoid(self, broken_chips: tuple[str, ...]) -> None:
        """Spares may hold a context on an accelerator that broke: they end, and others are made that keep off it."""
        if broken_chips == self._nobody.broken_chips:
            return
        self._nobody = msgspec.structs.replace(self._nobody, broken_chips=broken_chips)
        for spare in self._spares.values():
            spare.in_vain = True
            if spare.kept.child is not None:
                spare.kept.child.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """End them all; none is made any more."""
        self._number = 0
        for spare in tuple(self._spares.values()):
            child = spare.kept.child
            if child is not None:
                self._loop.unwatch(child.pidfd)
                child.send_signal(signal.SIGKILL)
                child.wait_ended(whom=spare.kept.process, timeout_s=END_TIMEOUT_S)
                child.close()
                self._remove(spare)
        self._log.close()
