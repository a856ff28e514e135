"""Hosts that share no disk with the master: their supervisors join the run, and files travel in both directions."""

from __future__ import annotations

import msgspec

from kintsugi.protocol.body import MessageBody

PART_BYTES = 1 << 20
"""Bytes of a file in one message: a reply of this size is kept, and sent again if it is lost."""


class HostVersions(msgspec.Struct, frozen=True):
    """Versions that have to be equal on all hosts of a run."""

    kintsugi: str
    torch: str
    python: str
    protocol: str
    """Digest of all message types."""


class HostFacts(msgspec.Struct, frozen=True):
    """A host as its supervisor finds it."""

    machine: str
    """Host name of the machine."""
    address: str
    """Address of the interface that reaches the master."""
    versions: HostVersions
    cores: int
    memory_bytes: int
    gpus: tuple[str, ...] = ()
    """Names of the accelerators."""
    wall: float = 0.0
    """Wall clock of the host when these were found."""
    free_bytes: int = 0
    """Free space for the host's scratch folder."""


class JoinHost(MessageBody, frozen=True):
    """The supervisor of a host redeems its ticket. From the answer on it uses its own key, and the ticket is void."""

    facts: HostFacts
    public_key: bytes


class RunFile(msgspec.Struct, frozen=True):
    """A file that a run needs on each host."""

    path: str
    """Path relative to the scratch folder of the host."""
    digest: str
    """xxh3-128 of its contents."""
    size: int
    modified_ns: int = 0


class HostJoined(MessageBody, frozen=True):
    """Everything that a supervisor needs to start its agent; holds the agent's secret key."""

    handover: bytes
    """`cluster.hosts.HostHandover`, encoded: the protocol does not know the programs of a run."""


class HostBeat(MessageBody, frozen=True):
    """Sign of life of a supervisor."""

    ready: bool = False
    """Its agent has started."""
    ended: bool = False
    """Its agent has ended in order, or can not be started again; this is its last message."""
    failure: str = ""
    """Why the host can not go on; empty after an orderly end."""
    wall: float = 0.0


class HostOrders(MessageBody, frozen=True):
    """Answer to a heartbeat."""

    end: bool = False
    """End the processes of this host."""


class FetchFile(MessageBody, frozen=True):
    """Request the bytes of a file from an offset on: by digest of the host manager, by path of the agent beside the
    master."""

    name: str
    offset: int = 0


class FilePart(MessageBody, frozen=True):
    """Bytes of a file; `size` is that of the whole file."""

    size: int
    content: bytes = b""


class ListFiles(MessageBody, frozen=True):
    """Request the files of a folder in `checkpoints/`."""

    folder: str


class FilesListed(MessageBody, frozen=True):
    sizes: dict[str, int]


class MirrorFiles(MessageBody, frozen=True):
    """Append bytes to files of the run folder: events, readings and logs of the host's processes."""

    sizes: dict[str, int]
    """Path relative to the run folder → number of bytes, in the order of `content`."""
    content: bytes = b""
    number: int = 0
    """Number of the message, for one that is sent again."""


class StoreFile(MessageBody, frozen=True):
    """Write bytes of a file of a checkpoint that is on its way to the run folder."""

    step: int
    name: str
    offset: int = 0
    content: bytes = b""


class KeepCheckpoint(MessageBody, frozen=True):
    """Verify the checkpoint whose files have arrived, and put it into its place."""

    step: int
    keep: int
    best_steps: tuple[int, ...] = ()


class CheckpointKept(MessageBody, frozen=True):
    path: str
    digest: str
