"""Layout of a rank's state: one flat tensor for everything that changes with a step.

    | weights: actor, critic | first moments | second moments | moving reference |
             └ matrices first, which decay; then norms and biases

Both stretches of a model end at a multiple of `ALIGNMENT` elements; what fills them up is zero and stays zero. So no
operator ever computes a last incomplete vector, and the bits of an update do not depend on where a layout is cut.
Saved states hold parameters by name, without the filling.

The tensor is flat so that every operation on all parameters (zeroing, adding, reducing, clipping, stepping, copying,
hashing) is one operation in one fixed order. If any stage of the run needs a critic or a moving reference, their space
is reserved from the start of the process and is zero until that stage begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kintsugi.model.arrays import Array, is_tensor
from kintsugi.model.tensor_slices import SliceName

ACTOR, CRITIC = "actor", "critic"

ALIGNMENT = 64
"""Elements. The operator of AdamW computes the last elements of a tensor, fewer than a vector of the CPU, in another
way, with other bits."""


def aligned(position: int) -> int:
    """The next position at which a stretch may end, or a tensor may be cut."""
    return -(-position // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class LayoutSlot:
    """Position of a parameter in a flat tensor."""

    name: str
    shape: tuple[int, ...]
    start: int

    def view(self, flat: Array) -> Any:
        return flat[self.start : self.start + math.prod(self.shape)].reshape(self.shape)


@dataclass(frozen=True)
class LayoutPart:
    """Range of a flat tensor that belongs to one model."""

    slots: tuple[LayoutSlot, ...]
    start: int
    decayed_stop: int
    """End of the matrices and their filling; norms and biases follow, which have no weight decay."""
    stop: int
    """End of the norms and biases and their filling."""
    prefix: str = ""
    """Prefix of its parameters' names in the saved state: "critic."."""

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        start: int = 0,
        prefix: str = "",
        is_filled: bool = True,
    ) -> LayoutPart:
        """Lay out all parameters of a model, matrices first. Both stretches are filled up, except for weights that are
        never updated, whose digests are stored."""
        assert start == aligned(start), f"a model begins at a multiple of {ALIGNMENT} elements, got {start}"
        slots, ends, position = [], [], start
        for decays in (True, False):
            for name, shape in shapes.items():
                if (len(shape) >= 2) == decays:
                    slots.append(LayoutSlot(name, shape, position))
                    position += math.prod(shape)
            position = aligned(position) if is_filled else position
            ends.append(position)
        decayed_stop, stop = ends
        return cls(tuple(slots), start, decayed_stop, stop, prefix)

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def first_shared(self) -> tuple[int, int]:
        """In both stretches, the first parameter that is no slice: those that are slices come before."""
        firsts = [self.decayed_stop, self.stop]
        for slot in reversed(self.slots):
            if SliceName.parse(slot.name).count == 1:
                firsts[slot.start >= self.decayed_stop] = slot.start
        return firsts[0], firsts[1]

    @property
    def fillings(self) -> tuple[range, range]:
        """Elements at the end of both stretches that belong to no parameter."""
        ends = [self.start, self.decayed_stop]
        for slot in self.slots:
            ends[slot.start >= self.decayed_stop] += math.prod(slot.shape)
        return range(ends[0], self.decayed_stop), range(ends[1], self.stop)

    def within(self, flat: Array) -> Any:
        return flat[self.start : self.stop]

    def views(self, flat: Array) -> dict[str, Any]:
        """View of each parameter by its Hugging Face name."""
        return {slot.name: slot.view(flat) for slot in self.slots}

    def fill(self, flat: Array, weights: Mapping[str, Array]) -> None:
        """Copy weights into the flat tensor; parameters without given weights (a new head) become zero."""
        for name, view in self.views(flat).items():
            if name in weights:
                source: Any = weights[name]
                view[...] = source.detach() if is_tensor(source) else source
            else:
                view[...] = 0


@dataclass(frozen=True)
class Layout:
    """Rows of the flat tensor and the models in them."""

    parts: Mapping[str, LayoutPart]
    """Models by role: "actor", "critic"."""
    has_reference: bool
    """Whether the last row is a moving reference, as long as the actor."""

    @property
    def actor(self) -> LayoutPart:
        return self.parts[ACTOR]

    @property
    def num_parameters(self) -> int:
        return max(part.stop for part in self.parts.values())

    @property
    def size(self) -> int:
        return 3 * self.num_parameters + (self.actor.size if self.has_reference else 0)

    def weights(self, flat: Array) -> Any:
        return flat[: self.num_parameters]

    def moments(self, flat: Array) -> Any:
        """First and second moments, as two rows."""
        return flat[self.num_parameters : 3 * self.num_parameters].reshape(2, -1)

    def reference(self, flat: Array) -> Any:
        assert self.has_reference, "the reference of this run does not move"
        return flat[3 * self.num_parameters :]

    def by_name(self, flat: Array) -> dict[str, Any]:
        """View of every tensor of the state: "weights/…", "moment1/critic.…", "reference/…"."""
        rows = {"weights": self.weights(flat)}
        rows["moment1"], rows["moment2"] = self.moments(flat)
        named = {
            f"{kind}/{part.prefix}{name}": view
            for kind, row in rows.items()
            for part in self.parts.values()
            for name, view in part.views(row).items()
        }
        if self.has_reference:
            named |= reference_by_name(self.actor, self.reference(flat))
        return named


def reference_by_name(part: LayoutPart, flat: Array) -> dict[str, Any]:
    """Weights of a reference model by their names in a saved state."""
    return {f"reference/{name}": view for name, view in part.views(flat).items()}
