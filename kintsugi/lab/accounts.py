"""What a run trained, told by its journal alone: a hash of every step that stands, and every sample accounted for."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import msgspec

from kintsugi.facts import (
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
    """A step that stands; two runs did the same exactly when all their records are equal."""

    state: str
    """Digest of weights, optimizer and random state that the ranks agreed on."""
    trained: str
    """Hash over the keys, tokens and rewards of its samples, in their order."""
    cursor: str
    """Hash over every ticket issued and set aside by then: where the data stand, and the ledger."""


class Rollback(msgspec.Struct, frozen=True):
    """Steps after `to` were undone when `step` was the last one."""

    step: int
    to: int


class Incident(msgspec.Struct, frozen=True):
    """What the master recorded of one incident."""

    number: int
    step: int
    """The last one committed when it was opened."""
    processes: frozenset[str]
    """That were lost."""
    timing: dict[str, float]
    outcome: str


class Account(msgspec.Struct, frozen=True):
    """A journal, added up."""

    weights_sha256: str
    steps: dict[int, StepRecord]
    samples_issued: int
    samples_lost: int
    """Issued, and neither trained nor set aside with a reason."""
    samples_duplicated: int
    """Trained in more than one step that stands."""
    rollbacks: tuple[Rollback, ...]
    incidents: tuple[Incident, ...]
    staleness_max: int = 0
    """Steps between the weights that a sample was drawn from and those that it trained, of the oldest one."""
    rewards: tuple[float, ...] = ()
    """Mean reward of every step that stands and has one, in order."""

    @property
    def last_reward(self) -> float:
        """What the run came to: the mean over its last steps, one in ten."""
        last = self.rewards[-max(1, len(self.rewards) // 10) :]
        return sum(last) / max(1, len(last))


def account_of(facts: Iterable[Fact]) -> Account:
    """Fold a journal."""
    fold = _Fold()
    for fact in facts:
        fold.take(fact)
    return fold.account()


class _Fold:
    def __init__(self) -> None:
        self._issued: dict[str, int] = {}
        self._scored: dict[str, dict[str, str]] = {}
        self._versions: dict[str, int] = {}
        """Ticket → the oldest weights that a sample of it was drawn from; -1 for rows of the data."""
        self._ages: dict[int, int] = {}
        self._rewards: dict[int, float] = {}
        self._set_aside: set[str] = set()
        self._formed: dict[int, tuple[str, ...]] = {}
        self._standing: dict[int, tuple[StepRecord, tuple[str, ...]]] = {}
        self._rollbacks: list[Rollback] = []
        self._opened: dict[int, IncidentOpened] = {}
        self._closed: dict[int, IncidentClosed] = {}
        self._sha256 = ""
        self._cursor = 0
        """Sum of the hashes of everything issued or set aside: independent of the order of either."""

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
                self._standing[step] = (self._record(step, digest), self._formed[step])
                versions = [self._versions[ticket] for ticket in self._formed[step]]
                self._ages[step] = max(
                    (step - 1 - version for version in versions if version >= 0), default=0
                )
                if "reward_mean" in metrics:
                    self._rewards[step] = metrics["reward_mean"]
            case RolledBack(step=last):
                self._rollbacks.append(Rollback(max(self._standing, default=0), last))
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

    def _record(self, step: int, state: str) -> StepRecord:
        tickets = self._formed[step]
        trained = [line for ticket in tickets for _, line in sorted(self._scored.get(ticket, {}).items())]
        return StepRecord(state=state, trained=_hash(trained), cursor=f"{self._cursor:064x}")

    def account(self) -> Account:
        trained = Counter(
            key for _, tickets in self._standing.values() for ticket in tickets for key in self._keys(ticket)
        )
        issued = {key for ticket in self._issued for key in self._keys(ticket)}
        return Account(
            weights_sha256=self._sha256,
            steps={step: record for step, (record, _) in self._standing.items()},
            samples_issued=len(issued),
            samples_lost=len(issued - set(trained) - self._set_aside),
            samples_duplicated=sum(count - 1 for count in trained.values()),
            rollbacks=tuple(self._rollbacks),
            staleness_max=max((self._ages[step] for step in self._standing), default=0),
            rewards=tuple(self._rewards[step] for step in sorted(self._standing) if step in self._rewards),
            incidents=tuple(
                Incident(
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


def first_difference(one: Account, other: Account, *, as_far_as_both_came: bool = False) -> int | None:
    """The first step in which two runs did not do the same; None when they did."""
    steps = (
        one.steps.keys() & other.steps.keys()
        if as_far_as_both_came
        else one.steps.keys() | other.steps.keys()
    )
    return next((step for step in sorted(steps) if one.steps.get(step) != other.steps.get(step)), None)
