"""Tensors that one call of a step computes for a rank's samples and a later call of the same step reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kintsugi.errors import RefusedError
from kintsugi.model.arrays import namespace

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
        self._tensors: dict[tuple[str, str], Any] = {}

    def put(self, name: str, keys: Sequence[str], tensors: Iterable[Any]) -> None:
        """Store one tensor for each sample."""
        self._tensors.update(((name, key), tensor) for key, tensor in zip(keys, tensors, strict=True))

    def of(self, name: str, key: str) -> Any:
        if (name, key) not in self._tensors:
            raise RefusedError(f"`{GIVEN_BY[name]}` of this step has not covered sample {key}")
        return self._tensors[name, key]

    def joined(self, name: str, keys: Sequence[str]) -> Any:
        """Concatenate the tensors of several samples."""
        parts = [self.of(name, key) for key in keys]
        return namespace(parts[0]).concatenate(parts)

    def clear(self) -> None:
        self._tensors = {}
