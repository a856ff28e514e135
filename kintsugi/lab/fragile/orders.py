"""What the processes of this system say to each other."""

from __future__ import annotations

import msgspec

from kintsugi.messages import RunCall
from kintsugi.types import Row, SampleMeta, Ticket, Trajectory


class Nothing(msgspec.Struct, frozen=True):
    """A question without details."""


class StartJob(msgspec.Struct, frozen=True):
    """`StartJob("rollout", ("rollout-0", "rollout-1"))`"""

    name: str
    processes: tuple[str, ...]


class Job(msgspec.Struct, frozen=True):
    uid: str


class JobStatus(msgspec.Struct, frozen=True):
    """How each process ended; empty while it runs."""

    ends: dict[str, str]


class Meeting(msgspec.Struct, frozen=True):
    """Where the ranks find each other."""

    store: str


class StartStage(msgspec.Struct, frozen=True):
    stage: str
    step: int


class TrainBatch(msgspec.Struct, frozen=True):
    """One model call with the samples that it needs."""

    call: RunCall
    trajectories: dict[str, Trajectory]


class Commit(msgspec.Struct, frozen=True):
    step: int


class UploadWeights(msgspec.Struct, frozen=True):
    """Put this version under its name into the meta-server, or see to it that the checkpoint has it."""

    version: int
    checkpoint: str = ""


class Uploaded(msgspec.Struct, frozen=True):
    """Names of the tensors."""

    names: tuple[str, ...]


class UpdateWeights(msgspec.Struct, frozen=True):
    """Take this version from the meta-server, or from a checkpoint."""

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


class Rollout(msgspec.Struct, frozen=True):
    step: int
    prompts: tuple[Prompt, ...]


class RolledOut(msgspec.Struct, frozen=True):
    metas: tuple[SampleMeta, ...]
    trajectories: tuple[Trajectory, ...]
