"""Open files and TCP ports of a process; ports distinguish its packets from those of other processes on the host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path


def ports_of(pids: Iterable[int]) -> frozenset[int]:
    """Return the local ports of all TCP sockets of these processes, listening or connected."""
    return frozenset(port for pid in pids for port in _ports(pid))


def _ports(pid: int) -> set[int]:
    inodes = _sockets(pid)
    found: set[int] = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] in inodes:
                    found.add(int(fields[1].rpartition(":")[2], 16))
    return found - {0}


def _sockets(pid: int) -> set[str]:
    """Return the inode numbers of a process's sockets."""
    return {target[8:-1] for _, target in opened(pid) if target.startswith("socket:[")}


def opened(pid: int) -> Iterator[tuple[Path, str]]:
    """Yield every descriptor of a process and its link target; none for a process that has ended or is not
    accessible."""
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in list(entries):
            with contextlib.suppress(OSError):
                yield Path(entry.path), os.readlink(entry.path)
