"""RECOVERING: the incident log, and the recovery of the ranks.

The protocol is `recovery.rank_protocol`, the choice of a strategy `recovery.strategy`; both know nothing of journals,
requests or samples. This module connects them with the run: which processes are lost, which step is committed, and
where its state can be found.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

import msgspec

from kintsugi.config.schema import Config
from kintsugi.config.stages import next_stage
from kintsugi.control.decision import DecisionBuilder
from kintsugi.control.dispatch import EpisodeDispatch
from kintsugi.control.due import carried_stage
from kintsugi.control.mesh_choice import (
    box_copies,
    can_grow,
    change_to,
    mesh_in_force,
    mesh_of_step,
    rank_names,
    wanted_mesh,
)
from kintsugi.control.pending import PendingRequests, Purpose
from kintsugi.control.phases.table import RUNNING, Phase, PhaseReport, PhaseResult
from kintsugi.control.processes import ProcessManager
from kintsugi.control.protocol import Raise, ShareBook
from kintsugi.errors import (
    DeadlineExceeded,
    DeviceError,
    DoesNotFit,
    EndedByError,
    Fault,
    FaultClass,
    SourceSilent,
    UnknownPeer,
    classify,
    root_first,
)
from kintsugi.journal.facts import FaultNoted, IncidentClosed, IncidentOpened, RolledBack, StrategyChosen
from kintsugi.model.seats import Mesh, mesh_of, seat_of, snapshots_of, without_holder
from kintsugi.protocol.messages import Body
from kintsugi.protocol.recovery import RebuildGroup
from kintsugi.protocol.training import Save
from kintsugi.recovery.incident_log import Incident, IncidentLog
from kintsugi.recovery.rank import Flow
from kintsugi.recovery.rank_protocol import RankOrders, RankProtocol, RankSet
from kintsugi.recovery.states import RecoveryState
from kintsugi.recovery.strategy import (
    FaultSituation,
    Strategy,
    impact,
    plan,
    unrecoverable_reason,
)
from kintsugi.runtime.backoff import growing_pause
from kintsugi.telemetry.events import FaultHandled
from kintsugi.types import Role

LONGEST_WAIT_S = 15.0
"""Longest wait for a replacement that neither registers nor fails; longer where starts have taken longer."""
START_FACTOR = 10.0
USUAL_STEPS = 20
SLOW_FACTOR = 3.0
SLOW_MARGIN_S = 0.5
SLOW_STEPS = 5
"""Steps for which slow ranks keep an incident open; then it is closed with an alert."""
MEETING_SHARE = 0.8
"""Share of the request deadline that the ranks have to form a group."""
UNADDRESSED_ATTEMPTS = 5
"""Repairs that may fail because addresses had not arrived, which says nothing of the state; after these they count."""
REPAIR_ATTEMPTS = 3
"""Repairs that may fail before steps are undone: a holder of the state may be unreachable only briefly."""
FIRST_PAUSE_S = 0.2
"""Pause before the third attempt; each further one is twice as long."""

_S = RecoveryState
FORMED = (_S.REBUILDING, _S.REPAIRING, _S.ROLLING_BACK, _S.STAGING, _S.NOTIFYING)
"""States in which the ranks of the group, and their seats, are settled."""


class RecoveryCoordinator:
    """One recovery at a time, and the incident that it belongs to."""

    def __init__(
        self,
        config: Config,
        *,
        decision: DecisionBuilder,
        pending: PendingRequests,
        processes: ProcessManager,
        dispatch: EpisodeDispatch,
        checkpoint_folder: str,
    ) -> None:
        self._config, self._decision, self._pending = config, decision, pending
        self._processes, self._dispatch = processes, dispatch
        self._folder = checkpoint_folder
        self._incidents = IncidentLog()
        self.protocol = RankProtocol()
        self.restore_paths: dict[int, str] = {}
        """Step → checkpoint that the run was resumed from; those of this session are in the journal."""
        self._begin_at = math.inf
        """Time at which a failed recovery is repeated."""
        self._dump_again = False
        """The last checkpoint is requested while another save is under way, which may be the answer."""
        self._read_hosts: set[str] = set()
        """Hosts whose snapshots could be read when ranks were last asked to repair their state."""
        self._unaddressed: set[str] = set()
        """Ranks that could not be repaired in this attempt because they lacked the address of a source."""
        self.step_s = 1.0
        """Duration of the last step."""
        self._usual_s: deque[float] = deque(maxlen=USUAL_STEPS)
        """Training time of the last steps without an incident."""

    @property
    def active(self) -> bool:
        return self.protocol.active or self._begin_at < math.inf

    @property
    def ranks(self) -> tuple[str, ...]:
        """Ranks of the current group, in rank order."""
        return self.protocol.ranks

    @property
    def can_grow(self) -> bool:
        """Whether the group continued smaller, and ranks that live now could have a seat."""
        living = self._decision.state.members.live(Role.MODEL)
        return can_grow(self._config, living, ranks=self.ranks)

    # The incident log.

    def note(self, fault: Fault, now: float, *, phase: str, lost: str = "") -> None:
        """Add a fault, of a lost process or a live one, to the open incident, or open one."""
        state = self._decision.state
        number = state.open_incident or state.num_incidents + 1
        self._incidents.fault(fault, number=number, now=now, lost=lost)
        if state.open_incident:
            self._decision.add_fact(FaultNoted(number, fault))
        else:
            self._decision.add_fact(IncidentOpened(number, state.step, phase, fault))
        if lost:
            message = f"{root_first([fault])[0].message}. {impact([lost])}"
            self._decision.add_effect(Raise.of(FaultHandled(message, of=lost, fault=fault.id)))

    def attribute_device_errors(self, cause: Fault, *, host: str) -> None:
        """Give the device errors that processes of a host reported in the open incident their cause, and journal them
        again."""
        incident, members = self._incidents.current, self._decision.state.members.members
        for index, fault in enumerate(incident.faults if incident is not None else ()):
            # A rank reports the error in its answer, a server in its event log before it ends.
            says_so = DeviceError.__name__ in (fault.kind, _error_at_end(fault))
            member = members.get(fault.process)
            if says_so and fault.cause is None and member is not None and member.host == host:
                assert incident is not None
                incident.faults[index] = explained = msgspec.structs.replace(fault, cause=cause)
                self._decision.add_fact(FaultNoted(incident.number, explained))

    def adopt(self, now: float) -> None:
        """Restore the incident that was open when the last master died."""
        number = self._decision.state.open_incident
        faults, lost = self._decision.state.incidents.unfinished()
        for fault in faults:
            self._incidents.fault(fault, number=number, now=now)
        if self._incidents.current is not None:
            self._incidents.current.processes |= dict.fromkeys(lost)
            self._incidents.current.progressed()

    def continue_group(self, ranks: tuple[str, ...], *, generation: int) -> None:
        """Take the group of the last master over: no rank is interrupted."""
        incident = self._incidents.current
        assert incident is not None, "the loss of a master is an incident"
        mesh = mesh_in_force(self._config, self._decision.state)
        self.protocol.adopt(ranks, generation=generation, mesh=mesh)
        incident.strategy = Strategy.CONTINUE
        reason = f"all {len(ranks)} ranks are in generation {generation} at the committed step: they go on"
        self._decision.add_fact(StrategyChosen(incident.number, Strategy.CONTINUE, reason, ()))
        self._decision.explain(reason)

    def goes_on_without(self, rank: str) -> bool:
        """Whether the group loses nothing with a rank: one that has no seat in it. The next step closes the incident,
        unless ranks with a seat are lost too; the group takes its successor back as it would have taken the rank."""
        incident = self._incidents.current
        if incident is None or self.active or not self.ranks or rank in self.ranks:
            return False
        reason = f"{rank} had no seat: the group goes on without it"
        if not any(process in self.ranks for process in incident.processes):
            incident.strategy = Strategy.ELASTIC
            self._decision.add_fact(StrategyChosen(incident.number, Strategy.ELASTIC, reason, ()))
        self._decision.explain(reason)
        return True

    def observe_start(self, seconds: float) -> None:
        """Record how long the start of the run took, as a measure for replacements."""
        self._incidents.start_s = max(self._incidents.start_s, seconds)

    def unrecoverable(self) -> str:
        """Return why the incident cannot be recovered by replacing and repeating; empty while it can."""
        return unrecoverable_reason(self._situation(replacements_fail=False))

    def committed(self, now: float, *, training_s: float, step_s: float) -> None:
        """Close the incident after a committed step, if no process is missing and the ranks are as fast as before."""
        incident, self.step_s = self._incidents.current, step_s
        if incident is None:
            self._usual_s.append(training_s)
            return
        incident.progressed()
        incident.num_steps += 1
        usual_s = median(self._usual_s) if self._usual_s else training_s
        slow = training_s > max(SLOW_FACTOR * usual_s, usual_s + SLOW_MARGIN_S)
        if slow and incident.num_steps < SLOW_STEPS:
            self._decision.explain(f"training took {training_s:.2f} s, {usual_s:.2f} s are usual")
            return
        if slow:
            values = {"training_s": training_s, "usual_s": usual_s}
            self._decision.add_effect(Raise("the ranks are slower than before the incident", values))
        self.close(now)

    def close(self, now: float) -> None:
        """Close the incident, unless a process is missing."""
        incident = self._incidents.current
        smaller = incident is not None and incident.strategy is Strategy.ELASTIC
        if incident is None or self.active or (self._processes.missing() and not smaller):
            return
        self._incidents.close()
        timing = incident.timing(self.protocol.since, now)
        processes = tuple(incident.processes)
        self._decision.add_fact(
            IncidentClosed(incident.number, incident.strategy, self._decision.state.step, processes, timing)
        )
        cause = root_first(incident.faults)[0]
        message = f"recovered by {incident.strategy}: {cause.message}"
        handled = FaultHandled(message, timing, of=cause.process, fault=cause.id)
        self._decision.add_effect(Raise.of(handled))

    @property
    def cause(self) -> Fault | None:
        """Cause of the open incident. The user's mistake precedes all others, which could have been recovered."""
        faults = root_first(self._incidents.current.faults) if self._incidents.current is not None else []
        mistakes = [fault for fault in faults if classify(fault) is FaultClass.USER]
        return next(iter([*mistakes, *faults]), None)

    # The recovery.

    def begin(self, now: float) -> PhaseReport:
        """Bring all ranks to the last committed step: at the start, after a fault, after a takeover."""
        self._pending.withdraw_all(Purpose.OPERATION)
        self._begin_at, self._unaddressed = math.inf, set()
        if self.protocol.state is _S.DUMPING:
            if not self._pending.is_asked(Purpose.DUMP):  # The rank that writes is lost as well.
                return self._end(now)
            return RUNNING
        if self.unrecoverable():
            return self._choose(now, replacements_fail=False)
        is_formed = bool(self.ranks)
        orders = self.protocol.begin(self._view(), now, term=self._decision.state.term)
        # Without a fault a smaller group grows: it does not wait for the ranks that are still missing.
        self.protocol.smaller = is_formed and self._incidents.current is None
        chosen = RUNNING
        if self.protocol.state is not _S.PRE_LOCKING:  # There is no live rank to lock.
            chosen = self._choose(now, replacements_fail=False)
        return _first(chosen, self._follow(orders, now))

    def answered(self, process: str, body: Body, now: float) -> PhaseReport:
        """Take the answer of a rank to an operation. When all are locked, the strategy is chosen."""
        before = self.protocol.state
        orders = self.protocol.answered(process, body, self._view(), now)
        if orders is None:
            return RUNNING
        chosen = RUNNING
        if before is _S.PRE_LOCKING:
            chosen = self._choose(now, replacements_fail=False)
        return _first(chosen, self._follow(orders, now))

    def joined(self, now: float) -> PhaseReport:
        """Continue if the process that joined was the last one missing."""
        if not self._processes.missing():
            self._incidents.all_live(now)
        orders = self.protocol.check(self._view(), now)
        return RUNNING if orders is None else self._follow(orders, now)

    def tick(self, now: float) -> PhaseReport:
        """Repeat a failed recovery when its pause is over, and end the wait for a replacement at its limit."""
        report = self.begin(now) if now >= self._begin_at else RUNNING
        if self.protocol.state is not _S.WAITING:
            return report
        waited_s = now - self.protocol.since[_S.WAITING]
        limit_s = max(LONGEST_WAIT_S, START_FACTOR * self._incidents.start_s)
        incident = self._incidents.current
        awaited = self._awaited(incident) if incident is not None else []
        # Without them no rank can continue, or parts of the last step are out of reach: they are also waited for after
        # starts that failed.
        needs_all = bool(awaited) or not self._decision.state.members.live(Role.MODEL)
        needs_all = needs_all or (incident is not None and self._can_not_hold(incident))
        if needs_all:
            limit_s = max(limit_s, self._config.cluster.start_timeout_s)
        if waited_s <= limit_s and (needs_all or not self._processes.cannot_start(Role.MODEL)):
            return report
        if incident is not None:
            incident.awaits_lost = False
            incident.awaited.update(awaited)  # They did not come: steps are undone instead.
        chosen, incident = self._choose(now, replacements_fail=True), self._incidents.current
        if incident is None or incident.strategy is not Strategy.ELASTIC:
            return chosen
        self.protocol.smaller = True
        orders = self.protocol.check(self._view(), now)
        assert orders is not None, "a rank is live, and none is waited for"
        return self._follow(orders, now)

    def failed(self, process: str, fault: Fault, now: float, *, phase: str) -> PhaseReport:
        """Take the failure of an operation or a model call at a live rank: repeat, or replace the rank first."""
        repairing = self.protocol.state is _S.REPAIRING and process in self.protocol.waits_for
        if repairing and fault.kind != DeadlineExceeded.__name__:
            if fault.kind == UnknownPeer.__name__:
                self._unaddressed.add(process)
            orders = self.protocol.repair_failed(process, self._view(), now)
            if orders is None:
                return RUNNING
            if not orders.problem:
                return self._follow(orders, now)
        self.note(fault, now, phase=phase)
        incident = self._incidents.current
        assert incident is not None
        incident.attempts += 1
        kind = classify(fault)
        if fault.kind == DoesNotFit.__name__:
            incident.does_not_fit, incident.refused = fault.message, self.protocol.mesh.ranks
        elif self.protocol.state is _S.REPAIRING and fault.kind != DeadlineExceeded.__name__:
            self._not_repaired(process, fault, incident, now)
        elif kind is not FaultClass.CONSEQUENCE and self._decision.state.members.is_live(process):
            incident.blamed[process] += 1
            again = incident.blamed[process] > 1
            if again or kind in (FaultClass.LINK, FaultClass.DEVICE):
                self._processes.terminate(process, fault, now)
        self.protocol.fail(now)
        num_failures = incident.attempts + incident.unaddressed
        if num_failures > 1 and not self.unrecoverable():
            # A fault that repeats immediately may need time: for example, an agent is restarting.
            self._pending.withdraw_all(Purpose.OPERATION)
            self._begin_at = now + growing_pause(num_failures - 1, first_s=FIRST_PAUSE_S)
            return RUNNING
        return self.begin(now)

    def _not_repaired(self, process: str, fault: Fault, incident: Incident, now: float) -> None:
        """Count a failed attempt to repair ranks. After several the state is looked for elsewhere or steps are undone,
        if no rank has it; else the rank that can not take it over is replaced."""
        self._decision.add_effect(ShareBook(tuple(sorted(self._unaddressed))))
        if self._unaddressed and incident.unaddressed < UNADDRESSED_ATTEMPTS:
            incident.unaddressed += 1
            incident.attempts -= 1
            return
        incident.repairs += 1
        if incident.repairs < REPAIR_ATTEMPTS:
            return
        step, living = self._decision.state.step, self._decision.state.members.live(Role.MODEL)
        ranks = [rank for rank in living if rank in self.ranks]
        holders = [rank for rank in ranks if self.protocol.holds(rank, step)]
        if without_holder(holders, self.protocol.mesh):
            lacking = [rank for rank in ranks if rank not in holders]
            is_handled = self._replace_newcomer(process, fault, now) or self._send_home(lacking, fault, now)
            if not is_handled and not self._look_further():
                self._fall_back(fault, now)
        elif process in living and process not in holders:
            self._processes.terminate(process, fault, now)

    def dumped(self, now: float) -> PhaseReport:
        """End the recovery: the last checkpoint is written, or cannot be. The answer to the first request may be a save
        of an earlier step that was under way."""
        state = self._decision.state
        if self._dump_again and state.step not in state.saved_steps:
            self._dump_again = False
            return self._ask_dump(now)
        return self._end(now)

    def _follow(self, orders: RankOrders, now: float) -> PhaseReport:
        self._decision.explain(orders.reason)
        mesh = self.protocol.mesh
        if self.protocol.state in FORMED and mesh != mesh_in_force(self._config, self._decision.state):
            self._decision.add_fact(change_to(mesh))
            self._decision.explain(f"the state is cut over {', '.join(mesh.ranks) or 'all ranks'} as {mesh}")
        if orders.problem:
            fault = self._decision.new_fault("IntegrityError", orders.problem, detail=orders.divergence)
            for culprit in orders.culprits[: max(0, len(self.ranks) - 1)]:
                self._processes.terminate(culprit, fault, now)
            return self.failed(self.ranks[0], fault, now, phase=Phase.RECOVERING)
        if orders.bodies:
            if self.protocol.state is _S.REPAIRING:
                self._read_hosts = self._hosts_with_ranks()
            bodies = {rank: self._timed(body) for rank, body in orders.bodies.items()}
            self._pending.ask_each(Purpose.OPERATION, bodies, now)
        elif not self.active:
            return PhaseReport(PhaseResult.RECOVERED)
        return RUNNING

    def _timed(self, body: Body) -> Body:
        """Limit the time that ranks wait for each other in a new group to less than the deadline of the request."""
        if not isinstance(body, RebuildGroup):
            return body
        limit_s = MEETING_SHARE * self._pending.deadline_s(RebuildGroup)
        return msgspec.structs.replace(body, timeout_s=limit_s)

    def _choose(self, now: float, *, replacements_fail: bool) -> PhaseReport:
        """Choose a strategy for the open incident, if there is one."""
        incident = self._incidents.current
        if incident is None:
            return RUNNING
        chosen = plan(self._situation(replacements_fail=replacements_fail))
        incident.strategy = chosen.strategy
        options = tuple(str(option) for option in chosen.options)
        self._decision.add_fact(StrategyChosen(incident.number, chosen.strategy, chosen.reason, options))
        self._decision.explain(f"{chosen.strategy}: {chosen.reason}")
        if chosen.strategy in (Strategy.DUMP, Strategy.EXIT):
            return self._dump(now, dump=chosen.strategy is Strategy.DUMP)
        return RUNNING

    def _dump(self, now: float, *, dump: bool) -> PhaseReport:
        """Write a last checkpoint if possible, then end with the cause."""
        state = self._decision.state
        self.protocol.give_up(now)
        if not dump or state.step in (0, *state.saved_steps):
            return self._end(now)
        self._dump_again = self._pending.is_asked(Purpose.SAVE)
        return self._ask_dump(now)

    def _ask_dump(self, now: float) -> PhaseReport:
        state = self._decision.state
        stage = carried_stage(self._config, step=state.step).name
        living = state.members.live(Role.MODEL)
        holders = [rank for rank in living if self.protocol.holds(rank, state.step)] or living
        # The rank that reported the fault is free, while the others may be blocked in a collective.
        free = [fault.process for fault in [self.cause] if fault is not None]
        writer = min(holders, key=lambda rank: (self._processes.is_terminating(rank), rank not in free))
        self._pending.ask_each(Purpose.DUMP, {writer: Save(state.step, stage, self._folder)}, now)
        return RUNNING

    def _end(self, now: float) -> PhaseReport:
        fault = self.cause
        assert fault is not None, "only an incident is given up"
        self.protocol.dumped(now)
        return PhaseReport(PhaseResult.UNRECOVERABLE, fault=fault)

    def _replace_newcomer(self, rank: str, fault: Fault, now: float) -> bool:
        """Start a rank again that can not assemble its part from those of the mesh before, in which it had none, as a
        source did not answer it: the others still have these, so it may be the one that can not reach them. Once per
        incident."""
        incident, state = self._incidents.current, self._decision.state
        assert incident is not None
        before = mesh_of_step(self._config, state, state.step)
        is_newcomer = bool(before.ranks) and before != self.protocol.mesh and rank not in before.ranks
        if not is_newcomer or rank in incident.sent_home or fault.kind != SourceSilent.__name__:
            return False
        incident.sent_home.add(rank)
        self._processes.terminate(rank, fault, now)
        return True

    def _look_further(self) -> bool:
        """Try again before steps are undone, where snapshots are on hosts that had no rank to read them: at once if one
        has come meanwhile, else when lost ranks are back. Return whether there are any."""
        incident = self._incidents.current
        assert incident is not None
        incident.awaits_lost = True
        lost, has_reader = self._awaited(incident), self._has_new_reader()
        incident.awaits_lost = bool(lost)
        if lost or has_reader:
            incident.attempts = incident.repairs = 0
        return bool(lost) or has_reader

    def _awaited(self, incident: Incident) -> list[str]:
        """Return the lost ranks that are waited for, each once per incident: the snapshots of their parts are on hosts
        without a live rank. None as soon as a rank lives where none could read before: it may be enough."""
        members = self._decision.state.members
        if not incident.awaits_lost or self._has_new_reader():
            return []
        unread = self._unread_homes()
        return [name for name in unread if not members.is_live(name) and name not in incident.awaited]

    def _has_new_reader(self) -> bool:
        """Whether a rank lives on a host whose snapshots could not be read when a repair was last tried."""
        return not self._hosts_with_ranks().isdisjoint(self._unread_homes().values())

    def _unread_homes(self) -> dict[str, str]:
        """Return the holders of the committed state whose snapshots could not be read then, each with their host."""
        state = self._decision.state
        mesh = mesh_of_step(self._config, state, state.step)
        homes = {
            name: state.homes.get(name, "") for name in mesh.ranks or rank_names(self._config.actor.workers)
        }
        return {
            name: home
            for name, home in homes.items()
            if home not in self._read_hosts and state.members.agent_of(home) is not None
        }

    def _hosts_with_ranks(self) -> set[str]:
        members = self._decision.state.members
        return {members.members[rank].host for rank in members.live(Role.MODEL)}

    def _can_not_hold(self, incident: Incident) -> bool:
        """Whether the live ranks are known not to be able to hold what is missing as well."""
        return bool(incident.does_not_fit) and incident.refused == self._cut_over() != ()

    def _send_home(self, ranks: list[str], fault: Fault, now: float) -> bool:
        """Start ranks without their part of the state again on the hosts where the snapshots of it are, once per
        incident: their agents were away when the ranks were placed. Return whether there are any."""
        incident, state = self._incidents.current, self._decision.state
        assert incident is not None
        mesh = self.protocol.mesh
        if mesh.boxes == 1 or mesh != mesh_of_step(self._config, state, state.step):
            return False
        away = [
            rank
            for rank in ranks
            if state.homes.get(rank, "") not in ("", state.members.members[rank].host)
            and state.members.agent_of(state.homes[rank]) is not None
            and rank not in incident.sent_home
        ]
        incident.sent_home.update(away)
        for rank in away:
            self._processes.terminate(rank, fault, now)
        return bool(away)

    def _fall_back(self, fault: Fault, now: float) -> None:
        """Undo steps after their state is lost: return to the step before, which a snapshot or a peer replica may still
        have, else to the last checkpoint, else to the beginning, where every fresh rank is."""
        state, incident = self._decision.state, self._incidents.current
        assert incident is not None
        earlier = (saved for saved in state.saved_steps if saved < state.step)
        step = max((saved for saved in earlier if state.can_return_to(saved) is None), default=0)
        if not incident.fell_back and state.step - 1 in state.digests:
            step = max(step, state.step - 1)
        back = RolledBack(step, f"the state of step {state.step} is lost: {fault.message}")
        if state.can_return_to(step) is not None:
            incident.unrecoverable = "no readable state is left of any step that the run still knows"
            return
        incident.fell_back, incident.attempts, incident.repairs = True, 0, 0
        self._pending.withdraw_all(Purpose.SAVE)  # Of a step that is undone now.
        self._decision.add_fact(back)
        self._decision.add_effect(Raise(f"back to step {step}: the state of later steps is lost"))
        for rank in self.protocol.begun if step == 0 else ():
            self._processes.terminate(rank, fault, now)
        self._dispatch.discard_all()

    def _situation(self, *, replacements_fail: bool) -> FaultSituation:
        return self._incidents.situation(
            missing=tuple(self._processes.missing(Role.MODEL)),
            living=tuple(self._decision.state.members.live(Role.MODEL)),
            replacements_fail=replacements_fail,
            step_s=self.step_s,
            cut_over=self._cut_over(),
        )

    def _cut_over(self) -> tuple[str, ...]:
        """Return the live ranks over which the state is cut again if no others come; empty if each of its parts has a
        rank."""
        living = self._decision.state.members.live(Role.MODEL)
        mesh = wanted_mesh(self._config, living) if living else Mesh()
        state = self._decision.state
        return mesh.ranks if mesh != mesh_of_step(self._config, state, state.step) else ()

    def _mesh(self) -> Mesh:
        """Return the mesh of the group that is formed, or is to be formed next."""
        state = self._decision.state
        if self.protocol.state in FORMED:
            return self.protocol.mesh
        living = state.members.live(Role.MODEL)
        if not self._processes.missing(Role.MODEL):
            return mesh_of(self._config.actor.layout)
        if self.protocol.smaller and living:
            return wanted_mesh(self._config, living)
        return mesh_in_force(self._config, state)

    def _view(self) -> RankSet:
        state = self._decision.state
        members, step = state.members.members, state.step
        living = tuple(state.members.live(Role.MODEL))
        # Their number is ranks times processes, so they are computed only when needed.
        may_repair, mesh = self.protocol.state in (_S.REBUILDING, _S.REPAIRING), self._mesh()
        is_recut = may_repair and mesh != mesh_of_step(self._config, state, step)
        seated = mesh.seated(living) if may_repair else ()
        return RankSet(
            living=living,
            missing=tuple(self._processes.missing(Role.MODEL)),
            stores={name: members[name].capabilities.get("store", "") for name in living},
            sources={name: self._sources(name, mesh, is_recut=is_recut) for name in seated},
            step=step,
            digest=state.digests.get(step, ""),
            stage=carried_stage(self._config, step=step).name,
            next_stage=next_stage(self._config, step=step).name,
            flow=next((members[n].capabilities.get("flow", Flow.ROLLBACK) for n in living), Flow.ROLLBACK),
            mesh=mesh,
            boxes={
                name: box_copies(self._config, state, rank=name, step=step)
                for name in (seated if is_recut else ())
            },
        )

    def _sources(self, rank: str, mesh: Mesh, *, is_recut: bool) -> tuple[str, ...]:
        """Return the places where a rank may find its state: snapshots of its host (its own first, then of ranks with
        the same part of the state), the agent of this host and those of others, the
        checkpoint. A state that was cut otherwise at this step
        is in the checkpoint only: copies with the same part may be of steps that were undone."""
        state, members = self._decision.state, self._decision.state.members
        path = state.checkpoint_paths.get(state.step) or self.restore_paths.get(state.step)
        saved = () if path is None else (path,)
        if is_recut:
            return saved
        host, seat = members.members[rank].host, seat_of(rank, mesh)
        here = [
            name
            for name, member in members.members.items()
            if member.role is Role.MODEL and member.host == host and name != rank
            if name in mesh.seated([name]) and seat_of(name, mesh) == seat
        ]
        configured = mesh_of(self._config.actor.layout)
        names = [snapshots_of(name, seat, configured) for name in (rank, *sorted(here))]
        snapshots = [f"snapshot:{name}" for name in names]
        # Where a rank with this box ran on another host, its copy may be with the agent of this one.
        keepers = sorted(members.live(Role.AGENT), key=lambda agent: members.members[agent].host != host)
        return (*snapshots, *keepers, *saved)


def _first(*reports: PhaseReport) -> PhaseReport:
    """Return the first report that is not RUNNING."""
    return next((report for report in reports if report.result is not PhaseResult.RUNNING), RUNNING)


def _error_at_end(fault: Fault) -> str:
    """Return the kind of the error that ended the process, of a fault that reports its end."""
    return fault.detail.kind if isinstance(fault.detail, EndedByError) else ""
