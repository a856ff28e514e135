"""One pass of a call over the pipeline stages of a model.

The ranks of a pipeline have the same micro-batches. Each computes its layers of one after the other, in the order that
is called 1F1B: a stage runs ahead of the backward passes by as many forward passes as there are stages after it.

    2 stages, 4 micro-batches     stage 0:  F0 F1 B0 F2 B1 F3 B2 B3
                                  stage 1:     F0 B0 F1 B1 F2 B2 F3 B3

Backward passes happen in the order of the micro-batches, in every stage, so gradients are added as one rank would add
them. Activations and their gradients travel in the compute type, over a channel per direction (`group.Edge`); what is
sent waits in the background until the neighbour takes it.

With tied embeddings (`tied_embedding.py`) a micro-batch is completed in the last stage when the first one has passed it
backward. The last stage goes on meanwhile; but before the backward passes of another shard all of a shard are complete,
because their gradients are one sum.

    2 stages, 2 shards of 2       stage 0:  F0 F1 B0 F2 B1 F3 B2 B3
                                  stage 1:     F0 B0 F1 B1 C0 F2 C1 B2 F3 B3 C2 C3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from kintsugi.model.gradient_roots import gradient_root
from kintsugi.model.transformer import Transformer
from kintsugi.training.batch import MicroBatch
from kintsugi.training.group import Groups
from kintsugi.training.losses import BatchLoss
from kintsugi.training.tied_embedding import TiedGradient

NEIGHBOUR_TIMEOUT_S = 600.0
"""Limit for a neighbouring stage to send: it may have to compute all stages before it. A rank that is lost is noticed
by its broken connection, and one that hangs by the master, long before."""


class Work(Enum):
    FORWARD = "F"
    BACKWARD = "B"
    COMPLETION = "C"
    """The first stage's part of a gradient is added, in the last stage of a model with tied embeddings."""


class Action(NamedTuple):
    """Work on one micro-batch."""

    work: Work
    batch: int

    def __str__(self) -> str:
        return f"{self.work.value}{self.batch}"


def schedule(*, stage: int, stages: int, num_batches: int, learns: bool = True) -> Iterator[Action]:
    """Order of the passes of one stage.

    >>> " ".join(map(str, schedule(stage=0, stages=2, num_batches=3)))
    'F0 F1 B0 F2 B1 B2'
    """
    ahead = min(stages - 1 - stage, num_batches) if learns else num_batches
    for batch in range(ahead):
        yield Action(Work.FORWARD, batch)
    for batch in range(ahead, num_batches):
        yield Action(Work.FORWARD, batch)
        yield Action(Work.BACKWARD, batch - ahead)
    for batch in range(num_batches - ahead, num_batches) if learns else ():
        yield Action(Work.BACKWARD, batch)


def completed(actions: Iterable[Action], *, stages: int, ends: Collection[int]) -> Iterator[Action]:
    """Order of the last stage of a model with tied embeddings: a micro-batch is completed when the first stage can have
    passed it backward. `ends` are the last micro-batches of the shards; one forward pass fills the wait at an end.

    >>> " ".join(map(str, completed(schedule(stage=1, stages=2, num_batches=3), stages=2, ends={1, 2})))
    'F0 B0 F1 B1 C0 F2 C1 B2 C2'
    """
    waiting: deque[int] = deque()
    is_end = False
    for action in actions:
        yield action
        if action.work is Work.BACKWARD:
            waiting.append(action.batch)
            is_end = action.batch in ends
        while waiting and (len(waiting) >= stages or (is_end and action.work is Work.FORWARD)):
            yield Action(Work.COMPLETION, waiting.popleft())
    for batch in waiting:
        yield Action(Work.COMPLETION, batch)


class Neighbours:
    """Exchange of this stage with the one before and the one after it."""

    def __init__(self, model: Transformer, groups: Groups | None) -> None:
        self._model = model
        self._previous = None if groups is None else groups.previous
        self._following = None if groups is None else groups.following
        self._embedding = None if groups is None else groups.embedding

    def receive_hidden(self, batch: MicroBatch, *, learns: bool = False) -> Tensor | None:
        """Activations with which this stage begins; None in the first one, unless the gradient of its embedded tokens
        is computed elsewhere."""
        edge = self._previous
        if edge is None:
            is_needed = learns and self._model.part.has_copy
            return self._model.embedded(batch.tokens) if is_needed else None
        hidden = self._like_hidden(batch)
        edge.forward.receive(hidden, timeout_s=NEIGHBOUR_TIMEOUT_S)
        return hidden

    def send_hidden(self, hidden: Tensor) -> None:
        assert self._following is not None, "the last stage passes nothing on"
        self._following.forward.send(hidden.detach())

    def receive_gradient(self, batch: MicroBatch) -> Tensor:
        """Gradient of the activations that this stage has passed on."""
        assert self._following is not None, "the last stage begins the backward pass"
        gradient = self._like_hidden(batch)
        self._following.backward.receive(gradient, timeout_s=NEIGHBOUR_TIMEOUT_S)
        return gradient

    def send_gradient(self, hidden: Tensor | None) -> None:
        """Pass the gradient of the activations back to the stage before, if there is one, and that of embedded tokens
        to the last stage."""
        if hidden is None:
            return
        assert hidden.grad is not None
        if self._previous is not None:
            self._previous.backward.send(hidden.grad)
        else:
            assert self._embedding is not None, "the ends of a model with tied embeddings are connected"
            self._embedding.forward.send(hidden.grad)

    def receive_embedding_gradient(self, batch: MicroBatch) -> Tensor:
        """Gradient of the embedded tokens, from the first stage."""
        assert self._embedding is not None, "the ends of a model with tied embeddings are connected"
        gradient = self._like_hidden(batch)
        self._embedding.forward.receive(gradient, timeout_s=NEIGHBOUR_TIMEOUT_S)
        return gradient

    def await_sent(self) -> None:
        for edge in (self._previous, self._following, self._embedding):
            for channel in edge or ():
                channel.await_sent(timeout_s=NEIGHBOUR_TIMEOUT_S)

    def _like_hidden(self, batch: MicroBatch) -> Tensor:
        model = self._model
        size = batch.tokens.numel(), model.config.hidden_size
        return torch.empty(size, dtype=model.dtype, device=model.device)


def learning_pass(
    model: Transformer,
    batches: Sequence[MicroBatch],
    *,
    groups: Groups,
    loss: Callable[[MicroBatch], BatchLoss],
    check: Callable[[], None],
    tied: TiedGradient | None = None,
    ends: Collection[int] = (),
) -> Iterator[BatchLoss | None]:
    """Forward and backward passes; yields when a micro-batch is finished in this stage, in their order: its loss and
    statistics in the last stage, None in the others. `tied` is the gradient of an embedding that the first stage uses
    too; `ends` are the last micro-batches of the shards."""
    neighbours, part = Neighbours(model, groups), model.part
    stage, stages = (0, 1) if groups.stages is None else (groups.stages.rank, groups.stages.size)
    actions = schedule(stage=stage, stages=stages, num_batches=len(batches))
    if tied is not None:
        actions = completed(actions, stages=stages, ends=ends)
    begun: dict[int, tuple[Tensor | None, Tensor, BatchLoss | None]] = {}
    passed: dict[int, BatchLoss | None] = {}
    for action in actions:
        check()
        batch = batches[action.batch]
        if action.work is Work.BACKWARD:
            hidden, output, found = begun.pop(action.batch)
            root = output if part.is_last else gradient_root([output], [neighbours.receive_gradient(batch)])
            root.backward()
            neighbours.send_gradient(hidden)
            if action.batch == len(batches) - 1:
                neighbours.await_sent()
            del hidden, output, root
            if tied is None:
                yield found
            else:
                tied.hold()
                passed[action.batch] = found
            continue
        if action.work is Work.COMPLETION:
            assert tied is not None
            tied.complete(batch.tokens, neighbours.receive_embedding_gradient(batch))
            yield passed.pop(action.batch)
            continue
        hidden = neighbours.receive_hidden(batch, learns=True)
        if hidden is not None:
            hidden.requires_grad = True
        model.incoming = hidden
        if part.is_last:
            found = loss(batch)
            begun[action.batch] = hidden, found.loss, found
        else:
            output = model.forward_packed(batch.tokens, batch.layout.positions, batch.layout)
            neighbours.send_hidden(output)
            begun[action.batch] = hidden, output, None
        model.incoming = None


def losses_alone(
    model: Transformer,
    batches: Sequence[MicroBatch],
    *,
    groups: Groups,
    loss: Callable[[MicroBatch], BatchLoss],
    check: Callable[[], None],
) -> Iterator[BatchLoss | None]:
    """The same without backward passes, for a model that does not learn in this step."""
    found: list[BatchLoss] = []
    for _ in forward_pass(
        model, batches, groups=groups, look=lambda batch: found.append(loss(batch)), check=check
    ):
        yield found.pop() if found else None


def forward_pass(
    model: Transformer,
    batches: Sequence[MicroBatch],
    *,
    groups: Groups | None,
    look: Callable[[MicroBatch], object],
    check: Callable[[], None],
) -> Iterator[MicroBatch]:
    """Forward passes without gradient, one for each micro-batch that is taken from this iterator. The last stage calls
    `look`, which runs the model; the others run their part and pass the activations on."""
    neighbours = Neighbours(model, groups)
    for batch in batches:
        check()
        with torch.no_grad():
            model.incoming = neighbours.receive_hidden(batch)
            if model.part.is_last:
                look(batch)
            else:
                neighbours.send_hidden(
                    model.forward_packed(batch.tokens, batch.layout.positions, batch.layout)
                )
        model.incoming = None
        if batch is batches[-1]:
            neighbours.await_sent()
        yield batch
