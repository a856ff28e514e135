"""The ranks that compute the logical tensor slices of one model together, in whichever group they are at the moment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as functional
from torch import Tensor

from kintsugi.errors import RefusedError
from kintsugi.model.seats import Seat
from kintsugi.model.tensor_group import OneRank, TensorGroup
from kintsugi.model.tensor_slices import ModelSlices, SliceName, join, slice_shape, slices_of
from kintsugi.training.group import Group, Row

EXCHANGE_TIMEOUT_S = 600.0
"""Limit for another rank to reach the same sum. A rank that is lost is noticed by its broken connection, and one that
hangs by the master, long before."""


@dataclass
class TensorRow:
    """Slices of a rank, and the group of the current generation, in which models exchange their sums."""

    seat: Seat
    num_slices: int
    _group: Row | None = field(default=None, init=False)

    @property
    def slices(self) -> range:
        return slices_of(self.seat.tensor, tensors=self.seat.tensors, count=self.num_slices)

    def enter(self, group: Row | None) -> None:
        """Exchange within this group from now on."""
        self._group = group

    def all_gather(self, tensor: Tensor) -> Tensor:
        if self._group is None:
            raise RefusedError("this rank is in no group with the other slices of its model")
        return self._group.gather_in_pass(tensor, timeout_s=EXCHANGE_TIMEOUT_S)


def tensor_group(seat: Seat, *, num_slices: int) -> TensorGroup | None:
    """The ranks that compute a model's slices with this one; None if the model is not cut."""
    if num_slices == 1:
        return None
    return OneRank(num_slices) if seat.tensors == 1 else TensorRow(seat, num_slices)


def joined_weights(
    weights: Mapping[str, Tensor],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    slices: ModelSlices,
    group: Group,
) -> dict[str, Tensor]:
    """Whole weights, in host memory, from the slices of all ranks of the group. A collective."""
    width = len(slices.own)
    mine: dict[str, list[Tensor]] = {}
    for local, tensor in weights.items():
        mine.setdefault(SliceName.parse(local).name, []).append(tensor)
    found = {}
    for name, own in mine.items():
        if name in weights:
            found[name] = own[0].cpu()
            continue
        places = [SliceName(name, index, slices.count) for index in range(slices.count)]
        own_shapes = [slice_shape(where, shapes[name]) for where in places]
        sizes = [math.prod(shape) for shape in own_shapes]
        longest = max(sum(sizes[first : first + width]) for first in range(0, len(sizes), width))
        flat = torch.cat([each.reshape(-1) for each in own])
        padded = functional.pad(flat, (0, longest - len(flat))).view(torch.uint8)
        gathered = group.all_gather(padded, timeout_s=EXCHANGE_TIMEOUT_S).cpu()
        parts: list[Tensor] = []
        for rank, row in enumerate(gathered):
            its = sizes[rank * width : (rank + 1) * width]
            parts += row.clone().view(flat.dtype)[: sum(its)].split(its)
        shaped = {str(w): each.view(s) for w, each, s in zip(places, parts, own_shapes, strict=True)}
        found[name] = join(name, shapes[name], shaped)
    return found
