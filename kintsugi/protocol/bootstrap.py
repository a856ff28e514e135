"""Identity and keys of a new process, which it needs before it can send a message.

It is handed over through an inherited descriptor, never by argv or environment, because it holds the secret key.
"""

from __future__ import annotations

import msgspec

from kintsugi.protocol.bulk import BulkMode
from kintsugi.types import Peer, Role


class Bootstrap(msgspec.Struct, frozen=True):
    """Identity of a process, the master that it reports to, and the descriptors that it inherits."""

    job: str
    run_dir: str
    process: str
    role: Role
    host: str
    incarnation: str
    public_key: bytes
    secret_key: bytes
    master: Peer
    lifeline: int
    """Read end of a pipe; end of file means that agent and launcher have both ended, and this process must end."""
    bind: str = "tcp://127.0.0.1:*"
    known_as: str = ""
    """Host name under which other processes reach this one; empty: by the address that it binds."""
    listener: int = -1
    """Descriptor of an already listening socket to use instead of `bind` (the master's, which survives its restart)."""
    agent: str = ""
    """Agent of this process's host, which started it and arbitrates shared devices."""
    segments: str = ""
    """Abstract Unix socket of the host's segment service; empty where there is none."""
    peers: tuple[Peer, ...] = ()
    """Peers known from the start; for the master its agents."""
    broken_chips: tuple[str, ...] = ()
    """Identities of accelerators of the host that this process must not use."""
    term: int = 0
    adopting: bool = False
    """For a master: whether it replaces one that died, so that workers may still run and continue under it."""
    bulk: BulkMode = "encrypted"
    """Protection of bulk connections to this process."""
    run_folder_agent: str = ""
    """Agent through which files of the run folder are read and written; empty where this host has the run folder."""
    num_processes: int = 0
    """Processes that the run starts with: the peers that this one may have."""
