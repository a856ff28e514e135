"""Contents of `summary.json`, the outcome of a run. Written by the master (`control/summary.py`)."""

from __future__ import annotations

import msgspec


class FaultLine(msgspec.Struct, frozen=True):
    """A fault in the summary."""

    kind: str
    process: str
    message: str


class IncidentLine(msgspec.Struct, frozen=True):
    """An incident in the summary; `kintsugi incidents` shows the details."""

    incident: int
    cause: str
    process: str
    """Process in which it began."""
    strategy: str
    step: int
    processes: tuple[str, ...]
    """Lost processes."""
    seconds: float | None
    """Duration; None if the incident was not resolved."""


class Staleness(msgspec.Struct, frozen=True):
    """Staleness of the trained samples: steps between the weights of the oldest token and the trained weights."""

    max: int = 0
    mean: float = 0.0
    histogram: dict[str, int] = {}
    """Staleness in steps → number of samples."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`summary.json`, written once when a run ends."""

    outcome: str
    name: str
    algorithm: str = ""
    """Algorithm of the main stage."""
    seed: int
    run_dir: str
    steps: int
    wall_s: float
    samples_trained: int
    samples_filtered: dict[str, int] = {}
    """Samples that the algorithm filtered out, by reason."""
    samples_expired: dict[str, int] = {}
    """Samples that were too old for training, by reason."""
    samples_quarantined: dict[str, int] = {}
    """Samples that could not be scored, by reason."""
    samples: dict[str, int] = {}
    """Number of issued samples by outcome; `duplicated` and `lost` are 0."""
    samples_by_end: dict[str, dict[str, float]] = {}
    """Number, mean length and mean reward of scored samples, by finish reason."""
    staleness: Staleness = Staleness()
    tokens_generated: int
    tokens_discarded: int = 0
    """Tokens that were sampled and scored but not trained."""
    tokens_trained: int
    reward_first: float | None
    reward_last: float | None
    eval_accuracy_before: float | None
    """Share of held-out problems answered correctly, or of held-out pairs that a reward model ranks correctly."""
    eval_accuracy_after: float | None
    weights_sha256: str | None
    weight_version: int
    weight_update_pause_ms: dict[str, float] = {}
    """p50 and p99 of the pause of a server for new weights, and the number of pauses (`count`)."""
    idle_share: dict[str, float] = {}
    """Idle share of the processes, by role."""
    memory: dict[str, dict[str, float]] = {}
    """Peaks of memory by process, over its incarnations: `host_bytes` (resident), on an accelerator
    `device_allocated_bytes`, `device_reserved_bytes` and, of a rank, `device_update_bytes` (in the update, without
    activations), `bytes_per_parameter` and `update_bytes_per_parameter`."""
    processes: dict[str, list[int]]
    """PIDs by role."""
    timing: dict[str, float]
    """Seconds by activity."""
    logprob_abs_diff_mean: float | None
    evaluations: tuple[dict[str, float], ...] = ()
    """Step, version and metrics of every evaluation, in order."""
    faults: tuple[FaultLine, ...] = ()
    """Faults of a failed run, the first cause first."""
    incidents: tuple[IncidentLine, ...] = ()
    loss_first: float | None = None
    """Loss of the first step of a main stage that samples nothing (SFT, DPO, a reward model); None for the others."""
    loss_last: float | None = None
    incidents_earlier: int = 0
    """Number of incidents before those that are listed …"""
    incidents_earlier_s: float = 0.0
    """… and their durations together."""
    incidents_open: int = 0
    """Number of incidents that were unresolved when the run ended."""
