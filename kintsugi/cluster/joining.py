"""How a host joins a run: the ticket that its supervisor starts with, and what it is handed over once it has joined.

    host manager ── ticket (through the engine: standard input, a descriptor, a file of mode 0600) ──► supervisor
    supervisor ── JoinHost, under the ticket's key ──► host manager ── HostJoined ──► supervisor
    supervisor ── HostBeat, MirrorFiles, under a key of its own ──► host manager

A ticket holds a key pair of its own and the public key of the host manager: both ends are authenticated and encrypted
from the first byte. The host manager takes a ticket once.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from importlib import metadata
from pathlib import Path

import msgspec

import kintsugi
from kintsugi.cluster.device_memory import read_devices
from kintsugi.cluster.handover import Programs
from kintsugi.errors import UserError
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.hosts import HostFacts, HostVersions, RunFile
from kintsugi.protocol.wire import Message
from kintsugi.runtime.waits import wait_readable
from kintsugi.telemetry.collect.cgroups import usable_memory_bytes
from kintsugi.types import Peer, Role, process_id

MOST_TICKET_BYTES = 65536
TICKET_S = 30.0
"""Time for a ticket to arrive on standard input."""
ABSENT = "none"
"""Version of a package that is not installed."""


class Ticket(msgspec.Struct, frozen=True):
    """One-time admission of one host; holds a secret key."""

    job: str
    host: str
    """Name of the host in the run: host-1."""
    process: str
    """Name of its supervisor: supervisor-1."""
    incarnation: str
    """Number of the ticket: that of a replacement is higher."""
    public_key: bytes
    secret_key: bytes
    manager: Peer
    """The host manager; its address is reached from every host."""
    made_at: float = 0.0
    """Wall clock of the launcher's machine."""

    @property
    def first_incarnation(self) -> str:
        """Incarnation of the supervisor while it redeems the ticket; later requests are numbered apart."""
        return f"ticket-{self.incarnation}"


class HostHandover(msgspec.Struct, frozen=True):
    """Everything that a supervisor needs to start its agent."""

    bootstrap: Bootstrap
    """Bootstrap of the agent, whose folder, address and lifeline the supervisor fills in."""
    programs: Programs
    spares: int
    start_timeout_s: float
    away_s: float
    files: tuple[RunFile, ...]
    """Files that the processes of the run read, with the configuration."""
    python_path: tuple[str, ...] = ()
    """Folders of copied modules, relative to the scratch folder."""
    imports: tuple[str, ...] = ()
    """User code that has to be importable on every host, as the copied configuration names it."""


def read_ticket(descriptor: int) -> Ticket:
    """Read a ticket; UserError if there is none."""
    content = b""
    while len(content) < MOST_TICKET_BYTES:
        ready = wait_readable(descriptor, whom="its engine", what="a ticket", timeout_s=TICKET_S)
        part = os.read(descriptor, MOST_TICKET_BYTES) if ready else b""
        if not part:
            break
        content += part
    try:
        return msgspec.json.decode(content, type=Ticket)
    except msgspec.DecodeError as error:
        raise UserError(f"expected the ticket of a run on standard input: {error}") from error


def supervisor_of(host: str) -> str:
    """`supervisor_of("host-2") == "supervisor-2"`."""
    return process_id(Role.SUPERVISOR, int(host.rpartition("-")[2]))


def versions() -> HostVersions:
    """Return the versions of this host, without importing torch."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ABSENT
    number = ".".join(map(str, sys.version_info[:2]))
    types = repr(msgspec.inspect.type_info(Message)).encode()
    return HostVersions(kintsugi.__version__, torch, number, hashlib.sha256(types).hexdigest()[:12])


def local_address(reached: str) -> str:
    """Return the address of the interface from which another host is reached; OSError if there is no route.

    Nothing is sent: connecting a datagram socket only looks at the routes.
    """
    family, _, _, _, address = socket.getaddrinfo(reached, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def facts_of_this_host(*, address: str, scratch: Path) -> HostFacts:
    """Return what a run has to know of this host."""
    disk = os.statvfs(scratch)
    return HostFacts(
        machine=socket.gethostname(),
        address=address,
        versions=versions(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=usable_memory_bytes(),
        gpus=tuple(device.name for device in read_devices()),
        wall=time.time(),
        free_bytes=disk.f_bavail * disk.f_frsize,
    )


class HostNeeds(msgspec.Struct, frozen=True):
    """Expectations of a host, from what places it and from the launcher's own machine."""

    versions: HostVersions
    gpus: int = 0
    memory_bytes: int = 0
    needed_bytes: int = 0
    """Disk space of the files that are copied to it."""
    said_by: str = "the hosts file"
    """Where the GPUs and the memory are asked for."""


MOST_CLOCK_S = 120.0
"""Difference of two clocks that is refused: the order of logs and the ages of files mean nothing with
it. Smaller differences are measured by the agents and corrected in the records."""
NOTED_CLOCK_S = 1.0
"""Difference of two clocks that is told."""


def why_refused(facts: HostFacts, needs: HostNeeds, *, now: float) -> str:
    """Return why a host can not take part, naming both sides; empty if it can. Pure."""
    pairs = zip(
        HostVersions.__struct_fields__,
        msgspec.structs.astuple(needs.versions),
        msgspec.structs.astuple(facts.versions),
        strict=True,
    )
    for what, expected, found in pairs:
        if found == ABSENT != expected:
            return f"expected {what} {expected}, as on the launcher's machine, found none"
        if expected != found:
            return f"expected {what} {expected}, as on the launcher's machine, found {found}"
    if len(facts.gpus) < needs.gpus:
        return f"expected {needs.gpus} GPUs, as {needs.said_by} says, found {len(facts.gpus)}"
    if facts.memory_bytes < needs.memory_bytes:
        return (
            f"expected {needs.memory_bytes / 2**30:.1f} GiB of memory, as {needs.said_by} says, found "
            f"{facts.memory_bytes / 2**30:.1f} GiB that its processes may use"
        )
    if facts.free_bytes < needs.needed_bytes:
        return (
            f"expected {needs.needed_bytes / 2**30:.1f} GiB of disk space for the files of the run, found "
            f"{facts.free_bytes / 2**30:.1f} GiB"
        )
    if abs(facts.wall - now) > MOST_CLOCK_S:
        return f"expected a clock within {MOST_CLOCK_S:g} s of the launcher's, found one {facts.wall - now:+.0f} s off"
    return ""
