"""What broke in a run, why, what was done about it and what it cost: a fold over its journal and nothing else. Pure.

The master's state carries the same book, so that the summary tells what `kintsugi incidents` tells.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from kintsugi.errors import Fault, GroupBroken, root_first
from kintsugi.facts import (
    CauseDiagnosed,
    EpochStarted,
    Fact,
    FaultNoted,
    IncidentClosed,
    IncidentOpened,
    ProcessJoined,
    ProcessLost,
    ProcessRetired,
    RolledBack,
    RunEnded,
    StepCommitted,
    StrategyChosen,
    TicketReturned,
)
from kintsugi.types import Role, process_id

MASTER = process_id(Role.MASTER, 0)
INTERRUPTED = "interrupted"
"""How a run ended that never said so: it was killed, and resumed later."""
LAST_WORDS = "; its last words:"
BEFORE_S, AFTER_S = 8.0, 3.0
"""A cause lies so far before the first fault that was noted, or so shortly after the last."""
LAST_ACCOUNTS = 3
MOST_DIAGNOSES = 64


class Relation(StrEnum):
    """What a fault is to its incident."""

    CAUSE = "cause"
    ALSO = "also"
    """Broke before the cause was mended, and nothing says that it followed from it."""
    THEN = "then"
    """Follows from another one."""


class ToldFault(msgspec.Struct, frozen=True):
    relation: Relation
    process: str
    kind: str
    message: str
    time: float
    """Wall clock; 0 where nobody noted it."""


class Loss(msgspec.Struct):
    """A process that was there and is gone: `Loss("model-1", "1.3", 4711, "1.8", 4812)`."""

    process: str
    incarnation: str
    pid: int
    """0 where the journal does not know it: a master's."""
    replacement: str = ""
    """Incarnation that took its place; empty while none has."""
    replacement_pid: int = 0


class Choice(msgspec.Struct):
    """A strategy that was chosen, so many times in a row."""

    strategy: str
    reason: str
    alternatives: tuple[str, ...]
    """The others, each with its price or with why it was impossible: "elastic: about 0.2 s"."""
    times: int = 1


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One incident as its journal tells it, from the first fault to the step that shows that it is over."""

    incident: int
    time: float
    """Wall clock of the first fault; 0 where nobody noted it."""
    step: int
    """The last one committed when it began."""
    phase: str
    faults: tuple[ToldFault, ...]
    """The cause first."""
    losses: tuple[Loss, ...]
    choices: tuple[Choice, ...]
    strategy: str
    """The last one; empty where nothing had to be chosen yet."""
    mended_step: int | None
    """The step that showed that it is over; None if it is not, or the run ended with it."""
    run_ended: str
    """How the run ended while it was open, or because of it; empty if it went on."""
    timing: dict[str, float]
    seconds: float | None
    """From the first fault until it was over."""
    steps_undone: int
    groups_again: int
    """Groups of samples that were given out again."""
    diagnosed: tuple[CauseDiagnosed, ...] = ()
    """What the watcher found to be the cause, from outside."""

    @property
    def cause(self) -> ToldFault:
        return self.faults[0]

    @property
    def is_open(self) -> bool:
        return self.mended_step is None and not self.run_ended


class IncidentReport(msgspec.Struct, frozen=True):
    """All that broke in a run."""

    incidents: tuple[Incident, ...]
    other_losses: tuple[Loss, ...]
    """Processes that were lost and came back without disturbing anything: agents."""
    other_diagnoses: tuple[CauseDiagnosed, ...] = ()
    """Troubles of which nothing broke: somebody was slow."""


class _Account:
    """An incident while facts come in."""

    def __init__(self, opened: IncidentOpened) -> None:
        self.opened = opened
        self.faults: list[Fault] = []
        self.losses: list[Loss] = []
        self.choices: list[Choice] = []
        self.closed: IncidentClosed | None = None
        self.run_ended = ""
        self.steps_undone = 0
        self.groups_again: set[str] = set()
        self.diagnosed: dict[tuple[str, str], CauseDiagnosed] = {}

    def choose(self, fact: StrategyChosen) -> None:
        """The reason ends with the strategies that were refused; they are told once, among the alternatives."""
        reason = "; ".join(part for part in fact.reason.split("; ") if part not in fact.alternatives)
        others = tuple(each for each in fact.alternatives if not each.startswith(f"{fact.strategy}:"))
        last = self.choices[-1] if self.choices else None
        if last is not None and (last.strategy, last.reason) == (fact.strategy, reason):
            last.times += 1
            last.alternatives = others
        else:
            self.choices.append(Choice(fact.strategy, reason, others))

    def told(self) -> Incident:
        times = [fault.time for fault in root_first(self.faults) if fault.time]
        timing = dict(self.closed.timing) if self.closed is not None else {}
        last = self.choices[-1].strategy if self.choices else ""
        return Incident(
            incident=self.opened.incident,
            time=min(times, default=0.0),
            step=self.opened.step,
            phase=self.opened.phase,
            faults=told_faults(self.faults),
            losses=tuple(self.losses),
            choices=tuple(self.choices),
            strategy=self.closed.outcome if self.closed is not None else last,
            mended_step=self.closed.step if self.closed is not None and not self.run_ended else None,
            run_ended=self.run_ended,
            timing=timing,
            seconds=self._seconds(timing, times=times) if timing else None,
            steps_undone=self.steps_undone,
            groups_again=len(self.groups_again),
            diagnosed=tuple(self.diagnosed.values()),
        )

    def explains(self, fact: CauseDiagnosed) -> bool:
        """Whether a diagnosis is about this incident: it names somebody of it, or began when it did."""
        faults = root_first(self.faults)
        times = [fault.time for fault in faults if fault.time]
        names = {fault.process for fault in faults} | {loss.process for loss in self.losses}
        near = times and min(times) - BEFORE_S <= fact.onset <= max(times) + AFTER_S
        return bool(near) or (self.closed is None and fact.process in names)

    @staticmethod
    def _seconds(timing: dict[str, float], *, times: list[float]) -> float:
        """A master that took over knows only how long it worked on it itself; the faults' own times reach further."""
        total = timing.get("total", 0.0)
        between = max(times, default=0.0) - min(times, default=0.0)
        return round(max(timing.get("outage", total), total + between), 4)


class IncidentBook:
    """Takes the facts of a journal in their order; most of them mean nothing here."""

    def __init__(self) -> None:
        self._accounts: list[_Account] = []
        self._open: _Account | None = None
        self._alive: dict[str, tuple[str, int]] = {}
        """Process → incarnation, pid."""
        self._recent: list[tuple[Fault | None, Loss]] = []
        """Lost since the last committed step while no incident was open: part of one that opens before the next."""
        self._other_losses: list[Loss] = []
        self._other_diagnoses: list[CauseDiagnosed] = []
        self._step = 0

    def report(self) -> IncidentReport:
        recent = (loss for _, loss in self._recent)
        return IncidentReport(
            tuple(account.told() for account in self._accounts),
            (*self._other_losses, *recent),
            tuple(self._other_diagnoses),
        )

    def unfinished(self) -> tuple[list[Fault], list[str]]:
        """Faults and lost processes of the incident that is open, for a master that has to finish it."""
        if self._open is None:
            return [], []
        return list(self._open.faults), [loss.process for loss in self._open.losses]

    def take(self, fact: Fact) -> None:
        match fact:
            case TicketReturned(ticket=ticket):
                if self._open is not None:
                    self._open.groups_again.add(ticket)
            case StepCommitted(step=step):
                self._step = step
                self._settle()
            case ProcessJoined(peer=peer, pid=pid):
                self._joined(peer.process, peer.incarnation, pid)
            case ProcessRetired(process=process):
                self._alive.pop(process, None)  # Nothing is lost when it ends.
            case ProcessLost():
                self._lost(fact)
            case RolledBack(step=step):
                if self._open is not None:
                    self._open.steps_undone += max(0, self._step - step)
                self._step = step
            case EpochStarted():
                self._begin_epoch(fact)
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
            self._open = _Account(fact)
            self._accounts.append(self._open)
            self._open.faults = [fault for fault, _ in self._recent if fault is not None] + [fact.fault]
            self._open.losses = [loss for _, loss in self._recent]
            self._recent.clear()
        elif self._open is not None:
            match fact:
                case FaultNoted(fault=fault):
                    self._open.faults.append(fault)
                case StrategyChosen():
                    self._open.choose(fact)
                case IncidentClosed():
                    self._open.closed, self._open = fact, None

    def _diagnosed(self, fact: CauseDiagnosed) -> None:
        """A diagnosis may come after the incident is over; it then belongs to the last one that it fits."""
        for account in reversed(self._accounts[-LAST_ACCOUNTS:]):
            if account.explains(fact):
                account.diagnosed[fact.process, fact.kind] = fact
                return
        self._other_diagnoses.append(fact)
        del self._other_diagnoses[:-MOST_DIAGNOSES]

    def _joined(self, process: str, incarnation: str, pid: int) -> None:
        self._alive[process] = (incarnation, pid)
        account = self._accounts[-1:]
        losses = [*(loss for each in account for loss in each.losses), *(loss for _, loss in self._recent)]
        for loss in (*losses, *self._other_losses):
            if loss.process == process and not loss.replacement:
                loss.replacement, loss.replacement_pid = incarnation, pid

    def _lost(self, fact: ProcessLost) -> None:
        """One that never came up is a fault of the incident, but nothing was lost with it."""
        incarnation, pid = self._alive.pop(fact.process, ("", 0))
        if incarnation == fact.incarnation:
            self._lose(Loss(fact.process, incarnation, pid), fact.fault)

    def _lose(self, loss: Loss, fault: Fault | None) -> None:
        if self._open is not None:
            self._open.losses.append(loss)
            self._open.faults += [fault] if fault is not None else []
        else:
            self._recent.append((fault, loss))

    def _settle(self) -> None:
        self._other_losses += [loss for _, loss in self._recent]
        self._recent.clear()

    def _begin_epoch(self, fact: EpochStarted) -> None:
        """Under a new master processes live on; in a new session nobody does, and that is no loss."""
        before = self._alive.pop(MASTER, None)
        if fact.adopting and before is not None:
            self._lose(Loss(MASTER, before[0], 0, fact.incarnation), None)
        if not fact.adopting:
            self._settle()
            self._alive.clear()
            if self._open is not None:
                self._open.run_ended, self._open = INTERRUPTED, None
        self._alive[MASTER] = (fact.incarnation, 0)

    def _end_run(self, fact: RunEnded) -> None:
        if self._open is not None:
            self._open.run_ended, self._open = fact.outcome, None
        elif fact.fault is not None and self._accounts:
            last = self._accounts[-1]
            if fact.fault.id in {fault.id for fault in root_first(last.faults)}:
                last.run_ended = fact.outcome


def report_of(facts: Iterable[Fact]) -> IncidentReport:
    book = IncidentBook()
    for fact in facts:
        book.take(fact)
    return book.report()


def told_faults(faults: Iterable[Fault]) -> tuple[ToldFault, ...]:
    """Faults with what each is to the first of them, the cause."""
    told = []
    for number, fault in enumerate(root_first(faults)):
        follows = fault.cause is not None or fault.kind == GroupBroken.__name__
        relation = Relation.CAUSE if number == 0 else Relation.THEN if follows else Relation.ALSO
        told.append(ToldFault(relation, fault.process, fault.kind, fault.message, fault.time))
    return tuple(told)


def headline(message: str) -> str:
    """A message on one line: of the last words of a process, the line that says what it died of.

    >>> headline("exited with code 1; its last words: Traceback (most recent call last):\\n  f()\\nKeyError: 'x'\\n")
    "exited with code 1: KeyError: 'x'"
    """
    lines = [line.rstrip() for line in message.splitlines() if line.strip()]
    first, _, words = lines[0].partition(LAST_WORDS) if lines else ("", "", "")
    said = [line for line in lines[1:] if not line[0].isspace()] or [lines[-1]] if lines[1:] else [words]
    return f"{first}: {said[-1].strip()}" if said[-1] else first
