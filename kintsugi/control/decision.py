"""Builder of one decision: the parts of the master add facts, effects and reasons to it."""

from __future__ import annotations

from kintsugi.control.protocol import Decision, Effect
from kintsugi.control.state import MasterState
from kintsugi.errors import Fault, FaultDetail
from kintsugi.journal.facts import Fact


class DecisionBuilder:
    """Collects facts (applied to the state immediately), effects and reasons until the decision is taken."""

    def __init__(self, state: MasterState) -> None:
        self.state = state
        self._facts: list[Fact] = []
        self._effects: list[Effect] = []
        self._reasons: list[str] = []
        self._num_faults = 0

    def add_fact(self, fact: Fact) -> None:
        self.state.apply(fact)
        self._facts.append(fact)

    def add_effect(self, effect: Effect) -> None:
        self._effects.append(effect)

    def explain(self, reason: str) -> None:
        self._reasons.append(reason)

    def new_fault(
        self, kind: str, message: str, *, process: str = "master-0", detail: FaultDetail | None = None
    ) -> Fault:
        """Return a fault that the master itself has found. Its id is unique in the run."""
        self._num_faults += 1
        return Fault(
            f"{self.state.term}#{self._num_faults}.{kind}", kind, process, message, 0.0, detail=detail
        )

    def take(self) -> Decision:
        """Return the decision; the builder is empty afterwards."""
        decision = Decision(tuple(self._facts), tuple(self._effects), "; ".join(self._reasons))
        self._facts, self._effects, self._reasons = [], [], []
        return decision
