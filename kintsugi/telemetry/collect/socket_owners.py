"""Owners of sockets, exchanged between the hosts of a run, so that each host can name the peers of its connections.

Every agent writes the socket addresses of its processes to `<run>/figures/<agent>.ends`, and the other agents read it.
The address book has the addresses at which processes listen for messages, but neither the sockets of collectives nor
the ports of connecting ends. Runs on one host have no such file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from kintsugi.runtime.disk import write_atomically
from kintsugi.telemetry.collect.links import WILDCARDS, Address

SUFFIX = ".ends"


class SocketEnds(msgspec.Struct, frozen=True):
    """`Ends({"10.0.0.1:4001": "server-0"})`."""

    owners: dict[str, str] = {}


class SocketOwners:
    """Writes and reads the files when called. It may block as long as the disk does, so it needs a thread of its
    own."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_suffix(SUFFIX)
        self._written: SocketEnds | None = None
        self._read: dict[Path, tuple[int, SocketEnds]] = {}
        self.own: SocketEnds | None = None
        """Addresses to publish; None while the run has only one host."""
        self.others: Mapping[Address, str] = {}
        """Addresses of other hosts → process."""

    def __call__(self) -> dict[str, float]:
        if self.own is None:
            return {}
        if self.own != self._written:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, msgspec.json.encode(self.own), durable=False)
            self._written = self.own
        found: dict[Address, str] = {}
        for path in self._path.parent.glob(f"*{SUFFIX}"):
            if path != self._path:
                for text, process in self._ends_in(path).owners.items():
                    host, _, port = text.rpartition(":")
                    found[host, int(port)] = process
        self.others = found
        return {}

    def _ends_in(self, path: Path) -> SocketEnds:
        changed = path.stat().st_mtime_ns
        if path not in self._read or self._read[path][0] != changed:
            try:
                self._read[path] = changed, msgspec.json.decode(path.read_bytes(), type=SocketEnds)
            except msgspec.MsgspecError:
                return SocketEnds()
        return self._read[path][1]

    def close(self) -> None:
        if self._written is not None:
            self._path.unlink(missing_ok=True)


def ends_of(sockets: Mapping[Address, str]) -> SocketEnds:
    """Return addresses to publish, without wildcard listeners: their address differs for each peer."""
    return SocketEnds(
        {f"{host}:{port}": name for (host, port), name in sockets.items() if host not in WILDCARDS}
    )
