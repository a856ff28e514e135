"""Recovery of training ranks: the operations of the recovery protocol, and the transfer of a state between ranks.

`sequence` grows with every round of recovery, over all terms. A rank refuses an operation that is older than the
latest one it has carried out.
"""

from __future__ import annotations

import msgspec

from kintsugi.protocol.body import MessageBody
from kintsugi.protocol.bulk import BulkOffer
from kintsugi.types import WeightManifest


class PreLock(MessageBody, frozen=True):
    """Pause at the agreed step: run no call after it until `NotifyNormal`."""

    step: int
    sequence: int


class DeviceStop(MessageBody, frozen=True):
    """Abort work on the device and leave the group's collective; `lost` are the ranks that have ended."""

    generation: int
    sequence: int
    lost: tuple[str, ...] = ()


class DeviceClean(MessageBody, frozen=True):
    """Discard what the aborted step left."""

    sequence: int


class MeshShape(msgspec.Struct, frozen=True):
    """Parts of the state along each axis (`model.seats.Mesh`)."""

    shards: int = 1
    stages: int = 1
    tensors: int = 1


class RebuildGroup(MessageBody, frozen=True):
    """Destroy the process group, join its next generation, and test it with a collective."""

    generation: int
    ranks: tuple[str, ...]
    """Process ids in rank order."""
    store: str
    """host:port#key of the generation's store; the process at `ranks[0]` serves it."""
    sequence: int
    timeout_s: float = 30.0
    """Time to wait for the other ranks. Shorter than the master's deadline for the reply, so that the reply can name
    the rank that is missing."""
    mesh: MeshShape | None = None
    """Mesh whose seats these ranks take, in their order; None: the configured one, where rank i has seat i."""
    step: int = -1
    """Agreed step. A rank that takes another seat adopts it, where it is prepared, and keeps its box for the others."""


class BoxCopy(msgspec.Struct, frozen=True):
    """Place of one box of a state."""

    source: str
    """As in `Repair.sources`, without checkpoints."""
    owner: str
    """Name under which its holder keeps snapshots of it (`model.seats.snapshots_of`)."""


class BoxCopies(msgspec.Struct, frozen=True):
    """Places of one box of a state, best first."""

    box: str
    digest: str
    copies: tuple[BoxCopy, ...]


class Repair(MessageBody, frozen=True):
    """Load the committed state of a step from the first of these sources that has it, and verify it."""

    step: int
    sources: tuple[str, ...]
    """In order of preference: "snapshot:model-0" (held by this host's agent), "model-1" (a replica), "agent-1" (a peer
    snapshot that another host's agent holds), or the path of a checkpoint."""
    sequence: int
    digest: str = ""
    """Expected digest of the state; empty when it is not known."""
    boxes: tuple[BoxCopies, ...] = ()
    """All boxes of the state as it was cut when the step was committed, where the group cuts it otherwise now: tried
    when no source has the rank's own."""
    begun: str = ""
    """Stage that ranks may have begun at this step, so that none of them has the boxes as they were committed; empty if
    the next step belongs to the same stage."""


class Rollback(MessageBody, frozen=True):
    """Return to the committed state of this step; a prepared one is adopted."""

    step: int
    sequence: int


class NotifyNormal(MessageBody, frozen=True):
    """Recovery has ended: the lock is released, training continues from this step."""

    step: int
    sequence: int


class RankReady(MessageBody, frozen=True):
    """Reply of a rank to a recovery operation: its committed step with the digest, its group and stage."""

    step: int
    state_digest: str
    half_updated: bool = False
    prepared_step: int = -1
    generation: int = 0
    stage: str = ""
    source: str = ""
    """After a repair: the source that was used."""


class AskStanding(MessageBody, frozen=True):
    """A new master asks a rank where it stands. Nothing is interrupted."""


class RankStanding(MessageBody, frozen=True):
    """Reply of a rank to a new master: whether it can go on as if its master had not changed."""

    ready: RankReady
    """Its state. Here `generation` is that of its current group, and `half_updated` does not count a call that is
    running or the time between two training calls of a step."""
    ranks: tuple[str, ...]
    """Processes of its group in rank order; empty while it is in none."""
    is_normal: bool
    """Whether no recovery is under way, and no call of the current step has failed here."""
    call_step: int = -1
    """Step of the calls that this rank runs, has run or keeps waiting; -1 for none."""
    blocks: tuple[int, ...] = ()
    """Blocks of shards that these calls name (`RunCall.blocks`)."""


class FetchState(MessageBody, frozen=True):
    """Ask for the state of a replica, or for a peer snapshot of an agent."""

    step: int
    owner: str = ""
    """Where a rank is asked for a box that it need not hold itself: the name under which its host keeps snapshots of
    it."""
    box: str = ""
    """Part of the state that is asked for (`model.seats.Seat.box`); empty for all of it."""


class StateFetched(MessageBody, frozen=True):
    """Manifest of the state, and its counters (`training.state.Counters`)."""

    manifest: WeightManifest
    stage: str
    updates: int
    skipped: int
    reference: str = ""
    critic_updates: int = 0
    critic_skipped: int = 0
    offer: BulkOffer | None = None
    """Offer of the pieces, by their indices in the manifest."""
    box: str = ""
    """Part of the state that it is (`model.seats.Seat.box`); empty for all of it."""


class ForgetStates(MessageBody, frozen=True):
    """The group returns to no step before this one, except from a checkpoint: agents forget copies of earlier states,
    and earlier snapshots of ranks that are not on their host any more."""

    step: int


class KeepState(MessageBody, frozen=True):
    """A rank stores a copy of its state with the agent of another host, which fetches it from the state's offer and
    replies when it has all of it."""

    owner: str
    state: StateFetched
