"""The latest answer for which all ranks gathered weights: what a rank tells a master that asks again.

A rank that has answered an earlier master does not wait for the others when the next one asks for the same. The next
one may have planned another publication, as other servers live. A rank that carried it out would gather weights without
those that still take part in the first one, and none knows which have answered. So another order to publish the same
step is refused, and the master forms the group again.
"""

from __future__ import annotations

from collections.abc import Callable

from kintsugi.errors import RefusedError
from kintsugi.protocol.messages import Body
from kintsugi.protocol.training import EvaluatePairs, HashWeights
from kintsugi.protocol.weights import Publish

Joint = Publish | HashWeights | EvaluatePairs
"""Requests that all ranks of a group carry out together."""


class JointAnswer:
    """One rank's memory of the last of these requests."""

    def __init__(self) -> None:
        self._last: tuple[int, int, Joint, Body] | None = None

    def once(self, request: Joint, *, group: int, step: int, answer: Callable[[], Body]) -> Body:
        """Return the answer to a request, which `answer` computes if this is no repetition of the last one.
        RefusedError for another order to publish the same step in the same group."""
        if self._last is not None and self._last[:2] == (group, step):
            _, _, last, given = self._last
            if last == request:
                return given
            if isinstance(last, Publish) and isinstance(request, Publish) and request.step == step:
                raise RefusedError(
                    f"the weights of step {step} were gathered for another order; the group has to be formed again"
                )
        computed = answer()
        self._last = group, step, request, computed
        return computed
