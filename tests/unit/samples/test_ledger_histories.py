"""Random histories: any order, duplicates, losses, deaths, restarts and rollbacks, watched by an independent oracle.

The oracle knows nothing of the ledger's states. It sees only the facts that the ledger accepted and keeps its own,
much simpler books about them. Ledgers with planted bugs show that it can tell a wrong one.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import ClassVar

import pytest

from kintsugi.journal.facts import (
    BatchFormed,
    LedgerFact,
    RolledBack,
    SampleQuarantined,
    SamplesScored,
    StepCommitted,
    TicketAssigned,
    TicketExpired,
    TicketFiltered,
    TicketReturned,
    TicketsIssued,
)
from kintsugi.samples.ledger import Ledger, LedgerError, SampleState
from kintsugi.samples.lifecycle import LIVE, TRANSITIONS
from kintsugi.types import FinishReason, SampleMeta, Ticket, sample_key, ticket_id

GROUP_SIZE = 3
WORKERS = ("rollout-0", "rollout-1", "rollout-2")


class Oracle:
    """Its own account of what the accepted facts mean, and what must never be among them."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.scored: dict[str, set[str]] = {}
        self.quarantined: set[str] = set()
        self.dropped: set[str] = set()
        self.batches: dict[int, tuple[str, ...]] = {}
        self.committed = 0

    def keys(self, ticket: str) -> set[str]:
        return {sample_key(ticket, index) for index in range(GROUP_SIZE)}

    def see(self, fact: LedgerFact) -> None:
        match fact:
            case TicketsIssued():
                for ticket in fact.tickets:
                    assert ticket.id not in self.order, f"{ticket.id} issued twice"
                    self.order.append(ticket.id)
                    self.scored[ticket.id] = set()
            case TicketAssigned():
                assert fact.ticket not in self.dropped, f"{fact.ticket} runs after its end"
                assert not self._steps_of(fact.ticket), f"{fact.ticket} runs while it is in a batch"
                self.scored[fact.ticket] = set()
            case SamplesScored():
                keys = {meta.key for meta in fact.samples}
                assert not keys & self.scored[fact.ticket], f"{fact.ticket} scored twice"
                assert not keys & self.quarantined, f"{fact.ticket} scored after quarantine"
                self.scored[fact.ticket] |= keys
            case SampleQuarantined():
                assert fact.key not in self.quarantined
                self.quarantined.add(fact.key)
            case TicketReturned():
                assert all(step > self.committed for step in self._steps_of(fact.ticket)), (
                    f"{fact} was trained"
                )
                for step in self._steps_of(fact.ticket):
                    del self.batches[step]
                self.scored[fact.ticket] = set()
            case TicketFiltered() | TicketExpired():
                assert not self._steps_of(fact.ticket) and fact.ticket not in self.dropped
                self.dropped.add(fact.ticket)
            case BatchFormed():
                for id in fact.tickets:
                    assert not self._steps_of(id), f"{id} is in two batches"
                    assert id not in self.dropped
                    valid = self.scored[id]
                    assert valid | (self.quarantined & self.keys(id)) == self.keys(id), f"{id} is incomplete"
                    assert len(valid) >= 2, f"{id} has {len(valid)} valid samples"
                self.batches[fact.step] = fact.tickets
            case StepCommitted():
                assert fact.step == self.committed + 1 and fact.step in self.batches
                self.committed = fact.step
            case RolledBack():
                for step in [step for step in self.batches if step > fact.step]:
                    del self.batches[step]
                self.committed = fact.step

    def _steps_of(self, ticket: str) -> list[int]:
        return [step for step, tickets in self.batches.items() if ticket in tickets]

    def trained(self) -> Counter[str]:
        """How often each sample was trained in the lineage that survived."""
        return Counter(
            key
            for step, tickets in self.batches.items()
            if step <= self.committed
            for ticket in tickets
            for key in self.keys(ticket) - self.quarantined
        )


class History:
    """A world that proposes facts, most of them sensible, many late, repeated or wrong; the ledger decides."""

    def __init__(self, kind: type[Ledger], seed: int) -> None:
        self.random = random.Random(seed)
        self.kind = kind
        self.ledger = kind()
        self.oracle = Oracle()
        self.accepted: list[LedgerFact] = []
        self.proposed: list[LedgerFact] = []
        self.position = 0

    def propose(self, fact: LedgerFact) -> bool:
        self.proposed.append(fact)
        if self.ledger.accepts(fact) is not None:
            if self.random.random() < 0.05:
                before = self.ledger.digest()
                with pytest.raises(LedgerError):
                    self.ledger.apply(fact)
                assert self.ledger.digest() == before
            return False
        self.ledger.apply(fact)
        self.accepted.append(fact)
        self.oracle.see(fact)
        self.check_counts()
        return True

    def check_counts(self) -> None:
        counts, oracle = self.ledger.counts(), self.oracle
        assert sum(counts.values()) == GROUP_SIZE * len(oracle.order) and min(counts.values()) >= 0
        assert counts[SampleState.TRAINED] == oracle.trained().total()
        assert counts[SampleState.QUARANTINED] == len(oracle.quarantined)
        assert self.ledger.step == oracle.committed

    def some_ticket(self) -> str:
        return self.random.choice(self.oracle.order)

    def issue(self) -> None:
        skip = self.random.random() < 0.1
        ids = range(self.position + skip, self.position + skip + self.random.randint(1, 3))
        tickets = tuple(Ticket(ticket_id("g", epoch=0, position=i), "g", 0, i, 0, GROUP_SIZE) for i in ids)
        if self.propose(TicketsIssued(tickets)):
            self.position = ids.stop

    def score(self, id: str, *, share: float = 0.7) -> None:
        worker = self.ledger.worker_of(id)[0] if self.random.random() < 0.9 else self.random.choice(WORKERS)
        open_ = [
            i for i in range(GROUP_SIZE) if self.ledger.state(sample_key(id, i)) is SampleState.GENERATING
        ]
        candidates = open_ if self.random.random() < 0.9 else range(GROUP_SIZE)
        indices = [index for index in candidates if self.random.random() < share]
        metas = tuple(
            SampleMeta(sample_key(id, i), id, 4, 2, 1.0, {}, FinishReason.EOS, 0, worker, "d")
            for i in indices
        )
        self.propose(SamplesScored(id, metas))

    def lose_worker(self) -> None:
        for id in self.ledger.assigned_to(self.random.choice(WORKERS)):
            self.propose(TicketReturned(id, "its worker died"))

    def form(self) -> None:
        step = self.ledger.step + self.random.choice((1, 1, 1, 2))
        tickets = self.ledger.next_batch(2) or (self.some_ticket(), self.some_ticket())
        self.propose(BatchFormed(step, tickets))

    def restart(self) -> None:
        """A new master folds the journal; it must stand where the old one stood."""
        fresh = self.kind()
        for fact in self.accepted:
            fresh.apply(fact)
        assert fresh.digest() == self.ledger.digest()
        self.ledger = fresh

    def move(self) -> None:
        roll = self.random.random()
        if roll < 0.05 or not self.oracle.order:
            self.issue()
        elif roll < 0.30:
            waiting = [ticket.id for ticket in self.ledger.issued_unassigned()] or [self.some_ticket()]
            worker = self.random.choice(WORKERS)
            self.propose(TicketAssigned(self.random.choice(waiting), worker, "a"))
        elif roll < 0.60:
            running = [id for worker in WORKERS for id in self.ledger.running_on(worker)]
            self.score(self.random.choice(running or [self.some_ticket()]))
        elif roll < 0.75:
            self.form()
        elif roll < 0.86:
            self.propose(StepCommitted(self.ledger.step + 1, "d"))
        elif roll < 0.94:
            self.disturb()
        else:
            self.propose(self.random.choice(self.proposed))

    def disturb(self) -> None:
        """Something goes wrong, or is given up."""
        choice = self.random.randrange(7)
        if choice == 0:
            self.lose_worker()
        elif choice == 1:
            self.restart()
        elif choice == 2:
            self.propose(RolledBack(max(0, self.ledger.step + self.random.randint(-2, 1)), "lost"))
        elif choice == 3:
            key = sample_key(self.some_ticket(), self.random.randrange(GROUP_SIZE))
            self.propose(SampleQuarantined(key, "no score"))
        elif choice == 4:
            self.propose(TicketFiltered(self.some_ticket(), "equal rewards"))
        elif choice == 5:
            self.propose(TicketExpired(self.some_ticket(), "too old"))
        else:
            self.propose(TicketReturned(self.some_ticket(), "tried again"))

    def drain(self) -> None:
        """No more trouble: everything that lives must still be able to reach its end."""
        for id in self.oracle.order:
            if self.ledger.in_batch(self.ledger.step + 1):
                self.propose(StepCommitted(self.ledger.step + 1, "d"))
            self.propose(TicketReturned(id, "start over"))
            self.propose(TicketAssigned(id, "rollout-0", "a"))
            for index in range(GROUP_SIZE):
                meta = SampleMeta(
                    sample_key(id, index), id, 4, 2, 1.0, {}, FinishReason.EOS, 0, "rollout-0", "d"
                )
                self.propose(SamplesScored(id, (meta,)))
        for id in self.ledger.unusable_tickets():
            self.propose(TicketFiltered(id, "too few valid samples"))
        while batch := self.ledger.next_batch(1):
            self.propose(BatchFormed(self.ledger.step + 1, batch))
            self.propose(StepCommitted(self.ledger.step + 1, "d"))

    def run(self, num_moves: int) -> None:
        for _ in range(num_moves):
            self.move()
        self.drain()
        self.restart()
        self.check_end()

    def check_end(self) -> None:
        assert not any(count for state, count in self.ledger.counts().items() if state in LIVE)
        trained = self.oracle.trained()
        assert not trained or max(trained.values()) == 1
        for id in self.oracle.order:
            states = {key: self.ledger.state(key) for key in self.oracle.keys(id)}
            for key, state in states.items():
                assert (state is SampleState.TRAINED) == (trained[key] == 1), f"{key} is {state}"
                ends = (
                    SampleState.TRAINED,
                    SampleState.QUARANTINED,
                    SampleState.FILTERED,
                    SampleState.EXPIRED,
                )
                assert state in ends
        for step in range(1, self.ledger.step + 1):
            assert self.ledger.trained_in(step) == self.oracle.batches[step]


@pytest.mark.parametrize("seed", range(25))
def test_every_sample_is_trained_exactly_once_or_ended_for_a_reason(seed: int) -> None:
    history = History(Ledger, seed)
    history.run(600)
    kinds = Counter(type(fact).__name__ for fact in history.accepted)
    assert kinds["StepCommitted"] > 2, "the history trained nothing, so it shows nothing"


def test_the_histories_contain_every_kind_of_fact_and_of_refusal() -> None:
    accepted, refused = Counter[str](), Counter[str]()
    for seed in range(6):
        history = History(Ledger, seed)
        history.run(600)
        accepted.update(type(fact).__name__ for fact in history.accepted)
        refused.update(type(fact).__name__ for fact in history.proposed)
    refused.subtract(accepted)
    kinds = {kind.__name__ for kind in LedgerFact.__args__}
    assert {kind for kind in kinds if accepted[kind] > 0} == kinds
    assert {kind for kind in kinds if refused[kind] > 0} == kinds


class TrainsAgain(Ledger):
    """Lets a late message return a ticket that was trained."""

    transitions: ClassVar = {**TRANSITIONS, (SampleState.TRAINED, TicketReturned): SampleState.ISSUED}


class TakesHalfGroups(Ledger):
    """Takes groups into a batch while they are generated."""

    transitions: ClassVar = {**TRANSITIONS, (SampleState.GENERATING, BatchFormed): SampleState.IN_BATCH}


class CountsScoresTwice(Ledger):
    """Accepts a repeated score."""

    transitions: ClassVar = {**TRANSITIONS, (SampleState.READY, SamplesScored): SampleState.READY}


class RevivesTheDropped(Ledger):
    """Runs a group that was given up."""

    transitions: ClassVar = {**TRANSITIONS, (SampleState.EXPIRED, TicketAssigned): SampleState.GENERATING}


class KeepsUndoneTraining(Ledger):
    """Forgets to issue again what an undone step had trained."""

    transitions: ClassVar = {**TRANSITIONS, (SampleState.TRAINED, RolledBack): SampleState.TRAINED}


class KeepsUndoneStep(Ledger):
    """Rolls the samples back, but not the step."""

    def _roll_back(self, step: int) -> None:
        before = self.step
        super()._roll_back(step)
        self.step = before


class RemembersOutsideTheFacts(Ledger):
    """Keeps something that no fact tells, so a restart loses it."""

    def accepts(self, fact: LedgerFact) -> str | None:
        self._num_issued += 1
        return super().accepts(fact)


@pytest.mark.parametrize(
    "planted",
    [
        TrainsAgain,
        TakesHalfGroups,
        CountsScoresTwice,
        RevivesTheDropped,
        KeepsUndoneTraining,
        KeepsUndoneStep,
        RemembersOutsideTheFacts,
    ],
)
def test_a_planted_bug_is_caught(planted: type[Ledger]) -> None:
    def survives(seed: int) -> bool:
        try:
            History(planted, seed).run(600)
        except (AssertionError, KeyError):
            return False
        return True

    assert not all(survives(seed) for seed in range(25))


def lineage(seed: int, *, disturbed: bool) -> list[tuple[str, ...]]:
    """Batches of twelve steps in issue order, two groups each; some groups are filtered by their id alone."""
    source = random.Random(seed)
    ledger = Ledger()
    position = 0
    while ledger.step < 12:
        kept = ledger.stage("g").num_issued - ledger.stage("g").num_dropped
        while kept < 2 * (ledger.step + 2):
            id = ticket_id("g", epoch=0, position=position)
            ledger.apply(TicketsIssued((Ticket(id, "g", 0, position, 0, 1),)))
            position, kept = position + 1, kept + 1
        waiting = [ticket.id for ticket in ledger.issued_unassigned()]
        source.shuffle(waiting)
        for id in waiting:
            ledger.apply(TicketAssigned(id, "rollout-0", "a"))
            if disturbed and source.random() < 0.3:
                ledger.apply(TicketReturned(id, "lost"))
                continue
            meta = SampleMeta(id + "/0", id, 4, 2, 1.0, {}, FinishReason.EOS, 0, "rollout-0", "d")
            ledger.apply(SamplesScored(id, (meta,)))
            if hash_of(id) % 5 == 0:
                ledger.apply(TicketFiltered(id, "by its id"))
        if batch := ledger.next_batch(2):
            ledger.apply(BatchFormed(ledger.step + 1, batch))
            if disturbed and source.random() < 0.2:
                ledger.apply(TicketReturned(batch[0], "its holder died"))
                continue
            ledger.apply(StepCommitted(ledger.step + 1, "d"))
        if disturbed and source.random() < 0.2:
            ledger.apply(RolledBack(source.randint(0, ledger.step), "lost"))
    return [ledger.trained_in(step) for step in range(1, 13)]


def hash_of(id: str) -> int:
    return sum(id.encode()) * 7919 // 13


@pytest.mark.parametrize("seed", range(10))
def test_a_disturbed_run_trains_the_same_batches_as_its_undisturbed_twin(seed: int) -> None:
    assert lineage(seed, disturbed=True) == lineage(seed, disturbed=False)
