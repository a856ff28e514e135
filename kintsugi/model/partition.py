"""Which parameters of a model a rank holds. Pure: imports no torch.

The layers of every model are cut into pipeline stages of about equal length, in order. The first stage also has the
embedding, the last one the final norm, the output projection and the value head. Parameters keep their names.

    layers of 2 stages:    embedding 0 1 2 | 3 4 5 norm head

A model whose output projection is its embedding has one such matrix. It belongs to the last stage, and the first one
computes with a copy of it (`training/tied_embedding.py`).

    tied embeddings:       copy 0 1 2 | 3 4 5 norm embedding
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kintsugi.errors import ModelError
from kintsugi.model.architecture import ModelConfig, parameter_shapes
from kintsugi.model.seats import WHOLE, Seat

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EMBEDDING = "model.embed_tokens."


class ModelPart(NamedTuple):
    """Layers of a model that one rank computes, and whether the model begins and ends there."""

    layers: range
    is_first: bool = True
    is_last: bool = True
    is_tied: bool = False
    """Whether the embedding is the output projection too, in another stage than the first."""

    def has(self, name: str) -> bool:
        """Whether a parameter belongs to it: each belongs to one stage."""
        layer = layer_of(name)
        if layer is not None:
            return layer in self.layers
        is_at_begin = is_embedding(name) and not self.is_tied
        return self.is_first if is_at_begin else self.is_last

    def uses(self, name: str) -> bool:
        """Whether it computes with a parameter."""
        return self.has(name) or (is_embedding(name) and self.uses_embedding)

    @property
    def uses_embedding(self) -> bool:
        return self.is_first or (self.is_last and self.is_tied)

    @property
    def has_copy(self) -> bool:
        """Whether it computes with a copy of the last stage's embedding."""
        return self.is_first and self.is_tied


def is_embedding(name: str) -> bool:
    """Whether a parameter, or a slice of one, is the matrix of token embeddings."""
    return name.startswith(_EMBEDDING)


def layer_of(name: str) -> int | None:
    """Layer of a parameter; None for embedding, final norm and heads.

    >>> layer_of("model.layers.3.mlp.up_proj.weight"), layer_of("model.norm.weight")
    (3, None)
    """
    found = _LAYER.match(name)
    return None if found is None else int(found[1])


def part_of(config: ModelConfig, seat: Seat = WHOLE) -> ModelPart:
    """Part of a model that a rank computes. Where layers do not come out even, the last stages have one more: the first
    ones keep activations of more micro-batches.

    >>> [list(part_of(config, Seat(stage=stage, stages=2)).layers) for stage in range(2)]    # doctest: +SKIP
    [[0, 1], [2, 3, 4]]
    """
    first, stop = (config.num_layers * stage // seat.stages for stage in (seat.stage, seat.stage + 1))
    is_tied = seat.stages > 1 and config.tie_embeddings and config.has_logits
    return ModelPart(range(first, stop), is_first=seat.is_first, is_last=seat.is_last, is_tied=is_tied)


def local_shapes(
    config: ModelConfig, seat: Seat = WHOLE, *, with_value_head: bool = False
) -> dict[str, tuple[int, ...]]:
    """Name and shape of the parameters that a rank holds, before they are cut over shards."""
    part = part_of(config, seat)
    shapes = parameter_shapes(config, with_value_head=with_value_head)
    return {name: shape for name, shape in shapes.items() if part.has(name)}


def used_shapes(config: ModelConfig, seat: Seat = WHOLE) -> dict[str, tuple[int, ...]]:
    """Name and shape of the parameters that a rank computes with."""
    part = part_of(config, seat)
    return {name: shape for name, shape in parameter_shapes(config).items() if part.uses(name)}


def check_stages(config: ModelConfig, stages: int) -> None:
    """Raise an error unless the model can be cut into this many stages."""
    if config.num_layers < stages:
        raise ModelError(
            f"`actor.layout.stages`: expected at most as many stages as layers, {config.num_layers}, got {stages}"
        )
