"""Tensors that one call of a step computes for a rank's samples and a later call of the same step reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kintsugi.errors import RefusedError

REFERENCE_LOGPROBS = "reference_logprobs"
PROXIMAL_LOGPROBS = "proximal_logprobs"
VALUES = "values"
"""Values of the critic: before each loss token, and one more after the last."""
TOKEN_ADVANTAGES = "token_advantages"
RETURNS = "returns"

GIVEN_BY = {
    REFERENCE_LOGPROBS: "reference_inference",
    PROXIMAL_LOGPROBS: "proximal_inference",
    VALUES: "critic_inference",
    TOKEN_ADVANTAGES: "gae or reward_to_go",
    RETURNS: "gae",
}
"""Interface that computes each of them, and so has to run first."""


class StepCache:
    """Tensors by name and sample key. A sample stays on its rank for the whole step, and so do its tensors."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, str], Tensor] = {}

    def put(self, name: str, keys: Sequence[str], tensors: Iterable[Tensor]) -> None:
        """Store one tensor for each sample."""
        self._tensors.update(((name, key), tensor) for key, tensor in zip(keys, tensors, strict=True))

    def of(self, name: str, key: str) -> Tensor:
        if (name, key) not in self._tensors:
            raise RefusedError(f"`{GIVEN_BY[name]}` of this step has not covered sample {key}")
        return self._tensors[name, key]

    def joined(self, name: str, keys: Sequence[str]) -> Tensor:
        """Concatenate the tensors of several samples."""
        return torch.cat([self.of(name, key) for key in keys])

    def clear(self) -> None:
        self._tensors = {}
