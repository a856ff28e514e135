"""Injects faults into a running job, records what was done, and leaves nothing behind.

    injector = Injector(run, folder)
    injected = injector.begin(Injection(ability=Ability.CPU, target="rollout-1", amount={"share": 0.9}))
    …
    injected = injector.end(injected)
    injector.close()

`begin` returns when the fault has begun. It raises `UserError` for a fault that is impossible (unknown process, a
trigger that does not occur, a mechanism that this machine lacks) and `ProcessDied` when the target ended before the
fault. A fault ends after its `duration_s`; `end` ends it earlier and returns the marker with the time of the end.

`signal_in_phase` kills or stops processes directly, without a process per fault, and undoes nothing. The soak uses it,
where the run has to replace the processes. The folder contains:

    undo.jsonl      how every change is undone, written before the change is made
    markers/N.json  what was done (`Injected`)
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import msgspec

from kintsugi.errors import DeadlineExceeded, ProcessDied, UserError
from kintsugi.lab import probing
from kintsugi.lab.faults.catalogue import mechanism_named
from kintsugi.lab.faults.mechanism import FaultContext, FaultMechanism
from kintsugi.lab.faults.signals import KillSignal, LostHost, StopSignal
from kintsugi.lab.injector.checks import check_injection
from kintsugi.lab.injector.fault_process import END_TIMEOUT_S, FaultProcess, PreparedFault
from kintsugi.lab.injector.injection import Ability, Injected, Injection
from kintsugi.lab.injector.reaper import ReaperGuard
from kintsugi.lab.injector.remote_fault import RemoteFault
from kintsugi.lab.injector.reports import InjectorReport
from kintsugi.lab.injector.triggers import TriggerWatch
from kintsugi.lab.injector.undo_log import ProcessIdentity, ResumeProcess, network_of
from kintsugi.lab.testbed.ports import ports_of
from kintsugi.lab.testbed.remote_hosts import HERE, RemoteHosts
from kintsugi.lab.testbed.testbed import RunTestbed
from kintsugi.lab.testbed.watch import MASTER, RunWatch
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.disk import write_atomically

READY_TIMEOUT_S = 20.0
REACH_TIMEOUT_S = 300.0
"""Time for a host on another machine to be there, from the start of its run."""
HOLD_LEASE_S = 120.0
"""Lease of the undo entry that resumes a held master if the laboratory dies meanwhile."""
SIGNALS: dict[Ability, type[KillSignal | StopSignal | LostHost]] = {
    Ability.KILL: KillSignal,
    Ability.STOP: StopSignal,
    Ability.HOST_LOSS: LostHost,
}
"""Faults that are one signal and need no process to prepare them."""


class InjectableRun(Protocol):
    """Interface of a run that faults are injected into; `MarkedRun` implements it."""

    run_dir: Path
    testbed: RunTestbed | None

    @property
    def running(self) -> bool: ...

    @property
    def remote(self) -> RemoteHosts | None: ...

    def is_ours(self, pid: int) -> bool: ...


def watch_of(run: InjectableRun) -> RunWatch:
    """Return a new watch of a run, some of whose processes may be on other machines."""
    if run.remote is None:
        return RunWatch(run.run_dir)
    return RunWatch(run.run_dir, is_elsewhere=run.remote.is_elsewhere)


class _MasterHold:
    """Whether a held master is resumed afterwards."""

    def __init__(self) -> None:
        self.resumes = True

    def keep_stopped(self) -> None:
        """Leave the master stopped: that is the fault."""
        self.resumes = False


class _Prepared(NamedTuple):
    """A fault that waits for its trigger."""

    fault: PreparedFault
    pid: int
    """Pid of the target, as its own host counts."""
    host: str
    mechanism: type[FaultMechanism]


class Injector:
    """Faults of one run. Several may be active at a time."""

    def __init__(self, run: InjectableRun, folder: Path, *, watch: RunWatch | None = None) -> None:
        """`watch` follows the run and stays open; without one, the injector follows the run itself."""
        self._run = run
        self._markers = folder / "markers"
        self._markers.mkdir(parents=True, exist_ok=True)
        self._guard = ReaperGuard(folder / "undo.jsonl")
        self._watch = watch if watch is not None else watch_of(run)
        self._owns_watch = watch is None
        self._active: dict[int, tuple[PreparedFault, Injected]] = {}
        self._count = len(list(self._markers.glob("*.json")))

    # Begin.

    def begin(self, injection: Injection) -> Injected:
        """Wait for the trigger and begin the fault."""
        try:
            return self._begin(injection)
        except UserError as error:
            raise UserError(f"{injection.ability.value} on {injection.target}: {error}") from error

    def _begin(self, injection: Injection) -> Injected:
        check_injection(injection)
        trigger = TriggerWatch(
            injection.trigger, watch=self._watch, run_dir=self._run.run_dir, alive=lambda: self._run.running
        )
        remote = self._run.remote
        is_elsewhere = remote is not None and remote.is_elsewhere(injection.target)
        if remote is not None and is_elsewhere:
            self._connect(remote, remote.host_of(injection.target))
            if injection.ability in SIGNALS:
                return self._signal_elsewhere(injection, trigger, remote)
        self._guard.renew()
        if self._run.testbed is not None:
            self._run.testbed.renew()
        if remote is not None and is_elsewhere:
            prepared = self._prepare_elsewhere(injection, remote)
        else:
            prepared = self._prepare_here(injection)
        fault = prepared.fault
        try:
            self._expect(fault, "ready", injection, prepared.pid)
            trigger.until_holds()
            trigger.pause()
            began = self._start(prepared, injection, trigger)
        except BaseException:
            fault.close()
            raise
        injected = self._record(
            injection,
            process=injection.target,
            pid=prepared.pid,
            host=prepared.host,
            mechanism=prepared.mechanism,
            wall=began.wall,
            monotonic=began.monotonic,
        )
        self._active[injected.number] = fault, injected
        return injected

    def _prepare_here(self, injection: Injection) -> _Prepared:
        """Prepare a fault of a process of this machine."""
        remote = self._run.remote
        target = self._identify(injection.target)
        # With other machines, this one too was named as one of the run's.
        mechanism = probing.choose(injection, pid=target.pid, may_share_network=remote is not None)
        peer = injection.peer
        is_peer_elsewhere = remote is not None and peer is not None and remote.is_elsewhere(peer)
        fault = FaultProcess(self._context(injection, mechanism, target, is_peer_elsewhere=is_peer_elsewhere))
        if peer is not None and is_peer_elsewhere:
            fault.follow(partial(self._ports_of, peer))
        return _Prepared(fault, target.pid, self._host_of(target), mechanism)

    def _prepare_elsewhere(self, injection: Injection, remote: RemoteHosts) -> _Prepared:
        """Prepare a fault of a process of another machine."""
        host, peer = remote.host_of(injection.target), injection.peer
        pid = self._watch.processes[injection.target].pid
        if peer is None:
            fault = RemoteFault(remote, host, injection, pid=pid)
        elif remote.host_of(peer) == host:
            fault = RemoteFault(remote, host, injection, pid=pid, peer_pid=self._watch.processes[peer].pid)
        else:
            fault = RemoteFault(remote, host, injection, pid=pid, ports=self._ports_of(peer) or ())
            fault.follow(partial(self._ports_of, peer))
        return _Prepared(fault, pid, host, mechanism_named(injection.ability, fault.mechanism))

    def _ports_of(self, process: str) -> frozenset[int] | None:
        """Return the ports of a process on any machine; None if that does not answer."""
        remote, presence = self._run.remote, self._watch.processes.get(process)
        if presence is None:
            return None
        if remote is not None and remote.is_elsewhere(process):
            return remote.ports_of(remote.host_of(process), presence.pid)
        return ports_of([presence.pid])

    def _connect(self, remote: RemoteHosts, host: str) -> None:
        """Connect to a host, before the trigger: it may take longer than the steps until then."""
        self._watch.until(
            lambda: remote.connect(host) or not self._run.running,
            what=f"a connection to {host}",
            timeout_s=REACH_TIMEOUT_S,
            pause_s=0.5,
        )

    def _signal_elsewhere(self, injection: Injection, trigger: TriggerWatch, remote: RemoteHosts) -> Injected:
        """Signal a process of another machine, or all of it; nothing is undone."""
        is_whole = injection.ability is Ability.HOST_LOSS
        while True:
            trigger.until_holds()
            trigger.pause()
            host = remote.host_of(injection.target)
            pids = {injection.target: self._watch.processes[injection.target].pid}
            pids |= remote.processes_on(host) if is_whole else {}
            for injected in self.signal_in_phase(injection, pids, is_whole_host=is_whole):
                if injected.process == injection.target:
                    return injected

    def _start(
        self,
        prepared: _Prepared,
        injection: Injection,
        trigger: TriggerWatch,
    ) -> InjectorReport:
        """Begin the fault; where the trigger names a phase, hold the master so that the phase can not pass."""
        fault = prepared.fault
        if (
            injection.trigger.phase is None
            or injection.trigger.after_s
            or MASTER not in self._watch.processes
        ):
            fault.go()
            return self._expect(fault, "began", injection, prepared.pid)
        while True:
            report: InjectorReport | None = None
            is_begun = False
            with self._master_held() as hold:
                if trigger.holds:
                    is_begun = True
                    fault.go()
                    with contextlib.suppress(DeadlineExceeded):
                        report = fault.receive(timeout_s=fault.longest_hold_s)
                    is_stop = injection.target == MASTER and prepared.mechanism is StopSignal
                    if is_stop and report is not None and report.what == "began":
                        hold.keep_stopped()
            if is_begun:
                return self._expect(fault, "began", injection, prepared.pid, report=report)
            trigger.until_holds()

    def signal_in_phase(
        self, injection: Injection, pids: Mapping[str, int], *, is_whole_host: bool = False
    ) -> tuple[Injected, ...]:
        """Kill or stop all of `pids` in one instant if the master is in the phase of the trigger; else return ().

        Processes that have ended, or that do not belong to the run, are left out. Nothing is undone later. With
        `is_whole_host` the supervisor of their host, on another machine, ends with them.
        """
        mechanism = SIGNALS[injection.ability]
        trigger = TriggerWatch(
            injection.trigger, watch=self._watch, run_dir=self._run.run_dir, alive=lambda: self._run.running
        )
        by_host = self._by_host(pids)
        for host in by_host.keys() - {HERE}:
            assert self._run.remote is not None
            self._run.remote.connect(host)
        hit: dict[str, tuple[str, int]] = {}
        """Process → its host and pid."""
        try:
            with self._master_held() as hold:
                if not trigger.holds:
                    return ()
                monotonic, wall = SYSTEM_CLOCK.monotonic(), SYSTEM_CLOCK.wall()
                for host, there in by_host.items():
                    hit |= self._signal(host, there, mechanism.number, is_whole=is_whole_host)
                if MASTER in hit and injection.ability is Ability.STOP:
                    hold.keep_stopped()
        except (ProcessDied, UserError):  # There is no master at this moment.
            return ()
        return tuple(
            self._record(
                injection,
                process=process,
                pid=pid,
                host=host,
                mechanism=mechanism,
                wall=wall,
                monotonic=monotonic,
            )
            for process, (host, pid) in hit.items()
        )

    def _by_host(self, pids: Mapping[str, int]) -> dict[str, dict[str, int]]:
        remote, found = self._run.remote, dict[str, dict[str, int]]()
        for process, pid in pids.items():
            found.setdefault(HERE if remote is None else remote.host_of(process), {})[process] = pid
        return found

    def _signal(
        self, host: str, pids: Mapping[str, int], number: signal.Signals, *, is_whole: bool
    ) -> dict[str, tuple[str, int]]:
        """Signal processes of one host; return those that got it."""
        remote = self._run.remote
        if remote is not None and host != HERE:
            hit = remote.signal(host, number, pids, is_whole=is_whole)
            return {process: (host, pids[process]) for process in hit}
        found = {}
        for process, pid in pids.items():
            with contextlib.suppress(ProcessLookupError):
                identity = ProcessIdentity.of(pid)
                if self._run.is_ours(pid) and identity.signal(number):
                    found[process] = self._host_of(identity), pid
        return found

    @contextlib.contextmanager
    def _master_held(self) -> Iterator[_MasterHold]:
        """Stop the master while its phase is checked and a fault begins, so that the phase can not pass in between."""
        master = self._identify(MASTER)
        entry = self._guard.before(ResumeProcess(master), lease_s=HOLD_LEASE_S)
        hold = _MasterHold()
        try:
            master.signal(signal.SIGSTOP)
            self._watch.glance()
            yield hold
        except BaseException:
            hold.resumes = True
            raise
        finally:
            if hold.resumes:
                self._guard.undo(entry)
            else:
                self._guard.forget(entry)

    def _record(
        self,
        injection: Injection,
        *,
        process: str,
        pid: int,
        host: str,
        mechanism: type[FaultMechanism],
        wall: float,
        monotonic: float,
    ) -> Injected:
        """Write the marker of a fault that has begun."""
        self._count += 1
        injected = Injected(
            injection=injection,
            process=process,
            pid=pid,
            host=host,
            mechanism=mechanism.name,
            start=wall,
            monotonic=monotonic,
            phase=self._watch.phase_at(monotonic),
            step=self._watch.step + 1,
            number=self._count,
            end=None if mechanism.lasts else wall,
        )
        self._mark(injected)
        return injected

    def _identify(self, process: str) -> ProcessIdentity:
        """Return a process of the run; UserError when the name is unknown, ProcessDied when the process has ended."""
        self._watch.look(force=True)
        presence = self._watch.processes.get(process)
        if presence is None:
            known = ", ".join(sorted(self._watch.processes)) or "none yet"
            raise UserError(f"target: this run has no process {process!r}; it has {known}")
        with contextlib.suppress(ProcessLookupError):
            identity = ProcessIdentity.of(presence.pid)
            # The start time is read before the mark, so a later process with the same pid can not be meant.
            if self._run.is_ours(identity.pid) and identity.alive:
                return identity
        raise ProcessDied(f"{process} (pid {presence.pid}) has ended and has not been replaced yet")

    def _context(
        self,
        injection: Injection,
        mechanism: type[FaultMechanism],
        target: ProcessIdentity,
        *,
        is_peer_elsewhere: bool,
    ) -> FaultContext:
        testbed, peer = self._run.testbed, injection.peer
        peers: tuple[ProcessIdentity, ...] = ()
        peer_ports: tuple[int, ...] | None = None
        if peer is not None and is_peer_elsewhere:
            peer_ports = tuple(sorted(self._ports_of(peer) or ()))
        elif peer is not None:
            peers = (self._identify(peer),)
        disk = testbed.disk if testbed is not None else None
        on_disk = disk is not None and self._run.run_dir.resolve().is_relative_to(disk.resolve())
        return FaultContext(
            injection=injection,
            mechanism=mechanism.name,
            target=target,
            peers=peers,
            peer_ports=peer_ports,
            run_dir=str(self._run.run_dir),
            disk=str(disk) if on_disk else None,
            named=testbed is not None and testbed.named,
            journal=str(self._guard.path),
            seed=self._count,
        )

    def _host_of(self, target: ProcessIdentity) -> str:
        """Return the name of the isolated host that the process runs on; the machine's own name where there is none."""
        testbed = self._run.testbed
        with contextlib.suppress(OSError):
            found = testbed.host_of(network_of(target.pid)) if testbed is not None else None
            if found is not None:
                return found
        return socket.gethostname()

    def _expect(
        self,
        fault: PreparedFault,
        what: str,
        injection: Injection,
        pid: int,
        *,
        report: InjectorReport | None = None,
    ) -> InjectorReport:
        """Wait for one kind of report, unless it is there already; ProcessDied or UserError when another one, or none,
        comes."""
        report = report or fault.receive(timeout_s=READY_TIMEOUT_S)
        if report is not None and report.what == what:
            return report
        if not fault.is_target_alive:
            raise ProcessDied(f"{injection.target} (pid {pid}) ended before the fault could begin")
        if report is not None:
            raise UserError(report.why)
        raise UserError(f"the injector was {'killed' if fault.has_ended else 'silent'}")

    # End.

    def end(self, injected: Injected) -> Injected:
        """Undo a fault, unless it has ended already; return its marker with the time of the end."""
        if injected.number not in self._active:
            return injected
        fault, injected = self._active.pop(injected.number)
        fault.end()
        report: InjectorReport | None = None
        with contextlib.suppress(DeadlineExceeded):
            report = fault.receive(timeout_s=END_TIMEOUT_S)
        ended = self._settle(fault, injected, report)
        self._mark(ended)
        return ended

    def _settle(self, fault: PreparedFault, injected: Injected, report: InjectorReport | None) -> Injected:
        """Make sure that the fault is undone, even when its process was killed or hangs; on another machine, the host
        does."""
        replace = msgspec.structs.replace
        if report is None or report.what != "ended":
            try:
                if isinstance(fault, FaultProcess):
                    fault.kill()
                    self._guard.undo_all_of(fault.child.pid)
            finally:
                fault.close()
            return replace(injected, end=injected.end or SYSTEM_CLOCK.wall())
        fault.close()
        return replace(
            injected,
            end=injected.end or report.wall,
            measured=report.measured,
            target_ended=report.target_ended,
        )

    @property
    def active(self) -> tuple[Injected, ...]:
        """Faults that were begun and not ended by `end`."""
        return tuple(injected for _, injected in self._active.values())

    def _mark(self, injected: Injected) -> None:
        write_atomically(
            self._markers / f"{injected.number}.json", msgspec.json.encode(injected), durable=False
        )

    def close(self) -> None:
        """End every fault, the last one first, and undo every change; an error in one does not keep the others."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._guard.close)
            if self._owns_watch:
                stack.callback(self._watch.close)
            for injected in self.active:
                stack.callback(self.end, injected)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
