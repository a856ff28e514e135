"""A state of random numbers, of which each rank has a box."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from kintsugi.checkpoint.store import stored_weights
from kintsugi.model.seats import Seat
from kintsugi.model.tensor_file import FileContent
from kintsugi.training.boxes import Box
from kintsugi.training.layout import ACTOR, Layout, LayoutPart


class DrawnState:
    """Weights of an actor and their moments."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self.layout = Layout({ACTOR: LayoutPart.of(self.shapes)}, has_reference=False)
        self.flat = torch.randn(self.layout.size, generator=torch.Generator().manual_seed(5))
        Box(self.layout).zero_filling(self.flat)

    def box_of(self, shard: int, shards: int) -> tuple[Box, Tensor]:
        """Return a box of the state, and its numbers."""
        box = Box(self.layout, Seat(shard, shards))
        live = torch.zeros(box.size)
        box.take(box.weights(live), self.layout.weights(self.flat))
        for row in (0, 1):
            box.take(box.moments(live)[row], self.layout.moments(self.flat)[row])
        return box, live

    def model_files(self, folder_of: Callable[[], Path]) -> Iterator[tuple[str, FileContent]]:
        """Files of the model of a checkpoint, once its boxes are in the folder, which is not known before."""
        weights = stored_weights(folder_of(), shapes=self.shapes)
        for name, tensor in self.layout.actor.views(self.layout.weights(self.flat)).items():
            assert torch.equal(weights[name], tensor), name
        yield "config.json", b"{}"
