"""Hosts that share no disk with the master: their supervisors join the run, and files travel in both directions."""

from __future__ import annotations

import msgspec

from kintsugi.protocol.body import MessageBody
from kintsugi.protocol.bulk import BulkOffer

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
    """Memory that its processes may use: that of the machine, or of the control group in which they are started."""
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
    listener: int = 0
    """Port at the host's address that accepts connections during this request: whether the others can reach the host is
    tried before it takes part."""


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
    leaving: str = ""
    """Why it is to end soon, although it still runs: its engine has asked it to by a signal."""
    wall: float = 0.0
    clock_s: float | None = None
    """Seconds by which its clock is ahead of the launcher's, by the fastest round trip; None before the first."""
    clock_error_s: float = 0.0
    """Bound of the error of that."""


class HostOrders(MessageBody, frozen=True):
    """Answer to a heartbeat."""

    end: bool = False
    """End the processes of this host."""
    wall: float = 0.0
    """Wall clock of the launcher's machine."""


class FetchFile(MessageBody, frozen=True):
    """Request the bytes of a file, by its digest, from an offset on."""

    name: str
    offset: int = 0


class FilePart(MessageBody, frozen=True):
    """Bytes of a file; `size` is that of the whole file."""

    size: int
    content: bytes = b""


class ListFiles(MessageBody, frozen=True):
    """Request the files of a folder in `checkpoints/`, and an offer of them."""

    folder: str


class FilesListed(MessageBody, frozen=True):
    sizes: dict[str, int]
    """Name → size, in the order of the indices of the offer."""
    offer: BulkOffer


class MirrorFiles(MessageBody, frozen=True):
    """Append bytes to files of the run folder: events, readings and logs of the host's processes."""

    sizes: dict[str, int]
    """Path relative to the run folder → number of bytes, in the order of `content`."""
    content: bytes = b""
    number: int = 0
    """Number of the message, for one that is sent again."""


class StoreFile(MessageBody, frozen=True):
    """Fetch a part of a file of a checkpoint that is on its way to the run folder, and write it there. Pieces of it
    that are there from an earlier attempt, by their digests, are not fetched again."""

    step: int
    name: str
    size: int
    """Size of the whole file."""
    offset: int
    digests: tuple[str, ...]
    """Digest of every piece of the part (`bulk.files.FILE_PIECE_BYTES`); the last one may be shorter."""
    offer: BulkOffer
    index: int
    """Index of the file in the offer."""


class KeepCheckpoint(MessageBody, frozen=True):
    """Verify the checkpoint whose files have arrived, and put it into its place."""

    step: int
    keep: int
    best_steps: tuple[int, ...] = ()


class CheckpointKept(MessageBody, frozen=True):
    path: str
    digest: str
