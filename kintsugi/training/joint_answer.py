"""Answers for which all ranks gathered weights of a step: what a rank tells a master that asks again.

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
    """One rank's memory of these requests, of the latest step in the latest group. A new master may not know how far
    the one before had come, so it may ask for any of them."""

    def __init__(self) -> None:
        self._place = -1, -1
        """Group and step."""
        self._given: list[tuple[Joint, Body]] = []

    def once(self, request: Joint, *, group: int, step: int, answer: Callable[[], Body]) -> Body:
        """Return the answer to a request, which `answer` computes if this is no repetition of an earlier one.
        RefusedError for another order to publish the same step in the same group."""
        if self._place != (group, step):
            self._place, self._given = (group, step), []
        for earlier, given in self._given:
            if earlier == request:
                return given
            if isinstance(earlier, Publish) and isinstance(request, Publish) and request.step == step:
                raise RefusedError(
                    f"the weights of step {step} were gathered for another order; the group has to be formed again"
                )
        computed = answer()
        self._given.append((request, computed))
        return computed
