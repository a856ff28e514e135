"""Model function calls, steps, stages and checkpoints: requests of the master to training ranks."""

from __future__ import annotations

from kintsugi.protocol.body import MessageBody
from kintsugi.protocol.recovery import StateFetched
from kintsugi.protocol.sample_transfer import Routes, Transfer
from kintsugi.types import (
    LogicalShard,
    Piece,
)


class RunCall(MessageBody, frozen=True):
    """Run one model function call on this rank's share of the batch."""

    call: str
    """Call of the graph: "actor_train"."""
    interface: str
    """Method of the model: "policy_train"."""
    step: int
    shards: tuple[LogicalShard, ...]
    num_shards: int
    """Shards of the whole batch, over all ranks."""
    totals: dict[str, float]
    """Denominators over the whole optimizer batch: {"tokens": …, "sequences": …}."""
    generation: int
    """Generation of the process group that this call must use."""
    arguments: dict[str, float] = {}
    stage: str = ""
    after: tuple[str, ...] = ()
    """Calls of this step that must end first: all ranks run them in the same order, so that collectives match."""
    prepares: bool = True
    """For a training call: whether it is the last one of the step and leaves the rank *prepared*."""
    blocks: tuple[int, ...] = ()
    """By data-parallel index: its contiguous block of shards; empty means its own number."""
    routes: Routes = Routes()
    """Routes to the samples that the rank does not have yet."""


class CallDone(MessageBody, frozen=True):
    """A call has ended. The last training call of a step leaves the rank *prepared*: updated, but not committed."""

    step: int
    state_digest: str
    """Digest of the prepared state; without meaning for a call that does not prepare one."""
    metrics: dict[str, float]
    timing: dict[str, float] = {}
    outputs: dict[str, dict[str, float]] = {}
    """Key → sample → value, for calls that produce per-sample scalars."""
    transfers: tuple[Transfer, ...] = ()
    """Transfers of samples for this call."""


class EvaluatePairs(MessageBody, frozen=True):
    """Rank held-out pairs `first` to `first + count - 1` with the committed reward model."""

    step: int
    first: int
    count: int


class PairsEvaluated(MessageBody, frozen=True):
    """Whether each pair is ranked right: the chosen answer has the higher score. A tie is wrong."""

    step: int
    first: int
    correct: tuple[bool, ...]


class CommitStep(MessageBody, frozen=True):
    """The step is in the journal: commit it."""

    step: int


class Save(MessageBody, frozen=True):
    """Write a checkpoint of the committed step, beside training. The reply comes when it is durable and verified; a
    rank that is still saving an earlier step replies when that is."""

    step: int
    stage: str
    folder: str
    best_steps: tuple[int, ...] = ()
    """Evaluated steps, the best first: of these, the first that has a checkpoint is kept beside the newest ones."""


class Saved(MessageBody, frozen=True):
    step: int
    """Step of the checkpoint: the requested one, or an earlier one whose save was under way."""
    path: str
    digest: str
    timing: dict[str, float] = {}
    """Seconds until the snapshot was written ("write"), until it was read back and renamed ("verify"), and for which
    training stood still ("stall"); and the size ("bytes")."""


class SavePiece(MessageBody, frozen=True):
    """The rank that writes a checkpoint asks another one to write its box of the same state, into the folder of the
    checkpoint. The reply comes when the file is durable."""

    folder: str
    state: StateFetched
    """Counters of the state and the box that is asked for; without pieces."""


class PieceSaved(MessageBody, frozen=True):
    """A file of a checkpoint that is being written, as it will be in the manifest."""

    name: str
    size: int
    digest: str
    pieces: tuple[Piece, ...]


class HashWeights(MessageBody, frozen=True):
    """Request the hash of the committed weights."""


class WeightsHashed(MessageBody, frozen=True):
    sha256: str


class StartStage(MessageBody, frozen=True):
    """A stage begins: set up its optimizer and schedule; weights are kept."""

    stage: str
    step: int
