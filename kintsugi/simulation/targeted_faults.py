"""Plans for combinations that chance would hardly produce: an event in a state, a crash of the master at a boundary.

A fault leads the master to the state, slow processes keep it there, and meanwhile something makes it decide. The target
is a function of the seed alone, so a replay has the same target.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kintsugi.control.phases.table import Phase
from kintsugi.control.placement import ProcessPlan
from kintsugi.recovery.states import RecoveryState
from kintsugi.simulation.coverage import (
    DUMPING,
    GIVEN_UP,
    HOPELESS_STATES,
    PRE_LOCKING,
    RECOVERING,
    RECOVERY_STATES,
    STAGING,
    WAITING,
    Pair,
    possible_boundaries,
    possible_events,
)
from kintsugi.simulation.faults import (
    EventBarrier,
    PlannedSimFault,
    SimulatedFaultKind,
    SimulatedFaultPlan,
    named,
)
from kintsugi.types import Role

SCALE = "ScaleRequested"
EVENTS = [pair for pair in possible_events() if pair[1] != SCALE]
SCALINGS = [pair for pair in possible_events() if pair[1] == SCALE]
BOUNDARIES = possible_boundaries()
LAST_STEP, STAGE_STEP = 10, 2
"""Last step of a simulated run, and of its first stage."""
LONGEST_HOLD_S = 6.0
STEPS: dict[str, tuple[int, ...]] = {
    "starting": (0,),
    "preparing": (STAGE_STEP,),
    "evaluating": (STAGE_STEP, LAST_STEP),
    "saving": (LAST_STEP,),
    "ending": (LAST_STEP,),
    "ended": (LAST_STEP,),
    STAGING: (0,),
    DUMPING: (1, 3, 5),
    GIVEN_UP: (4,),
}
"""Committed steps at which a run reaches a state. A run that is given up reaches it immediately; saved steps need no
dump. All other states are reached at every step."""
MOVING = ("collecting", "evaluating", *RECOVERY_STATES)
"""States in which groups move to a worker that joins."""
UNAIDED = ("sync", "RecordStep", "RecordEvaluation", "Finish")
"""Boundaries that the master passes in their states without help; for all others a process has to be lost."""


ASKED = {
    "training": "RunCall",
    "committing": "CommitStep",
    "publishing": "Publish",
    "ending": "HashWeights",
    **{
        RECOVERING + state.value: request
        for state, request in {
            RecoveryState.PRE_LOCKING: "PreLock",
            RecoveryState.DEVICE_STOPPING: "DeviceStop",
            RecoveryState.DEVICE_CLEANING: "DeviceClean",
            RecoveryState.REBUILDING: "RebuildGroup",
            RecoveryState.REPAIRING: "Repair",
            RecoveryState.ROLLING_BACK: "Rollback",
            RecoveryState.STAGING: "StartStage",
            RecoveryState.NOTIFYING: "NotifyNormal",
        }.items()
    },
}
"""State → requests of the master to the ranks."""


class TargetedFault:
    """Adds to a plan what brings one pair about."""

    def __init__(self, draw: random.Random, plan: SimulatedFaultPlan, layout: Sequence[ProcessPlan]) -> None:
        self._draw, self._plan = draw, plan
        self._ranks, self._rollouts = named(layout, Role.MODEL), named(layout, Role.ROLLOUT)
        self._others = named(layout, Role.ROLLOUT, Role.SERVER)
        self._hosts = {each.process: each.host for each in layout}
        self._agents = {each.host: each.process for each in layout if each.role is Role.AGENT}

    # An event.

    def at_event(self, pair: Pair) -> None:
        """Hold a message back until the master is in the state."""
        state, event = pair
        step, hold = self._step(state), EventBarrier(event, state, self._draw.uniform(1.0, 8.0))
        self._plan.hold = hold
        if event == "StopRequested":
            self._add(PlannedSimFault(SimulatedFaultKind.SIGNAL, "master-0", state=state))
        elif event == "RequestFailed":
            self._let_fail(state, step=step)
        elif event in ("Exited", "Joined", "Suspected"):
            self._lose_or_return(hold, step=step)
        self._lead_to(state, step=step, to=hold.leads if hold.about else None)

    def _let_fail(self, state: str, *, step: int) -> None:
        """Let a request of the master fail in this state: an agent dies, or a rank or rollout worker cannot do it."""
        if state == "starting":
            agent = self._draw.choice(list(self._agents.values()))
            self._add(
                PlannedSimFault(
                    SimulatedFaultKind.KILL, agent, state=state, delay_s=self._draw.uniform(0.012, 0.06)
                )
            )
        elif state in ASKED:
            self._add(
                PlannedSimFault(
                    SimulatedFaultKind.FAIL, self._draw.choice(self._ranks), ASKED[state], "collecting"
                )
            )
        else:
            worker = self._draw.choice(self._rollouts)
            self._add(
                PlannedSimFault(
                    SimulatedFaultKind.FAIL, worker, "RunEpisodes", "collecting", max(0, step - 1)
                )
            )

    def _lose_or_return(self, hold: EventBarrier, *, step: int) -> None:
        """Lose a process, or let one return. An exit during a recovery is held from before it, and so is a
        registration, which takes a while; all others happen in the state itself."""
        kind, victim = (
            SimulatedFaultKind.STOP if hold.event == "Suspected" else SimulatedFaultKind.KILL,
            self._draw.choice(self._others),
        )
        if hold.state == "starting":
            delay_s = self._draw.uniform(0.1, 0.3)
            self._add(PlannedSimFault(kind, victim, state=hold.state, delay_s=delay_s))
        elif hold.event == "Joined" or hold.state.startswith(RECOVERING):
            hold.about, early = victim, max(0, step - 3)
            self._add(PlannedSimFault(kind, victim, state="collecting", step=early))
            if hold.state == STAGING:  # The master is there only before the first step.
                for process in self._rollouts:
                    self._slow_down(process, step=0, share=1.0)
        else:
            self._delay_in_state(hold.state, step=step, share=1.5 if kind is SimulatedFaultKind.STOP else 0.1)
            self._add(PlannedSimFault(kind, victim, state=hold.state, step=step))

    def at_scaling(self, pair: Pair) -> None:
        """Request more or fewer servers in the state."""
        state, _ = pair
        servers = self._draw.choice((1, 3, 4))
        self._plan.scalings.append(PlannedSimFault(SimulatedFaultKind.SCALE, state=state, servers=servers))
        self._lead_to(state, step=self._step(state))

    # A crash.

    def at_crash(self, pair: Pair) -> None:
        """Crash the master at the first opportunity at a boundary, and bring that about."""
        state, what = pair
        step, after = self._step(state), self._draw.random() < 0.5
        crash = PlannedSimFault(
            SimulatedFaultKind.CRASH, "master-0", what, state, self._draw.choice((0, step)), after=after
        )
        self._add(crash)
        if what == "RecordEvaluation" and state == PRE_LOCKING:
            crash.step = 0
            self._grow_back_after_an_evaluation()
        elif what == "Tell" and state in MOVING:
            crash.step = max(0, step - 2)
            self._move_groups(state, step=crash.step)
        elif state == "ended":
            self._end_with(what)
        else:
            if what not in UNAIDED:
                self._delay_in_state(state, step=step, share=self._draw.choice((0.1, 0.3)))
                self._lose_process(state, step=step)
            self._lead_to(state, step=step)
        if what in ("sync", "Tell", "Admit", "Request") and state in (PRE_LOCKING, WAITING, *HOPELESS_STATES):
            self._take_over(state)

    def _delay_in_state(self, state: str, *, step: int, share: float) -> None:
        """Make the processes that the master waits for in this state slow, from some time before."""
        slow = self._rollouts if state in ("collecting", "evaluating") else self._ranks
        for process in slow:
            self._slow_down(process, step=max(0, step - 1), share=share)

    def _lose_process(self, state: str, *, step: int) -> None:
        """Lose a process once the master is in the state: it forgets it, orders another, and sends address books."""
        for victim in self._others if state == "starting" else [self._draw.choice(self._others)]:
            delay_s = self._draw.uniform(0.1, 0.3) if state == "starting" else 0.0
            self._add(
                PlannedSimFault(SimulatedFaultKind.KILL, victim, state=state, step=step, delay_s=delay_s)
            )

    def _move_groups(self, state: str, *, step: int) -> None:
        """Let a rollout worker return in this state and take over groups of slow workers."""
        moved, *slow = self._draw.sample(self._rollouts, len(self._rollouts))
        self._add(PlannedSimFault(SimulatedFaultKind.KILL, moved, state="collecting", step=step))
        for process in slow:
            self._slow_down(process, step=step, share=1.0)
        self._plan.hold = EventBarrier("Joined", state, LONGEST_HOLD_S, about=moved)
        self._lead_to(state, step=step, to=self._plan.hold.leads)

    def _take_over(self, state: str) -> None:
        """Crash the master in the state, so that its successor finds the run there."""
        if state == WAITING:  # State in which a recovery begins if there is no rank to lock.
            for rank in self._ranks:
                self._add(PlannedSimFault(SimulatedFaultKind.KILL, rank, state=PRE_LOCKING))
        self._add(PlannedSimFault(SimulatedFaultKind.KILL, "master-0", state=state))

    def _end_with(self, what: str) -> None:
        """Let a second master find the end, or the end close the last incident."""
        if what in ("Admit", "ShareBook"):
            self._add(PlannedSimFault(SimulatedFaultKind.CRASH, "master-0", "Finish", "ended"))
        elif what == "Raise":
            rank = self._draw.choice(self._ranks)
            self._add(PlannedSimFault(SimulatedFaultKind.KILL, rank, state="evaluating", step=LAST_STEP))

    def _grow_back_after_an_evaluation(self) -> None:
        """Let a rank that cannot be started for a while return when an evaluation ends."""
        rank = self._draw.choice(self._ranks)
        agent = self._agents[self._hosts[rank]]
        self._add(
            PlannedSimFault(
                SimulatedFaultKind.FAIL, agent, "StartProcess", state="collecting", about=rank, times=3
            ),
            PlannedSimFault(SimulatedFaultKind.KILL, rank, state="collecting"),
        )
        for process in self._rollouts:
            self._slow_down(process, step=0, share=0.3)
        self._plan.hold = EventBarrier("Joined", "evaluating", LONGEST_HOLD_S, about=rank)

    # Both.

    def _step(self, state: str) -> int:
        """Return a step at which the master reaches this state, or is led to it."""
        return self._draw.choice(STEPS.get(state, tuple(range(LAST_STEP - 2))))

    def _lead_to(self, state: str, *, step: int, to: list[PlannedSimFault] | None = None) -> None:
        """Lead the master to a state that a fault-free run never reaches."""
        rank, faults = self._draw.choice(self._ranks), self._plan.faults if to is None else to
        if state in HOPELESS_STATES:
            faults.append(PlannedSimFault(SimulatedFaultKind.POISON, rank, "RunCall", step=max(1, step)))
        elif state.startswith(RECOVERING):
            faults.append(PlannedSimFault(SimulatedFaultKind.KILL, rank, state="collecting", step=step))
        elif state == Phase.ADOPTING:
            faults.append(PlannedSimFault(SimulatedFaultKind.KILL, "master-0", state="training", step=step))

    def _slow_down(self, process: str, *, step: int, share: float) -> None:
        self._add(
            PlannedSimFault(
                SimulatedFaultKind.SLOW, process, state="collecting", step=step, duration_s=15.0, share=share
            )
        )

    def _add(self, *faults: PlannedSimFault) -> None:
        self._plan.faults.extend(faults)


def aim(draw: random.Random, plan: SimulatedFaultPlan, seed: int, layout: Sequence[ProcessPlan]) -> None:
    """Choose the target of a seed: a third of the seeds an event in a state, a third a crash, each in turn; of the rest
    every second one a scaling request in a state, and the others none."""
    if seed % 3 == 0:
        TargetedFault(draw, plan, layout).at_event(EVENTS[(seed // 3) % len(EVENTS)])
    elif seed % 3 == 1:
        TargetedFault(draw, plan, layout).at_crash(BOUNDARIES[(seed // 3) % len(BOUNDARIES)])
    elif seed % 2:
        TargetedFault(draw, plan, layout).at_scaling(SCALINGS[(seed // 6) % len(SCALINGS)])
