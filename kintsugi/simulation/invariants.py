"""What must hold at every step of every simulated run, and what was covered.

Each fact is compared with the undisturbed run: a step has one batch and one state, whatever broke. An asynchronous run
may come to another state, since who arrives when decides which weights a sample is drawn from; there, no sample may be
older than the bound, nor be of weights that were undone. A violation is kept with the moment it happened; the first one
is what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kintsugi.buffer.lifecycle import LIVE
from kintsugi.control.membership import MemberStatus
from kintsugi.control.protocol import Decision, Event
from kintsugi.control.shell import DURABLE
from kintsugi.control.staff import RETIRED
from kintsugi.control.state import MasterState
from kintsugi.facts import (
    BatchFormed,
    EpochStarted,
    Fact,
    ProcessLost,
    ProcessRetired,
    RolledBack,
    RunEnded,
    SamplesScored,
    ScaleRefused,
    ServersScaled,
    StepCommitted,
)
from kintsugi.messages import Body, Register
from kintsugi.simulation.coverage import IMPOSSIBLE_BOUNDARIES, IMPOSSIBLE_EVENTS, Coverage, Pair
from kintsugi.simulation.master import SimulatedMaster
from kintsugi.types import Role, role_of
from kintsugi.wire import Envelope


class Reference(msgspec.Struct):
    """The undisturbed run of a configuration: per step the batch and the state that it leaves."""

    digests: dict[int, str] = {}
    batches: dict[int, tuple[str, ...]] = {}
    weights_sha256: str = ""


class Invariants:
    """The observer of a run's masters and messages."""

    def __init__(
        self,
        *,
        reference: Reference | None,
        coverage: Coverage,
        touched: Callable[[str], bool],
        survives: Callable[[int], str],
        is_saved: Callable[[int], bool],
        max_staleness: int = 0,
    ) -> None:
        """`touched`: whether a fault hit this process. `survives`: who still holds the state of a step, if anybody.
        `is_saved`: whether a checkpoint of it is on disk."""
        self.violations: list[str] = []
        self.found = Reference({}, {})
        """What this run came to."""
        self.step = 0
        self.num_rollbacks = 0
        self._num_committed = 0
        self.facts: list[Fact] = []
        self._reference, self._coverage = reference, coverage
        self._touched, self._survives, self._is_saved = touched, survives, is_saved
        self._epoch = 0
        self._owners: dict[int, str] = {}
        self._trained: dict[str, int] = {}
        self._max_staleness = max_staleness
        self._versions: dict[str, int] = {}
        """Ticket → the oldest weights that a sample of it was drawn from."""
        self._retired: set[tuple[str, str]] = set()
        self._answered: set[str] = set()
        self._heard: dict[tuple[str, str], int] = {}
        self._host_was_hit = False
        """Whether what is being counted tells of the loss of an agent that a fault hit."""
        self._unsure: tuple[str, tuple[Fact, ...]] | None = None
        """The last append, by whom and what, while it is not durable."""
        self._on_decision: list[Callable[[SimulatedMaster], None]] = []

    def violated(self, what: str) -> None:
        self.violations.append(what)

    # The master.

    def follow(self, action: Callable[[SimulatedMaster], None]) -> None:
        """Call after every decision: faults wait for the master to come to a state."""
        self._on_decision.append(action)

    def decided(self, master: SimulatedMaster, state: str, event: Event, decision: Decision) -> None:
        met = (state, type(event).__name__)
        self._coverage.events[met] += 1
        boundaries = [type(effect).__name__ for effect in decision.effects]
        if any(isinstance(fact, DURABLE) for fact in decision.facts):
            boundaries.append("sync")
        after = master.state
        self._must_be_possible(met, IMPOSSIBLE_EVENTS)
        for what in boundaries:
            self._must_be_possible((after, what), IMPOSSIBLE_BOUNDARIES)
        for action in self._on_decision:
            action(master)

    def _must_be_possible(self, pair: Pair, impossible: dict[Pair, str]) -> None:
        if pair in impossible:
            self.violated(f"{pair[1]} occurs in {pair[0]}, which can not be: {impossible[pair]}")

    def crashed(self, state: str, what: str) -> None:
        self._coverage.crashes[state, what] += 1

    def journaled(self, master: SimulatedMaster, facts: tuple[Fact, ...], *, durable: bool) -> None:
        """What must last counts only when it does: nobody hears of it before, and a power cut may undo it."""
        self._unsure = (master.incarnation, facts)
        if durable:
            self.synced()

    def synced(self) -> None:
        assert self._unsure is not None, "only what was journaled is synced"
        incarnation, facts = self._unsure
        self._unsure = None
        self._count(facts, incarnation=incarnation)

    def taken_over(self, facts: Sequence[Fact]) -> None:
        """As much of the last append as its successor has found, was journaled. What need not last may be gone with the
        power, a rollback too: the run then stands where the journal says."""
        if self._unsure is not None:
            incarnation, unsure = self._unsure
            self._unsure = None
            for count in range(len(unsure), 0, -1):
                if tuple(facts[-count:]) == unsure[:count]:
                    self._count(unsure[:count], incarnation=incarnation)
                    break
        committed = [fact for fact in facts if isinstance(fact, StepCommitted)]
        if len(committed) != self._num_committed:
            self.violated(f"{self._num_committed} steps were committed, the journal has {len(committed)}")
        batches: dict[int, tuple[str, ...]] = {}
        self.step, self._trained = 0, {}
        for fact in facts:
            match fact:
                case BatchFormed():
                    batches[fact.step] = fact.tickets
                case StepCommitted():
                    self.step = fact.step
                    self._trained |= dict.fromkeys(batches.get(fact.step, ()), fact.step)
                case RolledBack():
                    self._return_to(fact.step)
                case _:
                    pass

    def _count(self, facts: tuple[Fact, ...], *, incarnation: str) -> None:
        self.facts.extend(facts)
        agents = [fact for fact in facts if isinstance(fact, ProcessLost) and _is_agent(fact.process)]
        self._host_was_hit = any(self._touched(fact.process) for fact in agents)
        for fact in facts:
            self._check(fact)
        owner = self._owners.get(self._epoch)
        if owner != incarnation:
            self.violated(f"master {incarnation} journals in epoch {self._epoch}, which {owner} owns")

    def _check(self, fact: Fact) -> None:
        match fact:
            case StepCommitted():
                self._committed(fact)
            case BatchFormed():
                self._batch_formed(fact)
            case ProcessLost():
                self._lost(fact)
            case SamplesScored():
                self._versions[fact.ticket] = min(meta.version for meta in fact.samples)
            case ProcessRetired():
                self._retired.add((fact.process, fact.incarnation))
            case ServersScaled() | ScaleRefused():
                if fact.request in self._answered:
                    self.violated(f"request {fact.request} is answered twice")
                self._answered.add(fact.request)
            case RolledBack():
                self._rolled_back(fact)
            case EpochStarted():
                self._epoch_started(fact)
            case RunEnded():
                self.found.weights_sha256 = fact.weights_sha256
            case _:
                pass

    def _epoch_started(self, fact: EpochStarted) -> None:
        if fact.epoch <= self._epoch:
            self.violated(f"epoch {fact.epoch} begins after epoch {self._epoch}")
        self._epoch = fact.epoch
        self._owners[fact.epoch] = fact.incarnation

    def _batch_formed(self, fact: BatchFormed) -> None:
        self.found.batches[fact.step] = fact.tickets
        for ticket in fact.tickets:
            version = self._versions[ticket]
            if version >= 0 and not 0 <= fact.step - 1 - version <= self._max_staleness:
                self.violated(f"{ticket}, drawn from version {version}, is in the batch of step {fact.step}")
        if (
            self._max_staleness == 0
            and self._reference is not None
            and self._reference.batches.get(fact.step) != fact.tickets
        ):
            self.violated(f"the batch of step {fact.step} is not that of the undisturbed run: {fact.tickets}")

    def _committed(self, fact: StepCommitted) -> None:
        if fact.step != self.step + 1:
            self.violated(f"step {fact.step} is committed after step {self.step}")
        self.step = fact.step
        self._num_committed += 1
        for ticket in self.found.batches.get(fact.step, ()):
            if ticket in self._trained:
                self.violated(f"{ticket} is trained in step {fact.step} and was in {self._trained[ticket]}")
            self._trained[ticket] = fact.step
        before = self.found.digests.setdefault(fact.step, fact.state_digest)
        expected = before if self._reference is None else self._reference.digests.get(fact.step)
        if self._max_staleness == 0 and fact.state_digest != expected:
            self.violated(f"step {fact.step} ends in state {fact.state_digest}, undisturbed in {expected}")

    def _rolled_back(self, fact: RolledBack) -> None:
        self.num_rollbacks += 1
        if fact.step not in (0, self.step - 1) and not self._is_saved(fact.step):
            self.violated(f"rolled back to step {fact.step}, of which nobody has the state")
        holder = self._survives(self.step) if fact.step < self.step else ""
        if holder and not fact.reason.startswith("resumed"):
            self.violated(f"rolled back to step {fact.step} though {holder} holds step {self.step}")
        self._return_to(fact.step)

    def _return_to(self, step: int) -> None:
        self.step = step
        self._trained = {ticket: trained for ticket, trained in self._trained.items() if trained <= step}

    def _lost(self, fact: ProcessLost) -> None:
        if fact.fault.kind == RETIRED and (fact.process, fact.incarnation) not in self._retired:
            self.violated(f"{fact.process} {fact.incarnation} left though it was needed")
        if fact.fault.kind == "HostLost" and self._host_was_hit:
            return  # With its agent, also one that was to start there and never came to be.
        if fact.fault.kind not in ("Stopped", RETIRED) and not self._touched(fact.process):
            self.violated(
                f"{fact.process} {fact.incarnation}, which no fault hit, was given up: {fact.fault.message}"
            )

    def compare_ends(self) -> None:
        """A run that says it has finished has done all that the undisturbed one did."""
        reference = self._reference
        if reference is None:
            return
        if self.step != len(reference.digests):
            self.violated(
                f"finished with {self.step} committed steps in the journal, not {len(reference.digests)}"
            )
        if self._max_staleness == 0 and self.found.weights_sha256 != reference.weights_sha256:
            self.violated(
                f"finished with weights {self.found.weights_sha256}, not {reference.weights_sha256}"
            )

    def compare_servers(self, state: MasterState, *, num_planned: int) -> None:
        """Nobody stays beyond the number that was asked for last, and a crash does not undo it."""
        wanted = num_planned if state.num_servers is None else state.num_servers
        too_many = [
            member.process
            for member in state.members.members.values()
            if member.role is Role.SERVER
            and member.status in (MemberStatus.REQUESTED, MemberStatus.LIVE)
            and int(member.process.rpartition("-")[2]) >= wanted
        ]
        if too_many:
            self.violated(f"{', '.join(too_many)} stayed though {wanted} servers were wanted")
        last = None
        for fact in self.facts:
            last = fact.servers if isinstance(fact, ServersScaled) else last
        if state.num_servers != last:
            self.violated(f"the run ends with {state.num_servers} servers, asked for were {last}")

    def compare_samples(self, state: MasterState) -> None:
        """A run that has finished has trained every sample that it issued, or set it aside with a reason."""
        counts = state.ledger.counts()
        unfinished = {each.value: counts[each] for each in LIVE if counts[each]}
        if unfinished:
            self.violated(f"samples are lost, the run has finished with {unfinished}")

    # Messages.

    def watch_messages(self, process: str, incarnation: str) -> Callable[[Envelope, Body], None]:
        """An observer of what a process lets in: after a master of one epoch was heard, none of an older one is."""

        def accepted(envelope: Envelope, body: Body) -> None:
            if role_of(envelope.sender) is not Role.MASTER or isinstance(body, Register):
                return
            newest = self._heard.get((process, incarnation), 0)
            if envelope.epoch < newest:
                self.violated(
                    f"{process} accepted {type(body).__name__} of epoch {envelope.epoch} after {newest}"
                )
            self._heard[process, incarnation] = max(newest, envelope.epoch)

        return accepted


def _is_agent(process: str) -> bool:
    return role_of(process) is Role.AGENT
