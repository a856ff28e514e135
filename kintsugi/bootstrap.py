"""What a process needs to know before it can speak: handed over through an inherited descriptor, never argv or
environment, because it holds the process's secret key."""

from __future__ import annotations

import msgspec

from kintsugi.types import Peer, Role


class Bootstrap(msgspec.Struct, frozen=True):
    """Who I am, whom to report to, and which descriptors I inherited."""

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
    """Read end of a pipe; end of file means that agent and launcher are both gone and this process must end."""
    bind: str = "tcp://127.0.0.1:*"
    known_as: str = ""
    """The name of the host by which others reach this process; empty: by the address that it binds."""
    listener: int = -1
    """Descriptor of an already listening socket to use instead of `bind` (the master's, which survives its restart)."""
    agent: str = ""
    """Of this process's host: who started it, and who says whose turn it is on a shared device."""
    segments: str = ""
    """Abstract Unix socket of the host's segment service; empty where there is none."""
    peers: tuple[Peer, ...] = ()
    """Known from the start: for the master its agents."""
    broken_chips: tuple[str, ...] = ()
    """Accelerators of the host, by their identity, that this process must not use."""
    epoch: int = 0
    adopting: bool = False
    """Of a master: an earlier one of this run died; its workers may live, and go on under this one."""
