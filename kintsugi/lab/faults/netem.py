"""Packets of one process, delayed or dropped by the kernel: `tc netem`.

    root prio (four bands; the first three are the default) ── band 4 ── netem
                                                               ▲ u32 filter: target's ports → other end's ports

Only outgoing packets of a network device are matched. Ports are looked up periodically, as in the other network
mechanisms. Works only on isolated hosts and on the machines of a run, and only on devices without traffic shaping.
"""

from __future__ import annotations

import contextlib
import socket
from functools import cache

from kintsugi.cluster.namespaces import enter
from kintsugi.lab.faults.mechanism import FaultImpossible, FaultMechanism
from kintsugi.lab.faults.network import (
    DEFAULT_DELAY_S,
    DEFAULT_SHARE,
    PORTS_S,
    check_interface,
    missing_right,
)
from kintsugi.lab.injector.undo_log import SHAPING_HANDLE, RemoveShaping, network_of
from kintsugi.lab.testbed import tools
from kintsugi.lab.testbed.ports import ports_of
from kintsugi.lab.testbed.tools import ToolFailed
from kintsugi.runtime.clock import SYSTEM_CLOCK

BAND = f"{SHAPING_HANDLE}:4"
"""Band of the matched packets; all other packets use the first three."""
MOST_PACKETS = 1 << 16
TCP = 6


@cache
def netem_refusal() -> str | None:
    """Try the queues in a temporary network namespace; return the kernel's refusal, or None when it works."""
    lines = [
        "tc qdisc add dev lo root handle 1: prio bands 4",
        "tc qdisc add dev lo parent 1:4 netem delay 1ms",
        "tc filter add dev lo parent 1: protocol ip u32 match ip sport 1 0xffff flowid 1:4",
    ]
    try:
        tools.call("unshare", "--net", "sh", "-c", " && ".join(lines))
    except ToolFailed as error:
        return str(error).rpartition(": ")[2].strip()
    return None


class _Shaped(FaultMechanism):
    """Base class: matches the packets; a subclass defines the effect on them."""

    ramps = True

    @classmethod
    def missing(cls) -> str | None:
        if (why := missing_right("to set queues of packets")) is not None:
            return why
        if not tools.has("tc"):
            return "tc is not installed (Debian: iproute2)"
        refusal = netem_refusal()
        return (
            f"this kernel can not shape packets (sch_netem, sch_prio, cls_u32): {refusal}"
            if refusal
            else None
        )

    @classmethod
    def unsupported_for(cls, pid: int, *, may_share_network: bool = False) -> str | None:
        with contextlib.suppress(OSError):
            if not may_share_network and network_of(pid) == network_of("self"):
                return "only on hosts of their own: run it on a testbed with isolated hosts"
        return None

    def prepare(self) -> None:
        self._network = network_of(self.pid)
        enter([f"/proc/{self.pid}/ns/net"])
        interface = self.injection.interface
        check_interface(interface)
        devices = [name for _, name in socket.if_nameindex()]
        self.interfaces = [interface] if interface is not None else devices
        for name in self.interfaces:
            _check_untouched(name)
        self._matches: list[str] | None = None
        self._effect = ""
        self._look_at = 0.0

    def effect(self, strength: float) -> str:
        """Return the arguments of netem."""
        raise NotImplementedError

    def begin(self) -> None:
        self._effect = self.effect(0.0 if self.injection.ramp_s else 1.0)
        for name in self.interfaces:
            self.before(RemoveShaping(self._network, name))
            _tc(
                f"qdisc add dev {name} root handle {SHAPING_HANDLE}: prio bands 4",
                f"qdisc add dev {name} parent {BAND} netem {self._effect} limit {MOST_PACKETS}",
            )
        self.refresh_filters()

    def refresh_filters(self) -> None:
        now = SYSTEM_CLOCK.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + PORTS_S
        own, peer = ports_of([self.pid]), self.peer_ports()
        matches = self.matches(own, peer)
        if matches == self._matches or (not own and not self.context.target.alive):
            return
        for name in self.interfaces:
            where = f"dev {name} parent {SHAPING_HANDLE}:"
            if self._matches:
                _tc(f"filter del {where}")
            _tc(*(f"filter add {where} protocol ip u32 {match} flowid {BAND}" for match in matches))
        self._matches = matches
        self.measured["ports"] = float(len(own))

    def matches(self, own: frozenset[int], peer: frozenset[int]) -> list[str]:
        """Return one match per pair of ports; with a peer and a port, that port of that peer."""
        port = self.injection.port
        others = sorted(peer) if self.has_peer else [None]
        if port is not None:
            others = [port] if not self.has_peer or port in peer else []
        return [
            f"match ip protocol {TCP} 0xff match ip sport {mine} 0xffff"
            + (f" match ip dport {other} 0xffff" if other is not None else "")
            for mine in sorted(own)
            for other in others
        ]

    def tick(self, strength: float) -> float:
        effect = self.effect(strength)
        if effect != self._effect:
            self._effect = effect
            _tc(
                *(
                    f"qdisc change dev {name} parent {BAND} netem {effect} limit {MOST_PACKETS}"
                    for name in self.interfaces
                )
            )
        self.refresh_filters()
        return PORTS_S


def _check_untouched(interface: str) -> None:
    """Raise when shaping is set already: undoing ours would remove it."""
    for line in tools.call("tc", "qdisc", "show", "dev", interface).splitlines():
        fields = line.split()
        if "root" in fields and fields[2] != "0:":
            raise FaultImpossible(f"{interface} has traffic shaping already: {line.strip()}")


def _tc(*lines: str) -> None:
    if lines:
        tools.call("tc", "-batch", "-", text="\n".join(lines) + "\n")


class ShapedDelay(_Shaped):
    """Delays all packets that the target sends; with jitter, packets can overtake each other."""

    name = "packets held back by the kernel (tc netem)"
    supported_parameters = frozenset({"delay_s", "jitter_s"})

    def effect(self, strength: float) -> str:
        delay_s, jitter_s = self.parameter("delay_s", DEFAULT_DELAY_S), self.parameter("jitter_s", 0.0)
        return f"delay {round(1e3 * strength * delay_s)}ms {round(1e3 * strength * jitter_s)}ms"


class ShapedLoss(_Shaped):
    """Drops a share of the packets that the target sends."""

    name = "packets dropped by the kernel (tc netem)"
    supported_parameters = frozenset({"share"})

    def effect(self, strength: float) -> str:
        return f"loss {100 * strength * self.parameter('share', DEFAULT_SHARE):.2f}%"
