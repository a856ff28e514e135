"""A group on its way through a rollout worker: ordered, run in one way or another, answered."""

from __future__ import annotations

import msgspec

from kintsugi.messages import EpisodesDone, RunEpisodes
from kintsugi.transport import Delivery
from kintsugi.types import Row, SampleText, Trajectory


class Group(msgspec.Struct, eq=False):
    """One group that was begun."""

    deliveries: list[Delivery]
    """All that asked for it, to be answered alike; those of a master that is gone lead nowhere."""
    request: RunEpisodes
    row: Row
    prompt: bytes
    """int32."""
    since: float
    deadline: float
    """Of the latest order."""
    is_open: bool = True
    """Somebody waits for its answer: it was neither answered nor dropped."""

    @property
    def ticket(self) -> str:
        return self.request.ticket.id


class Unread(msgspec.Struct, frozen=True):
    """An order whose row has not come out of its stream."""

    delivery: Delivery
    request: RunEpisodes
    since: float
    deadline: float


class Sample(msgspec.Struct, frozen=True):
    """What came of one sample, scored."""

    trajectory: Trajectory
    text: SampleText
    components: dict[str, float]
    """As they were given, unweighted; the first says what counts as right in an evaluation. A demonstration has
    none."""


class Outcome(msgspec.Struct, frozen=True):
    """What came of a group."""

    samples: list[Sample]
    quarantined: dict[str, str] = {}
    """Sample key → why there is none."""
    timing: dict[str, float] = {}
    """Seconds per call."""


class Finished(msgspec.Struct, frozen=True):
    """A group that was answered; kept until its samples are trained, or until the next evaluation."""

    request: RunEpisodes
    done: EpisodesDone
    trajectories: dict[str, Trajectory]


def is_same(order: RunEpisodes, other: RunEpisodes) -> bool:
    """The same group, however long each of those who ask would wait for it; to evaluate, with the same weights."""
    version = order.version if order.split == "train" else other.version
    return order == msgspec.structs.replace(other, timeout_s=order.timeout_s, version=version)
