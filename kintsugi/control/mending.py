"""What the master does when something breaks: keeps the incident's book and carries out the recovery of the ranks.

The protocol itself is `recovery.controller`, the choice of a strategy `recovery.policy`; both know nothing of journals,
requests or samples. Here they meet the run: who is lost, what was committed, where its state can be found.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median

import msgspec

from kintsugi.config import Config
from kintsugi.control.agenda import carried_stage
from kintsugi.control.draft import Conversation, Draft
from kintsugi.control.protocol import Raise, ShareBook
from kintsugi.control.staff import Staff
from kintsugi.errors import DeadlineExceeded, DeviceError, Fault, root_first
from kintsugi.facts import FaultNoted, IncidentClosed, IncidentOpened, RolledBack, StrategyChosen
from kintsugi.messages import Body, Save
from kintsugi.operations import RebuildGroup
from kintsugi.recovery.controller import Controller, Orders, Ranks
from kintsugi.recovery.incidents import Incidents
from kintsugi.recovery.policy import FaultClass, Situation, Strategy, classify, hopeless, impact, plan
from kintsugi.recovery.processor import Flow
from kintsugi.recovery.states import RecoveryState
from kintsugi.stages import next_stage
from kintsugi.types import Role

OPERATION = "rank"
DUMP = "dump"
LONGEST_WAIT_S = 15.0
"""For a replacement that neither comes nor fails; longer where starts were seen to take longer."""
START_FACTOR = 10.0
USUAL_STEPS = 20
SLOW_FACTOR = 3.0
SLOW_MARGIN_S = 0.5
SLOW_STEPS = 5
"""Steps that an incident stays open because they are slow; then it is closed, and people are told."""
MEETING_SHARE = 0.8
"""Of the time for which the master waits, what ranks have to come together."""
REPAIR_ATTEMPTS = 3
"""Repairs that may fail before steps are given up: who holds the state may be out of reach for a moment only."""
FIRST_PAUSE_S = 0.2
"""Before the third try; each further one waits twice as long."""

_S = RecoveryState


class Mending:
    """One recovery at a time, and the incident that it belongs to."""

    def __init__(
        self,
        config: Config,
        *,
        draft: Draft,
        talk: Conversation,
        staff: Staff,
        checkpoint_folder: str,
        mended: Callable[[float], None],
        give_up: Callable[[Fault, float], None],
        rolled_back: Callable[[], None],
    ) -> None:
        """`mended`: the ranks are one group at the agreed step. `give_up`: no strategy is left; this is the cause.
        `rolled_back`: steps were undone, so whatever ran for them is void."""
        self._config, self._draft, self._talk, self._staff = config, draft, talk, staff
        self._folder = checkpoint_folder
        self._mended, self._give_up, self._rolled_back = mended, give_up, rolled_back
        self._incidents = Incidents()
        self.controller = Controller()
        self.restore_paths: dict[int, str] = {}
        """Step → checkpoint that the run was resumed from; those of this session are in the journal."""
        self._begin_at = math.inf
        """When a recovery that failed is tried again."""
        self.step_s = 1.0
        """What a step takes, as last measured."""
        self._usual_s: deque[float] = deque(maxlen=USUAL_STEPS)
        """Seconds of training of the last undisturbed steps."""

    @property
    def active(self) -> bool:
        return self.controller.active or self._begin_at < math.inf

    @property
    def ranks(self) -> tuple[str, ...]:
        """Of the current group, in rank order."""
        return self.controller.ranks

    @property
    def can_grow(self) -> bool:
        """Whether the group went on smaller and could now be whole again."""
        return set(self._draft.state.members.live(Role.MODEL)) > set(self.ranks)

    # The book.

    def note(self, fault: Fault, now: float, *, phase: str, lost: str = "") -> None:
        """A fault, of a process that is lost or of one that lives, becomes part of the open incident or opens one."""
        state = self._draft.state
        number = state.open_incident or state.num_incidents + 1
        self._incidents.fault(fault, number=number, now=now, lost=lost)
        if state.open_incident:
            self._draft.fact(FaultNoted(number, fault))
        else:
            self._draft.fact(IncidentOpened(number, state.step, phase, fault))
        if lost:
            self._draft.do(Raise(f"{root_first([fault])[0].message}. {impact([lost])}"))

    def explain(self, cause: Fault, host: str, now: float) -> None:
        """What processes of a host said about their device in the open incident came from this: it is told again, with
        its cause."""
        incident, members = self._incidents.current, self._draft.state.members.members
        for index, fault in enumerate(incident.faults if incident is not None else ()):
            # A rank says it in its answer, a server with its last words.
            says_so = fault.kind == DeviceError.__name__ or DeviceError.__name__ in fault.message
            member = members.get(fault.process)
            if says_so and fault.cause is None and member is not None and member.host == host:
                assert incident is not None
                incident.faults[index] = explained = msgspec.structs.replace(fault, cause=cause)
                self._draft.fact(FaultNoted(incident.number, explained))

    def adopt(self, now: float) -> None:
        """A new master: what the journal says of the incident that was open when the last one died."""
        number = self._draft.state.open_incident
        faults, lost = self._draft.state.incidents.unfinished()
        for fault in faults:
            self._incidents.fault(fault, number=number, now=now)
        if self._incidents.current is not None:
            self._incidents.current.processes |= dict.fromkeys(lost)
            self._incidents.current.progressed()

    def started_in(self, seconds: float) -> None:
        """The run's own start shows what a start may take."""
        self._incidents.start_s = max(self._incidents.start_s, seconds)

    def beyond_help(self) -> str:
        """Why the incident can not be mended by replacing and repeating; empty while it can."""
        return hopeless(self._situation(replacements_fail=False))

    def committed(self, now: float, *, training_s: float, step_s: float) -> None:
        """A step was committed: the incident is over when nothing is missing and the ranks are as fast as before."""
        incident, self.step_s = self._incidents.current, step_s
        if incident is None:
            self._usual_s.append(training_s)
            return
        incident.progressed()
        incident.num_steps += 1
        usual_s = median(self._usual_s) if self._usual_s else training_s
        slow = training_s > max(SLOW_FACTOR * usual_s, usual_s + SLOW_MARGIN_S)
        if slow and incident.num_steps < SLOW_STEPS:
            self._draft.because(f"training took {training_s:.2f} s, {usual_s:.2f} s are usual")
            return
        if slow:
            values = {"training_s": training_s, "usual_s": usual_s}
            self._draft.do(Raise("the ranks are slower than before the incident", values))
        self.close(now)

    def close(self, now: float) -> None:
        """The incident is over, unless something is still missing."""
        incident = self._incidents.current
        smaller = incident is not None and incident.strategy is Strategy.ELASTIC
        if incident is None or self.active or (self._staff.missing() and not smaller):
            return
        self._incidents.close()
        timing = incident.timing(self.controller.since, now)
        processes = tuple(incident.processes)
        self._draft.fact(
            IncidentClosed(incident.number, incident.strategy, self._draft.state.step, processes, timing)
        )
        cause = root_first(incident.faults)[0]
        self._draft.do(Raise(f"mended by {incident.strategy}: {cause.message}", timing))

    @property
    def cause(self) -> Fault | None:
        """Of the open incident: the user's mistake if there is one, for whatever else broke would have been mended."""
        faults = root_first(self._incidents.current.faults) if self._incidents.current is not None else []
        mistakes = [fault for fault in faults if classify(fault) is FaultClass.USER]
        return next(iter([*mistakes, *faults]), None)

    # The recovery.

    def begin(self, now: float) -> None:
        """Bring all ranks to the last committed step: at the start, after a fault, under a new master."""
        self._talk.withdraw_all(f"{OPERATION}:")
        self._begin_at = math.inf
        if self.controller.state is _S.DUMPING:
            if not self._talk.is_asked(f"{DUMP}:"):  # Its writer is lost as well.
                self._end(now)
            return
        if self.beyond_help():
            self._choose(now, replacements_fail=False)
            return
        orders = self.controller.begin(self._view(), now, epoch=self._draft.state.epoch)
        if self.controller.state is not _S.PRE_LOCKING:  # Nobody lives whom one could lock.
            self._choose(now, replacements_fail=False)
        self._follow(orders, now)

    def answered(self, process: str, body: Body, now: float) -> None:
        """A rank answered the operation that was asked of it. When all are locked, the strategy is chosen."""
        before = self.controller.state
        orders = self.controller.answered(process, body, self._view(), now)
        if orders is None:
            return
        if before is _S.PRE_LOCKING:
            self._choose(now, replacements_fail=False)
        self._follow(orders, now)

    def joined(self, now: float) -> None:
        """Somebody came; perhaps it was the last one."""
        if not self._staff.missing():
            self._incidents.staffed(now)
        orders = self.controller.check(self._view(), now)
        if orders is not None:
            self._follow(orders, now)

    def tick(self, now: float) -> None:
        """Try again what failed, when its pause is over; wait for no replacement without end."""
        if now >= self._begin_at:
            self.begin(now)
        if self.controller.state is not _S.WAITING:
            return
        waited_s = now - self.controller.since[_S.WAITING]
        limit_s = max(LONGEST_WAIT_S, START_FACTOR * self._incidents.start_s)
        if not self._draft.state.members.live(Role.MODEL):  # Nobody could go on without them.
            limit_s = max(limit_s, self._config.cluster.start_timeout_s)
        if waited_s <= limit_s and not self._staff.do_not_come(Role.MODEL):
            return
        if self._choose(now, replacements_fail=True) is Strategy.ELASTIC:
            self.controller.smaller = True
            orders = self.controller.check(self._view(), now)
            assert orders is not None, "somebody lives, and nobody is waited for"
            self._follow(orders, now)

    def failed(self, process: str, fault: Fault, now: float, *, phase: str) -> None:
        """An operation, or a call of training, failed at a rank that lives: repeat, or replace the rank first."""
        repairing = self.controller.state is _S.REPAIRING and process in self.controller.waits_for
        if repairing and fault.kind != DeadlineExceeded.__name__:
            orders = self.controller.repair_failed(process, self._view(), now)
            if orders is None:
                return
            if not orders.problem:
                self._follow(orders, now)
                return
        self.note(fault, now, phase=phase)
        incident = self._incidents.current
        assert incident is not None
        incident.attempts += 1
        kind = classify(fault)
        if self.controller.state is _S.REPAIRING and fault.kind != DeadlineExceeded.__name__:
            incident.repairs += 1
            self._draft.do(ShareBook())  # It may not know yet where the others are.
            step, living = self._draft.state.step, self._draft.state.members.live(Role.MODEL)
            holders = [rank for rank in living if self.controller.holds(rank, step)]
            if incident.repairs >= REPAIR_ATTEMPTS and not holders:
                self._fall_back(fault, now)
            elif incident.repairs >= REPAIR_ATTEMPTS and process in living and process not in holders:
                self._staff.condemn(process, fault, now)
        elif kind is not FaultClass.CONSEQUENCE and self._draft.state.members.is_live(process):
            incident.blamed[process] += 1
            again = incident.blamed[process] > 1
            if again or kind in (FaultClass.LINK, FaultClass.DEVICE):
                self._staff.condemn(process, fault, now)
        self.controller.fail(now)
        if incident.attempts > 1 and not self.beyond_help():
            # What fails again at once may need a moment: an agent that is being restarted, say.
            self._talk.withdraw_all(f"{OPERATION}:")
            self._begin_at = now + FIRST_PAUSE_S * 2.0 ** (incident.attempts - 2)
            return
        self.begin(now)

    def dumped(self, now: float) -> None:
        """The last checkpoint is written, or can not be."""
        self._end(now)

    def _follow(self, orders: Orders, now: float) -> None:
        self._draft.because(orders.reason)
        if orders.problem:
            fault = self._fault("IntegrityError", orders.problem)
            for culprit in orders.culprits[: max(0, len(self.ranks) - 1)]:
                self._staff.condemn(culprit, fault, now)
            self.failed(self.ranks[0], fault, now, phase="recovering")
        elif orders.bodies:
            self._talk.ask_each(OPERATION, {rank: self._timed(b) for rank, b in orders.bodies.items()}, now)
        elif not self.active:
            self._mended(now)

    def _timed(self, body: Body) -> Body:
        """Ranks wait for each other when a group is rebuilt: they give up before the master would."""
        if not isinstance(body, RebuildGroup):
            return body
        limit_s = MEETING_SHARE * self._talk.deadline_s(RebuildGroup)
        return msgspec.structs.replace(body, timeout_s=limit_s)

    def _choose(self, now: float, *, replacements_fail: bool) -> Strategy | None:
        """The fault centre's choice for the open incident; None when nothing is wrong."""
        incident = self._incidents.current
        if incident is None:
            return None
        chosen = plan(self._situation(replacements_fail=replacements_fail))
        incident.strategy = chosen.strategy
        options = tuple(str(option) for option in chosen.options)
        self._draft.fact(StrategyChosen(incident.number, chosen.strategy, chosen.reason, options))
        self._draft.because(f"{chosen.strategy}: {chosen.reason}")
        if chosen.strategy in (Strategy.DUMP, Strategy.EXIT):
            self._dump(now, dump=chosen.strategy is Strategy.DUMP)
        return chosen.strategy

    def _dump(self, now: float, *, dump: bool) -> None:
        """Write what there is, then end with the cause."""
        state = self._draft.state
        self.controller.give_up(now)
        if not dump or state.step in (0, *state.saved_steps):
            self._end(now)
            return
        stage = carried_stage(self._config, step=state.step).name
        living = state.members.live(Role.MODEL)
        holders = [rank for rank in living if self.controller.holds(rank, state.step)] or living
        # Who made the mistake known is free, while the others may wait for it in a collective.
        free = [fault.process for fault in [self.cause] if fault is not None]
        writer = min(holders, key=lambda rank: (self._staff.is_condemned(rank), rank not in free))
        self._talk.ask_each(DUMP, {writer: Save(state.step, stage, self._folder)}, now)

    def _end(self, now: float) -> None:
        fault = self.cause
        assert fault is not None, "only an incident is given up"
        self.controller.dumped(now)
        self._give_up(fault, now)

    def _fall_back(self, fault: Fault, now: float) -> None:
        """Nobody holds the agreed step any more: the run returns to the step before, which a snapshot or a keeper may
        still have, else to its last checkpoint, else to its beginning, where only a fresh rank stands."""
        state, incident = self._draft.state, self._incidents.current
        assert incident is not None
        step = max((saved for saved in state.saved_steps if saved < state.step), default=0)
        if not incident.fell_back and state.step - 1 in state.digests:
            step = max(step, state.step - 1)
        back = RolledBack(step, f"the state of step {state.step} is lost: {fault.message}")
        if state.ledger.accepts(back) is not None:
            incident.beyond_help = "no readable state is left of any step that the run still knows"
            return
        incident.fell_back, incident.attempts, incident.repairs = True, 0, 0
        self._draft.fact(back)
        self._draft.do(Raise(f"back to step {step}: the state of later steps is lost"))
        for rank in self.controller.begun if step == 0 else ():
            self._staff.condemn(rank, fault, now)
        self._rolled_back()

    def _fault(self, kind: str, message: str) -> Fault:
        state = self._draft.state
        return Fault(f"{state.epoch}.{state.num_incarnations}.{kind}", kind, "master-0", message, 0.0)

    def _situation(self, *, replacements_fail: bool) -> Situation:
        return self._incidents.situation(
            missing=tuple(self._staff.missing(Role.MODEL)),
            living=tuple(self._draft.state.members.live(Role.MODEL)),
            replacements_fail=replacements_fail,
            step_s=self.step_s,
        )

    def _view(self) -> Ranks:
        state = self._draft.state
        members, step = state.members.members, state.step
        living = tuple(state.members.live(Role.MODEL))
        # There are as many as ranks times processes.
        may_repair = self.controller.state in (_S.REBUILDING, _S.REPAIRING)
        return Ranks(
            living=living,
            missing=tuple(self._staff.missing(Role.MODEL)),
            stores={name: members[name].capabilities.get("store", "") for name in living},
            sources={name: self._sources(name) for name in living} if may_repair else {},
            step=step,
            digest=state.digests.get(step, ""),
            stage=carried_stage(self._config, step=step).name,
            next_stage=next_stage(self._config, step=step).name,
            flow=next((members[n].capabilities.get("flow", Flow.ROLLBACK) for n in living), Flow.ROLLBACK),
        )

    def _sources(self, rank: str) -> tuple[str, ...]:
        """Its host's snapshots (its own first), then other hosts' agents, then the checkpoint."""
        members = self._draft.state.members
        host = members.members[rank].host
        here = [
            name
            for name, member in members.members.items()
            if member.role is Role.MODEL and member.host == host and name != rank
        ]
        snapshots = [f"snapshot:{name}" for name in (rank, *sorted(here))]
        keepers = [name for name in members.live(Role.AGENT) if members.members[name].host != host]
        state = self._draft.state
        path = state.checkpoint_paths.get(state.step) or self.restore_paths.get(state.step)
        return (*snapshots, *keepers, *([path] if path is not None else []))
