"""Who is connected with whom, and how well: the kernel's connections, named by the processes at their ends.

A connection belongs to the process that has its inode open. The process at the other end is found by where it listens
(the address book, and the listeners of this host: collectives have their own), or by the other end itself where that is
on this host too. Connections of the same two processes to the same listener are one link; its totals go on when a
connection is replaced by another.

Of many ranks that are all connected with all others, most connections do nothing at most times. A link on which nothing
happens is told of rarely; when something happens again, how it was in the look before is told first, so that whoever
takes differences sees the same as if it had been told of in every look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import NamedTuple

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
RARELY = 5
"""A link on which nothing happens is told of in one of so many looks."""
TOTALS = ("retransmits", "needless", "out_bytes", "in_bytes", "receiver_limited_s")
Counts = tuple[float, ...]
"""By `TOTALS`."""
NOTHING: Counts = (0.0,) * len(TOTALS)
_counts = attrgetter(*TOTALS)
_fixed = attrgetter(*(name for name in TcpInfo.__struct_fields__ if name != "last_received_s"))
"""What stays as it is while nothing happens."""


class LinkLook(NamedTuple):
    """What there is to tell of one moment."""

    before: list[LinkSample]
    """Of the look before, and left out then because nothing had happened: something has now."""
    now: list[LinkSample]


class _Told(NamedTuple):
    """What a link was like when it was last told of."""

    marks: list[object]
    num_left_out: int
    """Looks since then."""


class Links:
    """Turns the connections of one moment into samples; remembers what earlier connections of a link had counted."""

    def __init__(self) -> None:
        self._counted: dict[int, Counts] = {}
        """Of every living connection (by its cookie) what it had counted when it was last seen."""
        self._totals: dict[Key, Counts] = {}
        self._told: dict[Key, _Told] = {}
        self._left_out: dict[Key, list[TcpSocket]] = {}
        """Of the last look."""

    def look(
        self,
        sockets: Iterable[TcpSocket],
        *,
        owners: Mapping[int, str],
        book: Mapping[Address, str],
    ) -> LinkLook:
        """`owners`: inode → process of this host; `book`: where the processes of the run say that they listen."""
        owned = [each for each in sockets if each.inode in owners]
        names = _Names(owned, owners, book)
        groups: dict[Key, list[TcpSocket]] = {}
        for each in owned:
            if each.state != "LISTEN":
                groups.setdefault(names.key(each), []).append(each)
        found, told, left_out = LinkLook([], []), dict[Key, _Told](), dict[Key, list[TcpSocket]]()
        counted: dict[int, Counts] = {}
        for key, group in sorted(groups.items()):
            marks, last = [_mark(each) for each in group], self._told.get(key)
            is_same = last is not None and last.marks == marks and None not in marks
            if last is not None and is_same and last.num_left_out < RARELY - 1:
                told[key], left_out[key] = _Told(marks, last.num_left_out + 1), group
                counted |= {each.cookie: self._counted[each.cookie] for each in group}
                continue
            if key in self._left_out and not is_same:
                found.before.append(self._sample(key, self._left_out[key]))
            self._count(key, group, counted)
            found.now.append(self._sample(key, group))
            told[key] = _Told(marks, 0)
        self._counted, self._told, self._left_out = counted, told, left_out
        if len(self._totals) > MOST_LINKS:
            self._totals = {key: self._totals[key] for key in groups}
        return found

    def _count(self, key: Key, group: list[TcpSocket], counted: dict[int, Counts]) -> None:
        totals = self._totals.get(key, NOTHING)
        for each in group:
            if each.info is None:
                continue
            counted[each.cookie] = now = _counts(each.info)
            before = self._counted.get(each.cookie, NOTHING)
            totals = tuple(
                [
                    total + max(0.0, late - early)
                    for total, late, early in zip(totals, now, before, strict=True)
                ]
            )
        self._totals[key] = totals

    def _sample(self, key: Key, group: list[TcpSocket]) -> LinkSample:
        of, peer, port = key
        infos = [each.info for each in group if each.info is not None]
        retransmits, needless, out_bytes, in_bytes, receiver_limited_s = self._totals[key]
        values = {
            "connections": float(len(group)),
            "send_queue_bytes": float(sum([each.send_queue for each in group])),
            "receive_queue_bytes": float(sum([each.receive_queue for each in group])),
            **(_worst(infos) if infos else {}),
            "retransmits": retransmits,
            "needless": needless,
            "out_bytes": out_bytes,
            "in_bytes": in_bytes,
            "receiver_limited_s": round(receiver_limited_s, 6),
        }
        states = {each.state for each in group}
        state = next((each for each in WORST_FIRST if each in states), min(states))
        return LinkSample(of, peer, port, state, values)


def _mark(each: TcpSocket) -> object:
    """Of a connection on which nothing is on its way, something that is the same until something happens; else None."""
    info = each.info
    if info is None or each.send_queue or info.unacked or info.backoff:
        return None
    return each.cookie, each.state, each.receive_queue, _fixed(info)


def _worst(infos: list[TcpInfo]) -> dict[str, float]:
    """Of several connections of a link the one that does worst; what is on the way is added up."""
    measured = [info.min_rtt_s for info in infos if 0 < info.min_rtt_s < 4000]
    return {
        "rtt_s": max([info.rtt_s for info in infos]),
        "rtt_variance_s": max([info.rtt_variance_s for info in infos]),
        "min_rtt_s": min(measured, default=0.0),
        "rto_s": max([info.rto_s for info in infos]),
        "backoff": float(max([info.backoff for info in infos])),
        "unacked": float(sum([info.unacked for info in infos])),
        "lost": float(sum([info.lost for info in infos])),
        "last_received_s": min([info.last_received_s for info in infos]),
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
