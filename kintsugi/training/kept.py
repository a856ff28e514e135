"""What a rank computed for its samples in the current step and a later call of the same step reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kintsugi.errors import RefusedError

REFERENCE_LOGPROBS = "reference_logprobs"
PROXIMAL_LOGPROBS = "proximal_logprobs"
VALUES = "values"
"""Of the critic: before each loss token, and one more after the last."""
TOKEN_ADVANTAGES = "token_advantages"
RETURNS = "returns"

GIVEN_BY = {
    REFERENCE_LOGPROBS: "reference_inference",
    PROXIMAL_LOGPROBS: "proximal_inference",
    VALUES: "critic_inference",
    TOKEN_ADVANTAGES: "gae or reward_to_go",
    RETURNS: "gae",
}
"""Which interface has to come first."""


class KeptForStep:
    """Tensors by what they are and whose; shards do not move between the calls of a step, so neither do these."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Tensor] = {}

    def put(self, name: str, keys: Sequence[str], tensors: Iterable[Tensor]) -> None:
        """One tensor for each sample."""
        self._kept.update(((name, key), tensor) for key, tensor in zip(keys, tensors, strict=True))

    def of(self, name: str, key: str) -> Tensor:
        if (name, key) not in self._kept:
            raise RefusedError(f"`{GIVEN_BY[name]}` of this step has not covered sample {key}")
        return self._kept[name, key]

    def joined(self, name: str, keys: Sequence[str]) -> Tensor:
        """Those of several samples, one after another."""
        return torch.cat([self.of(name, key) for key in keys])

    def clear(self) -> None:
        self._kept = {}
