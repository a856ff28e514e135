"""Whole weights of a model of which no rank has all: gathered one by one, where they are published or hashed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kintsugi.training.boxes import GATHER_TIMEOUT_S, Box
from kintsugi.training.group import Group
from kintsugi.training.layout import LayoutSlot
from kintsugi.training.units import span_of


class GatheredWeights(Mapping[str, Tensor]):
    """All weights by name. Reading one is a collective: all ranks read all of them in one order."""

    def __init__(
        self,
        slots: Sequence[LayoutSlot],
        *,
        box: Box,
        part: str,
        weights: Tensor,
        dtype: torch.dtype,
        group: Group,
    ) -> None:
        """`weights`: those of all models that this rank's box holds, in float32; they are gathered in `dtype`."""
        self._slots = {slot.name: slot for slot in slots}
        self._box, self._part, self._weights = box, part, weights
        self._dtype, self._group = dtype, group

    def __getitem__(self, name: str) -> Tensor:
        span = span_of(self._slots[name], box=self._box, part=self._part)
        pieces = [span.of_shard(shard) for shard in range(self._box.seat.shards)]
        piece = self._box.piece_exchange(
            span.stretch, pieces, self._weights, dtype=self._dtype, group=self._group
        )
        incoming = self._group.all_to_all(
            piece.own, sent=piece.sent, received=piece.received, timeout_s=GATHER_TIMEOUT_S
        )
        found = torch.empty(span.stop - span.start, dtype=self._dtype, device=self._weights.device)
        piece.place(incoming, into=found, first=span.start)
        return found.view(self._slots[name].shape)

    def __contains__(self, name: object) -> bool:
        return name in self._slots

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._slots))

    def __len__(self) -> int:
        return len(self._slots)


class OwnWeights(Mapping[str, Tensor]):
    """The weights that one of the ranks needs, read in the order of their names. It takes part in gathering the others,
    too; `finish` does so for those after the last one."""

    def __init__(self, weights: Mapping[str, Tensor], *, names: Sequence[str], own: Collection[str]) -> None:
        """`names` are all that the ranks read, in order."""
        self._weights, self._own = weights, [name for name in names if name in own]
        self._ahead = iter(names)

    def __getitem__(self, name: str) -> Tensor:
        for passed in self._ahead:
            tensor = self._weights[passed]
            if passed == name:
                return tensor
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return name in self._own

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def finish(self) -> None:
        for name in self._ahead:
            self._weights[name]
