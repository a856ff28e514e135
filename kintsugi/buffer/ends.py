"""How samples ended, added up: whether those that train differ from those that do not, in length and reward."""

from __future__ import annotations

from collections.abc import Iterable

from kintsugi.types import SampleMeta


class Ends:
    """Sums per end ("trained", "expired", …) over samples that were scored."""

    def __init__(self) -> None:
        self.sums: dict[str, dict[str, float]] = {}
        self.tokens_discarded = 0
        """Sampled and scored, but not trained: dropped, or to be sampled again."""

    def add(self, end: str, samples: Iterable[SampleMeta], *, sign: int = 1) -> None:
        """`sign` -1 takes back what a rollback undid."""
        sums = self.sums.setdefault(end, {"samples": 0.0, "tokens": 0.0, "reward": 0.0})
        for meta in samples:
            sums["samples"] += sign
            sums["tokens"] += sign * meta.num_loss_tokens
            sums["reward"] += sign * meta.reward

    def discard(self, samples: Iterable[SampleMeta]) -> None:
        self.tokens_discarded += sum(meta.num_loss_tokens for meta in samples if meta.version >= 0)

    def means(self) -> dict[str, dict[str, float]]:
        """End → number of samples, mean length in sampled tokens, mean reward."""
        return {
            end: {
                "samples": sums["samples"],
                "length": sums["tokens"] / sums["samples"],
                "reward": sums["reward"] / sums["samples"],
            }
            for end, sums in sorted(self.sums.items())
            if sums["samples"] > 0
        }
