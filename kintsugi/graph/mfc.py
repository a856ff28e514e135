"""A model function call (MFC): inputs, outputs, role and cost."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kintsugi.types import Role


class Per(StrEnum):
    """Extent of one execution of a call."""

    GROUP = "group"
    """The samples of one ticket, as soon as its inputs exist; executed by the rollout worker that holds them."""
    BATCH = "batch"
    """The whole optimizer batch, in shards over all workers of the role."""


class Key(msgspec.Struct, frozen=True):
    """A named value per sample: `Key("logprobs", "float32", ("tokens",))`; an empty shape is a scalar."""

    name: str
    dtype: str
    shape: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(self.shape)}]"


class Call(msgspec.Struct, frozen=True):
    """One node of the graph.

    `Call("actor_train", Role.MODEL, Per.BATCH, "policy_train", inputs=(TOKENS, ADVANTAGE), outputs=(UPDATE,))`
    """

    name: str
    role: Role
    """Role of the processes that execute it; the master computes scalars from scalars."""
    per: Per
    interface: str
    """Name of the function that the role executes."""
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    flops_per_token: float = 0.0
    """Operations per model parameter and token: 2 for a forward pass, 6 with backward, 0 without a model."""
    min_workers: int = 1

    @property
    def trains(self) -> bool:
        """Whether it changes the state of the processes that execute it, and does not only read samples."""
        return any("state" in key.shape for key in self.outputs)


class Estimate(msgspec.Struct, frozen=True):
    """Cost of one execution of a call."""

    tokens: int
    flops: float
    bytes_moved: int


_SIZES = {"int32": 4, "float32": 4, "uint8": 1, "text": 1}


def estimate(call: Call, *, num_samples: int, tokens_per_sample: int, num_parameters: int) -> Estimate:
    """Floating-point work and bytes of per-sample values that a call reads and writes."""
    tokens = num_samples * tokens_per_sample
    moved = 0
    for key in call.inputs + call.outputs:
        entries = tokens if "tokens" in key.shape else num_samples
        moved += entries * _SIZES.get(key.dtype, 4)
    return Estimate(tokens, call.flops_per_token * num_parameters * tokens, moved)
