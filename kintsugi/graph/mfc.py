"""A model function call (MFC): what it needs, what it gives, who carries it out, what it costs."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kintsugi.types import Role


class Per(StrEnum):
    """What one execution of a call covers."""

    GROUP = "group"
    """One ticket's samples, as soon as its inputs exist; a rollout worker carries it out where the samples lie."""
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
    """Who carries it out; the master itself computes scalars from scalars."""
    per: Per
    interface: str
    """Which function of the worker."""
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    flops_per_token: float = 0.0
    """Per model parameter and token: 2 for a forward pass, 6 with backward. 0 where no model runs."""
    min_workers: int = 1

    @property
    def trains(self) -> bool:
        """Whether it changes the state of whoever carries it out, and does not only look at samples."""
        return any("state" in key.shape for key in self.outputs)


class Estimate(msgspec.Struct, frozen=True):
    """What one execution of a call takes."""

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
