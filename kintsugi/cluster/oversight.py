"""What a node agent sees by looking: who is stopped, which accelerators broke, how everybody fares, how they ended.

Nothing here decides about the run. What the master has to know is told; everything else is recorded in the run folder.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from kintsugi.bootstrap import Bootstrap
from kintsugi.cluster.children import Kept
from kintsugi.cluster.chips import ChipWatch, open_probe
from kintsugi.cluster.obituaries import Obituaries, OomLedger
from kintsugi.cluster.restarts import STOPPED_S, StoppedWatch
from kintsugi.cluster.sampling import Sampling, Scene
from kintsugi.errors import fault_of
from kintsugi.observe.clocks import ClockEstimate, reading
from kintsugi.observe.events import EventLog, FaultSeen, Note, events_path
from kintsugi.observe.figures import ClockSample, FiguresLog
from kintsugi.observe.links import address_in
from kintsugi.runtime import Clock
from kintsugi.supervision import AskTime, ProcessSuspected, TimeTold
from kintsugi.transport import Endpoint, PendingReply
from kintsugi.worker import Membership

ASK_TIME_S = 1.0


class Oversight:
    """Lives in the agent's loop and never makes it wait; what may take time is done in threads of its parts."""

    def __init__(
        self,
        kept: Mapping[str, Kept],
        endpoint: Endpoint,
        membership: Membership,
        *,
        own: Bootstrap,
        probe: str,
        clock: Clock,
    ) -> None:
        """`probe`: who reads the accelerators, as of `Programs`."""
        self._kept, self._endpoint, self._membership, self._own = kept, endpoint, membership, own
        self._clock = clock
        self._is_blind = False
        """It was told that looks fail."""
        self.chips = ChipWatch(partial(open_probe, probe), host=own.host, clock=clock)
        self._stopped = StoppedWatch()
        self._ooms = ooms = OomLedger()
        self._log = log = EventLog(events_path(own.run_dir, own.process), process=own.process, clock=clock)
        self._obituaries = Obituaries(log, ooms=ooms, clock=clock)
        self._sampling = Sampling(
            own, figures=membership.figures, ooms=ooms, note=lambda text: log.emit(Note(text)), clock=clock
        )
        self._times = TimeKeeping(endpoint, membership.figures, own=own, clock=clock)

    def begin(self) -> None:
        # The log is open from here on: it must not need a descriptor to say that there is none.
        self._log.emit(Note(f"{self._own.process} looks after the processes of {self._own.host}"))
        self.chips.begin()
        self._sampling.begin()

    def tick(self, now: float) -> None:
        """Show the recorder who is there. Called several times a second."""
        pids = {name: kept.child.pid for name, kept in self._kept.items() if kept.child is not None}
        listeners = ((address_in(peer.address), peer.process) for peer in self._endpoint.peers.values())
        book = {address: process for address, process in listeners if address is not None}
        if (own := address_in(self._endpoint.address)) is not None:
            book[own] = self._own.process
        has_other_hosts = any(peer.host != self._own.host for peer in self._endpoint.peers.values())
        self._sampling.show(Scene(pids, book, has_other_hosts, self.chips.readings))
        self._ooms.look_at(pids.values())
        if self._membership.registered:
            self._times.tick(now)

    def stopped(self, pids: Iterable[int], now: float) -> list[int]:
        """Those that have just been found stopped. A master is ended, as nobody else would; of others it is told."""
        stopped = self._stopped.sample(pids, now=now)
        for kept in self._kept.values():
            if kept.child is None or kept.child.pid not in stopped:
                continue
            if kept.process == self._own.master.process:
                kept.child.send_signal(signal.SIGKILL)
            else:
                evidence = f"process {kept.child.pid} is stopped (state T), for {STOPPED_S:g} s or more"
                self._membership.tell(ProcessSuspected(kept.process, kept.incarnation, evidence))
        return stopped

    def try_to(self, *looks: Callable[[float], None], now: float) -> None:
        """Take each of these periodic looks. The kernel may refuse one for want of descriptors or memory, which says
        nothing about who was to be looked at: that is told once, and looked again next time."""
        refused: OSError | None = None
        for look in looks:
            try:
                look(now)
            except OSError as error:
                refused = refused or error
        if refused is not None and not self._is_blind:
            fault = fault_of(refused, process=self._own.process, time=self._clock.wall())
            self._is_blind = self._log.try_emit(FaultSeen(fault))
        elif refused is None and self._is_blind:
            self._is_blind = False
            self._log.emit(Note(f"{self._own.process} can look at its processes again"))

    def chips_broke(self) -> bool:
        """Tell of what is new with the accelerators; whether one of them is to be left alone from now on."""
        users = {kept.child.pid: kept for kept in self._kept.values() if kept.child is not None}
        news = self.chips.news(users, epoch=self._endpoint.epoch)
        for fault in news:
            self._membership.tell(fault)
        return any(fault.broken for fault in news)

    def take_status(self, kept: Kept) -> int | None:
        """Of a child that has ended; how it did is recorded."""
        memory_bytes = self._sampling.rss_bytes(kept.process)
        return self._obituaries.take_status(kept, memory_bytes=memory_bytes)

    def close(self) -> None:
        self.chips.close()
        self._sampling.close()
        self._log.close()


class TimeKeeping:
    """Asks the master for its time, and records how far this host's clock is from it."""

    def __init__(self, endpoint: Endpoint, figures: FiguresLog, *, own: Bootstrap, clock: Clock) -> None:
        self._endpoint, self._figures, self._own, self._clock = endpoint, figures, own, clock
        self._estimate = ClockEstimate()
        self._next = 0.0

    def tick(self, now: float) -> None:
        if now < self._next:
            return
        self._next = now + ASK_TIME_S
        begun, asked_at = self._clock.monotonic(), self._clock.wall()

        def told(pending: PendingReply) -> None:
            round_trip_s = self._clock.monotonic() - begun
            if pending.error is None:
                self._take(asked_at, round_trip_s, pending.result().expect(TimeTold))

        self._endpoint.request(self._own.master.process, AskTime(), deadline_s=ASK_TIME_S, on_done=told)

    def _take(self, asked_at: float, round_trip_s: float, answer: TimeTold) -> None:
        new = reading(asked_at=asked_at, round_trip_s=round_trip_s, told=answer.wall)
        best = self._estimate.add(new)
        self._figures.write(ClockSample(self._own.host, round(best.offset_s, 6), round(best.error_s, 6)))
