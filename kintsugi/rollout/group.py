"""Records of a group in a rollout worker: waiting for its row, running, finished."""

from __future__ import annotations

import msgspec

from kintsugi.protocol.rollout import EpisodesDone, RunEpisodes
from kintsugi.telemetry.events import QuarantineCause
from kintsugi.transport import Delivery
from kintsugi.types import Row, SampleText, Trajectory


class RolloutGroup(msgspec.Struct, eq=False):
    """A group that was started."""

    deliveries: list[Delivery]
    """All requests for it; each is answered, although those of an ended master reach no process."""
    request: RunEpisodes
    row: Row
    prompt: bytes
    """Tokens as int32."""
    since: float
    deadline: float
    """Deadline of the latest request."""
    is_open: bool = True
    """Whether its requests are still to be answered: it was neither answered nor dropped."""

    @property
    def ticket(self) -> str:
        return self.request.ticket.id


LONGEST_ANSWER = 400
"""Characters of an expected answer that are recorded with each sample; its end, where worked solutions have it."""


def sample_text(row: Row, completion: str, *, prompt: str | None = None) -> SampleText:
    """Return the texts of a sample that are recorded for people and for the watch over learning."""
    answer, source = row.columns.get("answer", ""), row.columns.get("source", "")
    return SampleText(
        row.prompt if prompt is None else prompt,
        completion,
        "" if answer is None else str(answer)[-LONGEST_ANSWER:],
        source if isinstance(source, str) else "",
    )


class UnreadGroup(msgspec.Struct, frozen=True):
    """A requested group that waits for its row from a stream."""

    delivery: Delivery
    request: RunEpisodes
    since: float
    deadline: float


class GroupSample(msgspec.Struct, frozen=True):
    """One scored sample."""

    trajectory: Trajectory
    text: SampleText
    components: dict[str, float]
    """Unweighted reward components; an evaluation counts the first one. A demonstration has none."""


class GroupOutcome(msgspec.Struct, frozen=True):
    """Result of a group."""

    samples: list[GroupSample]
    quarantined: dict[str, str] = {}
    """Sample key → reason why the sample is missing."""
    timing: dict[str, float] = {}
    """Seconds per call."""
    cause: QuarantineCause = QuarantineCause.SAMPLE
    """Why samples are quarantined, if any are; USER_CODE if that is the reason for at least one."""


class FinishedGroup(msgspec.Struct, frozen=True):
    """An answered group, stored until its samples are trained, or until the next evaluation."""

    request: RunEpisodes
    done: EpisodesDone
    trajectories: dict[str, Trajectory]


def is_same(order: RunEpisodes, other: RunEpisodes) -> bool:
    """Whether two requests are for the same group, whatever their timeouts; in an evaluation, of the same version."""
    version = order.version if order.split == "train" else other.version
    return order == msgspec.structs.replace(other, timeout_s=order.timeout_s, version=version)
