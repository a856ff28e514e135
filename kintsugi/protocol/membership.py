"""Messages of every process: registration with the master, heartbeats, the address book, shutdown, and failures."""

from __future__ import annotations

import msgspec

from kintsugi.errors import Fault
from kintsugi.protocol.body import MessageBody
from kintsugi.types import (
    ChildReport,
    Peer,
    Progress,
    Role,
    Wait,
)


class Ok(MessageBody, frozen=True):
    """The request was carried out."""


class Failed(MessageBody, frozen=True):
    """The request could not be carried out; `fault` says why."""

    fault: Fault


class Ping(MessageBody, frozen=True):
    """Test the connection; answered with Ok."""

    payload: bytes = b""


class Register(MessageBody, frozen=True):
    """A process reports to the master: after its start, and again whenever a new master takes over."""

    peer: Peer
    role: Role
    pid: int
    capabilities: dict[str, str] = {}
    children: tuple[ChildReport, ...] = ()
    """For an agent: its living child processes."""


class Registered(MessageBody, frozen=True):
    """The master has registered the process; `term` is the one to use from now on."""

    term: int = msgspec.field(name="epoch")


class Heartbeat(MessageBody, frozen=True):
    """Sign of life, with progress, load, and declared waits."""

    progress: Progress
    load: float
    waits: tuple[Wait, ...] = ()
    book: int = -1
    """Number of the address book that the process has; the master sends what it lacks."""
    gauges: dict[str, float] = {}


TERM_BITS = 32
"""The number of an address book is the term of its master, shifted by so many bits, plus the changes in that term."""


class AddressBook(MessageBody, frozen=True):
    """All processes of the run with addresses and keys. A key that is not in it is no longer admitted."""

    number: int
    """Grows; an older book is ignored."""
    peers: tuple[Peer, ...]
    since: int | None = None
    """None: the book is whole. Otherwise it has only what changed after the book of this number, for a process that has
    that one or a later one."""
    removed: tuple[str, ...] = ()
    """Processes that are no longer in the book since then."""


class Shutdown(MessageBody, frozen=True):
    """Finish and exit."""

    reason: str
    exit_code: int = 0
    """Exit code of the run, for an agent that can not read the master's own."""
