"""Injects faults into processes of a run on one of its hosts, as the laboratory asks.

    kintsugi host-signals HOST SCRATCH          on the host itself: over ssh, by srun, or in the pod

The loop consumes one order per line of standard input (`remote_orders.py`), answers each with a line, waits for the
next, and ends with its input, when all faults are undone. Only what a supervisor of this host and run has started gets
a fault, and a signal also the supervisor itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from kintsugi.cluster.host_supervisor import RECORD, ScratchRecord, default_scratch, own_machine
from kintsugi.lab.injector.host_faults import HostFaults
from kintsugi.lab.testbed.remote_orders import Signalled, SignalOrder, read_order
from kintsugi.runtime.proc import process_start_time


class HostSignals:
    """Carries out orders on one host; on a node of Ray it is an actor."""

    def __init__(self, host: str, scratch: Path | None = None) -> None:
        """`scratch` is the folder of the supervisors; None: the usual one of this user."""
        self._host, self._scratch = host, scratch or default_scratch()
        self._faults = HostFaults()

    def answer(self, line: bytes) -> bytes:
        """Carry out the order of a line; return the line of the answer."""
        order = read_order(line)
        if isinstance(order, SignalOrder):
            return msgspec.json.encode(carry_out(order, host=self._host, scratch=self._scratch))
        return msgspec.json.encode(self._faults.answer(order, of_the_run=self._of_the_run(order.job)))

    def _of_the_run(self, job: str) -> set[int]:
        """Return the pids of the processes of a run on this host."""
        found = supervisors(self._scratch, job=job, host=self._host) if job else []
        pids: set[int] = set()
        for supervisor in found:
            with suppress(psutil.NoSuchProcess):
                pids |= {child.pid for child in supervisor.children(recursive=True)}
        return pids

    def close(self) -> None:
        """Undo all faults."""
        self._faults.close()


def carry_out(order: SignalOrder, *, host: str, scratch: Path) -> Signalled:
    """Signal what an order names. The supervisor comes first, so that it restarts nothing."""
    hit: list[str] = []
    for supervisor in supervisors(scratch, job=order.job, host=host):
        below = {child.pid: child for child in supervisor.children(recursive=True)}
        if order.is_whole:
            _send(order.number, [supervisor, *below.values()])
        for process, pid in order.pids.items():
            if pid in below:
                if not order.is_whole:
                    _send(order.number, [below[pid]])
                hit.append(process)
    return Signalled(tuple(hit))


def supervisors(scratch: Path, *, job: str, host: str) -> list[psutil.Process]:
    """Return the supervisors of a host of a run that run on this machine, by the records in their scratch folders."""
    found = []
    for path in scratch.glob(f"{job}-{host}-*/{RECORD}"):
        with suppress(OSError, msgspec.DecodeError, psutil.NoSuchProcess):
            record = msgspec.json.decode(path.read_bytes(), type=ScratchRecord)
            if record.machine == own_machine() and process_start_time(record.pid) == record.start_time:
                found.append(psutil.Process(record.pid))
    return found


def _send(number: int, processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def serve(host: str, scratch: Path) -> None:
    """Answer orders until the end of standard input."""
    signals = HostSignals(host, scratch)
    try:
        for line in sys.stdin.buffer:
            sys.stdout.write(f"{signals.answer(line).decode()}\n")
            sys.stdout.flush()
    finally:
        signals.close()
