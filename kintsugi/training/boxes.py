"""The part of the state that one rank holds: a *box* of the models' weights, their moments, and how ranks share them.

    flat weights of a model:   | matrices, which decay ……………………………… | norms, biases … |
    cut over two shards:       | box 0 ………………… | box 1 ………………… | box 0 …| box 1 …|

Each of the two stretches is cut into equal parts, whose length is a multiple of `ALIGNMENT` elements (the last parts
may be shorter, or empty). The box has the same form as the whole (`layout.py`): the rows weights, first and second
moments, each with the parts of all models. So it is one flat tensor, which is copied, hashed, rolled back and sent as
the whole state is.

A rank of several shards also has all weights in the type in which the models compute. They are gathered from the boxes
after each update, and when a group has returned to a committed step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from msgspec.structs import replace

from kintsugi.checkpoint.store import PART_MARK
from kintsugi.errors import IntegrityError
from kintsugi.model.arrays import Array, namespace, zeros
from kintsugi.model.seats import WHOLE, Mesh, Seat, seat_of, sources_of
from kintsugi.training.group import Group, Groups
from kintsugi.training.layout import ALIGNMENT, Layout, LayoutPart, LayoutSlot
from kintsugi.training.norms import gradient_norm
from kintsugi.training.reduction import PIECE_ELEMENTS, Cut

GATHER_TIMEOUT_S = 75.0
"""Limit for one piece: a library may keep one of the ranks for a minute."""


@dataclass(frozen=True)
class Stretch:
    """A range of the flat weights that is cut over the shards, and the own part of it."""

    start: int
    stop: int
    seat: Seat
    place: int
    """Where the own part begins in a row of the box."""

    @property
    def width(self) -> int:
        """Length of every part but the last ones."""
        unit = self.seat.shards * ALIGNMENT
        return -(-(self.stop - self.start) // unit) * ALIGNMENT

    def of_shard(self, shard: int) -> range:
        """Elements of the flat weights that a shard holds."""
        if self.seat.shards == 1:
            return range(self.start, self.stop)
        first = min(self.start + shard * self.width, self.stop)
        return range(first, min(first + self.width, self.stop))

    @property
    def num_pieces(self) -> int:
        """Number of exchanges in which all shards' parts are sent."""
        return -(-self.width // self._piece_elements)

    def piece(self, shard: int, number: int) -> range:
        """Elements of a shard's part that are sent in one exchange."""
        first = number * self._piece_elements
        return self.of_shard(shard)[first : first + self._piece_elements]

    @property
    def _piece_elements(self) -> int:
        return max(ALIGNMENT, PIECE_ELEMENTS // self.seat.shards)

    @property
    def own(self) -> range:
        return self.of_shard(self.seat.shard)

    def within(self, row: Any) -> Any:
        """The own part, of a row of the box."""
        return row[self.place : self.place + len(self.own)]

    def of_whole(self, flat: Any) -> Any:
        """The own part, of the flat weights of all models."""
        return flat[self.own.start : self.own.stop]


@dataclass(frozen=True)
class Box:
    """Part of a layout that one rank holds."""

    layout: Layout
    seat: Seat = WHOLE
    mesh: Mesh | None = None
    """Seats of the other ranks; None: those of the configured mesh."""

    def __post_init__(self) -> None:
        assert self.seat.shards == 1 or not self.layout.has_reference, "a moving reference is not cut"

    @property
    def is_whole(self) -> bool:
        return self.seat.shards == 1

    def seat_of(self, process: str) -> Seat:
        """Place of another rank of the group."""
        return seat_of(process, self.mesh or self.seat.mesh)

    def stretches(self, part: str) -> tuple[Stretch, Stretch]:
        """Matrices, then norms and biases, of one model."""
        return self._places[part]

    @cached_property
    def _places(self) -> dict[str, tuple[Stretch, Stretch]]:
        found, place = {}, 0
        for name, part in self.layout.parts.items():
            decayed = Stretch(part.start, part.decayed_stop, self.seat, place)
            place += len(decayed.own)
            plain = Stretch(part.decayed_stop, part.stop, self.seat, place)
            place += len(plain.own)
            found[name] = decayed, plain
        return found

    @property
    def num_parameters(self) -> int:
        """Elements of a row."""
        return sum(len(each.own) for both in self._places.values() for each in both)

    @property
    def size(self) -> int:
        extra = self.layout.size - 3 * self.layout.num_parameters
        return 3 * self.num_parameters + extra

    def part(self, name: str) -> LayoutPart:
        """Range of one model in a row of the box."""
        decayed, plain = self.stretches(name)
        return LayoutPart((), decayed.place, plain.place, plain.place + len(plain.own))

    def weights(self, flat: Any) -> Any:
        return flat[: self.num_parameters]

    def moments(self, flat: Any) -> Any:
        """First and second moments, as two rows."""
        count = self.num_parameters
        return flat[count : 3 * count].reshape(2, -1)

    def take(self, row: Any, whole: Any, *parts: str) -> None:
        """Fill the box's row with its elements of the flat weights of all models, or of some models."""
        for name in parts or self.layout.parts:
            for stretch in self.stretches(name):
                stretch.within(row)[...] = stretch.of_whole(whole)

    def own_elements(self, slot: LayoutSlot, part: str) -> tuple[range, range]:
        """Elements of a parameter that the box has: their places in a row of the box, and in the parameter."""
        decayed, plain = self.stretches(part)
        stretch = decayed if slot.start < self.layout.parts[part].decayed_stop else plain
        first = max(slot.start, stretch.own.start)
        stop = max(first, min(slot.start + math.prod(slot.shape), stretch.own.stop))
        place = stretch.place + first - stretch.own.start
        return range(place, place + stop - first), range(first - slot.start, stop - slot.start)

    def take_parameter(self, row: Any, slot: LayoutSlot, whole: Any, *, part: str) -> None:
        """Fill the box's row with its elements of one parameter of a model."""
        into, own = self.own_elements(slot, part)
        if own:
            row[into.start : into.stop] = whole.reshape(-1)[own.start : own.stop]

    def own_gradient(self, part: str, gradient: Any) -> Any:
        """The box's elements of the gradient of one model; the gradient itself where the box is everything."""
        if self.is_whole:
            return gradient
        first = self.layout.parts[part].start
        own = [gradient[each.own.start - first : each.own.stop - first] for each in self.stretches(part)]
        return namespace(gradient).concatenate(own)

    def by_name(self, flat: Any) -> dict[str, Any]:
        """View of every tensor of the box: "weights/…" for a whole tensor, "weights/…@4096" for a part of one."""
        if self.is_whole:
            return self.layout.by_name(flat)
        rows = {"weights": self.weights(flat)}
        rows["moment1"], rows["moment2"] = self.moments(flat)
        return {
            f"{kind}/{name}": row[start:stop] if shape is None else row[start:stop].reshape(shape)
            for kind, row in rows.items()
            for name, shape, start, stop in self._own_slots()
        }

    def _own_slots(self) -> Iterator[tuple[str, tuple[int, ...] | None, int, int]]:
        """Name, shape (None for a part of a tensor) and place in a row, of each tensor that lies in the box."""
        for part, each in self.layout.parts.items():
            for slot in each.slots:
                place, own = self.own_elements(slot, part)
                if not own:
                    continue
                name = each.prefix + slot.name
                if len(own) == math.prod(slot.shape):
                    yield name, slot.shape, place.start, place.stop
                else:
                    yield f"{name}{PART_MARK}{own.start}", None, place.start, place.stop

    def zero_filling(self, flat: Any) -> None:
        """Zero the elements of a state that belong to no parameter, before it is read by names."""
        rows = [self.weights(flat), *self.moments(flat)]
        for name, part in self.layout.parts.items():
            for stretch, filling in zip(self.stretches(name), part.fillings, strict=True):
                first = stretch.place + max(0, filling.start - stretch.own.start)
                for row in rows:
                    row[first : stretch.place + len(stretch.own)] = 0
        if self.layout.has_reference:
            for filling in self.layout.actor.fillings:
                self.layout.reference(flat)[filling.start : filling.stop] = 0

    def cut(self, part: str, group: Group) -> Cut | None:
        """Elements of the gradient of one model that each rank of a group receives; None if all receive everything."""
        if self.is_whole:
            return None
        shards = self.seat.shards
        self._check(group)
        boxes = tuple(self.seat_of(name).shard for name in group.ranks)
        first = self.layout.parts[part].start
        pieces = (
            tuple(stretch.piece(shard, number) for shard in range(shards))
            for stretch in self.stretches(part)
            for number in range(stretch.num_pieces)
        )
        return Cut(boxes, tuple(tuple(_moved(each, -first) for each in piece) for piece in pieces))

    def counted(self, world: Group) -> list[int]:
        """One of all ranks for each box."""
        holders: dict[int, int] = {}
        for rank, name in enumerate(world.ranks):
            holders.setdefault(self.seat_of(name).number, rank)
        return [holders[box] for box in range(self.seat.boxes)]

    def norm(self, part: str, gradient: Any, groups: Groups | None) -> float:
        """Norm of the gradient of one model, of which this rank has the box. A collective where it does not have
        everything."""
        if self.seat.is_whole:
            return gradient_norm([gradient])
        assert groups is not None, "the norm of several boxes is summed over the ranks"
        slices, shared = self._slices_and_shared(part, gradient)
        if groups.tensors is not None:
            self._check_shared(shared, groups.tensors)
        own = [*slices, *shared] if self.seat.tensor == 0 else slices
        counted = self.counted(groups.world)
        return gradient_norm(own, group=groups.world, counted=counted, timeout_s=GATHER_TIMEOUT_S)

    def _slices_and_shared(self, part: str, gradient: Any) -> tuple[list[Any], list[Any]]:
        """Elements of the box's gradient that are only here among the tensor ranks, and those that all of them have."""
        if self.seat.tensors == 1:
            return [gradient], []
        first_shared = self.layout.parts[part].first_shared
        slices, shared, start = [], [], 0
        for stretch, first in zip(self.stretches(part), first_shared, strict=True):
            stop = start + len(stretch.own)
            middle = start + min(max(first - stretch.own.start, 0), len(stretch.own))
            slices.append(gradient[start:middle])
            shared.append(gradient[middle:stop])
            start = stop
        return slices, shared

    def _check_shared(self, shared: list[Any], tensors: Group) -> None:
        """Compare the gradient that all tensor ranks have, by its norm. A collective."""
        mine = zeros(1, like=shared[0])
        mine[0] = gradient_norm(shared)
        found = tensors.all_gather(mine, timeout_s=GATHER_TIMEOUT_S).reshape(-1).tolist()
        if any(number != found[0] and not math.isnan(number) for number in found):
            raise IntegrityError(
                f"expected equal gradients of the weights that {', '.join(tensors.ranks)} all have, got the norms "
                f"{', '.join(map(str, found))}"
            )

    def gather(self, weights: Any, *, into: Any, group: Group, parts: tuple[str, ...]) -> None:
        """Complete the weights of these models in the type in which they compute, from the boxes of all ranks. A
        collective: all ranks of the group take part."""
        self._check(group)
        for part in parts:
            for stretch in self.stretches(part):
                for number in range(stretch.num_pieces):
                    pieces = [stretch.piece(shard, number) for shard in range(self.seat.shards)]
                    exchange = self.piece_exchange(stretch, pieces, weights, dtype=into.dtype, group=group)
                    incoming = group.all_to_all(
                        exchange.own,
                        sent=exchange.sent,
                        received=exchange.received,
                        timeout_s=GATHER_TIMEOUT_S,
                    )
                    exchange.place(incoming, into=into)

    def _check(self, group: Group) -> None:
        """Raise IntegrityError unless every box has a holder in the group."""
        held = {self.seat_of(name).shard for name in group.ranks}
        seats = (replace(self.seat, shard=shard) for shard in range(self.seat.shards) if shard not in held)
        missing = [seat.box for seat in seats]
        if missing:
            raise IntegrityError(
                f"expected a rank for each of {self.seat.shards} boxes among {', '.join(group.ranks)}, "
                f"found none for {', '.join(missing)}"
            )

    def piece_exchange(
        self, stretch: Stretch, pieces: Sequence[range], weights: Any, *, dtype: Any, group: Group
    ) -> PieceExchange:
        """Exchange by which every rank of a group receives these elements of the shards' parts of a stretch, in the
        type in which the models compute."""
        import torch  # No other framework cuts its state.

        sources = sources_of(tuple(group.ranks), self.mesh or self.seat.mesh)
        mine = pieces[self.seat.shard]
        place = stretch.place + mine.start - stretch.own.start
        own = weights[place : place + len(mine)].to(dtype).view(torch.uint8)
        # Every rank holds one box, so the sources of a rank are as many ranks as there are boxes.
        takes = [found[self.seat.shard] == group.rank for found in sources]
        boxes = {source: shard for shard, source in enumerate(sources[group.rank])}
        return PieceExchange(
            own.repeat(sum(takes)),
            sent=[own.numel() if each else 0 for each in takes],
            received=[
                dtype.itemsize * len(pieces[boxes[rank]]) if rank in boxes else 0
                for rank in range(group.size)
            ],
            elements=[pieces[boxes[rank]] for rank in sorted(boxes)],
        )


class PieceExchange(NamedTuple):
    """Bytes that one rank sends and receives where a piece of the weights is gathered."""

    own: Any
    """This rank's part, once for each rank that takes it from here."""
    sent: list[int]
    received: list[int]
    elements: list[range]
    """Elements of the flat weights that arrive, in their order."""

    @property
    def is_in_order(self) -> bool:
        """Whether the elements arrive as they lie in the flat weights."""
        return all(a.stop == b.start for a, b in pairwise(each for each in self.elements if each))

    def place(self, incoming: Any, *, into: Any, first: int = 0) -> None:
        """Put what arrived into the flat weights, or into a part of them that begins at element `first`."""
        start, itemsize = 0, into.element_size()
        for where in self.elements:
            end = start + itemsize * len(where)
            if where:
                into[where.start - first : where.stop - first] = _typed(incoming[start:end], like=into)
            start = end


def _moved(elements: range, by: int) -> range:
    return range(elements.start + by, elements.stop + by)


def _typed(content: Array, *, like: Array) -> Any:
    """Bytes as elements. A copy: they may begin anywhere in a buffer."""
    return content.clone().view(like.dtype)
