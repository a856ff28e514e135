"""Log of incidents: faults, their recovery, and its duration. Pure.

Faults that come before the last one is recovered belong to one incident, which is timed from the last of them. An
incident is over when everything lost is back (or given up) and a step was committed since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kintsugi.errors import Fault, is_shortage
from kintsugi.recovery.states import RecoveryState
from kintsugi.recovery.strategy import MAX_FAULTS, FaultSituation, Strategy
from kintsugi.runtime.backoff import SHORTAGES_PER_FAILURE
from kintsugi.types import Role, role_of

_S = RecoveryState


class Incident:
    """One incident, from its first fault to the step that proves that it is over."""

    def __init__(self, number: int, now: float) -> None:
        self.number = number
        self.faults: list[Fault] = []
        """First faults of the incident; the journal has all of them."""
        self.processes: dict[str, None] = {}
        """Processes that were lost."""
        self.strategy = Strategy.RECOVER
        self.num_steps = 0
        """Steps committed while the incident is open."""
        self.unrecoverable = ""
        """Reason why neither repeating nor replacing can help, where it is known."""
        self.progressed()
        self.first_fault_at = now
        self.last_fault_at = now
        self.all_live_at = now

    def progressed(self) -> None:
        """Reset the counters that the choice of a strategy depends on: a step was committed."""
        self.num_faults = 0
        """Number of faults without the first loss of each process: the loss of a host is a hundred of those."""
        self.deaths: Counter[str] = Counter()
        """Process → how often it was lost."""
        self.shortages: Counter[str] = Counter()
        """Process → how often it was lost because the host did not give it what it needs."""
        self.attempts = 0
        """Number of recoveries that failed without a new fault."""
        self.blamed: Counter[str] = Counter()
        """Live process → number of operations that failed there."""
        self.repairs = 0
        """Number of repairs that failed since the last rollback."""
        self.unaddressed = 0
        """Number of repairs that failed because a rank did not have the address of a source; not among `attempts`."""
        self.sent_home: set[str] = set()
        """Ranks that were started again on the host of their snapshot."""
        self.does_not_fit = ""
        """Reason why the ranks in `refused` can not hold the state of those that are missing as well."""
        self.refused: tuple[str, ...] = ()
        """Ranks of which that was said; others may be able to."""
        self.awaits_lost = False
        """Whether lost ranks are waited for, because the snapshots of their parts are out of reach."""
        self.awaited: set[str] = set()
        """Ranks that were waited for in vain."""
        self.fell_back = False
        """Whether the run has already returned to an earlier step."""

    def timing(self, since: Mapping[RecoveryState, float], now: float) -> dict[str, float]:
        """Return the seconds from the last fault to now, in parts; parts that did not occur are left out."""
        parts = {"total": now - self.last_fault_at, "outage": now - self.first_fault_at}
        if self.processes:
            parts["start"] = self.all_live_at - self.last_fault_at
        for name, begin, end in (
            ("lock", _S.PRE_LOCKING, _S.WAITING),
            ("rebuild", _S.REBUILDING, _S.REPAIRING),
            ("repair", _S.REPAIRING, _S.NOTIFYING),
        ):
            if begin in since and end in since and since[begin] >= self.last_fault_at:
                parts[name] = max(0.0, since[end] - since[begin])
        ready_at = max(self.all_live_at, since.get(_S.NORMAL, self.last_fault_at))
        parts["replay"] = now - max(ready_at, self.last_fault_at)
        return {name: round(max(0.0, seconds), 4) for name, seconds in parts.items()}


class IncidentLog:
    """At most one incident is open at a time."""

    def __init__(self) -> None:
        self.current: Incident | None = None
        self.start_s = 2.0
        """Duration of the last start of a replacement."""

    def fault(self, fault: Fault, *, number: int, now: float, lost: str = "") -> None:
        """Add a fault, of a lost process or a live one; open an incident if none is open.

        A loss explains the failures before it, and has its own limit.
        """
        current = self.current = self.current or Incident(number, now)
        if len(current.faults) < MAX_FAULTS:
            current.faults.append(fault)
        if not lost or lost in current.deaths:
            current.num_faults += 1
        current.last_fault_at = current.all_live_at = now
        if lost:
            current.processes[lost] = None
            current.deaths[lost] += self._weight(current, fault, lost)
            if fault.cause is None:  # The master did not terminate it.
                current.attempts = 0

    @staticmethod
    def _weight(current: Incident, fault: Fault, lost: str) -> int:
        """Return by how much a loss counts: what the host lacks may come back, so only every fifth does."""
        if not is_shortage(fault):
            return 1
        current.shortages[lost] += 1
        return int(current.shortages[lost] % SHORTAGES_PER_FAILURE == 0)

    def all_live(self, now: float) -> None:
        """Record the time at which the last missing process is back."""
        if self.current is not None and self.current.processes:
            self.current.all_live_at = now
            self.start_s = max(0.01, now - self.current.last_fault_at)

    def situation(
        self,
        *,
        missing: tuple[str, ...],
        living: tuple[str, ...],
        replacements_fail: bool,
        step_s: float,
        cut_over: tuple[str, ...] = (),
    ) -> FaultSituation:
        """Return the situation from which a strategy is chosen."""
        current = self.current
        return FaultSituation(
            faults=tuple(current.faults) if current else (),
            num_faults=current.num_faults if current else 0,
            unrecoverable=current.unrecoverable if current else "",
            lost=tuple(name for name in current.deaths if role_of(name) is Role.MODEL) if current else (),
            missing=missing,
            living=living,
            attempts=current.attempts if current else 0,
            most_deaths=max(current.deaths.values(), default=0) if current else 0,
            replacements_fail=replacements_fail,
            start_s=self.start_s,
            step_s=step_s,
            cut_over=cut_over,
            does_not_fit=current.does_not_fit if current and cut_over == current.refused else "",
        )

    def close(self) -> None:
        self.current = None
