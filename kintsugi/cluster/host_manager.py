"""The host manager: a process beside the launcher that starts hosts on other machines and keeps them.

    python -m kintsugi.cluster.host_manager DESCRIPTOR

    launcher ─► host manager ── tickets ─► back end (ssh) ─► supervisor ─► agent ─► processes
                     ▲───────── JoinHost, HostBeat, MirrorFiles, FetchFile ────┘

The loop consumes messages of supervisors and events of the back end; it waits for both. It gives each supervisor the
files of the run and appends the telemetry of its host to the run folder. A host that is silent, or that its engine has
lost, is ordered again under a new ticket, with pauses; the processes of the run are meanwhile started elsewhere, which
the master decides on its own. A host that can not join when the run begins ends the run by name.

It ends with the lifeline of the launcher: all hosts are told to end, then everything is given back. What joined is
recorded in `joined_hosts.json`, and the files of the hosts are kept in `host_files/` (`run_files.py`), with which a
successor of this process goes on.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from kintsugi.cluster.backends.contract import (
    Backend,
    HostCame,
    HostDoubted,
    HostLeaves,
    HostOrder,
    HostWent,
)
from kintsugi.cluster.backends.ray import open_ray
from kintsugi.cluster.backends.slurm import open_slurm
from kintsugi.cluster.backends.ssh import RemoteHost, SshBackend
from kintsugi.cluster.file_mirror import FileWriter
from kintsugi.cluster.host_manager_process import HOST_MANAGER, HostFailed, ManagerHandover
from kintsugi.cluster.joining import (
    NOTED_CLOCK_S,
    HostHandover,
    HostNeeds,
    Ticket,
    supervisor_of,
    versions,
    why_refused,
)
from kintsugi.cluster.run_files import RunFiles, remove_kept_files
from kintsugi.cluster.spawn import own_session_and_log
from kintsugi.config.schema import Config
from kintsugi.errors import Fault, KintsugiError, RefusedError, fault_of
from kintsugi.process.exit_codes import EXIT_USER_ERROR
from kintsugi.protocol.hosts import (
    PART_BYTES,
    FetchFile,
    FilePart,
    HostBeat,
    HostFacts,
    HostJoined,
    HostOrders,
    JoinHost,
    MirrorFiles,
)
from kintsugi.protocol.membership import Ok
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.backoff import growing_pause
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.disk import write_atomically
from kintsugi.runtime.waits import wait
from kintsugi.telemetry.disk_budget import DISK_BUDGET
from kintsugi.telemetry.events import Alert, EventLog, FaultSeen, HostLost, Note
from kintsugi.telemetry.verdict_files import HostNotice, give_notice
from kintsugi.transport import Delivery, Endpoint, new_key_pair
from kintsugi.types import Peer

TICK_S = 0.1
SILENT_S = 20.0
"""Silence after which a host is ordered again. The master gives its processes up earlier (15 s); a link that is back
before has lost nothing here."""
DOUBTED_SILENT_S = 5.0
"""Silence after which a host is ordered again that its engine doubts too."""
GONE_S = 2.5
"""Silence after which a host is lost whose connection was closed meanwhile: the kernel closes it when the supervisor
has died. One that lives connects again within a second."""
LAST_BEAT_S = 3.0
"""Longest time between the last heartbeat and the close of a connection for which the one explains the other."""
LONGEST_TURN_S = 1.0
"""A turn of the loop that took longer is time in which this process did not run, or waited for a disk: it says nothing
about the hosts."""
REACH_S = 2.0
"""Time to connect to a host that joins."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Pause before a lost host is ordered again; it doubles with each loss in a row."""
STEADY_S = 30.0
"""Time for a host to be ready before its next loss is none in a row. One that dies right after each start is then
ordered once a minute, over a run of any length."""
TOLD_LOSSES = 3
"""Losses in a row from which on they are told."""
END_S = 12.0
"""Time for all hosts to end in order."""
GIVE_BACK_S = 5.0
MOST_WHY = 2000
"""Characters of the reason in a report, which is one write to a pipe."""
INCARNATIONS = 10_000
"""Restarts of an agent by one supervisor; the agent of the next ticket has a higher number than all of them."""


class HostPhase(StrEnum):
    """Where a host is between its order and its end."""

    ORDERED = "ordered"
    JOINED = "joined"
    READY = "ready"
    LOST = "lost"
    ENDED = "ended"


class HostRecord(msgspec.Struct):
    """One host, as it is kept in `joined_hosts.json`."""

    host: str
    phase: HostPhase = HostPhase.ORDERED
    ticket: int = 0
    """Number of its last ticket."""
    public_key: bytes = b""
    """Key of its supervisor; empty until it has joined."""
    was_ready: bool = False
    place: str = ""
    """Machine in the words of its engine."""
    facts: HostFacts | None = None
    num_losses: int = 0
    """Losses in a row, none of them after `STEADY_S` of readiness."""
    clock_s: float | None = None
    """Seconds by which its clock is ahead of the launcher's; None before it was measured."""
    clock_error_s: float = 0.0


class HostDecision(msgspec.Struct, frozen=True):
    """Action about a host, and its reason."""

    action: str = ""
    """`order`: under a new ticket; `lose`: it is gone; `fail`: the run can not begin; empty: nothing."""
    why: str = ""
    is_silence: bool = False
    """Nothing but its silence is known: it may be cut off."""


def decide(
    record: HostRecord,
    *,
    now: float,
    since: float,
    heard_at: float,
    join_s: float,
    doubt: str = "",
    closed_at: float = -math.inf,
) -> HostDecision:
    """Decide about a host by time alone. Pure.

    `since` is when its phase began, `heard_at` when its supervisor was last heard of, `join_s` the time to join,
    `doubt` why its engine does not know whether it is alive, `closed_at` when a connection to any supervisor was last
    closed.
    """
    if record.phase in (HostPhase.ORDERED, HostPhase.JOINED) and now - since > join_s:
        what = "join" if record.phase is HostPhase.ORDERED else "start its agent"
        return HostDecision("lose" if record.was_ready else "fail", f"it did not {what} within {join_s:g} s")
    if record.phase in (HostPhase.JOINED, HostPhase.READY) and now - heard_at > SILENT_S:
        action = "lose" if record.was_ready else "fail"
        return HostDecision(action, f"it is silent for {SILENT_S:g} s", is_silence=True)
    if record.phase is HostPhase.READY and doubt and now - heard_at > DOUBTED_SILENT_S:
        return HostDecision("lose", f"{doubt}, and it is silent for {now - heard_at:.1f} s")
    is_closed = heard_at < closed_at < heard_at + LAST_BEAT_S
    if record.phase is HostPhase.READY and is_closed and now - heard_at > GONE_S:
        return HostDecision("lose", f"its connection was closed, and it is silent for {now - heard_at:.1f} s")
    if record.phase is HostPhase.LOST:
        pause_s = pause_after(record.num_losses)
        if now - since >= pause_s:
            return HostDecision("order", f"it was lost {pause_s:g} s ago")
    return HostDecision()


def pause_after(num_losses: int) -> float:
    """Return the seconds before a host is ordered again that was lost so many times in a row.

    >>> [pause_after(number) for number in (1, 2, 3, 6)]
    [2.0, 4.0, 8.0, 60.0]
    """
    return growing_pause(num_losses, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)


def why_not_reached(address: str, port: int) -> str:
    """Return why this machine can not connect to a port that a host listens on; empty if it can. Blocks for at most
    `REACH_S`."""
    if not port:
        return ""

    def attempt(remaining_s: float) -> str:
        try:
            socket.create_connection((address, port), timeout=max(0.1, min(remaining_s, REACH_S))).close()
        except (OSError, OverflowError) as error:
            return f"{getattr(error, 'strerror', None) or error}"
        return ""

    reason = wait(attempt, whom=address, what="a connection", timeout_s=REACH_S)
    if not reason:
        return ""
    return (
        f"it can not be reached at {address}, its own address, port {port} ({reason}): expected TCP between all "
        "machines in both directions; it is behind NAT, or a firewall closes its ports"
    )


def open_backend(
    config: Config, *, job: str, machines: Sequence[RemoteHost]
) -> tuple[Backend, dict[str, HostNeeds], dict[str, str]]:
    """Open the back end of `cluster.on`; return it with what each host has to have, and the names of their machines.
    `machines` are those of a hosts file."""
    match config.cluster.on:
        case "slurm":
            return open_slurm(config)
        case "ray":
            return open_ray(config, job=job)
        case "k8s":
            from kintsugi.cluster.backends.kubernetes.opening import open_kubernetes

            return open_kubernetes(config, job=job)
    needs = {
        f"host-{number}": HostNeeds(versions(), host.gpus, host.memory_gib << 30)
        for number, host in enumerate(machines, 1)
    }
    names = {f"host-{number}": f"{host.name}, {host.address}" for number, host in enumerate(machines, 1)}
    return SshBackend(machines), needs, names


class HostManager:
    """Hosts of one run over all their tickets."""

    def __init__(self, handover: ManagerHandover, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._handover, self._clock = handover, clock
        config = handover.config
        self._run_dir = Path(handover.run_dir)
        self._log = EventLog(RunFolder(self._run_dir).events_file(HOST_MANAGER), process=HOST_MANAGER)
        self._job = handover.agents[0].job
        self._files = RunFiles(config, run_dir=self._run_dir, job=self._job)
        self._writer = FileWriter(self._run_dir)
        self._agents = {agent.host: agent for agent in handover.agents}
        self._backend, self._needs, self._names = open_backend(
            config, job=self._job, machines=handover.machines
        )
        self._endpoint = Endpoint(
            job=self._job,
            process=HOST_MANAGER,
            incarnation="1",
            public_key=handover.public_key,
            secret_key=handover.secret_key,
            listener=handover.listener,
            clock=clock,
            num_peers=len(self._agents),
        )
        self._records = {host: HostRecord(host) for host in self._agents}
        self._since: dict[str, float] = {}
        self._heard_at: dict[str, float] = {}
        self._doubts: dict[str, str] = {}
        """Host → why its engine does not know whether it is alive."""
        self._closed_at = -math.inf
        self._checked_at = clock.monotonic()
        self._leaving: dict[str, tuple[Path, str]] = {}
        """Host that its engine wants back → the notice of it to the master, and the reason."""
        self._asked: set[str] = set()
        """Hosts whose supervisors were asked to end by their engine, which has been told to the back end."""
        self._ending_at: float | None = None

    def run(self) -> None:
        """Run until the launcher has ended and all hosts have, or can not be reached."""
        self._endpoint.watch(self._handover.lifeline, self._on_lifeline)
        now = self._checked_at = self._clock.monotonic()
        if not self._adopt(now):
            self._backend.start([self._order(host, now) for host in self._records])
            self._write()
        try:
            while not self._is_over():
                for delivery in self._endpoint.poll(TICK_S):
                    self._handle(delivery)
                self._take_events()
                if self._ending_at is None:
                    self._check(self._clock.monotonic())
            RunFolder(self._run_dir).hosts_file.unlink(missing_ok=True)
            remove_kept_files(self._run_dir)
        finally:
            # After an error the hosts stay, and so does the file: the next host manager goes on with them.
            if self._ending_at is not None:
                self._backend.give_back(timeout_s=GIVE_BACK_S)
            self._writer.close()
            self._endpoint.close(flush_s=0.5)
            self._log.close()

    def _adopt(self, now: float) -> bool:
        """Go on with the hosts of an earlier host manager of this session; False if there was none."""
        kept = kept_hosts(self._run_dir, job=self._job)
        if kept is None:
            return False
        for record in kept:
            self._records[record.host] = record
            self._since[record.host] = self._heard_at[record.host] = now
            if record.public_key:
                self._admit(record)
            if record.phase is HostPhase.ORDERED:  # Its ticket is lost with the process that made it.
                self._backend.replace(self._order(record.host, now))
        self._log.emit(Note("a host manager goes on with the hosts of its predecessor"))
        return True

    def _write(self) -> None:
        kept = KeptHosts(self._job, tuple(self._records.values()))
        with contextlib.suppress(OSError):  # On a full disk a successor knows less.
            write_atomically(
                RunFolder(self._run_dir).hosts_file, msgspec.json.encode(kept), durable=False, mode=0o600
            )

    # Orders.

    def _order(self, host: str, now: float) -> HostOrder:
        """Make a new ticket for a host. Its predecessor is not admitted any more."""
        record = self._records[host]
        record.ticket += 1
        record.phase, record.public_key = HostPhase.ORDERED, b""
        self._since[host] = self._heard_at[host] = now
        self._doubts.pop(host, None)
        public_key, secret_key = new_key_pair()
        manager = Peer(HOST_MANAGER, "1", "host-0", self._endpoint.address, self._handover.public_key)
        ticket = Ticket(
            job=self._job,
            host=host,
            process=supervisor_of(host),
            incarnation=str(record.ticket),
            public_key=public_key,
            secret_key=secret_key,
            manager=manager,
            made_at=self._clock.wall(),
        )
        self._endpoint.admit(Peer(ticket.process, ticket.first_incarnation, host, "", public_key))
        return HostOrder(host, msgspec.json.encode(ticket))

    def _admit(self, record: HostRecord) -> None:
        self._endpoint.admit(
            Peer(supervisor_of(record.host), str(record.ticket), record.host, "", record.public_key)
        )

    # Messages of supervisors.

    def _handle(self, delivery: Delivery) -> None:
        record = self._records[delivery.peer.host]
        try:
            match delivery.body:
                case JoinHost() as join:
                    self._join(record, join, delivery)
                case HostBeat() as beat:
                    self._beat(record, beat)
                    # A host that has nothing of the run yet ends at once when its engine asks for it.
                    early = bool(beat.leaving) and record.phase is HostPhase.JOINED
                    self._endpoint.reply(delivery, self._orders(end=early))
                case FetchFile(name=digest, offset=offset):
                    # The time to start its agent begins when it has all files: a large model takes longer than that.
                    self._since[record.host] = self._heard_at[record.host] = self._clock.monotonic()
                    part, size = self._files.read(digest, offset=offset, size=PART_BYTES)
                    self._endpoint.reply(delivery, FilePart(size, part))
                case MirrorFiles() as message:
                    self._writer.append(message, sender=delivery.peer)
                    self._endpoint.reply(delivery, Ok())
                    if self._writer.conflict:
                        self._report(HostFailed(self._named(record.host), self._writer.conflict))
                case body if delivery.wants_reply:
                    raise RefusedError(f"a host manager does not do {type(body).__name__}")
        except (KintsugiError, OSError, KeyError) as error:
            self._endpoint.fail(delivery, error)

    def _orders(self, *, end: bool) -> HostOrders:
        return HostOrders(end=end or self._ending_at is not None, wall=self._clock.wall())

    def _join(self, record: HostRecord, join: JoinHost, delivery: Delivery) -> None:
        if record.phase is not HostPhase.ORDERED:
            raise RefusedError(f"the ticket of {record.host} was used")
        needs = msgspec.structs.replace(self._needs[record.host], needed_bytes=self._files.size)
        why = why_refused(join.facts, needs, now=self._clock.wall())
        if why := why or why_not_reached(join.facts.address, join.listener):
            self._endpoint.fail(delivery, RefusedError(why))
            self._lose(record, why)
            return
        now = self._clock.monotonic()
        record.phase, record.facts, record.public_key = HostPhase.JOINED, join.facts, join.public_key
        self._since[record.host] = self._heard_at[record.host] = now
        config = self._handover.config
        agent = self._agents[record.host]
        number = int(agent.incarnation) + record.ticket * INCARNATIONS
        handover = HostHandover(
            bootstrap=msgspec.structs.replace(
                agent, incarnation=str(number), lifeline=-1, run_folder_agent="agent-0"
            ),
            programs=self._handover.programs,
            spares=config.cluster.spares,
            start_timeout_s=config.cluster.start_timeout_s,
            away_s=config.cluster.away_s,
            files=tuple(self._files.files),
            python_path=self._files.python_path,
            imports=self._files.imports,
        )
        self._endpoint.reply(delivery, HostJoined(msgspec.msgpack.encode(handover)))
        self._admit(record)
        self._write()
        self._log.emit(Note(f"{record.host} joined: {join.facts.machine}, {join.facts.address}"))

    def _beat(self, record: HostRecord, beat: HostBeat) -> None:
        self._heard_at[record.host] = self._clock.monotonic()
        if beat.clock_s is not None and (
            record.clock_s is None or beat.clock_error_s < record.clock_error_s / 2
        ):
            self._note_clock(record, beat.clock_s, beat.clock_error_s)
        if beat.ended:
            failed = bool(beat.failure) and self._ending_at is None
            if failed:
                self._lose(record, beat.failure)
            else:
                self._set_phase(record, HostPhase.ENDED)
        elif beat.ready and record.phase is HostPhase.JOINED:
            record.was_ready = True
            self._set_phase(record, HostPhase.READY)
        elif beat.leaving and record.phase is HostPhase.READY and record.host not in self._asked:
            self._asked.add(record.host)
            self._backend.asked_to_end(record.host, beat.leaving)

    def _note_clock(self, record: HostRecord, clock_s: float, error_s: float) -> None:
        """Keep the offset of a host's clock, and tell once of one that is off. Records are corrected by what the agents
        measure."""
        was_told = record.clock_s is not None and abs(record.clock_s) - record.clock_error_s > NOTED_CLOCK_S
        record.clock_s, record.clock_error_s = clock_s, error_s
        self._write()
        if abs(clock_s) - error_s > NOTED_CLOCK_S and not was_told:
            ahead = "ahead of" if clock_s > 0 else "behind"
            self._log.emit(
                Alert(
                    f"the clock of {self._named(record.host)} is {abs(clock_s):.1f} s {ahead} the launcher's; times of "
                    "its records are corrected",
                    {"clock_s": clock_s},
                )
            )

    def _set_phase(self, record: HostRecord, phase: HostPhase) -> None:
        record.phase = phase
        self._since[record.host] = self._clock.monotonic()
        self._write()

    # The back end and time.

    def _take_events(self) -> None:
        for event in self._backend.poll():
            record = self._records[event.host]
            match event:
                case HostCame(place=place):
                    record.place = place
                case HostDoubted(host=host, why=why):
                    self._doubts[host] = why
                case HostLeaves(host=host, why=why):
                    if record.phase is HostPhase.READY and host not in self._leaving:
                        self._leave(record, why)
                case HostWent(why=why) if record.phase not in (HostPhase.LOST, HostPhase.ENDED):
                    self._lose(record, why)

    def _check(self, now: float) -> None:
        late_s = now - self._checked_at
        if late_s > LONGEST_TURN_S:
            self._skip(late_s, now=now)
        self._checked_at = now
        if self._endpoint.closed_connections():
            self._closed_at = now
        for host, record in self._records.items():
            if (
                record.phase is HostPhase.READY
                and (leaves := self._leaving.get(host))
                and not leaves[0].exists()
            ):
                self._lose(record, leaves[1])
            decision = decide(
                record,
                now=now,
                since=self._since[host],
                heard_at=self._heard_at[host],
                join_s=self._handover.config.cluster.start_timeout_s,
                doubt=self._doubts.get(host, ""),
                closed_at=self._closed_at,
            )
            if decision.action == "order":
                self._backend.replace(self._order(host, now))
                self._write()
            elif decision.action:
                self._lose(record, decision.why, is_silence=decision.is_silence)

    def _skip(self, pause_s: float, *, now: float) -> None:
        """Leave out a time in which no message was read: hosts were not silent because of it."""
        for times in (self._since, self._heard_at):
            times.update({host: min(now, at + pause_s) for host, at in times.items()})
        self._closed_at += pause_s

    def _leave(self, record: HostRecord, why: str) -> None:
        """Have the master move the processes of a host between two steps; then the host is given up."""
        if (notice := self._tell_master(record, why, leaves=True)) is not None:
            self._leaving[record.host] = notice, why
        self._log.emit(Alert(f"{self._named(record.host)} is to be left: {why}"))

    def _tell_master(self, record: HostRecord, why: str, *, leaves: bool = False) -> Path | None:
        """Tell the master what it would only know by the silence of the host."""
        agent = self._agents[record.host]
        first = int(agent.incarnation) + record.ticket * INCARNATIONS
        notice = HostNotice(agent.process, first, first + INCARNATIONS - 1, why, leaves=leaves)
        try:
            return give_notice(self._run_dir, notice)
        except OSError as error:  # As on a full disk; the silence of the host remains.
            self._log.emit(FaultSeen(fault_of(error, process=HOST_MANAGER, time=self._clock.wall())))
            return None

    def _lose(self, record: HostRecord, why: str, *, is_silence: bool = False) -> None:
        """Note the loss of a host. If it had never started, the run can not begin."""
        if self._ending_at is not None:
            self._set_phase(record, HostPhase.ENDED)
            return
        named = self._named(record.host)
        notice, _ = self._leaving.pop(record.host, (None, ""))
        has_left = notice is not None and not notice.exists()
        if notice is not None and not has_left:  # It is gone before the master has moved its processes.
            with contextlib.suppress(OSError):
                notice.unlink()
        self._asked.discard(record.host)
        if not record.was_ready:
            self._report(HostFailed(named, why))
        elif record.phase in (HostPhase.JOINED, HostPhase.READY) and not has_left:
            self._tell_master(record, why)
        self._count_loss(record)
        record.public_key = b""
        process = supervisor_of(record.host)
        self._endpoint.forget(
            process, Fault(f"{process}@{record.ticket}", "HostLost", process, why, self._clock.wall())
        )
        self._set_phase(record, HostPhase.LOST)
        message = f"{named} is lost: {why}"
        if is_silence or has_left or not record.was_ready:
            self._log.emit(Alert(message))
        else:
            self._log.emit(HostLost(message, of=self._agents[record.host].process, host=record.host))

    def _count_loss(self, record: HostRecord) -> None:
        """Count a loss in a row, and tell of a host that does not stay."""
        ready_s = self._clock.monotonic() - self._since[record.host]
        if record.phase is HostPhase.READY and ready_s >= STEADY_S:
            record.num_losses = 0
        record.num_losses += 1
        if record.was_ready and record.num_losses >= TOLD_LOSSES:
            self._log.emit(
                Alert(
                    f"{self._named(record.host)} was lost {record.num_losses} times in a row, each time before it was "
                    f"ready for {STEADY_S:g} s; it is ordered again after {pause_after(record.num_losses):g} s"
                )
            )

    def _named(self, host: str) -> str:
        return f"{host} ({self._names.get(host) or self._records[host].place or 'not placed yet'})"

    def _report(self, report: HostFailed) -> None:
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._handover.report, encode_report(report))

    # The end.

    def _on_lifeline(self) -> None:
        """The run is over, or launcher and standby were killed: every host ends."""
        self._endpoint.unwatch(self._handover.lifeline)
        self._ending_at = self._clock.monotonic()

    def _is_over(self) -> bool:
        if self._ending_at is None:
            return False
        there = [each for each in self._records.values() if each.phase in (HostPhase.JOINED, HostPhase.READY)]
        return not there or self._clock.monotonic() - self._ending_at > END_S


class KeptHosts(msgspec.Struct, frozen=True):
    """`joined_hosts.json` of a run folder."""

    job: str
    hosts: tuple[HostRecord, ...]


def kept_hosts(run_dir: Path, *, job: str) -> tuple[HostRecord, ...] | None:
    """Return the hosts of an earlier host manager of this session; None if there was none."""
    try:
        kept = msgspec.json.decode(RunFolder(run_dir).hosts_file.read_bytes(), type=KeptHosts)
    except (OSError, msgspec.DecodeError):
        return None
    return kept.hosts if kept.job == job else None


def encode_report(report: HostFailed) -> bytes:
    """Encode a report as a line that the pipe takes whole."""
    return msgspec.json.encode(msgspec.structs.replace(report, why=report.why[-MOST_WHY:])) + b"\n"


def main(arguments: list[str]) -> int:
    """Body of the process."""
    (descriptor,) = arguments
    with os.fdopen(int(descriptor), "rb") as handed_over:
        handover = msgspec.msgpack.decode(handed_over.read(), type=ManagerHandover)
    for inherited in handover.descriptors:
        os.set_inheritable(inherited, False)
    own_session_and_log(HOST_MANAGER, RunFolder(handover.run_dir).log_file(HOST_MANAGER))
    DISK_BUDGET.divide(handover.agents[0].num_processes)
    try:
        HostManager(handover).run()
    except KintsugiError as error:
        sys.stderr.write(f"{error}\n")
        # A run that has begun goes on with the hosts that it has: a disk may be full, or an engine not answer, for a
        # while. The launcher starts another host manager after a pause.
        if kept_hosts(Path(handover.run_dir), job=handover.agents[0].job) is None:
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                os.write(handover.report, encode_report(HostFailed("the hosts", str(error))))
            remove_kept_files(Path(handover.run_dir))
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
