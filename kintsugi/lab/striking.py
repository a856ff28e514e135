"""Strikes a chosen process of a run in a chosen phase, and says what was really hit and when."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import msgspec

from kintsugi.cluster.children import ChildrenTable, table_path
from kintsugi.lab.faults import Aim, Deck, Kind, Target
from kintsugi.lab.running import MarkedRun, signal_ours
from kintsugi.lab.watching import MASTER, Watch
from kintsugi.runtime import SYSTEM_CLOCK

SIGNALS = {Kind.KILL: signal.SIGKILL, Kind.STOP: signal.SIGSTOP}


class Hit(msgspec.Struct, frozen=True):
    """A fault that struck."""

    aim: Aim
    phase: str
    """In which the master really was."""
    processes: dict[str, int]
    """What was hit → its pid."""
    at: float
    """Monotonic."""
    wall: float
    step: int
    """The last one committed before."""


class Striker:
    """Signals processes of one run, by the pids that their events tell."""

    def __init__(self, run: MarkedRun, watch: Watch, deck: Deck) -> None:
        self._run = run
        self._watch = watch
        self._deck = deck

    def choose(self, aim: Aim) -> dict[str, int]:
        """The processes that a fault of this kind will hit; empty when none of them runs."""
        staff = {
            process: presence.pid
            for process, presence in self._watch.staff.items()
            if self._run.is_ours(presence.pid)
        }
        role = "agent" if aim.target is Target.HOST else aim.target.value
        names = sorted(process for process in staff if process.startswith(f"{role}-"))
        if not names:
            return {}
        name = self._deck.choose(names)
        chosen = {name: staff[name]}
        if aim.target is Target.HOST:
            chosen |= children_of_agent(self._run.run_dir, name)
        return chosen

    def strike(self, aim: Aim, chosen: dict[str, int]) -> Hit | None:
        """Hit `chosen` if the master is in the phase that was aimed at; None when that moment has passed.

        The master stands still while we look, so that the phase can not pass between the look and the blow.
        """
        watch = self._watch
        if MASTER not in watch.staff:
            return None
        master = watch.staff[MASTER].pid
        if not signal_ours(self._run, master, signal.SIGSTOP):
            return None
        keep_stopped = False
        try:
            watch.glance()
            if watch.phase != aim.moment.value:
                return None
            at, wall = SYSTEM_CLOCK.monotonic(), SYSTEM_CLOCK.wall()
            number = SIGNALS[aim.kind]
            struck = {process: pid for process, pid in chosen.items() if signal_ours(self._run, pid, number)}
            keep_stopped = MASTER in struck and aim.kind is Kind.STOP
            if not struck:
                return None
            return Hit(aim, watch.phase_at(at), struck, at, wall, watch.step)
        finally:
            if not keep_stopped:
                signal_ours(self._run, master, signal.SIGCONT)


def children_of_agent(run_dir: Path, agent: str) -> dict[str, int]:
    """What an agent answers for, by the table that it keeps on disk."""
    with suppress(FileNotFoundError, msgspec.DecodeError):
        table = msgspec.json.decode(table_path(run_dir, agent).read_bytes(), type=ChildrenTable)
        return {child.process: child.pid for child in table.children}
    return {}
