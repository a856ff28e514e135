"""Where every number of a rank's state lies: one flat tensor for all that changes with a step.

    | weights: actor, critic | first moments | second moments | moving reference |
             └ matrices first, which decay; then norms and biases

Flat, because everything done to all parameters at once (zeroing, adding, reducing, clipping, stepping, copying,
hashing) is then one operation over one tensor, in one fixed order. Critic and moving reference have their place from
the start of the process where a stage of the run needs them, and are zero until that stage begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from kintsugi.model.transformer import Transformer

ACTOR, CRITIC = "actor", "critic"


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in a flat tensor."""

    name: str
    shape: tuple[int, ...]
    start: int

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + math.prod(self.shape)].view(self.shape)


@dataclass(frozen=True)
class Part:
    """One model's share of a flat tensor."""

    slots: tuple[Slot, ...]
    start: int
    decayed_stop: int
    """Where norms and biases begin, which do not decay."""
    stop: int
    prefix: str = ""
    """Of its parameters' names in the saved state: "critic."."""

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], *, start: int = 0, prefix: str = "") -> Part:
        """Places for all parameters of a model, matrices first."""
        slots, position, decayed_stop = [], start, start
        for name, shape in sorted(shapes.items(), key=lambda item: len(item[1]) < 2):
            slots.append(Slot(name, shape, position))
            position += math.prod(shape)
            decayed_stop = position if len(shape) >= 2 else decayed_stop
        return cls(tuple(slots), start, decayed_stop, position, prefix)

    @property
    def size(self) -> int:
        return self.stop - self.start

    def within(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each parameter by its Hugging Face name."""
        return {slot.name: slot.view(flat) for slot in self.slots}

    def fill(self, flat: Tensor, weights: Mapping[str, Tensor]) -> None:
        """Copy parameters to their places; those that are not given become zero (a new head)."""
        for name, view in self.views(flat).items():
            if name in weights:
                view.copy_(weights[name].detach())
            else:
                view.zero_()

    def point(self, model: Transformer, *, weights: Tensor, gradient: Tensor | None) -> None:
        """Make a model's parameters (and their gradients) views of flat tensors; without gradients they are frozen."""
        by_name = dict(model.named_parameters())
        for slot in self.slots:
            parameter = by_name[slot.name]
            parameter.data = slot.view(weights)
            parameter.requires_grad_(gradient is not None)
            if gradient is not None:
                parameter.grad = slot.view(gradient)


@dataclass(frozen=True)
class Layout:
    """The flat tensor's rows and the models in them."""

    parts: Mapping[str, Part]
    """By what they are: "actor", "critic"."""
    has_reference: bool
    """The moving reference is the last row, as long as the actor."""

    @property
    def actor(self) -> Part:
        return self.parts[ACTOR]

    @property
    def num_parameters(self) -> int:
        return max(part.stop for part in self.parts.values())

    @property
    def size(self) -> int:
        return 3 * self.num_parameters + (self.actor.size if self.has_reference else 0)

    def weights(self, flat: Tensor) -> Tensor:
        return flat[: self.num_parameters]

    def moments(self, flat: Tensor) -> Tensor:
        """Both, one under the other."""
        return flat[self.num_parameters : 3 * self.num_parameters].view(2, -1)

    def reference(self, flat: Tensor) -> Tensor:
        assert self.has_reference, "the reference of this run does not move"
        return flat[3 * self.num_parameters :]

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Every tensor of the state as a view: "weights/…", "moment1/critic.…", "reference/…"."""
        rows = {"weights": self.weights(flat)}
        rows["moment1"], rows["moment2"] = self.moments(flat).unbind()
        named = {
            f"{kind}/{part.prefix}{name}": view
            for kind, row in rows.items()
            for part in self.parts.values()
            for name, view in part.views(row).items()
        }
        if self.has_reference:
            named |= reference_by_name(self.actor, self.reference(flat))
        return named


def reference_by_name(part: Part, flat: Tensor) -> dict[str, Tensor]:
    """Weights of a reference model as they are named in a saved state."""
    return {f"reference/{name}": view for name, view in part.views(flat).items()}
