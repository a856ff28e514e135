"""Statistics and metrics of the training objectives, independent of the training framework.

An objective names its statistics, sums and maxima, which are combined exactly over shards and ranks. `metrics` turns
the totals of the batch into reported metrics; different calls use different names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kintsugi.protocol.training import RunCall
from kintsugi.training.layout import ACTOR
from kintsugi.training.packing import Kept
from kintsugi.training.rank_state import RankState, Update

Totals = Mapping[str, float]
"""Sums and maxima of one update by name."""


class Objective(Protocol):
    """One training interface."""

    @property
    def part(self) -> str:
        """Model that is trained."""
        ...

    @property
    def kept(self) -> Kept:
        """Samples that it needs."""
        ...

    @property
    def sums(self) -> tuple[str, ...]: ...

    @property
    def maxima(self) -> tuple[str, ...]: ...

    def loss(self, batch: Any, call: RunCall) -> Any:
        """Loss of one of the framework's micro-batches, and its statistics."""
        ...

    def metrics(self, totals: Sequence[Totals], updates: Sequence[Update]) -> dict[str, float]:
        """Compute metrics from the totals of every update; the sums always contain `loss`, `tokens`, `loss_tokens`."""
        ...


class ObjectiveMetrics:
    """Common part of the objectives; trains the actor unless a subclass overrides `part`."""

    part = ACTOR
    kept: Kept = "learned"
    maxima: tuple[str, ...] = ()

    def __init__(self, state: RankState) -> None:
        self._rank_state = state

    def common_metrics(self, totals: Sequence[Totals], updates: Sequence[Update]) -> dict[str, float]:
        return {
            "loss": mean_of(totals, "loss"),
            "grad_norm": sum(update.grad_norm for update in updates) / len(updates),
            "learning_rate": updates[-1].learning_rate,
            "update_ratio": sum(float(update.ratio) for update in updates) / len(updates),
            "skipped": float(sum(not update.applied for update in updates)),
            "tokens": totals[0]["tokens"],
            "loss_tokens": totals[0]["loss_tokens"],
        }


class SupervisedMetrics(ObjectiveMetrics):
    """Metrics of `sft_train`."""

    sums = ("entropy",)

    def metrics(self, totals: Sequence[Totals], updates: Sequence[Update]) -> dict[str, float]:
        first = totals[0]
        return {
            **self.common_metrics(totals, updates),
            "entropy": first["entropy"] / max(first["loss_tokens"], 1.0),
        }


class PolicyMetrics(ObjectiveMetrics):
    """Metrics of `policy_train`."""

    sums = (
        *("entropy", "clip_ratio", "kl", "behaviour_kl", "ratio", "logprob_abs_diff"),
        *("importance_weight", "importance_capped", "staleness"),
    )
    maxima = ("logprob_abs_diff", "importance_weight")

    def metrics(self, totals: Sequence[Totals], updates: Sequence[Update]) -> dict[str, float]:
        """Means over the loss tokens and, where an update changes them, over the step's updates.

        How far sampler and trainer agree is taken before the first update; afterwards they differ by intent. The ratio
        is that to the sampler, whatever the updates stay close to.
        """
        first = totals[0]
        num_tokens = max(first["loss_tokens"], 1.0)
        return {
            **self.common_metrics(totals, updates),
            **(self._importance(totals) if self._rank_state.stage.weighs_samples else {}),
            "entropy": first["entropy"] / num_tokens,
            "kl": mean_of(totals, "kl") / num_tokens,
            "behaviour_kl": first["behaviour_kl"] / num_tokens,
            "clip_ratio": mean_of(totals, "clip_ratio") / num_tokens,
            "ratio_mean": first["ratio"] / num_tokens,
            "token_staleness_mean": first["staleness"] / num_tokens,
            "logprob_abs_diff_mean": first["logprob_abs_diff"] / num_tokens,
            "logprob_abs_diff_max": first["logprob_abs_diff/max"],
        }

    def _importance(self, totals: Sequence[Totals]) -> dict[str, float]:
        """Metrics of the importance weights that correct for the policy that sampled."""
        num_tokens = max(totals[0]["loss_tokens"], 1.0)
        return {
            "importance_weight_mean": mean_of(totals, "importance_weight") / num_tokens,
            "importance_weight_max": max(each["importance_weight/max"] for each in totals),
            "importance_capped_share": mean_of(totals, "importance_capped") / num_tokens,
        }


def mean_of(totals: Sequence[Totals], name: str) -> float:
    """Mean of a statistic over the updates of a step."""
    return sum(each[name] for each in totals) / len(totals)
