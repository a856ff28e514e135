"""The ledger: the state of every sample, as a fold over facts. Pure; the master checks, journals, then applies.

The life of a sample
    ISSUED → GENERATING → SCORED → READY → IN_BATCH → TRAINED
    and, with a reason, FILTERED (the algorithm dropped its group), EXPIRED (too old), QUARANTINED (can not be scored).
    SCORED becomes READY without a fact of its own, when the whole group is scored or quarantined and enough of it is
    valid. A quarantined sample stays so through everything that happens to its group, so that a group that is run
    again trains on the same members. `lifecycle.TRANSITIONS` is the complete table; what it does not have is refused.

Invariants
    Every sample is in exactly one state. A sample is in at most one batch that was not rolled back. A group moves
    into a batch whole. Steps are committed in order, each with the batch that was formed for it.

Why a rollback gives the same run again
    Sampling noise is keyed by ticket, and a batch takes the oldest live groups (`next_batch`), so a run is determined
    by the order of issue alone. A rollback therefore keeps the id and place of every ticket: tickets of the undone
    steps, and all unfinished ones, are issued again at their place. No ticket is withdrawn, so the cursor stays, and
    the admission rule issues nothing new until the repeated steps have caught up.

    With two groups per batch (one sample each), step 1 trains t0 and t1, step 2 trains t2 and t3, then the state of
    step 2 is lost:

    >>> from kintsugi.types import FinishReason
    >>> ledger = Ledger()
    >>> def run(step: int, *ids: str) -> None:
    ...     for id in ids:
    ...         ledger.apply(TicketAssigned(id, "rollout-0", "a"))
    ...         meta = SampleMeta(id + "/0", id, 2, 1, 1.0, {}, FinishReason.EOS, step - 1, "rollout-0", "")
    ...         ledger.apply(SamplesScored(id, (meta,)))
    ...     ledger.apply(BatchFormed(step, ledger.next_batch(2)))
    ...     ledger.apply(StepCommitted(step, "digest"))
    >>> ledger.apply(TicketsIssued(tuple(Ticket(f"g:0:{i}:0", "g", 0, i, 0, 1) for i in range(4))))
    >>> run(1, "g:0:1:0", "g:0:0:0")
    >>> run(2, "g:0:2:0", "g:0:3:0")
    >>> ledger.apply(RolledBack(1, "rank 0 lost its state"))
    >>> [ticket.id for ticket in ledger.issued_unassigned()], ledger.trained_in(1)
    (['g:0:2:0', 'g:0:3:0'], ('g:0:0:0', 'g:0:1:0'))
    >>> run(2, "g:0:3:0", "g:0:2:0")
    >>> ledger.trained_in(2)
    ('g:0:2:0', 'g:0:3:0')

`FinishCounts` sums up how samples ended, to see whether trained and dropped samples differ in length and reward.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import ClassVar

import msgspec

from kintsugi.journal.facts import (
    BatchFormed,
    FilterReason,
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
from kintsugi.samples.batch_selection import CandidateGroup, choose_batch
from kintsugi.samples.lifecycle import LIVE, TRANSITIONS, GroupRecord, SampleState, StageCounters, phase_of
from kintsugi.types import SampleMeta, Ticket, sample_key, ticket_id

__all__ = ["Ledger", "LedgerError", "SampleState", "replay"]

_S = SampleState


class LedgerError(AssertionError):
    """A fact was applied that the ledger does not accept: a bug of ours, since `accepts` tells beforehand."""


class Ledger:
    """Fold of the facts so far: `accepts` checks, `apply` advances, all other methods read.

    The cost of `apply` is proportional to the samples it changes, that of queries to their result. Finished tickets are
    kept until `forget_before`. An id behind the cursor that is not kept is finished, so no list of forgotten tickets is
    needed.
    """

    transitions: ClassVar[Mapping[tuple[SampleState, type[LedgerFact]], SampleState]] = TRANSITIONS

    def __init__(self, *, min_valid: int = 2) -> None:
        """`min_valid`: scored samples that a group needs to be ready (or all of them, in a smaller group)."""
        self.step = 0
        """Last committed step."""
        self._min_valid = min_valid
        self._groups: dict[str, GroupRecord] = {}
        self._phases: dict[SampleState, dict[str, GroupRecord]] = {
            phase: {} for phase in SampleState if phase in LIVE
        }
        self._workers: dict[str, dict[str, GroupRecord]] = {}
        self._batches: dict[int, tuple[str, ...]] = {}
        self._dropped: dict[int, list[str]] = {}
        self._stages: dict[str, StageCounters] = {}
        self._reasons: Counter[tuple[SampleState, str]] = Counter()
        self._counts: Counter[SampleState] = Counter()
        self.ends = FinishCounts()
        self._num_issued = 0
        self._num_kept = 0
        self._forgotten = 0

    # Facts.

    def accepts(self, fact: LedgerFact) -> str | None:
        """Return why `fact` cannot be applied now (late, repeated, unknown), or None if it can."""
        match fact:
            case TicketsIssued():
                return self._refuse_issue(fact.tickets)
            case SamplesScored():
                return self._refuse_scores(fact)
            case SampleQuarantined():
                ticket, index = _split(fact.key)
                return self._refuse_move(ticket, type(fact), (index,))
            case BatchFormed():
                return self._refuse_batch(fact)
            case StepCommitted():
                if fact.step != self.step + 1:
                    return f"step {fact.step} can not be committed after step {self.step}"
                return None if fact.step in self._batches else f"no batch was formed for step {fact.step}"
            case RolledBack():
                if not max(0, self._forgotten - 1) <= fact.step <= self.step:
                    return f"can not go back to step {fact.step} from {self.step}; forgot before {self._forgotten}"
                return None
            case _:
                return self._refuse_move(fact.ticket, type(fact), None)

    def apply(self, fact: LedgerFact) -> None:
        """Advance by one fact; raises LedgerError, unchanged, if `accepts` would have refused it."""
        refusal = self.accepts(fact)
        if refusal is not None:
            raise LedgerError(f"{type(fact).__name__}: {refusal}")
        match fact:
            case TicketsIssued():
                for ticket in fact.tickets:
                    self._issue(ticket)
            case SamplesScored():
                self._score(self._groups[fact.ticket], fact.samples)
            case SampleQuarantined():
                ticket_name, index = _split(fact.key)
                group = self._groups[ticket_name]
                group.quarantine[fact.key] = fact.reason
                self._reasons[_S.QUARANTINED, fact.reason] += 1
                self._move(group, SampleQuarantined, (index,))
            case BatchFormed():
                self._batches[fact.step] = fact.tickets
                for ticket_name in fact.tickets:
                    self._groups[ticket_name].step = fact.step
                    self._move(self._groups[ticket_name], BatchFormed)
            case StepCommitted():
                self.step = fact.step
                for ticket_name in self._batches[fact.step]:
                    self._move(self._groups[ticket_name], StepCommitted)
            case RolledBack():
                self._roll_back(fact.step)
            case TicketAssigned():
                group = self._groups[fact.ticket]
                group.worker, group.incarnation = fact.worker, fact.incarnation
                group.version = fact.version
                self._workers.setdefault(fact.worker, {})[fact.ticket] = group
                self._move(group, TicketAssigned)
            case TicketReturned():
                self._return(self._groups[fact.ticket], fact.reason)
            case TicketFiltered() | TicketExpired():
                group = self._groups[fact.ticket]
                group.reason = fact.reason
                self._move(group, type(fact))
                self._reasons[group.phase, fact.reason] += group.states.count(group.phase)

    # Queries.

    def state(self, key: str) -> SampleState:
        """State of one sample; KeyError if its ticket was never issued or is forgotten."""
        ticket, index = _split(key)
        return self._groups[ticket].states[index]

    def reason(self, key: str) -> str:
        """Why a sample was quarantined, or its group filtered, expired or last returned; "" for none."""
        group = self._groups[_split(key)[0]]
        return group.quarantine.get(key, group.reason)

    def ticket(self, id: str) -> Ticket:
        """Return a ticket; KeyError if it was never issued or is forgotten."""
        return self._groups[id].ticket

    def worker_of(self, ticket: str) -> tuple[str, str]:
        """Process and incarnation that runs or keeps the group; empty strings if there is none."""
        group = self._groups[ticket]
        return group.worker, group.incarnation

    def version_of(self, ticket: str) -> int:
        """Weight version at the last assignment of the group; -1 if it was not assigned since a rollback."""
        return self._groups[ticket].version

    def quarantined_of(self, ticket: str) -> frozenset[str]:
        """Keys of the group's samples that stay quarantined in every later attempt; empty if it is forgotten."""
        group = self._groups.get(ticket)
        return frozenset() if group is None else frozenset(group.quarantine)

    def metas(self, ticket: str) -> tuple[SampleMeta, ...]:
        """Records of the scored samples, by sample index."""
        return tuple(meta for meta in self._groups[ticket].metas if meta is not None)

    def issued_unassigned(self) -> list[Ticket]:
        """Tickets that wait for a worker, in the order of issue."""
        return [group.ticket for group in self._in_order(self._phases[_S.ISSUED])]

    def assigned_to(self, worker: str) -> list[str]:
        """Live tickets that `worker` runs, or for which it keeps trajectories: they are lost with it."""
        return [group.ticket.id for group in self._in_order(self._workers.get(worker, {}))]

    def running_on(self, worker: str) -> list[str]:
        """The part of `assigned_to` that is still generating."""
        return [id for id in self.assigned_to(worker) if self._groups[id].phase is _S.GENERATING]

    def unusable_tickets(self) -> list[str]:
        """Groups that are complete but have too few valid samples to be ready; the master filters them."""
        return [group.ticket.id for group in self._in_order(self._phases[_S.SCORED])]

    def oldest_ready(self, size: int) -> list[str]:
        """The oldest groups that are in no batch, at most `size` of them, up to the first that is not ready."""
        waiting = (_S.ISSUED, _S.GENERATING, _S.SCORED)
        orders = (group.order for phase in waiting for group in self._phases[phase].values())
        limit, ready = min(orders, default=self._num_issued), self._in_order(self._phases[_S.READY])[:size]
        return [group.ticket.id for group in ready if group.order < limit]

    def candidates(self, count: int) -> list[CandidateGroup]:
        """The oldest `count` groups that are in no batch, for `choosing.choose_batch`."""
        free = (_S.ISSUED, _S.GENERATING, _S.SCORED, _S.READY)
        groups = (group for phase in free for group in self._phases[phase].values())
        return [
            CandidateGroup(group.ticket.id, group.phase is _S.READY, _oldest_version(group))
            for group in heapq.nsmallest(count, groups, key=lambda group: group.order)
        ]

    def next_batch(self, size: int) -> tuple[str, ...]:
        """The oldest `size` groups that are in no batch, once all of them are ready; empty before."""
        return choose_batch(self.candidates(size), size=size).batch

    def in_batch(self, step: int) -> tuple[str, ...]:
        """Tickets of the batch that was formed for `step` and is not committed."""
        return self._batches.get(step, ()) if step > self.step else ()

    def trained_in(self, step: int) -> tuple[str, ...]:
        """Tickets that the committed step trained; empty for a step that is not committed."""
        assert step >= self._forgotten, f"step {step} is forgotten (kept from {self._forgotten})"
        return self._batches.get(step, ()) if step <= self.step else ()

    def dropped_in(self, step: int, *, reason: str | None = None) -> tuple[str, ...]:
        """Tickets that ended untrained while the batch of `step` was collected (for this reason). They stay so when
        the step is undone: it is collected again without them."""
        ids = self._dropped.get(step, ())
        return tuple(id for id in ids if reason is None or self._groups[id].reason == reason)

    def counts(self) -> dict[SampleState, int]:
        """Samples per state, forgotten ones included."""
        return {state: self._counts[state] for state in SampleState}

    def reasons(self, state: SampleState) -> dict[str, int]:
        """Samples that ended in this state, per reason, the commonest first."""
        return {reason: count for (end, reason), count in self._reasons.most_common() if end is state}

    def stage(self, name: str) -> StageCounters:
        """Its counters; to be read, not kept."""
        return self._stages.get(name) or StageCounters()

    def digest(self) -> str:
        """Stable hash of the whole state: equal for equal facts, with the same `forget_before` calls among them."""
        state = (
            (self.step, self._min_valid, self._num_issued, self._forgotten),
            sorted(self._batches.items()),
            sorted(self._dropped.items()),
            list(self.counts().values()),
            (sorted(self.ends.sums.items()), self.ends.tokens_discarded),
            sorted(self._reasons.items()),
            {
                name: (s.num_issued, s.num_trained, s.num_dropped, s.num_failed, s.cursor)
                for name, s in self._stages.items()
            },
            list(self._groups.values()),
        )
        return hashlib.sha256(msgspec.msgpack.Encoder(order="deterministic").encode(state)).hexdigest()

    def forget_before(self, step: int) -> None:
        """Drop tickets that ended before `step`; the counters stay, and so does the refusal of their ids.

        For steps that no rollback can reach any more: the last durable checkpoint's.
        """
        assert step <= self.step + 1, f"step {step} is not committed yet (at {self.step})"
        self._forgotten = max(self._forgotten, step)
        for id in [
            id for id, group in self._groups.items() if group.phase not in LIVE and group.ended < step
        ]:
            self._num_kept -= len(self._groups.pop(id).states)
        for kept in (self._batches, self._dropped):
            for old in [old for old in kept if old < step]:
                del kept[old]

    @property
    def num_kept(self) -> int:
        """Samples whose groups are kept one by one."""
        return self._num_kept

    def step_of_newest(self, count: int) -> int:
        """Return the step before those that trained the newest `count` samples; at least the last two are newer."""
        step = self.step - 1
        while step > 0 and (batch := self._batches.get(step)) is not None and count > 0:
            count -= sum(len(self._groups[id].states) for id in batch)
            step -= 1
        return max(0, step)

    def rolled_back(self, step: int) -> bytes:
        """Encode the state that a rollback to this step leads to now. It leads to the same run later too: tickets that
        are issued meanwhile are then issued again, in the same order."""
        copy = Ledger(min_valid=self._min_valid)
        copy.restore(self.fold())
        copy.apply(RolledBack(step, ""))
        copy.forget_before(step)
        return copy.fold()

    # The whole, as bytes.

    def fold(self) -> bytes:
        """Encode the whole state: a ledger that restores it behaves as this one does."""
        return _encoder.encode(
            _FoldedLedger(
                step=self.step,
                num_issued=self._num_issued,
                forgotten=self._forgotten,
                groups=list(self._groups.values()),
                batches=self._batches,
                dropped=self._dropped,
                stages=self._stages,
                reasons=[(state, reason, count) for (state, reason), count in self._reasons.items()],
                counts=self._counts,
                ends=self.ends.sums,
                tokens_discarded=self.ends.tokens_discarded,
            )
        )

    def restore(self, folded: bytes) -> None:
        """Replace the state by one that `fold` encoded."""
        found = _decoder.decode(folded)
        self.step, self._num_issued, self._forgotten = found.step, found.num_issued, found.forgotten
        self._groups = {group.ticket.id: group for group in found.groups}
        self._num_kept = sum(len(group.states) for group in found.groups)
        self._phases = {phase: {} for phase in SampleState if phase in LIVE}
        self._workers = {}
        for id, group in self._groups.items():
            if group.phase in LIVE:
                self._phases[group.phase][id] = group
            if group.worker:
                self._workers.setdefault(group.worker, {})[id] = group
        self._batches, self._dropped, self._stages = found.batches, found.dropped, found.stages
        self._reasons = Counter({(state, reason): count for state, reason, count in found.reasons})
        self._counts = Counter(found.counts)
        self.ends = FinishCounts()
        self.ends.sums, self.ends.tokens_discarded = found.ends, found.tokens_discarded

    # Refusals.

    def _refuse_issue(self, tickets: tuple[Ticket, ...]) -> str | None:
        cursors: dict[str, tuple[int, int]] = {}
        seen: set[str] = set()
        for ticket in tickets:
            expected = _id_of(ticket, round=ticket.round)
            if ticket.id != expected or ticket.num_samples < 1:
                return f"malformed ticket: id {ticket.id!r} (expected {expected!r}), {ticket.num_samples} samples"
            if ticket.id in self._groups or ticket.id in seen:
                return f"ticket {ticket.id} is already issued"
            seen.add(ticket.id)
            if ticket.round > 0:
                refusal = self._refuse_round(ticket)
                if refusal is not None:
                    return refusal
                continue
            epoch, position = cursors.get(ticket.stage, self.stage(ticket.stage).cursor)
            if (ticket.epoch, ticket.position) not in ((epoch, position), (epoch + 1, 0)):
                return f"ticket {ticket.id} is out of order: the cursor stands at epoch {epoch}, position {position}"
            cursors[ticket.stage] = (ticket.epoch, ticket.position + 1)
        return None

    def _refuse_round(self, ticket: Ticket) -> str | None:
        """A prompt is sampled again only after its previous round ended without being trained."""
        id = _id_of(ticket, round=ticket.round - 1)
        previous = self._groups.get(id)
        if previous is None:
            return f"ticket {ticket.id} resamples {id}, which {self._absence(id)}"
        if previous.phase in LIVE or previous.phase is _S.TRAINED:
            return f"ticket {ticket.id} resamples {id}, which is {previous.phase.value}"
        return None

    def _refuse_scores(self, fact: SamplesScored) -> str | None:
        group = self._groups.get(fact.ticket)
        indices = [_split(meta.key)[1] for meta in fact.samples]
        if not indices or len(set(indices)) != len(indices):
            return f"expected distinct samples of {fact.ticket}, got indices {indices}"
        for meta, index in zip(fact.samples, indices, strict=True):
            if meta.key != sample_key(fact.ticket, index):
                return f"{meta.key} is not a sample of {fact.ticket}"
            if group is not None and meta.holder != group.worker:
                return f"{meta.key} is kept by {meta.holder}, but its ticket is with {group.worker or 'no worker'}"
        return self._refuse_move(fact.ticket, SamplesScored, indices)

    def _refuse_batch(self, fact: BatchFormed) -> str | None:
        if fact.step <= self.step or fact.step in self._batches:
            return f"step {fact.step} already has its batch"
        if not fact.tickets or len(set(fact.tickets)) != len(fact.tickets):
            return f"expected distinct tickets for step {fact.step}, got {fact.tickets}"
        refusals = (self._refuse_move(id, BatchFormed, None) for id in fact.tickets)
        return next((refusal for refusal in refusals if refusal is not None), None)

    def _refuse_move(self, id: str, kind: type[LedgerFact], indices: Iterable[int] | None) -> str | None:
        """Why samples of a ticket (all: None) can not make the transition of this kind of fact."""
        group = self._groups.get(id)
        if group is None:
            return f"ticket {id} {self._absence(id)}"
        for index in range(len(group.states)) if indices is None else indices:
            if not 0 <= index < len(group.states):
                return f"ticket {id} has no sample {index}"
            if (group.states[index], kind) not in self.transitions:
                return f"{sample_key(id, index)} is {group.states[index].value}"
        return f"every sample of {id} is quarantined" if group.phase is _S.QUARANTINED else None

    def _absence(self, id: str) -> str:
        """Reason for refusing a ticket that is not kept."""
        stage, *place = id.rsplit(":", 3)
        if stage not in self._stages or len(place) != 3 or not all(part.isdecimal() for part in place):
            return "was never issued"
        behind = (int(place[0]), int(place[1])) < self._stages[stage].cursor
        return "is finished and forgotten" if behind else "was never issued"

    # Moves.

    def _issue(self, ticket: Ticket) -> None:
        stage = self._stages.setdefault(ticket.stage, StageCounters())
        stage.num_issued += 1
        if ticket.round == 0:
            stage.cursor = (ticket.epoch, ticket.position + 1)
        states, metas = [_S.ISSUED] * ticket.num_samples, [None] * ticket.num_samples
        group = GroupRecord(ticket, self._num_issued, states, list(metas))
        self._num_issued += 1
        self._num_kept += len(states)
        self._groups[ticket.id] = self._phases[_S.ISSUED][ticket.id] = group
        self._counts[_S.ISSUED] += ticket.num_samples

    def _score(self, group: GroupRecord, samples: tuple[SampleMeta, ...]) -> None:
        indices = [_split(meta.key)[1] for meta in samples]
        for index, meta in zip(indices, samples, strict=True):
            group.metas[index] = meta
        self._move(group, SamplesScored, indices)

    def _return(self, group: GroupRecord, reason: str) -> None:
        """Return a group. If it was in a batch, the batch is dissolved, and its other groups are ready again."""
        if group.phase is _S.IN_BATCH:
            for member in [self._groups[id] for id in self._batches.pop(group.step)]:
                member.step = 0
                self._set(member, {i: _S.READY for i, s in enumerate(member.states) if s is _S.IN_BATCH})
        group.reason = reason
        self._move(group, TicketReturned)

    def _roll_back(self, step: int) -> None:
        """Undo the steps after `step`. Live groups may have tokens of undone weights, so they are issued again too."""
        undone = [self._groups[id] for later, ids in self._batches.items() if later > step for id in ids]
        live = [group for phase in self._phases.values() for group in phase.values() if not group.step]
        for later in [later for later in self._batches if later > step]:
            del self._batches[later]
        self.step = step
        for group in undone + live:
            group.step, group.version = 0, -1
            self._move(group, RolledBack)

    def _move(self, group: GroupRecord, kind: type[LedgerFact], indices: Iterable[int] | None = None) -> None:
        """Make the table's transition for these samples (all: None), then promote a complete group."""
        chosen = range(len(group.states)) if indices is None else indices
        self._set(group, {index: self.transitions[group.states[index], kind] for index in chosen})
        needed = min(self._min_valid, group.ticket.num_samples)
        if group.phase is _S.SCORED and group.states.count(_S.SCORED) >= needed:
            self._set(
                group, {index: _S.READY for index, state in enumerate(group.states) if state is _S.SCORED}
            )

    def _set(self, group: GroupRecord, changes: Mapping[int, SampleState]) -> None:
        for index, state in changes.items():
            before_it, meta = group.states[index], group.metas[index]
            self._counts[before_it] -= 1
            self._counts[state] += 1
            group.states[index] = state
            if meta is None:
                continue
            if before_it is _S.TRAINED:
                self.ends.add(before_it, (meta,), sign=-1)
            if state not in LIVE:
                self.ends.add(state, (meta,))
            if state in (_S.ISSUED, _S.FILTERED, _S.EXPIRED):
                self.ends.discard((meta,))
            if state is _S.ISSUED:
                group.metas[index] = None
        before, group.phase = group.phase, phase_of(group.states)
        if group.phase is not before:
            self._enter(group, before)
        if group.phase not in (_S.GENERATING, _S.SCORED, _S.READY, _S.IN_BATCH):
            self._workers.get(group.worker, {}).pop(group.ticket.id, None)
            group.worker = group.incarnation = ""

    def _enter(self, group: GroupRecord, before: SampleState) -> None:
        """Keep the indices and counters in step with a group's change of phase."""
        id, stage = group.ticket.id, self._stages[group.ticket.stage]
        if before in LIVE:
            del self._phases[before][id]
        elif before is _S.TRAINED:
            stage.num_trained -= 1
        if group.phase in LIVE:
            self._phases[group.phase][id] = group
            return
        if group.phase is _S.TRAINED:
            group.ended = self.step
            stage.num_trained += 1
        else:
            group.ended = self.step + 1
            stage.num_dropped += 1
            stage.num_failed += group.reason != FilterReason.EQUAL_REWARDS
            self._dropped.setdefault(group.ended, []).append(id)

    @staticmethod
    def _in_order(groups: Mapping[str, GroupRecord]) -> list[GroupRecord]:
        return sorted(groups.values(), key=lambda group: group.order)


class _FoldedLedger(msgspec.Struct, omit_defaults=True):
    """The state of a ledger; its indices follow from the groups."""

    step: int
    num_issued: int
    forgotten: int
    groups: list[GroupRecord]
    batches: dict[int, tuple[str, ...]]
    dropped: dict[int, list[str]]
    stages: dict[str, StageCounters]
    reasons: list[tuple[SampleState, str, int]]
    counts: dict[SampleState, int]
    ends: dict[str, dict[str, float]]
    tokens_discarded: int


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_FoldedLedger] = msgspec.msgpack.Decoder(_FoldedLedger)


def _oldest_version(group: GroupRecord) -> int:
    """Version of the group's oldest token if known, else of the weights at its assignment."""
    versions = [meta.version for meta in group.metas if meta is not None]
    return min(versions) if group.phase is _S.READY and versions else group.version


def _split(key: str) -> tuple[str, int]:
    """`_split("grpo:0:17:0/3") == ("grpo:0:17:0", 3)`; the index is -1 when there is none."""
    ticket, _, index = key.rpartition("/")
    return ticket, int(index) if index.isdecimal() else -1


def _id_of(ticket: Ticket, *, round: int) -> str:
    return ticket_id(ticket.stage, epoch=ticket.epoch, position=ticket.position, round=round)


def replay(facts: Iterable[LedgerFact], *, min_valid: int = 2) -> Ledger:
    """Build the ledger from facts."""
    ledger = Ledger(min_valid=min_valid)
    for fact in facts:
        ledger.apply(fact)
    return ledger


class FinishCounts:
    """Sums per end ("trained", "expired", …) over samples that were scored."""

    def __init__(self) -> None:
        self.sums: dict[str, dict[str, float]] = {}
        self.tokens_discarded = 0
        """Tokens that were sampled and scored but not trained: dropped, or to be sampled again."""

    def add(self, end: str, samples: Iterable[SampleMeta], *, sign: int = 1) -> None:
        """Add samples to the sums of an end; `sign` -1 removes samples that a rollback undid."""
        sums = self.sums.setdefault(end, {"samples": 0.0, "tokens": 0.0, "reward": 0.0})
        for meta in samples:
            sums["samples"] += sign
            sums["tokens"] += sign * meta.num_loss_tokens
            sums["reward"] += sign * meta.reward

    def discard(self, samples: Iterable[SampleMeta]) -> None:
        self.tokens_discarded += sum(meta.num_loss_tokens for meta in samples if meta.version >= 0)

    def means(self) -> dict[str, dict[str, float]]:
        """End → number of samples, mean length in sampled tokens, mean reward."""
        return {
            end: {
                "samples": sums["samples"],
                "length": sums["tokens"] / sums["samples"],
                "reward": sums["reward"] / sums["samples"],
            }
            for end, sums in sorted(self.sums.items())
            if sums["samples"] > 0
        }
