"""What recovery asks of a training rank, under the protocol's names, and how a state gets from one to another.

`messages.py` lists them with all other messages. `sequence` grows with every round of recovery, over all epochs; a rank
refuses an operation that is older than the latest it has carried out.
"""

from __future__ import annotations

import msgspec

from kintsugi.types import WeightManifest


class _Body(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    pass


class PreLock(_Body, frozen=True):
    """Pause at the agreed step: run no call after it, until told that all is normal."""

    step: int
    sequence: int


class DeviceStop(_Body, frozen=True):
    """Abort device work and leave the group's collective; `lost` are the ranks that are gone."""

    generation: int
    sequence: int
    lost: tuple[str, ...] = ()


class DeviceClean(_Body, frozen=True):
    """Drop what the aborted step left."""

    sequence: int


class RebuildGroup(_Body, frozen=True):
    """Destroy the process group, join the next generation of it, and try it out with a collective."""

    generation: int
    ranks: tuple[str, ...]
    """Process ids in rank order."""
    store: str
    """host:port of the generation's store; the process at `ranks[0]` serves it."""
    sequence: int
    timeout_s: float = 30.0
    """For the others; shorter than the master waits for the answer, so that it hears who did not come instead of
    blaming who waited."""


class Repair(_Body, frozen=True):
    """Take over the committed state of a step from the first of these sources that has it, verified."""

    step: int
    sources: tuple[str, ...]
    """By preference: "snapshot:model-0" (held by this host's agent), "model-1" (a replica), "agent-1" (the copy of this
    rank that another host's agent keeps), or a checkpoint's path."""
    sequence: int
    digest: str = ""
    """What the state must hash to; empty when it is not known."""


class Rollback(_Body, frozen=True):
    """Return to the committed state of this step; a prepared one is adopted."""

    step: int
    sequence: int


class NotifyNormal(_Body, frozen=True):
    """Recovery is over: the lock is gone, training goes on from this step."""

    step: int
    sequence: int


class RankReady(_Body, frozen=True):
    """A rank's answer to a recovery operation: committed step and its hash, the group and stage it is in."""

    step: int
    state_digest: str
    half_updated: bool = False
    prepared_step: int = -1
    generation: int = 0
    stage: str = ""
    source: str = ""
    """Of a repair: which of the sources it was."""


class FetchState(_Body, frozen=True):
    """A damaged or new rank asks a replica, or an agent for what it keeps: first without `pieces`, for the manifest."""

    step: int
    pieces: tuple[int, ...] = ()
    """Indices into the manifest; answered with WeightsFetched and their bytes, in order, as bulk frames."""
    owner: str = ""


class StateFetched(_Body, frozen=True):
    """What the state consists of, and its counters (`training.state.Counters`)."""

    manifest: WeightManifest
    stage: str
    updates: int
    skipped: int
    reference: str = ""
    critic_updates: int = 0
    critic_skipped: int = 0


class KeepState(_Body, frozen=True):
    """A rank gives the agent of another host a copy of its committed state; the bytes follow as bulk frames."""

    owner: str
    state: StateFetched
