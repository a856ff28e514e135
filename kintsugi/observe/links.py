"""Who is connected with whom, and how well: the kernel's connections, named by the processes at their ends.

A connection belongs to the process that has its inode open. The process at the other end is found by where it listens
(the address book, and the listeners of this host: collectives have their own), or by the other end itself where that is
on this host too. Connections of the same two processes to the same listener are one link; its totals go on when a
connection is replaced by another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter

from kintsugi.observe.figures import LinkSample
from kintsugi.observe.tcp import TcpInfo, TcpSocket

Address = tuple[str, int]
Key = tuple[str, str, int]
"""Process, its peer, and the port on which the one who was connected to listens."""

WORST_FIRST = (
    "SYN_SENT",
    "SYN_RECV",
    "CLOSE_WAIT",
    "FIN_WAIT1",
    "FIN_WAIT2",
    "CLOSING",
    "LAST_ACK",
    "ESTABLISHED",
)
WILDCARDS = ("0.0.0.0", "::")
MOST_LINKS = 1024
"""Totals of links without a connection are remembered up to here: strangers come from a new port each time."""
TOTALS = ("retransmits", "needless", "out_bytes", "in_bytes", "receiver_limited_s")
Counts = tuple[float, ...]
"""By `TOTALS`."""
NOTHING: Counts = (0.0,) * len(TOTALS)
_counts = attrgetter(*TOTALS)


class Links:
    """Turns the connections of one moment into samples; remembers what earlier connections of a link had counted."""

    def __init__(self) -> None:
        self._counted: dict[int, Counts] = {}
        """Of every living connection (by its cookie) what it had counted when it was last seen."""
        self._totals: dict[Key, Counts] = {}

    def samples(
        self,
        sockets: Iterable[TcpSocket],
        *,
        owners: Mapping[int, str],
        book: Mapping[Address, str],
    ) -> list[LinkSample]:
        """`owners`: inode → process of this host; `book`: where the processes of the run say that they listen."""
        owned = [each for each in sockets if each.inode in owners]
        names = _Names(owned, owners, book)
        groups: dict[Key, list[TcpSocket]] = {}
        for each in owned:
            if each.state != "LISTEN":
                groups.setdefault(names.key(each), []).append(each)
        self._count(groups)
        return [self._sample(key, group) for key, group in sorted(groups.items())]

    def _count(self, groups: Mapping[Key, list[TcpSocket]]) -> None:
        counted: dict[int, Counts] = {}
        for key, group in groups.items():
            totals = self._totals.get(key, NOTHING)
            for each in group:
                if each.info is None:
                    continue
                counted[each.cookie] = now = _counts(each.info)
                before = self._counted.get(each.cookie, NOTHING)
                totals = tuple(
                    total + max(0.0, late - early)
                    for total, late, early in zip(totals, now, before, strict=True)
                )
            self._totals[key] = totals
        self._counted = counted
        if len(self._totals) > MOST_LINKS:
            self._totals = {key: self._totals[key] for key in groups}

    def _sample(self, key: Key, group: list[TcpSocket]) -> LinkSample:
        of, peer, port = key
        infos = [each.info for each in group if each.info is not None]
        values = {
            "connections": float(len(group)),
            "send_queue_bytes": float(sum(each.send_queue for each in group)),
            "receive_queue_bytes": float(sum(each.receive_queue for each in group)),
            **(_worst(infos) if infos else {}),
            **dict(zip(TOTALS, self._totals[key], strict=True)),
        }
        states = {each.state for each in group}
        state = next((each for each in WORST_FIRST if each in states), min(states))
        return LinkSample(of, peer, port, state, {name: round(value, 6) for name, value in values.items()})


def _worst(infos: list[TcpInfo]) -> dict[str, float]:
    """Of several connections of a link the one that does worst; what is on the way is added up."""
    measured = [info.min_rtt_s for info in infos if 0 < info.min_rtt_s < 4000]
    return {
        "rtt_s": max(info.rtt_s for info in infos),
        "rtt_variance_s": max(info.rtt_variance_s for info in infos),
        "min_rtt_s": min(measured, default=0.0),
        "rto_s": max(info.rto_s for info in infos),
        "backoff": float(max(info.backoff for info in infos)),
        "unacked": float(sum(info.unacked for info in infos)),
        "lost": float(sum(info.lost for info in infos)),
        "last_received_s": min(info.last_received_s for info in infos),
    }


class _Names:
    """Names the process at the other end of a connection."""

    def __init__(
        self, owned: Iterable[TcpSocket], owners: Mapping[int, str], book: Mapping[Address, str]
    ) -> None:
        self._owners, self._book = owners, book
        self._listeners: dict[Address, str] = {}
        self._ends: dict[tuple[Address, Address], str] = {}
        for each in owned:
            if each.state == "LISTEN":
                self._listeners.setdefault(each.local, owners[each.inode])
            else:
                self._ends[each.local, each.remote] = owners[each.inode]

    def key(self, each: TcpSocket) -> Key:
        of = self._owners[each.inode]
        listens = self._listener(each.remote)
        if listens is not None:
            return of, listens, each.remote[1]
        accepted = self._listener(each.local) is not None
        port = each.local[1] if accepted else each.remote[1]
        # Of the one who connected from elsewhere only the host is known: its port is another one each time.
        stranger = each.remote[0] if accepted else f"{each.remote[0]}:{each.remote[1]}"
        return of, self._ends.get((each.remote, each.local), stranger), port

    def _listener(self, address: Address) -> str | None:
        """Sockets that outlive their process are held by several: the book knows whose they are."""
        if (named := self._book.get(address) or self._listeners.get(address)) is not None:
            return named
        anywhere = (self._listeners.get((wildcard, address[1])) for wildcard in WILDCARDS)
        return next((name for name in anywhere if name is not None), None)


def address_in(endpoint: str) -> Address | None:
    """`address_in("tcp://127.0.0.1:4001") == ("127.0.0.1", 4001)`; None for one that is not there yet."""
    host, separator, port = endpoint.removeprefix("tcp://").rpartition(":")
    return (host.strip("[]"), int(port)) if separator and port.isdecimal() else None
