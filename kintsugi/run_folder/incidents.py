"""Incidents of a run, reconstructed from the facts of its journal: cause, losses, recovery and cost. Pure.

The state of the master contains the same index, so `summary.json` and `kintsugi incidents` agree. It has the newest
incidents; of the others it has sums, and the master writes each to `incidents.jsonl` when it drops it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from kintsugi.errors import Fault, GroupBroken, root_first
from kintsugi.journal.facts import (
    CauseDiagnosed,
    Fact,
    FaultNoted,
    IncidentClosed,
    IncidentOpened,
    ProcessJoined,
    ProcessLost,
    ProcessRetired,
    RolledBack,
    RunEnded,
    StateFolded,
    StepCommitted,
    StrategyChosen,
    TermStarted,
    TicketReturned,
)
from kintsugi.types import Role, process_id

MASTER = process_id(Role.MASTER, 0)
INTERRUPTED = "interrupted"
"""End of a run without a recorded end: it was killed, and resumed later."""
LAST_WORDS = "; its last words:"
"""Separator between the exit of a process and the end of its log, in messages of faults."""
BEFORE_S, AFTER_S = 8.0, 3.0
"""Window of a matching diagnosis: its onset is at most this long before the first fault, or after the last one."""
LAST_INCIDENTS = 3
"""Number of latest incidents that a diagnosis may belong to."""
MOST_DIAGNOSES = 64
"""Maximum number of diagnoses without an incident that are kept."""
MOST_INCIDENTS = 200
"""Incidents that are kept one by one."""
MOST_FAULTS, MOST_LOSSES = 256, 2048
"""First faults, and first losses, of one incident that are kept; `events/` has all of them."""


class FaultRelation(StrEnum):
    """Relation of a fault to the cause of its incident."""

    CAUSE = "cause"
    ALSO = "also"
    """Occurred before the incident was resolved, without a known relation to the cause."""
    THEN = "then"
    """Consequence of another fault."""


class ReportedFault(msgspec.Struct, frozen=True):
    """A fault of an incident."""

    relation: FaultRelation
    process: str
    kind: str
    message: str
    time: float
    """Wall clock; 0 if unknown."""


class ProcessLoss(msgspec.Struct):
    """Loss of a running process: `ProcessLoss("model-1", "1.3", 4711, "1.8", 4812)`."""

    process: str
    incarnation: str
    pid: int
    """0 if the journal does not contain it, as for a master."""
    replacement: str = ""
    """Incarnation of the replacement; empty if there is none yet."""
    replacement_pid: int = 0


class ChosenStrategy(msgspec.Struct):
    """A recovery strategy that was chosen one or more times in a row."""

    strategy: str
    reason: str
    alternatives: tuple[str, ...]
    """Strategies that were not chosen, each with its cost or the reason why it was impossible: "elastic: about 0.2
    s"."""
    times: int = 1


class IncidentHistory(msgspec.Struct, frozen=True, kw_only=True):
    """One incident, from the first fault to the first step that was committed after it."""

    incident: int
    time: float
    """Wall clock of the first fault; 0 if unknown."""
    step: int
    """Last committed step when it began."""
    phase: str
    faults: tuple[ReportedFault, ...]
    """All faults, the cause first."""
    losses: tuple[ProcessLoss, ...]
    choices: tuple[ChosenStrategy, ...]
    strategy: str
    """Strategy that was chosen last; empty if none was needed yet."""
    mended_step: int | None
    """First step that was committed after the recovery; None if the incident is open or the run ended with it."""
    run_ended: str
    """Outcome of the run if it ended during the incident or because of it; else empty."""
    timing: dict[str, float]
    seconds: float | None
    """Duration from the first fault to the end of the incident."""
    steps_undone: int
    groups_again: int
    """Number of groups that were issued again."""
    diagnosed: tuple[CauseDiagnosed, ...] = ()
    """Root causes that the diagnosis process found."""

    @property
    def cause(self) -> ReportedFault:
        return self.faults[0]

    @property
    def is_open(self) -> bool:
        return self.mended_step is None and not self.run_ended


class EarlierIncidents(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sums over the incidents that are no longer kept one by one."""

    count: int = 0
    recovered: int = 0
    seconds: float = 0.0
    steps_undone: int = 0

    def plus(self, incident: IncidentHistory) -> EarlierIncidents:
        return EarlierIncidents(
            self.count + 1,
            self.recovered + (incident.mended_step is not None),
            self.seconds + (incident.seconds or 0.0),
            self.steps_undone + incident.steps_undone,
        )


class IncidentReport(msgspec.Struct, frozen=True):
    """Incidents of a run."""

    incidents: tuple[IncidentHistory, ...]
    """All of them, or the newest ones; then `earlier` has the sums of the others."""
    other_losses: tuple[ProcessLoss, ...]
    """Processes, such as agents, that were lost and replaced without affecting training."""
    other_diagnoses: tuple[CauseDiagnosed, ...] = ()
    """Causes that belong to no incident: slowdowns, and losses that did not affect training."""
    earlier: EarlierIncidents = EarlierIncidents()


class _IncidentRecord(msgspec.Struct, omit_defaults=True):
    """Mutable record of one incident while facts are read."""

    opened: IncidentOpened
    faults: list[Fault] = []
    losses: list[ProcessLoss] = []
    choices: list[ChosenStrategy] = []
    closed: IncidentClosed | None = None
    run_ended: str = ""
    steps_undone: int = 0
    groups_again: dict[str, None] = {}
    diagnosed: list[CauseDiagnosed] = []

    def choose(self, fact: StrategyChosen) -> None:
        """Add a chosen strategy; rejected ones are removed from its reason, as they are among the alternatives."""
        reason = "; ".join(part for part in fact.reason.split("; ") if part not in fact.alternatives)
        others = tuple(each for each in fact.alternatives if not each.startswith(f"{fact.strategy}:"))
        last = self.choices[-1] if self.choices else None
        if last is not None and (last.strategy, last.reason) == (fact.strategy, reason):
            last.times += 1
            last.alternatives = others
        else:
            self.choices.append(ChosenStrategy(fact.strategy, reason, others))
            del self.choices[1 : -MOST_FAULTS + 1]

    def add_fault(self, fault: Fault) -> None:
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(fault)

    def add_loss(self, loss: ProcessLoss) -> None:
        if len(self.losses) < MOST_LOSSES:
            self.losses.append(loss)

    def history(self) -> IncidentHistory:
        times = [fault.time for fault in root_first(self.faults) if fault.time]
        timing = dict(self.closed.timing) if self.closed is not None else {}
        last = self.choices[-1].strategy if self.choices else ""
        return IncidentHistory(
            incident=self.opened.incident,
            time=min(times, default=0.0),
            step=self.opened.step,
            phase=self.opened.phase,
            faults=reported_faults(self.faults),
            losses=tuple(self.losses),
            choices=tuple(self.choices),
            strategy=self.closed.outcome if self.closed is not None else last,
            mended_step=self.closed.step if self.closed is not None and not self.run_ended else None,
            run_ended=self.run_ended,
            timing=timing,
            seconds=self._seconds(timing, times=times) if timing else None,
            steps_undone=self.steps_undone,
            groups_again=len(self.groups_again),
            diagnosed=tuple(self.diagnosed),
        )

    def diagnose(self, fact: CauseDiagnosed) -> None:
        """Add a cause; a later diagnosis of the same kind for the same process takes its place."""
        for number, known in enumerate(self.diagnosed):
            if (known.process, known.kind) == (fact.process, fact.kind):
                self.diagnosed[number] = fact
                return
        self.diagnosed.append(fact)

    def explains(self, fact: CauseDiagnosed) -> bool:
        """Whether a diagnosis belongs to this incident: same time, or a process of the open incident."""
        faults = root_first(self.faults)
        times = [fault.time for fault in faults if fault.time]
        names = {fault.process for fault in faults} | {loss.process for loss in self.losses}
        near = times and min(times) - BEFORE_S <= fact.onset <= max(times) + AFTER_S
        return bool(near) or (self.closed is None and fact.process in names)

    @staticmethod
    def _seconds(timing: dict[str, float], *, times: list[float]) -> float:
        """Duration; a master that took over has measured its own part only, so the times of the faults count too."""
        total = timing.get("total", 0.0)
        between = max(times, default=0.0) - min(times, default=0.0)
        return round(max(timing.get("outage", total), total + between), 4)


class _FoldedIndex(msgspec.Struct, omit_defaults=True):
    records: list[_IncidentRecord]
    is_open: bool
    """Whether the last record is of the open incident."""
    alive: dict[str, tuple[str, int]]
    recent: list[tuple[Fault | None, ProcessLoss]]
    other_losses: list[ProcessLoss]
    other_diagnoses: list[CauseDiagnosed]
    step: int
    earlier: EarlierIncidents = EarlierIncidents()


class IncidentIndex:
    """Index of the incidents in a journal; `take` receives all facts in order and ignores unrelated ones."""

    def __init__(self) -> None:
        self._records: list[_IncidentRecord] = []
        self._open: _IncidentRecord | None = None
        self._alive: dict[str, tuple[str, int]] = {}
        """Running processes: name → incarnation, pid."""
        self._recent: list[tuple[Fault | None, ProcessLoss]] = []
        """Losses since the last committed step without an open incident; part of an incident that opens before the
        next."""
        self._other_losses: list[ProcessLoss] = []
        self._other_diagnoses: list[CauseDiagnosed] = []
        self._step = 0
        self._earlier = EarlierIncidents()
        self._dropped: deque[IncidentHistory] = deque(maxlen=MOST_INCIDENTS)
        """Incidents that were dropped since `take_dropped`."""

    def take_dropped(self) -> list[IncidentHistory]:
        """Return the incidents that are not kept any more, once."""
        dropped = list(self._dropped)
        self._dropped.clear()
        return dropped

    def report(self) -> IncidentReport:
        recent = (loss for _, loss in self._recent)
        return IncidentReport(
            tuple(record.history() for record in self._records),
            (*self._other_losses, *recent),
            tuple(self._other_diagnoses),
            self._earlier,
        )

    def fold(self) -> bytes:
        """Encode the index."""
        return msgspec.msgpack.encode(
            _FoldedIndex(
                records=self._records,
                is_open=self._open is not None,
                alive=self._alive,
                recent=self._recent,
                other_losses=self._other_losses,
                other_diagnoses=self._other_diagnoses,
                step=self._step,
                earlier=self._earlier,
            )
        )

    def _restore(self, folded: bytes) -> None:
        found = msgspec.msgpack.decode(folded, type=_FoldedIndex)
        self._records = found.records
        self._open = found.records[-1] if found.is_open else None
        self._alive, self._recent, self._step = found.alive, found.recent, found.step
        self._other_losses, self._other_diagnoses = found.other_losses, found.other_diagnoses
        self._earlier = found.earlier
        self._drop_oldest()

    def unfinished(self) -> tuple[list[Fault], list[str]]:
        """Faults and lost processes of the open incident, for a master that takes over."""
        if self._open is None:
            return [], []
        return list(self._open.faults), [loss.process for loss in self._open.losses]

    def take(self, fact: Fact) -> None:
        match fact:
            case StateFolded(parts=parts):
                self._restore(parts["incidents"])
            case TicketReturned(ticket=ticket):
                if self._open is not None:
                    self._open.groups_again[ticket] = None
            case StepCommitted(step=step):
                self._step = step
                self._settle()
            case ProcessJoined(peer=peer, pid=pid):
                self._joined(peer.process, peer.incarnation, pid)
            case ProcessRetired(process=process):
                self._alive.pop(process, None)  # Its exit is not a loss.
            case ProcessLost():
                self._lost(fact)
            case RolledBack(step=step):
                if self._open is not None:
                    self._open.steps_undone += max(0, self._step - step)
                self._step = step
            case TermStarted():
                self._begin_term(fact)
            case RunEnded():
                self._end_run(fact)
            case CauseDiagnosed():
                self._diagnosed(fact)
            case IncidentOpened() | FaultNoted() | StrategyChosen() | IncidentClosed():
                self._take_of_incident(fact)
            case _:
                pass

    def _take_of_incident(self, fact: IncidentOpened | FaultNoted | StrategyChosen | IncidentClosed) -> None:
        if isinstance(fact, IncidentOpened):
            self._open = _IncidentRecord(fact)
            self._records.append(self._open)
            self._drop_oldest()
            self._open.faults = [fault for fault, _ in self._recent if fault is not None] + [fact.fault]
            self._open.losses = [loss for _, loss in self._recent]
            self._recent.clear()
        elif self._open is not None:
            match fact:
                case FaultNoted(fault=fault):
                    self._open.add_fault(fault)
                case StrategyChosen():
                    self._open.choose(fact)
                case IncidentClosed():
                    self._open.closed, self._open = fact, None

    def _drop_oldest(self) -> None:
        while len(self._records) > MOST_INCIDENTS:
            history = self._records.pop(0).history()
            self._earlier = self._earlier.plus(history)
            self._dropped.append(history)

    def _diagnosed(self, fact: CauseDiagnosed) -> None:
        """Assign a diagnosis to the latest incident that it explains, which may be over already."""
        for record in reversed(self._records[-LAST_INCIDENTS:]):
            if record.explains(fact):
                record.diagnose(fact)
                return
        self._other_diagnoses.append(fact)
        del self._other_diagnoses[:-MOST_DIAGNOSES]

    def _joined(self, process: str, incarnation: str, pid: int) -> None:
        self._alive[process] = (incarnation, pid)
        latest = self._records[-1:]
        losses = [*(loss for each in latest for loss in each.losses), *(loss for _, loss in self._recent)]
        for loss in (*losses, *self._other_losses):
            if loss.process == process and not loss.replacement:
                loss.replacement, loss.replacement_pid = incarnation, pid

    def _lost(self, fact: ProcessLost) -> None:
        """Record the loss of a process; one that never started is a fault only."""
        incarnation, pid = self._alive.pop(fact.process, ("", 0))
        if incarnation == fact.incarnation:
            self._lose(ProcessLoss(fact.process, incarnation, pid), fact.fault)

    def _lose(self, loss: ProcessLoss, fault: Fault | None) -> None:
        if self._open is not None:
            self._open.add_loss(loss)
            if fault is not None:
                self._open.add_fault(fault)
        elif len(self._recent) < MOST_LOSSES:
            self._recent.append((fault, loss))

    def _settle(self) -> None:
        self._other_losses += [loss for _, loss in self._recent]
        del self._other_losses[:-MOST_LOSSES]
        self._recent.clear()

    def _begin_term(self, fact: TermStarted) -> None:
        """A new master adopts running processes; a new session has none, which is not a loss."""
        before = self._alive.pop(MASTER, None)
        if fact.adopting and before is not None:
            self._lose(ProcessLoss(MASTER, before[0], 0, fact.incarnation), None)
        if not fact.adopting:
            self._settle()
            self._alive.clear()
            if self._open is not None:
                self._open.run_ended, self._open = INTERRUPTED, None
        self._alive[MASTER] = (fact.incarnation, 0)

    def _end_run(self, fact: RunEnded) -> None:
        if self._open is not None:
            self._open.run_ended, self._open = fact.outcome, None
        elif fact.fault is not None and self._records:
            last = self._records[-1]
            if fact.fault.id in {fault.id for fault in root_first(last.faults)}:
                last.run_ended = fact.outcome


def report_of(facts: Iterable[Fact]) -> IncidentReport:
    """Read all facts of a journal and report its incidents."""
    index = IncidentIndex()
    for fact in facts:
        index.take(fact)
    return index.report()


def reported_faults(faults: Iterable[Fault]) -> tuple[ReportedFault, ...]:
    """Order faults with the cause first and state the relation of each to it."""
    reported = []
    for number, fault in enumerate(root_first(faults)):
        follows = fault.cause is not None or fault.kind == GroupBroken.__name__
        relation = (
            FaultRelation.CAUSE if number == 0 else FaultRelation.THEN if follows else FaultRelation.ALSO
        )
        reported.append(ReportedFault(relation, fault.process, fault.kind, fault.message, fault.time))
    return tuple(reported)


def headline(message: str) -> str:
    """Shorten a message to one line; of the log of a dead process, keep the line with the error.

    >>> headline("exited with code 1; its last words: Traceback (most recent call last):\\n  f()\\nKeyError: 'x'\\n")
    "exited with code 1: KeyError: 'x'"
    """
    lines = [line.rstrip() for line in message.splitlines() if line.strip()]
    first, _, words = lines[0].partition(LAST_WORDS) if lines else ("", "", "")
    errors = [line for line in lines[1:] if not line[0].isspace()] or [lines[-1]] if lines[1:] else [words]
    return f"{first}: {errors[-1].strip()}" if errors[-1] else first
