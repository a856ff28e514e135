"""Orders of the laboratory to a program on a host of a run, and its answers: one JSON object a line each.

laboratory ── SignalOrder ──► program ── Signalled ──► laboratory
           ── FaultOrder ───►         ── FaultAnswer ─►
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kintsugi.lab.injector.injection import Injection
from kintsugi.lab.injector.reports import InjectorReport

PROGRAM = ("-P", "-m", "kintsugi", "host-signals")
"""Arguments of an interpreter that runs the program; host and scratch folder follow."""
ANSWER_BEGINS = b"{"


class SignalOrder(msgspec.Struct, frozen=True, tag="Signal"):
    """`SignalOrder("grpo-1f…", 9, {"model-0": 4711})`."""

    job: str
    number: int
    pids: dict[str, int] = {}
    is_whole: bool = False
    """The supervisor of the host too, and everything below it: the host is lost."""


class Signalled(msgspec.Struct, frozen=True):
    """Answer to an order to signal."""

    hit: tuple[str, ...]
    """Processes that got the signal."""
    is_reached: bool = True
    """The program on the host has answered."""
    why: str = ""
    """Why no order can be carried out on this host, now or later; empty if one may be."""


class FaultOrder(msgspec.Struct, frozen=True, tag="Fault", kw_only=True, omit_defaults=True):
    """`FaultOrder(job="grpo-1f…", do="prepare", fault="4711-1", injection=…, pid=4711)`."""

    job: str = ""
    do: Literal["probe", "prepare", "ports", "begin", "end", "close", "look_up"]
    """Whether faults of this kind are possible here; prepare a fault; take the ports of its other end; begin it; end
    it; undo everything; return the ports of the process `pid`."""
    fault: str = ""
    """Name of the fault in later orders."""
    injection: Injection | None = None
    pid: int = 0
    """Pid of the target, as its own host counts."""
    peer_pid: int | None = None
    """Pid of the other end, where that is on the same host."""
    ports: tuple[int, ...] | None = None
    """Ports of the other end, where that is on another host."""


class FaultAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to an order about a fault."""

    report: InjectorReport | None = None
    """Report of the process that carries out the fault."""
    mechanism: str = ""
    """Name of the mechanism that was chosen."""
    ports: tuple[int, ...] = ()
    why: str = ""
    """Why the order was not carried out; empty if it was."""
    is_reached: bool = True
    """The program on the host has answered."""


Order = SignalOrder | FaultOrder


def unreached(order: Order, *, why: str = "") -> bytes:
    """Return the answer to an order that has not reached its host."""
    if isinstance(order, FaultOrder):
        return msgspec.json.encode(FaultAnswer(is_reached=False, why=why))
    return msgspec.json.encode(Signalled((), is_reached=False, why=why))


_ORDERS: msgspec.json.Decoder[SignalOrder | FaultOrder] = msgspec.json.Decoder(SignalOrder | FaultOrder)


def read_order(line: bytes) -> Order:
    return _ORDERS.decode(line)
