"""What broke, what was done about it, how long it took: the fault centre's book. Pure.

Faults that come before the last one is mended belong to one incident, which is timed from the last of them. An incident
is over when everything lost is back (or given up) and a step was committed since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kintsugi.errors import Fault
from kintsugi.recovery.policy import MAX_FAULTS, Situation, Strategy
from kintsugi.recovery.states import RecoveryState
from kintsugi.types import Role, role_of

_S = RecoveryState


class Incident:
    """One incident, from its first fault to the step that shows that it is over."""

    def __init__(self, number: int, now: float) -> None:
        self.number = number
        self.faults: list[Fault] = []
        """Those that a report begins with; the journal has all of them."""
        self.processes: dict[str, None] = {}
        """That were lost."""
        self.strategy = Strategy.RECOVER
        self.num_steps = 0
        """Committed while it is open."""
        self.beyond_help = ""
        """Why nothing can help that repeats or replaces, where that is known."""
        self.progressed()
        self.first_fault_at = now
        self.last_fault_at = now
        self.staffed_at = now

    def progressed(self) -> None:
        """A step was committed: what the policy judges by counts from here."""
        self.num_faults = 0
        """Without the first loss of each process: a host takes all of its processes with it, a hundred perhaps."""
        self.deaths: Counter[str] = Counter()
        """Process → how often it was lost."""
        self.attempts = 0
        """Recoveries that failed by themselves."""
        self.blamed: Counter[str] = Counter()
        """Living process → how often an operation failed there."""
        self.repairs = 0
        """Repairs that failed since the run last fell back."""
        self.fell_back = False
        """The run has returned to an earlier step already."""

    def timing(self, since: Mapping[RecoveryState, float], now: float) -> dict[str, float]:
        """Seconds from the last fault to now, in parts; parts that did not occur are left out."""
        parts = {"total": now - self.last_fault_at, "outage": now - self.first_fault_at}
        if self.processes:
            parts["start"] = self.staffed_at - self.last_fault_at
        for name, begin, end in (
            ("lock", _S.PRE_LOCKING, _S.WAITING),
            ("rebuild", _S.REBUILDING, _S.REPAIRING),
            ("repair", _S.REPAIRING, _S.NOTIFYING),
        ):
            if begin in since and end in since and since[begin] >= self.last_fault_at:
                parts[name] = max(0.0, since[end] - since[begin])
        ready_at = max(self.staffed_at, since.get(_S.NORMAL, self.last_fault_at))
        parts["replay"] = now - max(ready_at, self.last_fault_at)
        return {name: round(max(0.0, seconds), 4) for name, seconds in parts.items()}


class Incidents:
    """At most one incident is open at a time."""

    def __init__(self) -> None:
        self.current: Incident | None = None
        self.start_s = 2.0
        """What the start of a replacement took last."""

    def fault(self, fault: Fault, *, number: int, now: float, lost: str = "") -> None:
        """Note a fault, of a process that is lost or of one that lives; a new incident begins if none is open.

        A loss explains failures before it, and is bounded by itself.
        """
        current = self.current = self.current or Incident(number, now)
        if len(current.faults) < MAX_FAULTS:
            current.faults.append(fault)
        if not lost or lost in current.deaths:
            current.num_faults += 1
        current.last_fault_at = current.staffed_at = now
        if lost:
            current.processes[lost] = None
            current.deaths[lost] += 1
            if fault.cause is None:  # It was not us who ended it.
                current.attempts = 0

    def staffed(self, now: float) -> None:
        """The last missing process is back."""
        if self.current is not None and self.current.processes:
            self.current.staffed_at = now
            self.start_s = max(0.01, now - self.current.last_fault_at)

    def situation(
        self, *, missing: tuple[str, ...], living: tuple[str, ...], replacements_fail: bool, step_s: float
    ) -> Situation:
        """What the policy is asked about."""
        current = self.current
        return Situation(
            faults=tuple(current.faults) if current else (),
            num_faults=current.num_faults if current else 0,
            beyond_help=current.beyond_help if current else "",
            lost=tuple(name for name in current.deaths if role_of(name) is Role.MODEL) if current else (),
            missing=missing,
            living=living,
            attempts=current.attempts if current else 0,
            most_deaths=max(current.deaths.values(), default=0) if current else 0,
            replacements_fail=replacements_fail,
            start_s=self.start_s,
            step_s=step_s,
        )

    def close(self) -> None:
        self.current = None
