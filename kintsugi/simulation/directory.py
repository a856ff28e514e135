"""Address book for thousands of simulated processes: all share one book, and each keeps only its differences.

A book per process would take quadratic memory and time. The rules are those of `transport.Directory`, which the
processes of smaller clusters use unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kintsugi.protocol.membership import AddressBook
from kintsugi.transport.directory import Caller, Directory
from kintsugi.types import Peer


class BookIndex:
    """An address book by name and by key, built once for all processes."""

    def __init__(self, book: AddressBook) -> None:
        self.number = book.number
        self.by_name = {peer.process: peer for peer in book.peers}
        self.by_key = {peer.public_key.decode(): peer for peer in book.peers}


class _Peers(dict[str, Peer]):
    """Names → peers: entries of this process itself precede those of the shared book."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: dict[str, Peer] = {}
        self.gone: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        own = super().get(name)
        if own is not None:
            return own
        return default if name in self.gone else self.shared.get(name, default)

    def __getitem__(self, name: str) -> Peer:
        found: Peer | None = self.get(name)
        if found is None:
            raise KeyError(name)
        return found

    def __contains__(self, name: object) -> bool:
        return self.get(str(name)) is not None

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in {**self.shared, **dict(super().items())} if name not in self.gone])

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def pop(self, name: str, default: Any = None) -> Any:
        found = self.get(name, default)
        super().pop(name, None)
        self.gone.add(name)
        return found

    def __setitem__(self, name: str, peer: Peer) -> None:
        self.gone.discard(name)
        super().__setitem__(name, peer)


class _Callers(dict[str, Caller]):
    """Keys → callers; a caller of the shared book is created at its first message."""

    def __init__(self, peers: _Peers) -> None:
        super().__init__()
        self.shared: dict[str, Peer] = {}
        self._peers = peers

    def get(self, key: str, default: Any = None) -> Any:
        known = super().get(key)
        if known is not None:
            return known
        peer = self.shared.get(key)
        if peer is None or self._peers.get(peer.process) != peer:
            return default
        self[key] = caller = Caller(peer)
        return caller

    def __getitem__(self, key: str) -> Caller:
        found: Caller | None = self.get(key)
        if found is None:
            raise KeyError(key)
        return found

    def __contains__(self, key: object) -> bool:
        return self.get(str(key)) is not None

    def __delitem__(self, key: str) -> None:
        super().pop(key, None)


class SharedDirectory(Directory):
    """A directory over a shared book."""

    def __init__(self, *, job: str, process: str) -> None:
        super().__init__(job=job, process=process)
        self._own_peers = _Peers()
        self._own_callers = _Callers(self._own_peers)
        self.peers = self._own_peers
        self.callers = self._own_callers

    def use_book(self, index: BookIndex) -> None:
        """Use this book from now on; a process that is not in it is unknown."""
        self.number = index.number
        self._own_peers.clear()
        self._own_peers.gone.clear()
        self._own_peers.shared = index.by_name
        self._own_callers.shared = index.by_key
        for key in [key for key in dict.keys(self._own_callers) if key not in index.by_key]:
            del self._own_callers[key]
