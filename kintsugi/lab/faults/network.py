"""Packets of one process, delayed, dropped at random, or cut off.

The packets are recognised by ports, which are looked up periodically because a process reconnects. Packets of the
target are matched in an nftables table of our own and queued to this process, which decides about each one.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import socket
from collections import deque
from functools import cache
from typing import Literal
from uuid import uuid4

import msgspec

from kintsugi.cluster.namespaces import enter
from kintsugi.lab.faults.mechanism import EXTRA_LEASE_S, FaultImpossible, FaultMechanism
from kintsugi.lab.injector.undo_log import (
    MARK_BASE,
    RemoveRules,
    iptables_is_nft,
    iptables_table_is_ours,
    network_of,
    queue_rules,
)
from kintsugi.lab.testbed import tools
from kintsugi.lab.testbed.packets import ACCEPT, DROP, PacketQueue
from kintsugi.lab.testbed.ports import ports_of
from kintsugi.lab.testbed.tools import ToolFailed
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.proc import has_capability

PORTS_S = 0.1
"""Interval between two look-ups of the ports."""
DEFAULT_DELAY_S = 0.2
DEFAULT_SHARE = 0.1
SHORTEST_WAY_S = 0.25
"""Shortest time from the lowest delay to the highest, used when the jitter is small."""


@cache
def queue_rule() -> str | None:
    """Return the tool that can queue packets to a program: `nft` where the kernel supports it, else `iptables`; None
    for neither."""
    table = "add table inet t; add chain inet t c { type filter hook output priority 0; }; "
    queue = table + "add rule inet t c meta mark 5 queue flags bypass to 1"
    attempts = {
        "nft": ("nft", queue),
        "iptables": (
            "iptables",
            "-A",
            "OUTPUT",
            "-m",
            "mark",
            "--mark",
            "5",
            "-j",
            "NFQUEUE",
            "--queue-bypass",
        ),
    }
    for name, command in attempts.items():
        try:
            tools.call("unshare", "--net", *command)
        except ToolFailed:
            continue
        return name
    return None


def missing_for_packets() -> str | None:
    if (why := missing_right("to set rules about packets")) is not None:
        return why
    if not tools.has("nft"):
        return "nft is not installed (Debian: nftables)"
    return None


def missing_right(what: str) -> str | None:
    """Return which right to change a network this process lacks; None when it has them."""
    if os.geteuid() != 0:
        return f"expected root, {what}"
    for number, name in ((12, "CAP_NET_ADMIN"), (21, "CAP_SYS_ADMIN")):
        if not has_capability(number):
            return f"expected {name}, {what}"
    return None


def check_interface(name: str | None) -> None:
    """Raise FaultImpossible for a network device that does not exist in the network of this process."""
    there = [device for _, device in socket.if_nameindex()]
    if name is not None and name not in there:
        raise FaultImpossible(
            f"interface: expected a network device of the target's host ({', '.join(there)}), got {name!r}"
        )


class _PacketFault(FaultMechanism):
    """Base class: rules in the target's network that match its packets; a subclass defines the effect on them."""

    outgoing: bool = True
    incoming: bool = True

    def prepare(self) -> None:
        self._network = network_of(self.pid)
        enter([f"/proc/{self.pid}/ns/net"])
        check_interface(self.injection.interface)
        self.table = f"k{uuid4().hex[:8]}"
        self.number = 1 + int(self.table[1:], 16) % 60000
        self._ports: tuple[frozenset[int], frozenset[int]] | None = None
        self._look_at = 0.0

    def begin(self) -> None:
        self.before(self.undo_entry())
        tools.call("nft", "-f", "-", text=self.rules())
        self.refresh_ports()

    def undo_entry(self) -> RemoveRules:
        return RemoveRules(self._network, self.table)

    def consequence(self, *, incoming: bool) -> str:
        """Return the action of the rule for a matched packet."""
        raise NotImplementedError

    def rules(self) -> str:
        table = self.table
        lines = [f"table inet {table} {{"]
        # The kernel forgets the ports by itself when the fault is over: then the rules match nothing, even if all
        # processes of the laboratory were killed at once.
        expiry_s = math.ceil(self.injection.duration_s + EXTRA_LEASE_S)
        kind = f"type inet_service; flags timeout; timeout {expiry_s}s;"
        lines += [f"  set {name} {{ {kind} }}" for name in ("own", "peer")]
        for hook, wanted, device, own, other in (
            ("output", self.outgoing, "oifname", "sport", "dport"),
            ("input", self.incoming, "iifname", "dport", "sport"),
        ):
            if wanted:
                lines.append(f"  chain {hook} {{ type filter hook {hook} priority mangle;")
                match = f"{self._through(device)}tcp {own} @own{self._other_end(other)}"
                lines.append(f"    {match} {self.consequence(incoming=hook == 'input')}")
                lines.append("  }")
        return "\n".join([*lines, "}"]) + "\n"

    def _through(self, field: str) -> str:
        interface = self.injection.interface
        return f'{field} "{interface}" ' if interface is not None else ""

    def _other_end(self, field: str) -> str:
        """Match the other end; with a peer and a port, that port of that peer."""
        peer = f" tcp {field} @peer" if self.has_peer else ""
        return peer + (f" tcp {field} {self.injection.port}" if self.injection.port is not None else "")

    def refresh_ports(self) -> None:
        now = SYSTEM_CLOCK.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + PORTS_S
        own, peer = ports_of([self.pid]), self.peer_ports()
        if (own, peer) == self._ports or (not own and not self.context.target.alive):
            return
        self._ports = own, peer
        lines = []
        for name, ports in (("own", own), ("peer", peer)):
            lines.append(f"flush set inet {self.table} {name}")
            if ports:
                elements = ", ".join(map(str, sorted(ports)))
                lines.append(f"add element inet {self.table} {name} {{ {elements} }}")
        tools.call("nft", "-f", "-", text="\n".join(lines) + "\n")
        self.measured["ports"] = float(len(own))


class _QueuedFault(_PacketFault):
    """Base class: every matched packet is queued to this process."""

    @classmethod
    def missing(cls) -> str | None:
        why = missing_for_packets()
        if why is None and queue_rule() is None:
            return "this kernel hands no packets to programs (nfnetlink_queue), or iptables is not installed"
        return why

    @classmethod
    def unsupported_for(cls, pid: int, *, may_share_network: bool = False) -> str | None:
        """Return why it does not work: iptables makes a table of its own, and an older one, which shows none to nft,
        leaves it behind. Both are acceptable on an isolated host."""
        with contextlib.suppress(OSError):
            if queue_rule() == "nft" or network_of(pid) != network_of("self"):
                return None
            if not may_share_network:
                return "on this kernel only on hosts of their own: run it on a testbed with isolated hosts"
            if not iptables_is_nft():
                return "this iptables leaves empty tables behind (legacy); expected one that is based on nftables"
        return None

    @property
    def _mark(self) -> int:
        return MARK_BASE + self.number

    def prepare(self) -> None:
        super().prepare()
        self._random = random.Random(self.context.seed)
        self._queue = PacketQueue(self.number)
        self.measured |= {"packets": 0.0, "dropped": 0.0}

    def consequence(self, *, incoming: bool) -> str:
        if queue_rule() == "nft":
            return f"queue flags bypass to {self.number}"
        return f"meta mark set {self._mark:#x}"

    def undo_entry(self) -> RemoveRules:
        chains = self._chains()
        is_made = bool(chains) and iptables_is_nft() and iptables_table_is_ours()
        return RemoveRules(
            self._network,
            self.table,
            chains=chains,
            mark=self._mark,
            queue=self.number,
            is_table_made=is_made,
        )

    def _chains(self) -> tuple[Literal["OUTPUT", "INPUT"], ...]:
        """Return the chains of iptables to queue in, on kernels where nftables can not queue."""
        if queue_rule() == "nft":
            return ()
        chains: list[Literal["OUTPUT", "INPUT"]] = []
        if self.outgoing:
            chains.append("OUTPUT")
        if self.incoming:
            chains.append("INPUT")
        return tuple(chains)

    def begin(self) -> None:
        super().begin()
        for rule in queue_rules(self._chains(), mark=self._mark, queue=self.number):
            tools.call("iptables", "-A", *rule)

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self._queue.fileno(),)

    def tick(self, strength: float) -> float:
        packets = list(self._queue.arrived())
        self.measured["packets"] += len(packets)
        wait_s = self.take(packets, strength)
        self.refresh_ports()
        return min(wait_s, PORTS_S)

    def take(self, packets: list[int], strength: float) -> float:
        """Decide about packets, now or later; return the seconds until the next decision is due."""
        raise NotImplementedError

    def drop(self, packets: list[int], *, share: float) -> None:
        lost = [packet for packet in packets if self._random.random() < share]
        kept = sorted(set(packets) - set(lost))
        self._queue.decide(lost, DROP)
        self._queue.decide(kept, ACCEPT)
        self.measured["dropped"] += len(lost)

    def end(self) -> None:
        """Remove the rules first, then release the held packets, then close the queue."""
        super().end()
        if hasattr(self, "_queue"):
            self.release()
            self._queue.close()

    def release(self) -> None:
        self._queue.decide(list(self._queue.arrived()), ACCEPT)


class JitterWalk:
    """Delay of packets over time: uniformly distributed in delay ± jitter, without reordering.

    A link keeps the order of its packets. If each packet drew its own delay, a packet with a long delay would block all
    packets behind it, and nearly all would get the longest delay. Instead the delay moves up and down between its
    bounds, each time at a random speed, and falls more slowly than time passes: a packet that is sent later arrives
    later. Over time its mean is `delay_s` and its standard deviation `jitter_s` / √3, for all speeds.
    """

    def __init__(self, delay_s: float, jitter_s: float, *, choose: random.Random) -> None:
        self._delay_s = delay_s
        self._jitter_s = min(jitter_s, delay_s)
        self._random = choose
        self._way = choose.choice((-1, 1))
        self._began = self._ends = 0.0

    def at(self, now: float) -> float:
        """Return the delay at a time; times must not decrease."""
        if not self._jitter_s:
            return self._delay_s
        if not self._ends:
            # Start at a random position, so that a short observation does not always begin at a bound.
            length_s = self._length_s()
            self._began = now - self._random.random() * length_s
            self._ends = self._began + length_s
        while now >= self._ends:
            self._began, self._way = self._ends, -self._way
            self._ends += self._length_s()
        passed = (now - self._began) / (self._ends - self._began)
        return self._delay_s + self._jitter_s * self._way * (2 * passed - 1)

    def _length_s(self) -> float:
        """Draw the time from one bound to the other; the distance is twice the jitter."""
        return max(SHORTEST_WAY_S, 2 * self._jitter_s) * self._random.uniform(1.0, 2.0)


class HeldPacket(msgspec.Struct, frozen=True):
    """Packet that waits for its release."""

    due: float
    arrived: float
    packet: int


class DelayStatistics:
    """Mean and standard deviation of the delays that were applied."""

    def __init__(self) -> None:
        self._count, self.mean, self._squares = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        self._count += 1
        away = value - self.mean
        self.mean += away / self._count
        self._squares += away * (value - self.mean)

    @property
    def deviation(self) -> float:
        return math.sqrt(self._squares / self._count) if self._count else 0.0


class PacketDelay(_QueuedFault):
    """Delays all packets that the target sends, in the order in which they were sent."""

    name = "packets held back by a program (NFQUEUE)"
    supported_parameters = frozenset({"delay_s", "jitter_s"})
    ramps = True
    incoming = False

    def prepare(self) -> None:
        super().prepare()
        self._held: deque[HeldPacket] = deque()
        self._applied = DelayStatistics()
        self._jitter = JitterWalk(
            self.parameter("delay_s", DEFAULT_DELAY_S), self.parameter("jitter_s", 0.0), choose=self._random
        )

    def take(self, packets: list[int], strength: float) -> float:
        now = SYSTEM_CLOCK.monotonic()
        for packet in packets:
            due = now + strength * self._jitter.at(now)
            # A slow link keeps the order of its packets.
            self._held.append(HeldPacket(max(due, self._held[-1].due if self._held else 0.0), now, packet))
        ready = []
        while self._held and self._held[0].due <= now:
            held = self._held.popleft()
            ready.append(held.packet)
            self._applied.add(now - held.arrived)
        self._queue.decide(ready, ACCEPT)
        self.measured |= {"delay_mean_s": self._applied.mean, "delay_deviation_s": self._applied.deviation}
        return max(0.0, self._held[0].due - now) if self._held else PORTS_S

    def release(self) -> None:
        super().release()
        self._queue.decide([held.packet for held in self._held], ACCEPT)


class PacketLoss(_QueuedFault):
    """Drops a share of the packets that the target sends or receives."""

    name = "packets dropped by a program (NFQUEUE)"
    supported_parameters = frozenset({"share"})
    ramps = True

    def take(self, packets: list[int], strength: float) -> float:
        self.drop(packets, share=strength * self.parameter("share", DEFAULT_SHARE))
        return PORTS_S


class NetworkCut(_QueuedFault):
    """Drops all packets in both directions."""

    name = "all packets dropped by a program (NFQUEUE)"

    def take(self, packets: list[int], strength: float) -> float:
        self.drop(packets, share=1.0)
        return PORTS_S


class FilteredLoss(_PacketFault):
    """Drops a share of arriving packets in the kernel. Outgoing packets are not dropped: the sender would get an
    error."""

    name = "arriving packets dropped at random (nftables)"
    supported_parameters = frozenset({"share"})
    outgoing = False

    @classmethod
    def missing(cls) -> str | None:
        return missing_for_packets()

    def share(self) -> float:
        return self.parameter("share", DEFAULT_SHARE)

    def consequence(self, *, incoming: bool) -> str:
        return f"numgen random mod 10000 < {round(10000 * self.share())} counter drop"

    def tick(self, strength: float) -> float:
        self.refresh_ports()
        return PORTS_S


class FilteredCut(FilteredLoss):
    """Drops all arriving packets in the kernel; without acknowledgements the target soon stops sending."""

    name = "arriving packets dropped (nftables)"
    supported_parameters = frozenset()

    def consequence(self, *, incoming: bool) -> str:
        return "counter drop"
