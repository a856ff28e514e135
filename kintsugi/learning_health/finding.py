"""Findings about learning, in the form of a diagnosis: what, since which step, evidence, consequences, what to do."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class LearningKind(StrEnum):
    """Kind of a finding. Kinds differ where the remedy differs."""

    EQUAL_REWARDS = "equal_rewards"
    """All samples of every group earn the same, so nothing is learned."""
    REWARD_FORMAT = "reward_format"
    """Completions contain the expected answer, and the reward function never accepts it."""
    WRONG_DIRECTION = "wrong_direction"
    """Rewarded samples become less likely, or the reward falls."""
    REWARD_HACKING = "reward_hacking"
    """The reward rises while held-out accuracy falls."""
    LEAKED_ANSWER = "leaked_answer"
    """The prompts contain the answers."""
    SOURCE_STUCK = "source_stuck"
    """One source of a mixture never earns anything."""
    ENTROPY_COLLAPSE = "entropy_collapse"
    """The policy became deterministic before it learned the task."""
    LENGTH = "length"
    """Completions are all truncated, or grow into the limit."""
    DIVERGENCE = "divergence"
    """Weights, KL, gradient or loss change far too fast."""
    SAMPLER_MISMATCH = "sampler_mismatch"
    """Sampler and trainer disagree about the probabilities of the same tokens under the same weights."""
    REFERENCE_MISMATCH = "reference_mismatch"
    """The reference model is another one than the model that training starts from."""
    TOKENIZER_MISMATCH = "tokenizer_mismatch"
    """The tokenizer is not the one that the model was trained with."""
    NO_UPDATE = "no_update"
    """Updates are made and do not change the weights."""
    GRADIENT_CLIPPED = "gradient_clipped"
    """Every gradient is far above the clipping limit."""
    UPDATES_SKIPPED = "updates_skipped"
    """Gradients are not finite, so updates are left out."""
    STALE_BATCHES = "stale_batches"
    """Samples are so old that the policy has moved away from the one that produced them."""


class LearningEvidence(msgspec.Struct, frozen=True):
    """A recorded figure, with the file that contains it."""

    source: str
    """A file of the run folder: `metrics.jsonl`, `samples.jsonl`, `config.yaml`."""
    step: int
    quote: str


class LearningFinding(msgspec.Struct, frozen=True, kw_only=True):
    kind: LearningKind
    since_step: int
    """First step that shows it."""
    step: int
    """Latest step that was read."""
    confidence: float
    """0 to 1."""
    summary: str
    """One sentence with figures."""
    evidence: tuple[LearningEvidence, ...]
    advice: str
    leads_to: tuple[LearningKind, ...] = ()
    """Other findings that this one explains."""


class LearningReport(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    step: int
    """Latest step that was read; 0 before the first."""
    time: float
    """Wall-clock time of the latest step."""
    findings: tuple[LearningFinding, ...]
    """Findings, the cause of others first; empty: nothing to report."""
    abstained: str = ""
    """Why nothing is reported; empty where something is."""
