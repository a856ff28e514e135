"""What every mechanism is: a fault that is prepared, begins, grows to its strength, and is undone.

A mechanism lives in a process of its own (`lab/culprit.py`), which calls it in this order:

    prepare ─► begin ─► tick … tick ─► end

`tick` is called with the strength that the ramp has reached (0 to 1), again after as many seconds as it says, and when
one of its descriptors is readable.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import ClassVar

import msgspec

from kintsugi.errors import WorldError
from kintsugi.lab.injection import Injection, Trigger
from kintsugi.lab.undo import Entry, Undo, UndoJournal, Who

TICK_S = 0.05
EXTRA_LEASE_S = 2.0
"""Of an undo entry beyond the fault's own end: whoever made the change comes first."""


_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """In a child before it executes its program: the kernel ends it with the one who started it.

    `parent` is that one's number: who had ended before the kernel was asked has somebody else as the parent of its
    child, which would then be left over.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class Impossible(WorldError):
    """This target can not be hit in this way; the message says why, and what would work."""


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a mechanism is told."""

    injection: Injection
    mechanism: str
    target: Who
    peers: tuple[Who, ...] = ()
    """The other end of the link; empty: every one."""
    run_dir: str
    disk: str | None = None
    """Where the disk of the laboratory's own is mounted that the run is on; None: it is on somebody else's."""
    named: bool = False
    """Hosts know each other by name, and ask a name server."""
    journal: str
    seed: int = 0


class Fault:
    """One mechanism of one ability, and one use of it."""

    name: ClassVar[str]
    """For people, and for `Injection.mechanism`: `cpu quota of a control group`."""
    stands_for: ClassVar[str] = ""
    """What it is not but acts like; empty: it is the thing itself."""
    lasts: ClassVar[bool] = True
    """False: it is over when it has begun, and there is nothing to undo."""
    words: ClassVar[frozenset[str]] = frozenset()
    """Of `Injection.amount`: those that it does as it is told."""
    ramps: ClassVar[bool] = False
    """Whether it grows to its strength over `Injection.ramp_s`."""

    def __init__(self, scene: Scene, journal: UndoJournal) -> None:
        self.scene = scene
        self.injection = scene.injection
        self.pid = scene.target.pid
        self._journal = journal
        self._entries: list[Entry] = []
        self.measured: dict[str, float] = {}

    @classmethod
    def missing(cls) -> str | None:
        """What keeps this machine, or this user, from it; None when nothing does."""
        return None

    @classmethod
    def unsuited(cls, pid: int) -> str | None:
        """What keeps it from hitting this process; None when nothing does."""
        return None

    @classmethod
    def ignored(cls, injection: Injection) -> tuple[str, ...]:
        """What an injection asks for that it would not do."""
        unknown = [f"amount.{word}" for word in sorted(set(injection.amount) - cls.words)]
        return (*unknown, *(["ramp_s"] if injection.ramp_s > 0 and not cls.ramps else []))

    def amount(self, name: str, default: float) -> float:
        assert name in self.words, f"{self.name} does not declare {name}"
        return self.injection.amount.get(name, default)

    def before(self, undo: Undo) -> None:
        """To be called before a change is made. What is prepared has to last until the trigger comes; who made it and
        is gone has no lease."""
        trigger = self.injection.trigger
        waiting_s = trigger.timeout_s + trigger.after_s if trigger != Trigger() else 0.0
        lease_s = waiting_s + self.injection.duration_s + EXTRA_LEASE_S
        self._entries.append(self._journal.before(undo, lease_s=lease_s))

    def prepare(self) -> None:
        """Whatever takes time and hurts nobody."""

    def begin(self) -> None:
        raise NotImplementedError

    def tick(self, strength: float) -> float:
        """Have this strength now; gives the seconds until it wants to be called again."""
        return TICK_S

    @property
    def descriptors(self) -> tuple[int, ...]:
        """That make `tick` due when they are readable."""
        return ()

    def end(self) -> None:
        """Undo everything, the last change first."""
        while self._entries:
            self._journal.undo(self._entries[-1])
            self._entries.pop()
