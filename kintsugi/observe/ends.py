"""Who has which end of a connection, told between the hosts of a run, so that each can name its peers on the others.

Every agent leaves the ends that its own processes have in `<run>/figures/<agent>.ends`; the others read it. An address
book knows where processes listen for messages; it does not know the sockets of collectives, nor from which port
somebody connects. Runs of one host have no such file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from kintsugi.observe.links import WILDCARDS, Address

SUFFIX = ".ends"


class Ends(msgspec.Struct, frozen=True):
    """`Ends({"10.0.0.1:4001": "server-0"})`."""

    owners: dict[str, str] = {}


class SharedEnds:
    """Tells and learns when it is called, which may take as long as the disk does: belongs to a thread of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_suffix(SUFFIX)
        self._told: Ends | None = None
        self._read: dict[Path, tuple[int, Ends]] = {}
        self.own: Ends | None = None
        """What to tell; nothing while there is nobody else."""
        self.others: Mapping[Address, str] = {}
        """What was learned."""

    def __call__(self) -> dict[str, float]:
        if self.own is None:
            return {}
        if self.own != self._told:
            new = self._path.with_suffix(f"{SUFFIX}.new")
            new.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(msgspec.json.encode(self.own))
            new.replace(self._path)
            self._told = self.own
        found: dict[Address, str] = {}
        for path in self._path.parent.glob(f"*{SUFFIX}"):
            if path != self._path:
                for text, process in self._ends_in(path).owners.items():
                    host, _, port = text.rpartition(":")
                    found[host, int(port)] = process
        self.others = found
        return {}

    def _ends_in(self, path: Path) -> Ends:
        changed = path.stat().st_mtime_ns
        if path not in self._read or self._read[path][0] != changed:
            try:
                self._read[path] = changed, msgspec.json.decode(path.read_bytes(), type=Ends)
            except msgspec.MsgspecError:
                return Ends()
        return self._read[path][1]

    def close(self) -> None:
        if self._told is not None:
            self._path.unlink(missing_ok=True)


def ends_of(sockets: Mapping[Address, str]) -> Ends:
    """One that listens everywhere is told as listening nowhere: its address is another one for everybody."""
    return Ends({f"{host}:{port}": name for (host, port), name in sockets.items() if host not in WILDCARDS})
