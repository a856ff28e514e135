"""Faults on one host of a run, as the laboratory on another machine orders them.

    laboratory ── FaultOrder ──► HostFaults ── a process per fault (`injector_process.py`)
                                     └─────── reaper of this host (`reaper.py`)

The undo journal, the reaper and the processes of the faults are on the host itself, so that everything is undone there
when the laboratory, its connection, or this program ends, and when each of them is killed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path

from kintsugi.errors import DeadlineExceeded, KintsugiError, UntrustedFile, UserError
from kintsugi.lab import probing
from kintsugi.lab.faults.mechanism import FaultContext
from kintsugi.lab.injector.checks import NETWORK
from kintsugi.lab.injector.fault_process import END_TIMEOUT_S, FaultProcess
from kintsugi.lab.injector.reaper import ReaperGuard, own_world
from kintsugi.lab.injector.reports import InjectorReport
from kintsugi.lab.injector.undo_log import ProcessIdentity, UndoJournal
from kintsugi.lab.testbed.ports import ports_of
from kintsugi.lab.testbed.remote_orders import FaultAnswer, FaultOrder

READY_TIMEOUT_S = 20.0
FOLDERS = "kintsugi-faults"
"""Begin of the names of the folders with the undo journals."""
JOURNAL = "undo.jsonl"


class HostFaults:
    """Faults of one laboratory on this host. `close` undoes all of them."""

    def __init__(self) -> None:
        own = ProcessIdentity.of(os.getpid())
        # On a disk of this machine: a scratch folder may be on one that machines share.
        name = f"{FOLDERS}-{own_world()}-{own.pid}-{own.born}"
        self._folder = Path(tempfile.gettempdir(), name)
        self._guard: ReaperGuard | None = None
        self._faults: dict[str, FaultProcess] = {}

    def answer(self, order: FaultOrder, *, of_the_run: Collection[int]) -> FaultAnswer:
        """Carry out an order. Only processes `of_the_run` get faults, and only their ports are told."""
        try:
            match order.do:
                case "probe":
                    assert order.injection is not None
                    # What belongs to the run is in the network of this machine, as this process is.
                    own = os.getpid() if order.injection.ability in NETWORK else None
                    chosen = probing.choose(order.injection, pid=own, may_share_network=True)
                    return FaultAnswer(mechanism=chosen.name)
                case "look_up":
                    return FaultAnswer(ports=tuple(sorted(ports_of({order.pid} & set(of_the_run)))))
                case "prepare":
                    return self._prepare(order, of_the_run=of_the_run)
                case "close":
                    self.close()
                    return FaultAnswer()
            return self._go_on(order)
        except (KintsugiError, OSError) as error:
            return FaultAnswer(why=str(error))

    def _prepare(self, order: FaultOrder, *, of_the_run: Collection[int]) -> FaultAnswer:
        injection = order.injection
        assert injection is not None, order
        if order.pid not in of_the_run:
            raise UserError(f"process {order.pid} has ended, or belongs to another run")
        mechanism = probing.choose(injection, pid=order.pid, may_share_network=True)
        guard = self._guarded()
        peers = () if order.peer_pid is None else (ProcessIdentity.of(order.peer_pid),)
        context = FaultContext(
            injection=injection,
            mechanism=mechanism.name,
            target=ProcessIdentity.of(order.pid),
            peers=peers,
            peer_ports=order.ports,
            run_dir=str(self._folder),
            journal=str(guard.path),
            seed=len(self._faults),
        )
        process = self._faults[order.fault] = FaultProcess(context)
        return FaultAnswer(process.receive(timeout_s=READY_TIMEOUT_S), mechanism.name)

    def _guarded(self) -> ReaperGuard:
        """Return the undo journal, with a running reaper."""
        if self._guard is None:
            remove_leftovers(self._folder.parent)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._guard = ReaperGuard(self._folder / JOURNAL)
        self._guard.renew()
        return self._guard

    def _go_on(self, order: FaultOrder) -> FaultAnswer:
        """Carry out an order about a fault that is prepared."""
        process = self._faults.get(order.fault)
        if process is None:
            raise UserError("the connection to this host was lost meanwhile: the fault was undone")
        match order.do:
            case "ports":
                process.tell_ports(order.ports or ())
                return FaultAnswer()
            case "begin":
                process.go()
                return FaultAnswer(process.receive(timeout_s=READY_TIMEOUT_S))
            case _:
                del self._faults[order.fault]
                return FaultAnswer(self._end(process))

    def _end(self, process: FaultProcess) -> InjectorReport | None:
        """End a fault and make sure that it is undone, even when its process was killed or hangs."""
        assert self._guard is not None
        process.end()
        report: InjectorReport | None = None
        try:
            with suppress(DeadlineExceeded):
                report = process.receive(timeout_s=END_TIMEOUT_S)
            if report is None or report.what != "ended":
                process.kill()
                self._guard.undo_all_of(process.child.pid)
        finally:
            process.close()
        return report

    def close(self) -> None:
        """Undo everything; an error in one fault does not keep the others."""
        guard, self._guard = self._guard, None
        faults, self._faults = self._faults, {}
        try:
            with ExitStack() as stack:
                for process in faults.values():
                    stack.callback(process.close)
        finally:
            if guard is not None:
                guard.close()
                # Only after everything is undone: the journal says how.
                shutil.rmtree(self._folder, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove the journals of programs of this machine that were killed, once everything is undone."""
    for path in folder.glob(f"{FOLDERS}-{own_world()}-*"):
        with suppress(OSError, UntrustedFile, ValueError):
            *_, pid, born = path.name.split("-")
            if ProcessIdentity(int(pid), int(born)).alive:
                continue
            journal = UndoJournal(path / JOURNAL)
            left = journal.outstanding()
            journal.close()
            if not left:
                shutil.rmtree(path, ignore_errors=True)
