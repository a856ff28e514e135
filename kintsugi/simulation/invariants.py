"""Invariants that must hold at every step of every simulated run, and its coverage.

Each fact is compared with the fault-free run: a step has one batch and one state, whatever faults occur. An
asynchronous run may reach another state, since the order of arrival decides which weights a sample is drawn from;
there, no sample may exceed the staleness bound or come from weights that were undone. Violations are kept with their
time; the first one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kintsugi.control.membership import WorkerStatus
from kintsugi.control.process import DURABLE
from kintsugi.control.processes import RETIRED
from kintsugi.control.protocol import Decision, Event
from kintsugi.control.state import MasterState
from kintsugi.journal.facts import (
    BatchFormed,
    Fact,
    ProcessLost,
    ProcessRetired,
    RolledBack,
    RunEnded,
    SamplesScored,
    ScaleRefused,
    ServersScaled,
    StepCommitted,
    TermStarted,
)
from kintsugi.protocol.membership import Register
from kintsugi.protocol.messages import Body
from kintsugi.protocol.wire import Envelope
from kintsugi.samples.lifecycle import LIVE
from kintsugi.simulation.coverage import IMPOSSIBLE_BOUNDARIES, IMPOSSIBLE_EVENTS, Coverage, Pair
from kintsugi.simulation.master import SimulatedMaster
from kintsugi.simulation.replay_adapter import digest_of_whole
from kintsugi.types import Role, kind_of, role_of


class Reference(msgspec.Struct):
    """Fault-free run of a configuration: batch and resulting state of each step."""

    digests: dict[int, str] = {}
    batches: dict[int, tuple[str, ...]] = {}
    weights_sha256: str = ""


class Invariants:
    """Observer of the masters and messages of a run."""

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
        """`touched`: whether a fault hit this process. `survives`: a holder of the state of a step, if any. `is_saved`:
        whether a checkpoint of it is on disk."""
        self.violations: list[str] = []
        self.found = Reference({}, {})
        """Batches and states of this run."""
        self.step = 0
        self.num_rollbacks = 0
        self._num_committed = 0
        self._begins_again = False
        """Whether all steps were undone since the last one was committed: ranks that still have a part of them go."""
        self.facts: list[Fact] = []
        self._reference, self._coverage = reference, coverage
        self._touched, self._survives, self._is_saved = touched, survives, is_saved
        self._term = 0
        self._owners: dict[int, str] = {}
        self._trained: dict[str, int] = {}
        self._max_staleness = max_staleness
        self._versions: dict[str, int] = {}
        """Ticket → oldest version that a sample of it was drawn from."""
        self._retired: set[tuple[str, str]] = set()
        self._answered: set[str] = set()
        self._newest_term: dict[tuple[str, str], int] = {}
        self._host_was_hit = False
        """Whether the fact in hand is about the loss of an agent that a fault hit."""
        self._unsure: tuple[str, tuple[Fact, ...]] | None = None
        """Last append, its writer and facts, until it is durable."""
        self._on_decision: list[Callable[[SimulatedMaster], None]] = []

    def violated(self, what: str) -> None:
        self.violations.append(what)

    # The master.

    def follow(self, action: Callable[[SimulatedMaster], None]) -> None:
        """Call `action` after every decision, for faults that wait for a state of the master."""
        self._on_decision.append(action)

    def decided(self, master: SimulatedMaster, state: str, event: Event, decision: Decision) -> None:
        met = (state, kind_of(event))
        self._coverage.events[met] += 1
        boundaries = [kind_of(effect) for effect in decision.effects]
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
        """Check facts when they are journaled. A fact that must be durable counts only after the sync: it has no
        effects before, and a power cut may undo it."""
        self._unsure = (master.incarnation, facts)
        if durable:
            self.synced()

    def synced(self) -> None:
        assert self._unsure is not None, "only what was journaled is synced"
        incarnation, facts = self._unsure
        self._unsure = None
        self._count(facts, incarnation=incarnation)

    def taken_over(self, facts: Sequence[Fact]) -> None:
        """Count as much of the last append as the next master has found. A fact that need not be durable may be lost
        with the power, also a rollback: the run then has the state of the journal."""
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

    def restored(self, state: MasterState, replayed: MasterState) -> None:
        if state.fold() != replayed.fold():
            self.violated("the folded state and the facts after it lead to another state than all facts do")

    def _count(self, facts: tuple[Fact, ...], *, incarnation: str) -> None:
        self.facts.extend(facts)
        agents = [fact for fact in facts if isinstance(fact, ProcessLost) and _is_agent(fact.process)]
        self._host_was_hit = any(self._touched(fact.process) for fact in agents)
        for fact in facts:
            self._check(fact)
        owner = self._owners.get(self._term)
        if owner != incarnation:
            self.violated(f"master {incarnation} journals in term {self._term}, which {owner} owns")

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
            case TermStarted():
                self._term_started(fact)
            case RunEnded():
                self.found.weights_sha256 = fact.weights_sha256
            case _:
                pass

    def _term_started(self, fact: TermStarted) -> None:
        if fact.term <= self._term:
            self.violated(f"term {fact.term} begins after term {self._term}")
        self._term = fact.term
        self._owners[fact.term] = fact.incarnation

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
        self._begins_again = False
        for ticket in self.found.batches.get(fact.step, ()):
            if ticket in self._trained:
                self.violated(f"{ticket} is trained in step {fact.step} and was in {self._trained[ticket]}")
            self._trained[ticket] = fact.step
        digest = digest_of_whole(fact.state_digest)  # However it is cut in this step.
        before = self.found.digests.setdefault(fact.step, digest)
        expected = before if self._reference is None else self._reference.digests.get(fact.step)
        if self._max_staleness == 0 and digest != expected:
            self.violated(f"step {fact.step} ends in state {digest}, undisturbed in {expected}")

    def _rolled_back(self, fact: RolledBack) -> None:
        self.num_rollbacks += 1
        if fact.step not in (0, self.step - 1) and not self._is_saved(fact.step):
            self.violated(f"rolled back to step {fact.step}, of which no process has the state")
        holder = self._survives(self.step) if fact.step < self.step else ""
        if holder and not fact.reason.startswith("resumed"):
            self.violated(f"rolled back to step {fact.step} though {holder} holds step {self.step}")
        self._begins_again = fact.step == 0
        self._return_to(fact.step)

    def _return_to(self, step: int) -> None:
        self.step = step
        self._trained = {ticket: trained for ticket, trained in self._trained.items() if trained <= step}

    def _lost(self, fact: ProcessLost) -> None:
        if fact.fault.kind == RETIRED and (fact.process, fact.incarnation) not in self._retired:
            self.violated(f"{fact.process} {fact.incarnation} left though it was needed")
        if fact.fault.kind == "HostLost" and self._host_was_hit:
            return  # With its agent a process is lost, also one that was to start there and never did.
        if self._begins_again and role_of(fact.process) is Role.MODEL:
            return  # A rank of a state of which another part is lost.
        if fact.fault.kind not in ("Stopped", RETIRED) and not self._touched(fact.process):
            self.violated(
                f"{fact.process} {fact.incarnation}, which no fault hit, was given up: {fact.fault.message}"
            )

    def compare_ends(self) -> None:
        """Check that a run that reports success has done all that the fault-free run did."""
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
        """Check that the number of servers is the one requested last, and that a crash does not undo it."""
        wanted = num_planned if state.num_servers is None else state.num_servers
        too_many = [
            member.process
            for member in state.members.members.values()
            if member.role is Role.SERVER
            and member.status in (WorkerStatus.REQUESTED, WorkerStatus.LIVE)
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
        """Check that a finished run has trained every sample that it issued, or dropped it with a reason."""
        counts = state.ledger.counts()
        unfinished = {each.value: counts[each] for each in LIVE if counts[each]}
        if unfinished:
            self.violated(f"samples are lost, the run has finished with {unfinished}")

    # Messages.

    def watch_messages(self, process: str, incarnation: str) -> Callable[[Envelope, Body], None]:
        """Return an observer of the messages that a process accepts: after a master of one term, none of an older
        one."""

        def accepted(envelope: Envelope, body: Body) -> None:
            if role_of(envelope.sender) is not Role.MASTER or isinstance(body, Register):
                return
            newest = self._newest_term.get((process, incarnation), 0)
            if envelope.term < newest:
                self.violated(
                    f"{process} accepted {type(body).__name__} of term {envelope.term} after {newest}"
                )
            self._newest_term[process, incarnation] = max(newest, envelope.term)

        return accepted


def _is_agent(process: str) -> bool:
    return role_of(process) is Role.AGENT
