"""Passes of a model whose weights are gathered unit by unit: all micro-batches pass through a unit before the next one
begins, so that its weights are gathered once forward and once backward, however many micro-batches there are.

    forward    embedding ─► layer 0 ─► … ─► layer n ─► head: loss and its gradient
    backward   embedding ◄─ layer 0 ◄─ … ◄─ layer n ◄─┘

Kept are the inputs of the layers, for all micro-batches of the rank; a layer is computed again in the backward pass. A
gradient is summed over the micro-batches in their order, as in a pass of one micro-batch after the other, so it has the
same bits. The head of a model whose output projection is its embedding is computed twice: the gradients of both uses
are added up for each micro-batch, as autograd does.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from kintsugi.model.gradient_roots import gradient_root
from kintsugi.model.transformer import DecoderLayer, PackedPass, Transformer
from kintsugi.runtime.counters import COUNTERS
from kintsugi.training.batch import MicroBatch
from kintsugi.training.boxes import Box
from kintsugi.training.group import Column
from kintsugi.training.losses import BatchLoss
from kintsugi.training.unit_gradients import Leaves, UnitGradients
from kintsugi.training.unit_weights import UnitWeights
from kintsugi.training.units import ModelUnits, Unit


class UnitPass:
    """Runs one trained model."""

    def __init__(
        self,
        model: Transformer,
        units: ModelUnits,
        *,
        weights: UnitWeights,
        gradients: UnitGradients,
        is_tied: bool,
    ) -> None:
        """`is_tied`: the embedding is used by the head, too."""
        self._model, self._units = model, units
        self._weights, self._gradients = weights, gradients
        self._ends: tuple[Unit, ...] = (units.embedding, units.head) if is_tied else (units.head,)
        self._is_tied = is_tied
        layers = model.model.layers
        self._layers = [layer for layer in layers if isinstance(layer, DecoderLayer)]
        assert len(self._layers) == len(units.layers) == len(layers)

    def enter(self, box: Box) -> None:
        """Exchange with the ranks of another mesh, in which this rank holds the same box."""
        self._weights.enter(box)
        self._gradients.enter(box)

    def learn(
        self,
        batches: Sequence[MicroBatch],
        *,
        leaves: Leaves,
        loss: Callable[[MicroBatch], BatchLoss],
        group: Column,
        check: Callable[[], None],
    ) -> list[BatchLoss]:
        """Forward and backward pass; losses and statistics of the micro-batches. The gradient of the whole batch is
        then in this rank's box of it. A collective."""
        units, gradients = self._units, self._gradients
        back = [(unit,) for unit in reversed(units.layers)]
        steps = [*self._forward_steps(), *back, *([self._ends] if self._is_tied else [])]
        turns = self._weights.in_order(steps, group)
        found: list[BatchLoss] = []
        try:
            inputs, shared = self._forward(batches, turns=turns, check=check)
            gradients.begin(leaves, group)
            last = inputs.pop()
            stream: list[Tensor | None] = [*last]
            if not self._is_tied:
                last.clear()

            def head(place: int) -> None:
                check()
                hidden = _leaf(stream[place])
                found.append(self._head(batches[place], hidden, loss=loss))
                stream[place] = hidden.grad

            next(turns)
            self._model.model.embed_tokens.requires_grad_(not self._is_tied)
            gradients.add(units.head, head)
            self._model.model.embed_tokens.requires_grad_(True)
            for unit, layer in zip(reversed(units.layers), reversed(self._layers), strict=True):
                next(turns)
                gradients.add(unit, self._layer(layer, inputs.pop(), shared, stream=stream, check=check))
            if self._is_tied:
                next(turns)
            gradients.add(
                units.embedding, self._embedding(batches, last, stream=stream, loss=loss, check=check)
            )
            gradients.finish()
        finally:
            self._release()
            turns.close()
        return found

    def look(
        self,
        batches: Sequence[MicroBatch],
        *,
        look: Callable[[MicroBatch], object],
        group: Column,
        check: Callable[[], None],
    ) -> None:
        """Forward pass without gradient; `look`, which runs the model, finds its layers computed. A collective."""
        turns = self._weights.in_order(self._forward_steps(), group)
        try:
            inputs, _ = self._forward(batches, turns=turns, check=check, keeps=False)
            next(turns)
            for batch, residual in zip(batches, inputs.pop(), strict=True):
                check()
                with torch.no_grad():
                    self._model.residual = residual
                    look(batch)
                COUNTERS.add("micro_batches")
        finally:
            self._release()
            turns.close()

    def take_waited_s(self) -> float:
        """Time since the last call in which this rank waited for others."""
        waited_s = self._weights.waited_s + self._gradients.waited_s
        self._weights.waited_s = self._gradients.waited_s = 0.0
        return waited_s

    def _forward_steps(self) -> list[tuple[Unit, ...]]:
        units = self._units
        return [(units.embedding,), *((unit,) for unit in units.layers), self._ends]

    @torch.no_grad()
    def _forward(
        self,
        batches: Sequence[MicroBatch],
        *,
        turns: Generator[Sequence[Unit], None, None],
        check: Callable[[], None],
        keeps: bool = True,
    ) -> tuple[list[list[Tensor]], list[PackedPass]]:
        """Pass through embedding and layers: the input of each layer, or only the output of the last one, by
        micro-batch."""
        shared = [self._model.shared_pass(batch.layout.positions, batch.layout) for batch in batches]
        next(turns)
        inputs = [[self._model.model.embed_tokens(batch.tokens) for batch in batches]]
        for layer in self._layers:
            next(turns)
            before = inputs[-1] if keeps else inputs.pop()
            inputs.append([])
            for place, hidden in enumerate(before):
                check()
                inputs[-1].append(layer.whole(hidden, shared[place]))
                if not keeps:
                    del hidden
        return inputs, shared

    def _head(
        self, batch: MicroBatch, hidden: Tensor, *, loss: Callable[[MicroBatch], BatchLoss]
    ) -> BatchLoss:
        self._model.residual = hidden
        found = loss(batch)
        found.loss.backward()
        COUNTERS.add("micro_batches")
        return BatchLoss(
            found.loss.detach(),
            {name: each.detach() for name, each in found.sums.items()},
            {name: each.detach() for name, each in found.maxima.items()},
        )

    def _layer(
        self,
        layer: DecoderLayer,
        inputs: list[Tensor],
        shared: Sequence[PackedPass],
        *,
        stream: list[Tensor | None],
        check: Callable[[], None],
    ) -> Callable[[int], None]:
        """Backward pass of a layer for one micro-batch; the gradient of its input takes the place of that of its
        output in `stream`."""

        def backward(place: int) -> None:
            check()
            hidden = _leaf(inputs[place])
            gradient_root([layer.whole(hidden, shared[place])], [_known(stream[place])]).backward()
            stream[place] = hidden.grad

        return backward

    def _embedding(
        self,
        batches: Sequence[MicroBatch],
        last: Sequence[Tensor],
        *,
        stream: list[Tensor | None],
        loss: Callable[[MicroBatch], BatchLoss],
        check: Callable[[], None],
    ) -> Callable[[int], None]:
        """Backward pass of the embedding; without its weights where only tokens and gradient are needed."""

        def backward(place: int) -> None:
            check()
            roots: list[Tensor] = [self._model.model.embed_tokens(batches[place].tokens)]
            gradients = [_known(stream[place])]
            if self._is_tied:
                self._model.residual = last[place]
                again = loss(batches[place]).loss
                if again.requires_grad:
                    roots, gradients = [*roots, again], [*gradients, torch.ones_like(again)]
            gradient_root(roots, gradients).backward()
            stream[place] = None

        return backward

    def _release(self) -> None:
        self._model.residual = None
        self._model.model.embed_tokens.requires_grad_(True)


def _leaf(tensor: Tensor | None) -> Tensor:
    return _known(tensor).detach().requires_grad_(True)


def _known(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "every micro-batch has passed through the unit before"
    return tensor
