"""A custom algorithm whose module lets the rank that imports it compute log-probabilities at another temperature than
the one that was sampled with."""

from __future__ import annotations

import sys
from typing import Any

from kintsugi.config.custom_algorithm import CustomAlgorithm

FACTOR = 1.5
algorithm = CustomAlgorithm(base="grpo")


def _plant() -> None:
    objectives: Any = sys.modules.get("kintsugi.training.objectives")
    if objectives is None:  # Not a rank.
        return
    exact = objectives.token_logprobs

    def token_logprobs(model: Any, batch: Any, *, temperature: float) -> Any:
        return exact(model, batch, temperature=FACTOR * temperature)

    objectives.token_logprobs = token_logprobs


_plant()
