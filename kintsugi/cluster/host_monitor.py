"""The node agent as a monitor of its host: stopped processes, broken accelerators, exits, and readings once a second.

    agent's loop ─► targets ─► sampling thread ─► readings ─► `<run>/figures/<agent>.jsonl`

What the master has to act on is sent to it; everything else is recorded in the run folder. The run does not depend on
the readings: a value that can not be read is left out, one that can not be written is counted, and nothing here blocks
the agent's loop. Without `begin` (an agent under test) nothing is recorded.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

import msgspec

from kintsugi.cluster.accelerators import AcceleratorMonitor, AcceleratorReading, open_probe
from kintsugi.cluster.child import ChildProcess
from kintsugi.cluster.exit_recorder import ExitRecorder, OomAttribution
from kintsugi.cluster.restart_policy import STOPPED_S, StoppedProcessDetector
from kintsugi.errors import DeadlineExceeded, fault_of
from kintsugi.process.membership import Membership
from kintsugi.protocol.agents import AskTime, Inspected, ProcessSuspected, TimeTold
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.waits import WaitTable, join, wait
from kintsugi.telemetry.collect.cgroups import ControlGroups
from kintsugi.telemetry.collect.clock_offset import ClockEstimate, reading
from kintsugi.telemetry.collect.links import Address, LinkTable, address_in, num_recorded
from kintsugi.telemetry.collect.probes import DiskProbe, NameProbe, Probe, is_name
from kintsugi.telemetry.collect.process import UNREADABLE, HostStatSampler, OpenFiles, ProcessSampler
from kintsugi.telemetry.collect.socket_owners import SocketOwners, ends_of
from kintsugi.telemetry.collect.tcp import TcpTable, socket_inodes
from kintsugi.telemetry.events import EventLog, FaultSeen, Note, Stamp
from kintsugi.telemetry.readings import ClockOffsetReading, ReadingsLog, Sample
from kintsugi.transport import Endpoint, PendingReply

ASK_TIME_S = 1.0


class HostMonitor:
    """Part of the agent's loop that never blocks it; slow reads happen in threads."""

    def __init__(
        self,
        children: Mapping[str, ChildProcess],
        endpoint: Endpoint,
        membership: Membership,
        *,
        own: Bootstrap,
        probe: str,
        clock: Clock,
    ) -> None:
        """`probe` is `Programs.probe`."""
        self._children = children
        self._endpoint = endpoint
        self._membership = membership
        self._own = own
        self._clock = clock
        self._checks_fail = False
        """Whether it is recorded that checks fail."""
        self.accelerators = AcceleratorMonitor(partial(open_probe, probe), host=own.host, clock=clock)
        self._stopped = StoppedProcessDetector()
        self._control_groups = ControlGroups()
        self._ooms = ooms = OomAttribution()
        self.log = log = EventLog(
            RunFolder(own.run_dir).events_file(own.process), process=own.process, clock=clock
        )
        self._exit_recorder = ExitRecorder(log, ooms=ooms, clock=clock)
        self._sampler = HostSampler(
            own, readings=membership.readings, ooms=ooms, note=lambda text: log.emit(Note(text)), clock=clock
        )
        self._clock_sync = ClockSync(endpoint, membership.readings, own=own, clock=clock)

    def begin(self) -> None:
        # Opens the log, so that a later lack of descriptors can be recorded.
        self.log.emit(Note(f"{self._own.process} monitors the processes of {self._own.host}"))
        self.accelerators.begin()
        self._sampler.begin()

    def tick(self, now: float) -> None:
        """Update the targets of the sampling thread. Called several times a second."""
        pids = {name: child.handle.pid for name, child in self._children.items() if child.handle is not None}
        listeners = ((address_in(peer.address), peer.process) for peer in self._endpoint.peers.values())
        book = {address: process for address, process in listeners if address is not None}
        if (own := address_in(self._endpoint.address)) is not None:
            book[own] = self._own.process
        has_other_hosts = any(peer.host != self._own.host for peer in self._endpoint.peers.values())
        self._sampler.update_targets(MonitorTargets(pids, book, has_other_hosts, self.accelerators.readings))
        self._ooms.update_groups(pids.values())
        if self._membership.registered:
            self._clock_sync.tick(now)

    def inspect(self, process: str, incarnation: str) -> Inspected:
        """State of a child from outside; empty for an unknown process or another incarnation."""
        child = self._children.get(process)
        if child is None or child.incarnation != incarnation:
            return Inspected("")
        readings = RunFolder(self._own.run_dir).readings_file(process)
        return child.inspected(readings=readings, control_groups=self._control_groups)

    def report_stopped(self, pids: Iterable[int], now: float) -> list[int]:
        """Return pids that are newly found stopped. A stopped master is killed; others are reported to the master."""
        stopped = self._stopped.sample(pids, now=now)
        for child in self._children.values():
            if child.handle is None or child.handle.pid not in stopped:
                continue
            if child.process == self._own.master.process:
                child.handle.send_signal(signal.SIGKILL)
            else:
                evidence = f"process {child.handle.pid} is stopped (state T), for {STOPPED_S:g} s or more"
                self._membership.send_to_master(ProcessSuspected(child.process, child.incarnation, evidence))
        return stopped

    def run_checks(self, *checks: Callable[[float], None], now: float) -> None:
        """Run these periodic checks. The kernel may refuse one for lack of descriptors or memory, which says nothing
        about the processes: that is recorded once, and the check is repeated next time."""
        refused: OSError | None = None
        for check in checks:
            try:
                check(now)
            except OSError as error:
                refused = refused or error
        if refused is not None and not self._checks_fail:
            fault = fault_of(refused, process=self._own.process, time=self._clock.wall())
            self._checks_fail = self.log.try_emit(FaultSeen(fault))
        elif refused is None and self._checks_fail:
            self._checks_fail = False
            self.log.emit(Note(f"{self._own.process} can check its processes again"))

    def report_accelerator_faults(self) -> bool:
        """Report new faults of accelerators to the master; True if one of them is broken."""
        users = {child.handle.pid: child for child in self._children.values() if child.handle is not None}
        news = self.accelerators.new_faults(users, term=self._endpoint.term)
        for fault in news:
            self._membership.send_to_master(fault)
        return any(fault.broken for fault in news)

    def take_status(self, child: ChildProcess) -> int | None:
        """Reap a child that has ended, record its exit, and return its status."""
        memory_bytes = self._sampler.rss_bytes(child.process)
        return self._exit_recorder.take_status(child, memory_bytes=memory_bytes)

    def close(self) -> None:
        self.accelerators.close()
        self._sampler.close()
        self.log.close()


class ClockSync:
    """Requests the master's time periodically and records the offset of this host's clock."""

    def __init__(self, endpoint: Endpoint, readings: ReadingsLog, *, own: Bootstrap, clock: Clock) -> None:
        self._endpoint = endpoint
        self._readings = readings
        self._own = own
        self._clock = clock
        self._estimate = ClockEstimate()
        self._next = 0.0

    def tick(self, now: float) -> None:
        if now < self._next:
            return
        self._next = now + ASK_TIME_S
        begun, asked_at = self._clock.monotonic(), self._clock.wall()

        def on_reply(pending: PendingReply) -> None:
            round_trip_s = self._clock.monotonic() - begun
            if pending.error is None:
                self._take(asked_at, round_trip_s, pending.result().expect(TimeTold))

        self._endpoint.request(self._own.master.process, AskTime(), deadline_s=ASK_TIME_S, on_done=on_reply)

    def _take(self, asked_at: float, round_trip_s: float, answer: TimeTold) -> None:
        new = reading(sent_at=asked_at, round_trip_s=round_trip_s, remote_time=answer.wall)
        best = self._estimate.add(new)
        self._readings.write(
            ClockOffsetReading(self._own.host, round(best.offset_s, 6), round(best.error_s, 6))
        )


SAMPLE_S = 1.0
CLOSE_S = 0.2


class MonitorTargets(msgspec.Struct, frozen=True):
    """Processes, listeners and accelerators to sample, as the agent's loop knew them last."""

    pids: dict[str, int] = {}
    book: dict[Address, str] = {}
    """Address → process of the run that listens there."""
    has_other_hosts: bool = False
    accelerators: tuple[AcceleratorReading, ...] = ()


class HostSampler:
    """Thread that consumes the latest targets, produces readings, waits for its next turn, and ends at `close`."""

    def __init__(
        self,
        own: Bootstrap,
        *,
        readings: ReadingsLog,
        ooms: OomAttribution,
        note: Callable[[str], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`note` is called once for each unexpected error."""
        self._own = own
        self._readings = readings
        self._ooms = ooms
        self._note = note
        self._clock = clock
        self._noted: set[str] = set()
        self._control_groups = ControlGroups()
        self._samplers: dict[str, ProcessSampler] = {}
        self._files = OpenFiles()
        self._host = HostStatSampler(own.host, run_dir=own.run_dir)
        self._links = LinkTable()
        self._late_readings: list[Sample] = []
        """Readings of links of the round before that are written after all."""
        self._table: TcpTable | None = None
        self._owners: dict[int, str | None] = {}
        """Inode of a socket → its process; None for a process that is not part of the run."""
        self._disk = DiskProbe(RunFolder(own.run_dir).readings_file(own.process).with_suffix(".probe"))
        self._probes = [Probe("fsync", self._disk, note=note, clock=clock)]
        self._ends = SocketOwners(RunFolder(own.run_dir).readings_file(own.process))
        self._ends_probe = Probe("ends", self._ends, note=note, clock=clock)
        master = address_in(own.master.address)
        if master is not None and is_name(master[0]):
            self._probes.append(Probe("resolve", NameProbe(master[0]), note=note, clock=clock))
        self._targets = MonitorTargets()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampling", daemon=True)

    def begin(self) -> None:
        for probe in (*self._probes, self._ends_probe):
            probe.begin()
        self._thread.start()

    def update_targets(self, targets: MonitorTargets) -> None:
        """Set what is sampled; called by the agent's loop."""
        self._targets = targets

    def rss_bytes(self, process: str) -> float:
        """Resident memory of a child at its last reading."""
        sampler = self._samplers.get(process)
        return 0.0 if sampler is None else sampler.rss_bytes

    def _run(self) -> None:
        waits = WaitTable()
        before: Stamp | None = None
        while not self._closing.is_set():
            begun = self._clock.monotonic()
            samples = self.samples()
            self._readings.write(*self._late_readings, stamp=before)
            before = self._readings.stamp()
            self._readings.write(*samples, stamp=before)
            with suppress(DeadlineExceeded):
                wait(
                    lambda remaining_s: self._closing.wait(remaining_s) or None,
                    whom="itself",
                    what="the next sample",
                    timeout_s=max(0.1, begun + SAMPLE_S - self._clock.monotonic()),
                    waits=waits,
                )

    def samples(self) -> list[Sample]:
        """Read everything once."""
        targets = self._targets
        self._late_readings = []
        found: list[Sample] = []
        for part in (self._process_samples, self._host_samples, self._link_samples):
            try:
                found += part(targets)
            except UNREADABLE:
                COUNTERS.add("figures.unreadable")
            except Exception as error:  # noqa: BLE001 - the thread's outermost boundary: it continues.
                COUNTERS.add("figures.unreadable")
                if part.__name__ not in self._noted:
                    self._note(f"readings are left out: {error!r}")
                self._noted.add(part.__name__)
        return found

    def _process_samples(self, targets: MonitorTargets) -> list[Sample]:
        self._control_groups.begin_round()
        # The agent comes last: the master's listener, which both have open, belongs to the master.
        pids = {**targets.pids, self._own.process: os.getpid()}
        for name, pid in pids.items():
            if name not in self._samplers or self._samplers[name].pid != pid:
                if name in self._samplers:
                    self._samplers[name].close()
                sampler = ProcessSampler(name, pid, control_groups=self._control_groups, files=self._files)
                self._samplers[name] = sampler
        for gone in self._samplers.keys() - pids.keys():
            self._samplers.pop(gone).close()
        found: list[Sample] = []
        for name in pids:
            sample = self._samplers[name].sample()
            if sample is not None:
                memory = sum(accelerator.memory_of.get(sample.pid, 0) for accelerator in targets.accelerators)
                if memory:
                    sample.values["device_memory_bytes"] = float(memory)
                found.append(sample)
        self._ooms.count(self._clock.monotonic())
        return found

    def _host_samples(self, targets: MonitorTargets) -> list[Sample]:
        more = {name: value for probe in self._probes for name, value in probe.values().items()}
        for index, accelerator in enumerate(targets.accelerators):
            more |= {f"device_{index}_{name}": value for name, value in accelerator.metrics().items()}
        return [self._host.sample(more)]

    def _link_samples(self, targets: MonitorTargets) -> list[Sample]:
        if self._table is None:
            self._table = TcpTable()
        sockets = self._table.read()
        self._find_owners({each.inode for each in sockets if each.inode})
        owners = {inode: name for inode, name in self._owners.items() if name is not None}
        if targets.has_other_hosts:
            own = {each.local: owners[each.inode] for each in sockets if each.inode in owners}
            self._ends.own = ends_of(own)
        book = {**self._ends.others, **targets.book}
        most = num_recorded(len(self._samplers), num_processes=self._own.num_processes)
        look = self._links.look(sockets, owners=owners, book=book, most=most)
        self._late_readings = [*look.before]
        return [*look.now]

    def _find_owners(self, inodes: set[int]) -> None:
        """Find the owners of sockets. Reading all descriptors is expensive: only done for a socket that is new."""
        if inodes - self._owners.keys():
            found: dict[int, str] = {}
            for name, sampler in self._samplers.items():
                for inode in socket_inodes(sampler.pid):
                    found.setdefault(inode, name)
            self._owners = {inode: found.get(inode) for inode in inodes}
        else:
            self._owners = {inode: self._owners[inode] for inode in inodes}

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            with suppress(DeadlineExceeded):
                join(self._thread, whom="sampling thread", what="its end", timeout_s=CLOSE_S)
        for probe in (*self._probes, self._ends_probe):
            probe.close()
        self._disk.close()
        self._ends.close()
        if not self._thread.is_alive():
            self._files.forget("/proc/")
            if self._table is not None:
                self._table.close()
        self._readings.close()
