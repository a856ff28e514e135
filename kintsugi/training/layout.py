"""Layout of a rank's state: one flat tensor for everything that changes with a step.

    | weights: actor, critic | first moments | second moments | moving reference |
             └ matrices first, which decay; then norms and biases

The tensor is flat so that every operation on all parameters (zeroing, adding, reducing, clipping, stepping, copying,
hashing) is one operation in one fixed order. If any stage of the run needs a critic or a moving reference, their space
is reserved from the start of the process and is zero until that stage begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from kintsugi.model.transformer import Transformer

ACTOR, CRITIC = "actor", "critic"


@dataclass(frozen=True)
class LayoutSlot:
    """Position of a parameter in a flat tensor."""

    name: str
    shape: tuple[int, ...]
    start: int

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + math.prod(self.shape)].view(self.shape)


@dataclass(frozen=True)
class LayoutPart:
    """Range of a flat tensor that belongs to one model."""

    slots: tuple[LayoutSlot, ...]
    start: int
    decayed_stop: int
    """End of the matrices; norms and biases follow, which have no weight decay."""
    stop: int
    prefix: str = ""
    """Prefix of its parameters' names in the saved state: "critic."."""

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], *, start: int = 0, prefix: str = "") -> LayoutPart:
        """Lay out all parameters of a model, matrices first."""
        slots, position, decayed_stop = [], start, start
        for name, shape in sorted(shapes.items(), key=lambda item: len(item[1]) < 2):
            slots.append(LayoutSlot(name, shape, position))
            position += math.prod(shape)
            decayed_stop = position if len(shape) >= 2 else decayed_stop
        return cls(tuple(slots), start, decayed_stop, position, prefix)

    @property
    def size(self) -> int:
        return self.stop - self.start

    def within(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """View of each parameter by its Hugging Face name."""
        return {slot.name: slot.view(flat) for slot in self.slots}

    def fill(self, flat: Tensor, weights: Mapping[str, Tensor]) -> None:
        """Copy weights into the flat tensor; parameters without given weights (a new head) become zero."""
        for name, view in self.views(flat).items():
            if name in weights:
                view.copy_(weights[name].detach())
            else:
                view.zero_()

    def point(self, model: Transformer, *, weights: Tensor) -> None:
        """Make a model's parameters views of flat weights, frozen; the memory that they had is released."""
        for slot, parameter in self._parameters(model):
            parameter.data = slot.view(weights)
            parameter.requires_grad = False

    def learn(self, model: Transformer, *, gradient: Tensor) -> None:
        """Make backward passes through a model add its gradients to a flat tensor.

        Gradients of the tensor's own type are views of it. Others are added as soon as autograd has finished one of
        them, which is then dropped, so that a second gradient of the whole model never exists.
        """
        for slot, parameter in self._parameters(model):
            parameter.requires_grad = True
            if parameter.dtype == gradient.dtype:
                parameter.grad = slot.view(gradient)
            else:
                parameter.register_post_accumulate_grad_hook(partial(_move_gradient, slot.view(gradient)))

    def _parameters(self, model: Transformer) -> Iterator[tuple[LayoutSlot, Tensor]]:
        by_name = dict(model.named_parameters())
        return ((slot, by_name[slot.name]) for slot in self.slots)


def _move_gradient(total: Tensor, parameter: Tensor) -> None:
    assert parameter.grad is not None, "called after a gradient was accumulated"
    total.add_(parameter.grad)
    parameter.grad = None


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

    def weights(self, flat: Tensor) -> Tensor:
        return flat[: self.num_parameters]

    def moments(self, flat: Tensor) -> Tensor:
        """First and second moments, as two rows."""
        return flat[self.num_parameters : 3 * self.num_parameters].view(2, -1)

    def reference(self, flat: Tensor) -> Tensor:
        assert self.has_reference, "the reference of this run does not move"
        return flat[3 * self.num_parameters :]

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """View of every tensor of the state: "weights/…", "moment1/critic.…", "reference/…"."""
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


def reference_by_name(part: LayoutPart, flat: Tensor) -> dict[str, Tensor]:
    """Weights of a reference model by their names in a saved state."""
    return {f"reference/{name}": view for name, view in part.views(flat).items()}
