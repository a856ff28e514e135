"""The end of a run that can not go on: for a moment the master listens for what explains it."""

from __future__ import annotations

import math

from kintsugi.control.state import MasterState
from kintsugi.errors import Fault, root_first

FAULT_GRACE_S = 1.0
"""How long to listen, after the run was called failed, for what explains it."""


class Failure:
    """Faults that the run can not survive, as far as they are known."""

    def __init__(self, state: MasterState) -> None:
        self._state = state
        self._faults: dict[str, Fault] = {}
        self._end_at = math.inf

    @property
    def begun(self) -> bool:
        """Whether the run was called failed, so that nothing is mended any more."""
        return self._end_at < math.inf

    @property
    def causes(self) -> tuple[Fault, ...]:
        """The first cause first."""
        return tuple(root_first(self._faults.values()))

    def begin(self, fault: Fault, now: float) -> None:
        """Note a fault that the run can not survive; it ends after a moment in which the real cause may still show."""
        self.note(fault)
        self._end_at = min(self._end_at, now + FAULT_GRACE_S)

    def note(self, fault: Fault) -> None:
        self._faults[fault.id] = fault

    def is_due(self, now: float) -> bool:
        return now >= self._end_at

    def new_fault(self, kind: str, message: str, *, process: str = "master-0") -> Fault:
        """A fault that the master itself has found."""
        number = f"{self._state.epoch}.{self._state.num_incarnations}.{len(self._faults)}"
        return Fault(f"{number}.{process}", kind, process, message, 0.0)
