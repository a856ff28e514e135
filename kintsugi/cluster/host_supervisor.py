"""The supervisor of a host on another machine: the launcher's role for one host. An engine starts it with a ticket.

    ticket ─► join (versions, GPUs, memory, clock) ─► files of the run ─► agent ─► (the run) ─► no process is left

It joins the run through the host manager, copies the files of the run into a scratch folder, starts the agent with the
same code as the launcher does (`launcher.py`), restarts it, and holds the lifelines of its processes. It sends
heartbeats and the telemetry of its processes to the host manager.

The host ends when its agent has ended in order, when the host manager says so, and when the host manager has not
answered for `cluster.away_s`. SIGTERM, by which an engine asks for the machine, is told to the host manager: it has the
processes of this host moved between two steps and then ends the host. What that takes longer than the engine waits is
lost as any host is. A supervisor that is killed leaves nothing either: the lifelines end with it. Its scratch folder is
removed at its end, or by the next supervisor on the same machine.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec
import xxhash

from kintsugi.cluster.backends.command import EngineCommand
from kintsugi.cluster.file_mirror import FileReader
from kintsugi.cluster.joining import (
    HostHandover,
    Ticket,
    facts_of_this_host,
    local_address,
)
from kintsugi.cluster.launcher import Launcher
from kintsugi.cluster.namespaces import HostNamespaces
from kintsugi.cluster.orphans import subreaper
from kintsugi.cluster.run_files import SCRATCH, fill_in_scratch
from kintsugi.errors import (
    DeadlineExceeded,
    IntegrityError,
    KintsugiError,
    RefusedError,
    UserError,
    WorldError,
)
from kintsugi.process.exit_codes import EXIT_ERROR, EXIT_USER_ERROR
from kintsugi.protocol.hosts import (
    FetchFile,
    FilePart,
    HostBeat,
    HostJoined,
    HostOrders,
    JoinHost,
    MirrorFiles,
    RunFile,
)
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.descriptors import raise_descriptor_limit
from kintsugi.runtime.disk import write_atomically
from kintsugi.runtime.proc import process_start_time
from kintsugi.runtime.processes import SystemProcesses
from kintsugi.runtime.secrecy import private_process
from kintsugi.runtime.signals import Signals
from kintsugi.telemetry.collect.clock_offset import ClockEstimate, reading
from kintsugi.transport import Endpoint, PendingReply, new_key_pair

JOIN_S = 8.0
"""Time for the host manager to answer a ticket."""
FETCH_S = 60.0
"""Time for one part of a file."""
BEAT_S = 0.5
MIRROR_S = 1.0
ANSWER_S = 5.0
"""Deadline of a heartbeat; the next one follows."""
TOLD_S = 3.0
"""Time for the host manager to hear that this host was asked to end."""
LAST_S = 5.0
"""Time for the last telemetry and the last message of a host."""
IMPORT_S = 120.0
"""Time for the import of user code on trial."""
RECORD = "supervisor.json"
ASKED_TO_END = "its supervisor was asked to end by a signal"


class ScratchRecord(msgspec.Struct, frozen=True):
    """`supervisor.json` of a scratch folder: the process that uses it."""

    pid: int
    start_time: int
    machine: str = ""
    """Machine and process namespace of the pid: scratch folders may be on a disk that machines share."""


def own_machine() -> str:
    """Identity of this machine and of the process namespace in which pids are meant."""
    try:
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        machine = ""
    return f"{socket.gethostname()} {machine} {os.readlink('/proc/self/ns/pid')}"


def default_scratch() -> Path:
    """Return the folder in which supervisors of this user make their scratch folders."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kintsugi" / "hosts"


def supervise_host(ticket: Ticket, *, scratch: Path, detach: bool = False) -> int:
    """Join the run of a ticket and supervise this host to its end; return the exit code. Main thread only.

    With `detach` this returns 0 as soon as the host has joined, and a process in a session of its own goes on.
    UserError or WorldError if it could not join.
    """
    scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
    remove_leftovers(scratch)
    address = _address_for(ticket)
    keys = new_key_pair()
    handover = _join(ticket, keys=keys, address=address, scratch=scratch)
    if detach and not _go_on_alone():
        return 0
    folder = scratch / f"{ticket.job}-{ticket.host}-{ticket.incarnation}"
    folder.mkdir(mode=0o700)
    try:
        record = ScratchRecord(os.getpid(), process_start_time(os.getpid()) or 0, own_machine())
        write_atomically(folder / RECORD, msgspec.json.encode(record), durable=False)
        return _HostSupervisor(ticket, handover, keys=keys, address=address, folder=folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(scratch: Path) -> None:
    """Remove scratch folders of this machine whose supervisor was killed."""
    machine = own_machine()
    for path in scratch.glob(f"*/{RECORD}"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            record = msgspec.json.decode(path.read_bytes(), type=ScratchRecord)
            if record.machine == machine and process_start_time(record.pid) != record.start_time:
                shutil.rmtree(path.parent, ignore_errors=True)


def _address_for(ticket: Ticket) -> str:
    """Return the address of this host's interface that reaches the host manager."""
    there = ticket.manager.address.removeprefix("tcp://").rpartition(":")[0]
    try:
        return local_address(there)
    except OSError as error:
        raise WorldError(f"no route to the launcher at {there}: {error.strerror or error}") from error


def _join(ticket: Ticket, *, keys: tuple[bytes, bytes], address: str, scratch: Path) -> HostHandover:
    """Redeem the ticket. UserError with the reason if this host is refused."""
    keys_of_ticket = ticket.public_key, ticket.secret_key
    endpoint = _endpoint(ticket, keys=keys_of_ticket, incarnation=ticket.first_incarnation)
    try:
        facts = facts_of_this_host(address=address, scratch=scratch)
        with socket.create_server((address, 0)) as listener:
            join = JoinHost(facts, keys[0], listener.getsockname()[1])
            joined = endpoint.call(ticket.manager.process, join, deadline_s=JOIN_S).body
        assert isinstance(joined, HostJoined), joined
        return msgspec.msgpack.decode(joined.handover, type=HostHandover)
    except DeadlineExceeded as error:
        raise WorldError(
            f"the launcher at {ticket.manager.address} did not answer for {JOIN_S:g} s: its port may be closed, or the "
            "ticket may be of another run, or used"
        ) from error
    except WorldError as error:
        cause = error.cause
        raise UserError(cause.message if cause is not None else str(error)) from error
    finally:
        endpoint.close()


def _endpoint(ticket: Ticket, *, keys: tuple[bytes, bytes], incarnation: str) -> Endpoint:
    endpoint = Endpoint(
        job=ticket.job,
        process=ticket.process,
        incarnation=incarnation,
        public_key=keys[0],
        secret_key=keys[1],
    )
    endpoint.admit(ticket.manager)
    return endpoint


def _go_on_alone() -> bool:
    """Continue in a process without terminal and parent; False in the one that was started."""
    if os.fork() > 0:
        return False
    os.setsid()
    if os.fork() > 0:
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)
    return True


class _HostSupervisor:
    """One host from its handover to its end."""

    def __init__(
        self,
        ticket: Ticket,
        handover: HostHandover,
        *,
        keys: tuple[bytes, bytes],
        address: str,
        folder: Path,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._ticket, self._handover, self._address = ticket, handover, address
        self._folder, self._clock = folder, clock
        self._endpoint = _endpoint(ticket, keys=keys, incarnation=ticket.incarnation)
        self._link = _Link(self._endpoint, ticket, folder=folder, away_s=handover.away_s, clock=clock)

    def run(self) -> int:
        failure = ""
        try:
            with ExitStack() as stack:
                stack.enter_context(private_process())
                self._fetch_files()
                self._check_imports()
                stack.enter_context(subreaper())
                code = self._run_agent(stack)
        except (KintsugiError, OSError) as error:
            failure, code = f"{error}", EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_ERROR
        self._link.send_rest()
        # Before the last message: its engine may kill this process as soon as the run knows that the host has ended.
        shutil.rmtree(self._folder, ignore_errors=True)
        self._link.say_ended(self._link.failure or failure)
        self._endpoint.close()
        return code

    def _run_agent(self, stack: ExitStack) -> int:
        own, handover = self._handover.bootstrap, self._handover
        raise_descriptor_limit(own.num_processes)
        if handover.python_path:
            os.environ["PYTHONPATH"] = self._python_path()
        signals = Signals(signal.SIGINT, signal.SIGTERM)
        stack.callback(signals.close)
        place = HostNamespaces(own.host, address=self._address)
        launcher = Launcher(
            run_dir=self._folder,
            signals=signals,
            processes=SystemProcesses(),
            start_timeout_s=handover.start_timeout_s,
            standby=None,
            own=self._ticket.process,
        )
        stack.callback(launcher.clean_up)
        bootstrap = msgspec.structs.replace(own, run_dir=str(self._folder), bind=place.bind)
        launcher.add_agent(bootstrap, programs=handover.programs, spares=handover.spares, place=place)

        def tick() -> None:
            self._link.ready = launcher.is_ready
            if launcher.was_asked_to_stop:
                self._link.leave()
            if self._link.tick():
                launcher.close_agents()

        code = launcher.run(tick)
        if launcher.was_asked_to_stop:
            # Its engine takes the machine away: to the run this host is lost, unless the run is over.
            self._link.failure = self._link.failure or ASKED_TO_END
        return code

    def _fetch_files(self) -> None:
        for file in self._handover.files:
            target = self._folder / file.path
            assert target.resolve().is_relative_to(self._folder.resolve()), file
            target.parent.mkdir(parents=True, exist_ok=True)
            self._fetch(file, target)
            if file.modified_ns:
                os.utime(target, ns=(file.modified_ns, file.modified_ns))

    def _fetch(self, file: RunFile, target: Path) -> None:
        """Copy one file and compare its digest; files that name the scratch folder get its path."""
        digest, offset = xxhash.xxh3_128(), 0
        with target.open("wb") as output:
            while offset < file.size:
                reply = self._endpoint.call(
                    self._ticket.manager.process, FetchFile(file.digest, offset), deadline_s=FETCH_S
                )
                part = reply.expect(FilePart).content
                if not part:
                    break
                digest.update(part)
                output.write(part)
                offset += len(part)
                self._link.heard()
        if digest.hexdigest() != file.digest:
            raise IntegrityError(
                f"{file.path}: expected the file of xxh3 {file.digest}, got {digest.hexdigest()}; it was changed "
                "on the launcher's machine since the run was started or resumed: put it back, or stop and resume"
            )
        if not file.modified_ns and SCRATCH.encode() in (contents := target.read_bytes()):
            target.write_bytes(fill_in_scratch(contents, self._folder))

    def _check_imports(self) -> None:
        """Import the user's code in a process of its own, so that a missing package is named before the run begins."""
        named = [path.replace(SCRATCH, str(self._folder)) for path in self._handover.imports]
        if not named:
            return
        program = (
            "import sys; from kintsugi.runtime.user_modules import import_object\n"
            "for path in sys.argv[1:]: import_object(path, field='user code')"
        )
        trial = EngineCommand(
            [sys.executable, "-P", "-c", program, *named],
            environment={**os.environ, "PYTHONPATH": self._python_path()},
        )
        trial.close(timeout_s=IMPORT_S, keep_output=True)
        if trial.status != 0:
            raise UserError(trial.explain().partition(": ")[2] or trial.explain())

    def _python_path(self) -> str:
        """Folders of copied modules, before those of this host. An empty entry would be the working folder."""
        copied = [str(self._folder / path) for path in self._handover.python_path]
        return os.pathsep.join(filter(None, (*copied, os.environ.get("PYTHONPATH"))))


class _Link:
    """The supervisor's side of its connection to the host manager. Never blocks before `finish`."""

    def __init__(
        self, endpoint: Endpoint, ticket: Ticket, *, folder: Path, away_s: float, clock: Clock
    ) -> None:
        self._endpoint, self._manager, self._clock = endpoint, ticket.manager.process, clock
        self._away_s = away_s
        self._reader = FileReader(folder)
        self._heard_at = clock.monotonic()
        self._beat: PendingReply | None = None
        self._mirror: PendingReply | None = None
        self._beat_at = self._mirror_at = -math.inf
        self._is_over = False
        self._leaving_at = math.inf
        """When this host was asked to end."""
        self._beat_leaves = self._has_told = False
        """Whether the present heartbeat says so, and whether one was answered that did."""
        self._is_refused = False
        self._offsets = ClockEstimate()
        self._beat_sent = 0.0, 0.0
        """Monotonic and wall clock at which the present heartbeat was sent."""
        self.ready = False
        self.failure = ""
        """Why this host ends before the run does; empty if it was told to."""

    def heard(self) -> None:
        """The host manager has answered."""
        self._heard_at = self._clock.monotonic()

    def leave(self) -> None:
        """This host was asked to end; it does when it is told to, or when that can not be told."""
        if self._leaving_at == math.inf:
            self._leaving_at = self._clock.monotonic()
            self._beat_at = -math.inf

    def tick(self) -> bool:
        """Send what is due and take answers; whether this host has to end."""
        self._endpoint.poll(0.0)
        now = self._clock.monotonic()
        self._take_beat()
        self._take_mirror()
        if self._beat is None and now >= self._beat_at:
            self._beat_at = now + BEAT_S
            self._beat_leaves = self._leaving_at <= now
            beat = HostBeat(
                ready=self.ready,
                leaving=ASKED_TO_END if self._beat_leaves else "",
                wall=self._clock.wall(),
                clock_s=None if self._offsets.best is None else self._offsets.best.offset_s,
                clock_error_s=0.0 if self._offsets.best is None else self._offsets.best.error_s,
            )
            self._beat_sent = now, beat.wall
            self._beat = self._ask(beat, deadline_s=ANSWER_S)
        if self._mirror is None and now >= self._mirror_at:
            self._mirror_at = now + MIRROR_S
            self._send_files()
        if now - self._heard_at > self._away_s and not self._is_over:
            self.failure = f"the launcher has not answered for {self._away_s:g} s (cluster.away_s)"
            self._is_over = True
        return self._is_over or (not self._has_told and now - self._leaving_at > TOLD_S)

    def _ask(self, body: HostBeat | MirrorFiles, *, deadline_s: float) -> PendingReply:
        return self._endpoint.request(self._manager, body, deadline_s=deadline_s)

    def _take_beat(self) -> None:
        if self._beat is None or not self._beat.done:
            return
        beat, self._beat = self._beat, None
        try:
            orders = beat.result().expect(HostOrders)
            sent, wall = self._beat_sent
            took_s = self._clock.monotonic() - sent
            self._offsets.add(reading(sent_at=wall, round_trip_s=took_s, remote_time=orders.wall))
        except (DeadlineExceeded, WorldError) as error:
            is_refused = isinstance(error, RefusedError)
            if is_refused or (error.cause is not None and error.cause.kind == RefusedError.__name__):
                self.failure = f"another supervisor has taken this host over: {error}"
                self._is_over = self._is_refused = True
            return
        self.heard()
        self._has_told = self._has_told or self._beat_leaves
        self._is_over = self._is_over or orders.end

    def _send_files(self) -> None:
        parts = self._reader.next_parts()
        if parts:
            sizes = {name: len(content) for name, content in parts.items()}
            message = MirrorFiles(sizes, b"".join(parts.values()), self._reader.number)
            self._mirror = self._ask(message, deadline_s=FETCH_S)

    def _take_mirror(self) -> None:
        if self._mirror is None or not self._mirror.done:
            return
        mirror, self._mirror = self._mirror, None
        with contextlib.suppress(WorldError):
            mirror.result()
            self._reader.taken()
            self._mirror_at = -math.inf  # There may be more.

    def send_rest(self) -> None:
        """Send the rest of the telemetry, as far as the host manager answers in time. One that has given this host up
        takes none."""
        if self._is_refused:
            return
        until = self._clock.monotonic() + LAST_S
        with contextlib.suppress(WorldError):
            while self._clock.monotonic() < until:
                if self._mirror is None:
                    self._send_files()
                if self._mirror is None:
                    break
                self._endpoint.poll(0.1)
                self._take_mirror()

    def say_ended(self, failure: str) -> None:
        """Send the last message."""
        if self._is_refused:
            return
        with contextlib.suppress(WorldError):
            last = HostBeat(ended=True, failure=failure[-2000:], wall=self._clock.wall())
            self._endpoint.call(self._manager, last, deadline_s=LAST_S)
        self._reader.close()
