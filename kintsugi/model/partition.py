"""Which parameters of a model a rank holds. Pure: imports no torch.

The layers of every model are cut into pipeline stages of about equal length, in order. The first stage also has the
embedding, the last one the final norm, the output projection and the value head. Parameters keep their names.

    layers of 2 stages:    embedding 0 1 2 | 3 4 5 norm head
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

    def has(self, name: str) -> bool:
        """Whether a parameter belongs to it."""
        layer = layer_of(name)
        if layer is not None:
            return layer in self.layers
        return self.is_first if name.startswith(_EMBEDDING) else self.is_last


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
    return ModelPart(range(first, stop), is_first=seat.is_first, is_last=seat.is_last)


def local_shapes(
    config: ModelConfig, seat: Seat = WHOLE, *, with_value_head: bool = False
) -> dict[str, tuple[int, ...]]:
    """Name and shape of the parameters that a rank holds, before they are cut over shards."""
    part = part_of(config, seat)
    shapes = parameter_shapes(config, with_value_head=with_value_head)
    return {name: shape for name, shape in shapes.items() if part.has(name)}


def check_stages(config: ModelConfig, stages: int, *, has_logits: bool = True) -> None:
    """Raise an error unless the model can be cut into this many stages."""
    if config.num_layers < stages:
        raise ModelError(
            f"`actor.layout.stages`: expected at most as many stages as layers, {config.num_layers}, got {stages}"
        )
    if stages > 1 and has_logits and config.tie_embeddings:
        raise ModelError(
            f"`actor.layout.stages`: expected 1, because the output projection of this model is its embedding, which "
            f"would lie in two stages (not possible yet), got {stages}"
        )
