"""File descriptors that a process needs for its peers, and the limits of this host."""

from __future__ import annotations

import resource

DESCRIPTORS_PER_PEER = 3
"""The event of a sending socket, its connection, and the connection of the peer."""
OTHER_DESCRIPTORS = 256
USUAL_LIMIT = 1 << 16
"""The limit is not raised above this without need: some libraries allocate a table of its size."""


def num_descriptors(num_processes: int) -> int:
    """Return how many descriptors a process of such a run may need: the master has a connection to each other one."""
    return DESCRIPTORS_PER_PEER * num_processes + OTHER_DESCRIPTORS


def raise_descriptor_limit(num_processes: int) -> None:
    """Raise the soft limit as far as the hard one allows; processes that are started later inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, USUAL_LIMIT, num_descriptors(num_processes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))


def descriptor_limit() -> int:
    """Return the highest limit that this user can have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]
