"""Packets of one process that come late, get lost, or do not come at all.

Whose packets they are is told by ports, which are looked up again and again: a process connects anew. Those of the
target are marked (in a table of nftables that is ours alone) and handed to this process, which decides about each.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import socket
from collections import deque
from functools import cache
from uuid import uuid4

import msgspec

from kintsugi.cluster.hosts import enter
from kintsugi.lab import tools
from kintsugi.lab.abilities.fault import Fault, Impossible
from kintsugi.lab.packets import ACCEPT, DROP, PacketQueue
from kintsugi.lab.ports import ports_of
from kintsugi.lab.tools import ToolFailed
from kintsugi.lab.undo import Rules, network_of
from kintsugi.runtime import SYSTEM_CLOCK

PORTS_S = 0.1
"""Between two looks at the ports."""
DEFAULT_DELAY_S = 0.2
DEFAULT_SHARE = 0.1
SHORTEST_WAY_S = 0.25
"""From the shortest delay to the longest, where there is hardly any jitter."""
MARK_BASE = 0x6B000000


@cache
def queue_rule() -> str | None:
    """Which tool can hand packets to a program: `nft` where the kernel has it, else `iptables`; None: neither."""
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
    if os.geteuid() != 0:
        return "expected root, to set rules about packets"
    if not tools.has("nft"):
        return "nft is not installed (Debian: nftables)"
    return None


def check_interface(name: str | None) -> None:
    """Impossible for a network device that the network of this process has not."""
    there = [device for _, device in socket.if_nameindex()]
    if name is not None and name not in there:
        raise Impossible(
            f"interface: expected a network device of the target's host ({', '.join(there)}), got {name!r}"
        )


class _PacketFault(Fault):
    """Rules in the target's network that match its packets; what becomes of them is the subclass's."""

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
        self.before(Rules(self._network, self.table, commands=self.undo_commands()))
        tools.call("nft", "-f", "-", text=self.rules())
        self.refresh_ports()

    def undo_commands(self) -> tuple[tuple[str, ...], ...]:
        return ()

    def consequence(self, *, incoming: bool) -> str:
        """What a rule says of a packet that it matches."""
        raise NotImplementedError

    def rules(self) -> str:
        table = self.table
        lines = [f"table inet {table} {{"]
        lines += [f"  set {name} {{ type inet_service; }}" for name in ("own", "peer")]
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
        """Of a peer and a port, both: that port of that peer."""
        peer = f" tcp {field} @peer" if self.scene.peers else ""
        return peer + (f" tcp {field} {self.injection.port}" if self.injection.port is not None else "")

    def refresh_ports(self) -> None:
        now = SYSTEM_CLOCK.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + PORTS_S
        own, peer = ports_of([self.pid]), ports_of(who.pid for who in self.scene.peers)
        if (own, peer) == self._ports or (not own and not self.scene.target.alive):
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
    """Every packet that matches is handed to this process."""

    @classmethod
    def missing(cls) -> str | None:
        why = missing_for_packets()
        if why is None and queue_rule() is None:
            return "this kernel hands no packets to programs (nfnetlink_queue), or iptables is not installed"
        return why

    @classmethod
    def unsuited(cls, pid: int) -> str | None:
        """Rules of iptables leave empty tables behind, which only a network that ends with its host may get."""
        with contextlib.suppress(OSError):
            if queue_rule() != "nft" and network_of(pid) == network_of("self"):
                return "on this kernel only on hosts of their own: give the run a place with hosts"
        return None

    @property
    def _mark(self) -> str:
        return hex(MARK_BASE + self.number)

    def prepare(self) -> None:
        super().prepare()
        self._random = random.Random(self.scene.seed)
        self._queue = PacketQueue(self.number)
        self.measured |= {"packets": 0.0, "dropped": 0.0}

    def consequence(self, *, incoming: bool) -> str:
        if queue_rule() == "nft":
            return f"queue flags bypass to {self.number}"
        return f"meta mark set {self._mark}"

    def undo_commands(self) -> tuple[tuple[str, ...], ...]:
        return tuple(("iptables", "-D", *rule) for rule in self._marked_rules())

    def _marked_rules(self) -> list[tuple[str, ...]]:
        """What hands marked packets over, where nftables itself can not."""
        if queue_rule() == "nft":
            return []
        match = ("-m", "mark", "--mark", self._mark)
        queue = ("-j", "NFQUEUE", "--queue-num", str(self.number), "--queue-bypass")
        chains = [("OUTPUT", self.outgoing), ("INPUT", self.incoming)]
        return [(chain, *match, *queue) for chain, wanted in chains if wanted]

    def begin(self) -> None:
        super().begin()
        for rule in self._marked_rules():
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
        """Decide about packets, now or later; gives the seconds until the next is due."""
        raise NotImplementedError

    def drop(self, packets: list[int], *, share: float) -> None:
        lost = [packet for packet in packets if self._random.random() < share]
        kept = sorted(set(packets) - set(lost))
        self._queue.decide(lost, DROP)
        self._queue.decide(kept, ACCEPT)
        self.measured["dropped"] += len(lost)

    def end(self) -> None:
        """No more packets first, then those that are still held, then the queue itself."""
        super().end()
        if hasattr(self, "_queue"):
            self.release()
            self._queue.close()

    def release(self) -> None:
        self._queue.decide(list(self._queue.arrived()), ACCEPT)


class Wander:
    """How long packets are held back at a moment: evenly spread between delay ± jitter, and never overtaken.

    A link keeps the order of its packets. If each packet drew a delay of its own, one with a long delay would hold up
    all behind it, and nearly all would have the longest. So the delay goes up and down between its ends, each time at
    a speed of its own, and falls more slowly than time passes: whoever is sent later arrives later. Over time its mean
    is `delay_s`, its standard deviation `jitter_s` / √3, whatever the speeds are.
    """

    def __init__(self, delay_s: float, jitter_s: float, *, choose: random.Random) -> None:
        self._delay_s = delay_s
        self._jitter_s = min(jitter_s, delay_s)
        self._random = choose
        self._way = choose.choice((-1, 1))
        self._began = self._ends = 0.0

    def at(self, now: float) -> float:
        """Asked at moments that do not go back."""
        if not self._jitter_s:
            return self._delay_s
        if not self._ends:
            # Somewhere on the first way: who is looked at for a short time is not always at an end.
            length_s = self._length_s()
            self._began = now - self._random.random() * length_s
            self._ends = self._began + length_s
        while now >= self._ends:
            self._began, self._way = self._ends, -self._way
            self._ends += self._length_s()
        passed = (now - self._began) / (self._ends - self._began)
        return self._delay_s + self._jitter_s * self._way * (2 * passed - 1)

    def _length_s(self) -> float:
        """From one end to the other. The way is twice the jitter long."""
        return max(SHORTEST_WAY_S, 2 * self._jitter_s) * self._random.uniform(1.0, 2.0)


class Held(msgspec.Struct, frozen=True):
    """A packet that waits for its time."""

    due: float
    arrived: float
    packet: int


class Applied:
    """Mean and standard deviation of what was really done."""

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


class Delay(_QueuedFault):
    """Everything that the target sends goes out later, in the order in which it was sent."""

    name = "packets held back by a program (NFQUEUE)"
    words = frozenset({"delay_s", "jitter_s"})
    ramps = True
    incoming = False

    def prepare(self) -> None:
        super().prepare()
        self._held: deque[Held] = deque()
        self._applied = Applied()
        self._wander = Wander(
            self.amount("delay_s", DEFAULT_DELAY_S), self.amount("jitter_s", 0.0), choose=self._random
        )

    def take(self, packets: list[int], strength: float) -> float:
        now = SYSTEM_CLOCK.monotonic()
        for packet in packets:
            due = now + strength * self._wander.at(now)
            # A link that is slow does not overtake itself.
            self._held.append(Held(max(due, self._held[-1].due if self._held else 0.0), now, packet))
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


class Loss(_QueuedFault):
    """So many of the packets that the target sends or is sent disappear."""

    name = "packets dropped by a program (NFQUEUE)"
    words = frozenset({"share"})
    ramps = True

    def take(self, packets: list[int], strength: float) -> float:
        self.drop(packets, share=strength * self.amount("share", DEFAULT_SHARE))
        return PORTS_S


class Cut(_QueuedFault):
    """Nothing comes through, either way."""

    name = "all packets dropped by a program (NFQUEUE)"

    def take(self, packets: list[int], strength: float) -> float:
        self.drop(packets, share=1.0)
        return PORTS_S


class FilteredLoss(_PacketFault):
    """The kernel drops at random what arrives. Only that: what it drops on the way out, the sender is told of."""

    name = "arriving packets dropped at random (nftables)"
    words = frozenset({"share"})
    outgoing = False

    @classmethod
    def missing(cls) -> str | None:
        return missing_for_packets()

    def share(self) -> float:
        return self.amount("share", DEFAULT_SHARE)

    def consequence(self, *, incoming: bool) -> str:
        return f"numgen random mod 10000 < {round(10000 * self.share())} counter drop"

    def tick(self, strength: float) -> float:
        self.refresh_ports()
        return PORTS_S


class FilteredCut(FilteredLoss):
    """The kernel drops whatever arrives: without answers nothing goes out for long either."""

    name = "arriving packets dropped (nftables)"
    words = frozenset()

    def consequence(self, *, incoming: bool) -> str:
        return "counter drop"
