"""Groups of episodes: the master has a rollout worker run them, and ranks fetch their samples."""

from __future__ import annotations

from kintsugi.protocol.body import MessageBody
from kintsugi.types import (
    SampleMeta,
    SampleText,
    SamplingParams,
    Ticket,
    Trajectory,
)


class RunEpisodes(MessageBody, frozen=True):
    """Run one group: all samples of one ticket, or one evaluation problem (`split` "train" or "eval")."""

    ticket: Ticket
    split: str
    sampling: SamplingParams
    version: int
    """Generate with weights at least this new; to evaluate, with exactly these."""
    timeout_s: float
    """The master's own deadline, which every process on the way uses as well."""
    lineage: int = 0
    """Grows when steps are undone: samples of an earlier lineage are invalid."""


class EpisodesDone(MessageBody, frozen=True):
    ticket: str
    samples: tuple[SampleMeta, ...]
    quarantined: dict[str, str] = {}
    """Sample key → reason."""
    texts: dict[str, SampleText] = {}
    """Sample key → its text; only for samples that will be trained."""
    timing: dict[str, float] = {}
    """Seconds per call."""


class FetchSamples(MessageBody, frozen=True):
    keys: tuple[str, ...]


class SamplesFetched(MessageBody, frozen=True):
    samples: tuple[Trajectory, ...]


class Drop(MessageBody, frozen=True):
    """The samples of these tickets have been trained or dropped: free their memory."""

    tickets: tuple[str, ...]
