"""`summary.json` as its readers see it: what a run came to. The master writes it (`control/summary.py`)."""

from __future__ import annotations

import msgspec


class FaultLine(msgspec.Struct, frozen=True):
    """A fault as the summary tells it."""

    kind: str
    process: str
    message: str


class IncidentLine(msgspec.Struct, frozen=True):
    """An incident as the summary tells it; `kintsugi incidents` tells all of it."""

    incident: int
    cause: str
    process: str
    """Where it began."""
    strategy: str
    step: int
    processes: tuple[str, ...]
    """That were lost."""
    seconds: float | None
    """From the first fault until it was over; None if it never was."""


class Staleness(msgspec.Struct, frozen=True):
    """Steps between the weights of a sample's oldest token and those that it trained, over a run's samples."""

    max: int = 0
    mean: float = 0.0
    histogram: dict[str, int] = {}
    """Steps → samples."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`summary.json`, written once when a run ends."""

    outcome: str
    name: str
    algorithm: str = ""
    """Of the main stage."""
    seed: int
    run_dir: str
    steps: int
    wall_s: float
    samples_trained: int
    samples_filtered: dict[str, int] = {}
    """Reason → samples that the algorithm had no use for."""
    samples_expired: dict[str, int] = {}
    """Reason → samples that were too old to be trained."""
    samples_quarantined: dict[str, int] = {}
    """Reason → samples that could not be scored."""
    samples: dict[str, int] = {}
    """What became of those that were issued; `duplicated` and `lost` are 0."""
    samples_by_end: dict[str, dict[str, float]] = {}
    """End → number, mean length and mean reward of the samples that were scored."""
    staleness: Staleness = Staleness()
    tokens_generated: int
    tokens_discarded: int = 0
    """Sampled and scored, but not trained."""
    tokens_trained: int
    reward_first: float | None
    reward_last: float | None
    eval_accuracy_before: float | None
    """Share of held-out problems solved, or of held-out pairs that a reward model ranks right."""
    eval_accuracy_after: float | None
    weights_sha256: str | None
    weight_version: int
    weight_update_pause_ms: dict[str, float] = {}
    """p50 and p99 of how long servers stood still for new weights, and how often (`count`)."""
    idle_share: dict[str, float] = {}
    """Role → share of their lives in which its processes had nothing to do."""
    processes: dict[str, list[int]]
    """Role → pids."""
    timing: dict[str, float]
    """Stage → seconds."""
    logprob_abs_diff_mean: float | None
    evaluations: tuple[dict[str, float], ...] = ()
    """Step, version and figures of every evaluation, in order."""
    faults: tuple[FaultLine, ...] = ()
    """Why it failed, the first cause first."""
    incidents: tuple[IncidentLine, ...] = ()
    incidents_open: int = 0
    """How many of them were not mended when the run ended."""
