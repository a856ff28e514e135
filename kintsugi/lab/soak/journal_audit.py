"""Audit of a run from its journal alone: a hash of every committed step, and an audit of every sample."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import msgspec

from kintsugi.journal.facts import (
    BatchFormed,
    Fact,
    IncidentClosed,
    IncidentOpened,
    RolledBack,
    RunEnded,
    SampleQuarantined,
    SamplesScored,
    StepCommitted,
    TicketExpired,
    TicketFiltered,
    TicketsIssued,
)
from kintsugi.types import sample_key


class StepRecord(msgspec.Struct, frozen=True):
    """Committed step that was not rolled back; two runs are equal exactly when all their records are equal."""

    state: str
    """Digest of weights, optimizer and random state that the ranks agreed on."""
    trained: str
    """Hash over the keys, tokens and rewards of its samples, in order."""
    cursor: str
    """Hash over all tickets issued and samples set aside up to the first commit of this step: position in the data, and
    the ledger."""


class JournaledRollback(msgspec.Struct, frozen=True):
    """Steps after `to` were undone when `step` was the last one."""

    step: int
    to: int


class JournaledIncident(msgspec.Struct, frozen=True):
    """Incident as the master recorded it."""

    number: int
    step: int
    """Last step committed when the incident was opened."""
    processes: frozenset[str]
    """Processes that were lost."""
    timing: dict[str, float]
    outcome: str


class JournalAudit(msgspec.Struct, frozen=True):
    """Totals of a journal."""

    weights_sha256: str
    steps: dict[int, StepRecord]
    samples_issued: int
    samples_lost: int
    """Samples issued that were neither trained nor set aside with a reason."""
    samples_duplicated: int
    """Samples trained in more than one step."""
    rollbacks: tuple[JournaledRollback, ...]
    incidents: tuple[JournaledIncident, ...]
    staleness_max: int = 0
    """Largest number of steps between the weights that generated a sample and the weights that it trained."""
    rewards: tuple[float, ...] = ()
    """Mean rewards of the steps that have one, in order."""

    @property
    def last_reward(self) -> float:
        """Mean reward over the last tenth of the steps."""
        last = self.rewards[-max(1, len(self.rewards) // 10) :]
        return sum(last) / max(1, len(last))


def audit(facts: Iterable[Fact]) -> JournalAudit:
    """Fold the facts of a journal into totals."""
    fold = _Fold()
    for fact in facts:
        fold.take(fact)
    return fold.audit()


class _Fold:
    def __init__(self) -> None:
        self._issued: dict[str, int] = {}
        self._scored: dict[str, dict[str, str]] = {}
        self._versions: dict[str, int] = {}
        """Ticket → oldest weights version that generated one of its samples; -1 for rows of the data set."""
        self._ages: dict[int, int] = {}
        self._rewards: dict[int, float] = {}
        self._set_aside: set[str] = set()
        self._formed: dict[int, tuple[str, ...]] = {}
        self._standing: dict[int, tuple[StepRecord, tuple[str, ...]]] = {}
        self._rollbacks: list[JournaledRollback] = []
        self._opened: dict[int, IncidentOpened] = {}
        self._closed: dict[int, IncidentClosed] = {}
        self._sha256 = ""
        self._cursor = 0
        """Sum of the hashes of everything issued or set aside: independent of the order."""
        self._cursors: dict[int, str] = {}
        """Step → the sum when it was committed for the first time."""

    def take(self, fact: Fact) -> None:
        match fact:
            case TicketsIssued(tickets=tickets):
                self._count([ticket.id for ticket in tickets if ticket.id not in self._issued])
                self._issued |= {ticket.id: ticket.num_samples for ticket in tickets}
            case SamplesScored(ticket=ticket, samples=samples):
                digests = {meta.key: f"{meta.key} {meta.digest} {meta.reward!r}" for meta in samples}
                self._scored[ticket] = self._scored.get(ticket, {}) | digests
                self._versions[ticket] = min(meta.version for meta in samples)
            case SampleQuarantined(key=key):
                self._put_aside([key])
            case TicketFiltered(ticket=ticket) | TicketExpired(ticket=ticket):
                self._put_aside(self._keys(ticket))
            case BatchFormed(step=step, tickets=tickets):
                self._formed[step] = tickets
            case StepCommitted(step=step, state_digest=digest, metrics=metrics):
                # A step that is made again finds the tickets of the undone steps after it issued already.
                cursor = self._cursors.setdefault(step, f"{self._cursor:064x}")
                self._standing[step] = (self._record(step, digest, cursor), self._formed[step])
                versions = [self._versions[ticket] for ticket in self._formed[step]]
                self._ages[step] = max(
                    (step - 1 - version for version in versions if version >= 0), default=0
                )
                if "reward_mean" in metrics:
                    self._rewards[step] = metrics["reward_mean"]
            case RolledBack(step=last):
                self._rollbacks.append(JournaledRollback(max(self._standing, default=0), last))
                self._standing = {step: kept for step, kept in self._standing.items() if step <= last}
            case IncidentOpened(incident=number):
                self._opened.setdefault(number, fact)
            case IncidentClosed(incident=number):
                self._closed[number] = fact
            case RunEnded(weights_sha256=sha256):
                self._sha256 = sha256
            case _:
                pass

    def _put_aside(self, keys: list[str]) -> None:
        self._count([f"aside {key}" for key in keys if key not in self._set_aside])
        self._set_aside.update(keys)

    def _count(self, names: list[str]) -> None:
        self._cursor = (self._cursor + sum(int(_hash([name]), 16) for name in names)) % (1 << 256)

    def _keys(self, ticket: str) -> list[str]:
        return [sample_key(ticket, index) for index in range(self._issued[ticket])]

    def _record(self, step: int, state: str, cursor: str) -> StepRecord:
        tickets = self._formed[step]
        trained = [line for ticket in tickets for _, line in sorted(self._scored.get(ticket, {}).items())]
        return StepRecord(state=state, trained=_hash(trained), cursor=cursor)

    def audit(self) -> JournalAudit:
        trained = Counter(
            key for _, tickets in self._standing.values() for ticket in tickets for key in self._keys(ticket)
        )
        issued = {key for ticket in self._issued for key in self._keys(ticket)}
        return JournalAudit(
            weights_sha256=self._sha256,
            steps={step: record for step, (record, _) in self._standing.items()},
            samples_issued=len(issued),
            samples_lost=len(issued - set(trained) - self._set_aside),
            samples_duplicated=sum(count - 1 for count in trained.values()),
            rollbacks=tuple(self._rollbacks),
            staleness_max=max((self._ages[step] for step in self._standing), default=0),
            rewards=tuple(self._rewards[step] for step in sorted(self._standing) if step in self._rewards),
            incidents=tuple(
                JournaledIncident(
                    number=number,
                    step=opened.step,
                    processes=frozenset(
                        {opened.fault.process, *(closed.processes if closed is not None else ())}
                    ),
                    timing=closed.timing if closed is not None else {},
                    outcome=closed.outcome if closed is not None else "open",
                )
                for number, opened in self._opened.items()
                for closed in (self._closed.get(number),)
            ),
        )


def _hash(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def first_difference(
    one: JournalAudit, other: JournalAudit, *, common_steps_only: bool = False
) -> int | None:
    """Return the first step in which two runs differ; None when they are equal."""
    steps = (
        one.steps.keys() & other.steps.keys() if common_steps_only else one.steps.keys() | other.steps.keys()
    )
    return next((step for step in sorted(steps) if one.steps.get(step) != other.steps.get(step)), None)
