"""Weights of a model that are gathered from the ranks unit by unit: only units that are being computed have memory, and
those that are on their way.

    compute    | embedding   | layer 0     | layer 1     | …
    exchange   | layer 0     | layer 1     | layer 2     | …
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kintsugi.model.transformer import Transformer
from kintsugi.training.boxes import Box, PieceExchange
from kintsugi.training.group import Column, Exchange
from kintsugi.training.units import ModelUnits, Span, Unit

EXCHANGE_TIMEOUT_S = 600.0
"""Limit for another rank to reach the same unit. A rank that is lost is noticed by its broken connection, and one that
hangs by the master, long before."""


@dataclass(frozen=True)
class Arriving:
    """A unit's weights on their way."""

    unit: Unit
    memory: Tensor
    exchanges: Sequence[tuple[Span, PieceExchange, Exchange]]


class UnitWeights:
    """Parameters of one model. A parameter without memory has its shape, and is not a number where it is read."""

    def __init__(self, model: Transformer, units: ModelUnits, *, box: Box, weights: Tensor) -> None:
        """`weights`: the weights of all models that this rank's box holds, in float32."""
        self._parameters = dict(model.named_parameters())
        self._box, self._weights, self._dtype = box, weights, model.dtype
        self._nothing = torch.full((1,), float("nan"), dtype=model.dtype, device=weights.device)
        self.waited_s = 0.0
        """Time in which this rank waited for weights."""
        for unit in units:
            self.drop(unit)

    def enter(self, box: Box) -> None:
        """Exchange with the ranks of another mesh, in which this rank holds the same box."""
        self._box = box

    def in_order(
        self, steps: Sequence[Sequence[Unit]], group: Column
    ) -> Generator[Sequence[Unit], None, None]:
        """Yield the units of each step while their weights are there; those of the next step are gathered meanwhile. A
        collective: all ranks take the same steps."""
        ahead = self._start_all(steps[0], group)
        for index, units in enumerate(steps):
            arrived = ahead
            try:
                while arrived:
                    self._finish(arrived.pop(0))
                ahead = self._start_all(steps[index + 1], group) if index + 1 < len(steps) else []
                yield units
            finally:
                for unit in units:
                    self.drop(unit)

    def drop(self, unit: Unit) -> None:
        """Release the memory of a unit's weights."""
        for slot in unit.slots:
            self._parameters[slot.name].data = self._nothing.expand(slot.shape)

    def _start_all(self, units: Sequence[Unit], group: Column) -> list[Arriving]:
        return [self._start(unit, group) for unit in units]

    def _start(self, unit: Unit, group: Column) -> Arriving:
        shards = range(self._box.seat.shards)
        memory = torch.empty(unit.size, dtype=self._dtype, device=self._weights.device)
        exchanges = []
        for span in unit.spans:
            pieces = [span.of_shard(shard) for shard in shards]
            piece = self._box.piece_exchange(
                span.stretch, pieces, self._weights, dtype=self._dtype, group=group
            )
            into = memory[span.place : span.place + span.stop - span.start].view(torch.uint8)
            started = group.start_all_to_all(
                piece.own,
                sent=piece.sent,
                received=piece.received,
                timeout_s=EXCHANGE_TIMEOUT_S,
                into=into if piece.is_in_order else None,
            )
            exchanges.append((span, piece, started))
        return Arriving(unit, memory, exchanges)

    def _finish(self, arriving: Arriving) -> None:
        start = time.perf_counter()
        for span, piece, exchange in arriving.exchanges:
            incoming = exchange.received(timeout_s=EXCHANGE_TIMEOUT_S)
            if not piece.is_in_order:
                piece.place(incoming, into=arriving.memory, first=span.start - span.place)
        for name, view in arriving.unit.views(arriving.memory).items():
            self._parameters[name].data = view
        self.waited_s += time.perf_counter() - start
