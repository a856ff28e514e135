"""Messages between the processes of this system."""

from __future__ import annotations

import msgspec

from kintsugi.protocol.training import RunCall
from kintsugi.types import Row, SampleMeta, Ticket, Trajectory


class Empty(msgspec.Struct, frozen=True):
    """Request without content."""


class StartJob(msgspec.Struct, frozen=True):
    """`StartJob("rollout", ("rollout-0", "rollout-1"))`"""

    name: str
    processes: tuple[str, ...]


class JobSpec(msgspec.Struct, frozen=True):
    uid: str


class JobStatus(msgspec.Struct, frozen=True):
    """How each process ended; empty while it is running."""

    ends: dict[str, str]


class Rendezvous(msgspec.Struct, frozen=True):
    """Address at which the ranks form their process group."""

    store: str


class StartFragileStage(msgspec.Struct, frozen=True):
    stage: str
    step: int


class TrainBatch(msgspec.Struct, frozen=True):
    """One model call with the samples that it needs."""

    call: RunCall
    trajectories: dict[str, Trajectory]


class CommitFragileStep(msgspec.Struct, frozen=True):
    step: int


class UploadShard(msgspec.Struct, frozen=True):
    """Upload this version to the meta-server, or check that the checkpoint contains it."""

    version: int
    checkpoint: str = ""


class Uploaded(msgspec.Struct, frozen=True):
    """Names of the tensors."""

    names: tuple[str, ...]


class UpdateWeights(msgspec.Struct, frozen=True):
    """Load this version from the meta-server, or from a checkpoint."""

    version: int
    names: tuple[str, ...] = ()
    checkpoint: str = ""


class SaveCheckpoint(msgspec.Struct, frozen=True):
    step: int
    folder: str


class NotifyEvent(msgspec.Struct, frozen=True):
    """`NotifyEvent("rollout_start", 10)`"""

    event: str
    step: int


class Prompt(msgspec.Struct, frozen=True):
    ticket: Ticket
    row: Row
    tokens: tuple[int, ...]


class RolloutOrder(msgspec.Struct, frozen=True):
    step: int
    prompts: tuple[Prompt, ...]


class RolledOut(msgspec.Struct, frozen=True):
    metas: tuple[SampleMeta, ...]
    trajectories: tuple[Trajectory, ...]
