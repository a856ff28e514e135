"""Signals processes of a run on one of its hosts, as the laboratory asks.

    kintsugi host-signals HOST SCRATCH          on the host itself: over ssh, by srun, or in the pod

The loop consumes one order per line of standard input, answers each with a line, waits for the next, and ends with its
input. Only what a supervisor of this host and run has started is signalled, and the supervisor itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from kintsugi.cluster.host_supervisor import RECORD, ScratchRecord, default_scratch, own_machine
from kintsugi.runtime.proc import process_start_time

PROGRAM = ("-P", "-m", "kintsugi", "host-signals")
"""Arguments of an interpreter that runs this; host and scratch folder follow."""
ANSWER_BEGINS = b"{"


class SignalOrder(msgspec.Struct, frozen=True):
    """`SignalOrder("grpo-1f…", 9, {"model-0": 4711})`."""

    job: str
    number: int
    pids: dict[str, int] = {}
    is_whole: bool = False
    """The supervisor of the host too, and everything below it: the host is lost."""


class Signalled(msgspec.Struct, frozen=True):
    """Answer to an order."""

    hit: tuple[str, ...]
    """Processes that got the signal."""
    is_reached: bool = True
    """The program on the host has answered."""
    why: str = ""
    """Why no order can be carried out on this host, now or later; empty if one may be."""


class HostSignals:
    """Carries out orders on one host; on a node of Ray it is an actor."""

    def __init__(self, host: str, scratch: Path | None = None) -> None:
        """`scratch` is the folder of the supervisors; None: the usual one of this user."""
        self._host, self._scratch = host, scratch or default_scratch()

    def answer(self, line: bytes) -> bytes:
        """Carry out the order of a line; return the line of the answer."""
        order = msgspec.json.decode(line, type=SignalOrder)
        return msgspec.json.encode(carry_out(order, host=self._host, scratch=self._scratch))


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
    for line in sys.stdin.buffer:
        sys.stdout.write(f"{signals.answer(line).decode()}\n")
        sys.stdout.flush()
