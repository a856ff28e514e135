"""An embedding that is the output projection too, of a model that is cut over pipeline stages.

    first stage                                      last stage
    copy in the compute type                         weights, moments, gradient
    rows of the tokens ──── activations ───► … ───►  logits, loss ──► h: gradient of the projection
    gradient of these rows ───────────────────────►                   e: gradient of the embedding
    ◄──────────── weights, after each update ──────                   total += h + e

The matrix belongs to the last stage. A process that has the whole model adds both gradients of a micro-batch before it
adds them to the total, as autograd does with a weight that is used twice. The last stage does the same in the order of
the micro-batches, so the total has the same bits. For that it keeps the h of a micro-batch until the first stage has
passed it backward: as many matrices as there are stages. What is sent is as large as activations, not as the matrix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from kintsugi.model.gradient_roots import gradient_root
from kintsugi.model.transformer import Transformer
from kintsugi.training.group import Edge

COPY_TIMEOUT_S = 300.0
"""Limit for one matrix: the other stage may begin later, after the collectives of its own ranks."""


class TiedGradient:
    """Gradient of the embedding in the last stage, from both of its uses."""

    def __init__(self, model: Transformer, totals: Sequence[tuple[Tensor, Tensor]]) -> None:
        """`totals`: parameters of the embedding, of which there is one for each slice, and the tensors to which their
        gradients are added."""
        self._model = model
        self._totals = totals
        self._held: deque[list[Tensor | None]] = deque()

    def hold(self) -> None:
        """Keep the gradient of the output projection, which a backward pass has just computed."""
        self._held.append([parameter.grad for parameter, _ in self._totals])
        self._forget_last()

    def complete(self, tokens: Tensor, gradient: Tensor) -> None:
        """Add the gradient of the longest held micro-batch to the total. `gradient` is that of the rows of its
        tokens."""
        for (parameter, _), held in zip(self._totals, self._held.popleft(), strict=True):
            parameter.grad = held
        parts = self._model.embedded_parts(tokens)
        gradient_root(parts, [gradient] * len(parts)).backward()
        for parameter, total in self._totals:
            assert parameter.grad is not None, "a backward pass has computed it"
            total.add_(parameter.grad)
        self._forget_last()

    def clear(self) -> None:
        """Drop what an interrupted pass has left."""
        self._held.clear()
        self._forget_last()

    def _forget_last(self) -> None:
        for parameter, _ in self._totals:
            parameter.grad = None


def copy_embedding(embedding: Sequence[Tensor], *, edge: Edge, is_first: bool) -> None:
    """Copy these tensors of the last stage into those of the first one. A collective of the two."""
    for tensor in embedding:
        if is_first:
            edge.backward.receive(tensor.detach(), timeout_s=COPY_TIMEOUT_S)
        else:
            edge.backward.send(tensor.detach())
    if not is_first:
        edge.backward.await_sent(timeout_s=COPY_TIMEOUT_S)
