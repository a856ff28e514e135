"""Base class of all fault mechanisms: prepared, begun, ramped up to full strength, and undone.

A mechanism runs in a process of its own (`lab/injector/injector_process.py`), which calls it in this order:

    prepare ─► begin ─► tick … tick ─► end

`tick` receives the strength that the ramp has reached (0 to 1). It is called again after the number of seconds that it
returns, and when one of its descriptors is readable.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable
from typing import ClassVar

import msgspec

from kintsugi.errors import WorldError
from kintsugi.lab.injector.injection import Injection, Trigger
from kintsugi.lab.injector.undo_log import ProcessIdentity, Undo, UndoEntry, UndoJournal
from kintsugi.lab.testbed.ports import ports_of

TICK_S = 0.05
EXTRA_LEASE_S = 2.0
"""Additional lease of an undo entry beyond the fault's end, so that the process that made the change undoes it
first."""


_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this child process when its parent ends; called before the child executes its program.

    `parent` is the parent's pid: a parent that ended before the request is detected by the changed parent, and the
    child exits.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class FaultImpossible(WorldError):
    """The fault can not be injected into this target; the message contains the reason and what would work."""


class FaultContext(msgspec.Struct, frozen=True, kw_only=True):
    """Input of a mechanism."""

    injection: Injection
    mechanism: str
    target: ProcessIdentity
    peers: tuple[ProcessIdentity, ...] = ()
    """Other end of the link, on the host of the target; empty for all links, and where `peer_ports` is set."""
    peer_ports: tuple[int, ...] | None = None
    """Ports of the other end where it is on another host: the laboratory looks them up there and sends changes."""
    run_dir: str
    disk: str | None = None
    """Mount point of the run's own disk, created by the laboratory; None when the run uses a disk of the machine."""
    named: bool = False
    """Whether hosts address each other by name, through a name server."""
    journal: str
    seed: int = 0


class FaultMechanism:
    """One mechanism of one fault type; an instance is one use of it."""

    name: ClassVar[str]
    """Name for reports and for `Injection.mechanism`: `cpu quota of a control group`."""
    stands_for: ClassVar[str] = ""
    """Fault that this mechanism only imitates; empty for a real fault."""
    lasts: ClassVar[bool] = True
    """False when the fault is over as soon as it has begun, so that there is nothing to undo."""
    supported_parameters: ClassVar[frozenset[str]] = frozenset()
    """Keys of `Injection.amount` that this mechanism implements."""
    shares_device: ClassVar[bool] = False
    """Whether every process on the accelerator of the target is affected."""
    shares_memory: ClassVar[bool] = False
    """Whether memory is changed that ranks and servers of the target's host have in common."""
    ramps: ClassVar[bool] = False
    """Whether the strength grows over `Injection.ramp_s`."""

    def __init__(self, context: FaultContext, journal: UndoJournal) -> None:
        self.context = context
        self.injection = context.injection
        self.pid = context.target.pid
        self._ports_elsewhere = frozenset(context.peer_ports or ())
        self._journal = journal
        self._entries: list[UndoEntry] = []
        self.measured: dict[str, float] = {}

    @classmethod
    def missing(cls) -> str | None:
        """Return why this machine, or this user, can not use it; None when it works."""
        return None

    @classmethod
    def unsupported_for(cls, pid: int, *, may_share_network: bool = False) -> str | None:
        """Return why it does not work on this process; None when it works. With `may_share_network` the network of this
        machine itself may be changed: it was named as one of the run's machines."""
        return None

    @classmethod
    def ignored(cls, injection: Injection) -> tuple[str, ...]:
        """Return the fields of an injection that this mechanism does not implement."""
        unknown = [f"amount.{name}" for name in sorted(set(injection.amount) - cls.supported_parameters)]
        return (*unknown, *(["ramp_s"] if injection.ramp_s > 0 and not cls.ramps else []))

    def parameter(self, name: str, default: float) -> float:
        assert name in self.supported_parameters, f"{self.name} does not declare {name}"
        return self.injection.amount.get(name, default)

    @property
    def has_peer(self) -> bool:
        """Whether the fault is restricted to the link with another process."""
        return bool(self.context.peers) or self.context.peer_ports is not None

    def peer_ports(self) -> frozenset[int]:
        """Return the present ports of the other end."""
        return ports_of(peer.pid for peer in self.context.peers) | self._ports_elsewhere

    def set_peer_ports(self, ports: Iterable[int]) -> None:
        """Take the ports of an other end on another host, which has opened or closed some."""
        self._ports_elsewhere = frozenset(ports)

    def before(self, undo: Undo) -> None:
        """Journal how a change is undone; must be called before the change. The lease covers the wait for the trigger,
        since a change may be made in `prepare`."""
        trigger = self.injection.trigger
        waiting_s = trigger.timeout_s + trigger.after_s if trigger != Trigger() else 0.0
        lease_s = waiting_s + self.injection.duration_s + EXTRA_LEASE_S
        self._entries.append(self._journal.before(undo, lease_s=lease_s))

    def prepare(self) -> None:
        """Do what takes time and has no effect on the target yet."""

    def begin(self) -> None:
        raise NotImplementedError

    def tick(self, strength: float) -> float:
        """Apply this strength now; return the seconds until the next call."""
        return TICK_S

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that trigger `tick` when they are readable."""
        return ()

    def end(self) -> None:
        """Undo all changes, the last one first."""
        while self._entries:
            self._journal.undo(self._entries[-1])
            self._entries.pop()
