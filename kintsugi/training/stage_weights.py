"""Weights of a model that is cut over pipeline stages, gathered on the first stage, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from kintsugi.model.arrays import Array
from kintsugi.training.group import Group
from kintsugi.weights.manifest import weights_sha256

EXCHANGE_TIMEOUT_S = 300.0
"""Limit for one weight: a stage may begin later than the others."""


class StageWeights(Mapping[str, Array]):
    """All weights by name. Reading one is a collective of the stages: all of them read all weights in one order, and
    only the first one receives those of the others."""

    def __init__(
        self,
        local: Mapping[str, Array],
        *,
        shapes: Mapping[str, tuple[int, ...]],
        stage_of: Callable[[str], int],
        stages: Group,
    ) -> None:
        """`shapes` are those of all weights; `stage_of` tells which stage has one."""
        self._local, self._shapes = local, shapes
        self._stage_of, self._stages = stage_of, stages

    def __getitem__(self, name: str) -> Array:
        owner, rank = self._stage_of(name), self._stages.rank
        if owner == 0 and rank == 0:
            return self._local[name]
        example: torch.Tensor = next(iter(self._local.values()))
        if owner == 0:
            return example.new_empty(0)
        size = torch.Size(self._shapes[name]).numel() * example.element_size()
        outgoing = example.new_empty(0, dtype=torch.uint8)
        if owner == rank:
            mine: torch.Tensor = self._local[name]
            outgoing = mine.detach().contiguous().view(-1).view(torch.uint8)
        found = self._stages.all_to_all(
            outgoing,
            sent=[size if owner == rank and other == 0 else 0 for other in range(self._stages.size)],
            received=[size if rank == 0 and other == owner else 0 for other in range(self._stages.size)],
            timeout_s=EXCHANGE_TIMEOUT_S,
        )
        return found.view(example.dtype).view(self._shapes[name]) if rank == 0 else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def stage_weights_sha256(
    local: Mapping[str, Array],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    stage_of: Callable[[str], int],
    stages: Group,
) -> str:
    """`weights_sha256` of the whole model on the first stage; empty on the others. A collective of the stages."""
    digest = weights_sha256(StageWeights(local, shapes=shapes, stage_of=stage_of, stages=stages))
    return digest if stages.rank == 0 else ""
