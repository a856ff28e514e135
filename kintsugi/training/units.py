"""Units of a model whose weights are gathered one after the other: embedding, each layer, head.

A unit's parameters lie in up to two ranges of the flat weights: its matrices, and its norms and biases. In the memory
of a unit they lie side by side, each range at the same place relative to `ALIGNMENT` as in the flat weights, so that no
kernel finds a weight aligned otherwise than where all weights are there.

    flat weights:   | embedding | layer 0 | layer 1 | head |      | norms of layer 0 | of layer 1 | of head |
    shards:         | box 0 ………………………… | box 1 ……… |      | box 0 ………………………… | box 1 …………… |
    unit "layer 0":               | matrices | norms |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kintsugi.model.partition import layer_of
from kintsugi.training.boxes import Box, Stretch
from kintsugi.training.layout import ALIGNMENT, LayoutPart, LayoutSlot
from kintsugi.training.reduction import PIECE_ELEMENTS

EMBEDDING, HEAD = "embedding", "head"
EMBEDDING_WEIGHT = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Span:
    """A range of the flat weights within one stretch, and where it begins in the memory of a unit."""

    stretch: Stretch
    start: int
    stop: int
    place: int

    def of_shard(self, shard: int) -> range:
        """Elements that a shard holds, by their places in the flat weights."""
        held = self.stretch.of_shard(shard)
        first, stop = max(self.start, held.start), min(self.stop, held.stop)
        return range(first, stop) if first < stop else range(held.start, held.start)

    def in_unit(self, shard: int) -> range:
        """The same elements by their places in the memory of the unit."""
        held = self.of_shard(shard)
        first = self.place + max(0, held.start - self.start)
        return range(first, first + len(held))


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered, computed with and dropped together."""

    name: str
    """`embedding`, `layer 3` or `head`."""
    slots: tuple[LayoutSlot, ...]
    """Parameters by their places in the memory of the unit."""
    spans: tuple[Span, ...]
    size: int
    """Elements of its memory."""

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(slot.shape) for slot in self.slots)

    def views(self, memory: Any) -> dict[str, Any]:
        return {slot.name: slot.view(memory) for slot in self.slots}


@dataclass(frozen=True)
class ModelUnits:
    """Units of one model in the order of the forward pass."""

    embedding: Unit
    layers: tuple[Unit, ...]
    head: Unit

    def __iter__(self) -> Iterator[Unit]:
        yield self.embedding
        yield from self.layers
        yield self.head


def units_of(box: Box, part: str) -> ModelUnits:
    """Units of one model of a layout."""
    slots: dict[str, list[LayoutSlot]] = {}
    for slot in box.layout.parts[part].slots:
        slots.setdefault(unit_name(slot.name), []).append(slot)
    found = {name: _unit(name, each, box=box, part=part) for name, each in slots.items()}
    embedding, head = found.pop(EMBEDDING), found.pop(HEAD)
    return ModelUnits(embedding, tuple(found[name] for name in sorted(found, key=_number)), head)


def unit_name(parameter: str) -> str:
    """`unit_name("model.layers.3.mlp.up_proj.weight") == "layer 3"`."""
    layer = layer_of(parameter)
    if layer is not None:
        return f"layer {layer}"
    return EMBEDDING if parameter == EMBEDDING_WEIGHT else HEAD


def span_of(slot: LayoutSlot, *, box: Box, part: str) -> Span:
    """One parameter, as a unit of its own."""
    stretch = _stretch_of(slot, box=box, part=part)
    return Span(stretch, slot.start, slot.start + math.prod(slot.shape), 0)


def _number(name: str) -> int:
    return int(name.rpartition(" ")[2])


def _unit(name: str, slots: Sequence[LayoutSlot], *, box: Box, part: str) -> Unit:
    spans: list[Span] = []
    moved: list[LayoutSlot] = []
    size = 0
    for first, stop in _ranges(slots, box.layout.parts[part]):
        place = -(-size // ALIGNMENT) * ALIGNMENT + first.start % ALIGNMENT
        stretch = _stretch_of(first, box=box, part=part)
        for start in range(first.start, stop, PIECE_ELEMENTS):
            end = min(start + PIECE_ELEMENTS, stop)
            spans.append(Span(stretch, start, end, place + start - first.start))
        moved += [
            LayoutSlot(slot.name, slot.shape, place + slot.start - first.start)
            for slot in slots
            if first.start <= slot.start < stop
        ]
        size = place + stop - first.start
    return Unit(name, tuple(moved), tuple(spans), size)


def _ranges(slots: Sequence[LayoutSlot], part: LayoutPart) -> Iterator[tuple[LayoutSlot, int]]:
    """Ranges without gaps, within one stretch, that these parameters fill: the first of each, and its end."""
    first, stop = slots[0], slots[0].start
    for slot in slots:
        if slot.start != stop or (slot.start >= part.decayed_stop) != (first.start >= part.decayed_stop):
            yield first, stop
            first = slot
        stop = slot.start + math.prod(slot.shape)
    yield first, stop


def _stretch_of(slot: LayoutSlot, *, box: Box, part: str) -> Stretch:
    decayed, plain = box.stretches(part)
    return decayed if slot.start < box.layout.parts[part].decayed_stop else plain
