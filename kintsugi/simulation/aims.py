"""How a plan brings about what chance would hardly ever do: an event in a state, the master's death at a boundary.

The master is led to the state by a fault that makes it go there, lingers in it because those it waits for are slow, and
meanwhile something happens that makes it decide. What is aimed at is a function of the seed alone, so a replay aims at
the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kintsugi.control.layout import ProcessPlan
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
from kintsugi.simulation.faults import Hold, Kind, Plan, Planned, named
from kintsugi.types import Role

SCALE = "ScaleRequested"
EVENTS = [pair for pair in possible_events() if pair[1] != SCALE]
SCALINGS = [pair for pair in possible_events() if pair[1] == SCALE]
BOUNDARIES = possible_boundaries()
LAST_STEP, STAGE_STEP = 10, 2
"""Of a simulated run, and of its first stage."""
LONGEST_HOLD_S = 6.0
STEPS: dict[str, tuple[int, ...]] = {
    "starting": (0,),
    "preparing": (STAGE_STEP,),
    "evaluating": (STAGE_STEP, LAST_STEP),
    "saving": (4, 8, LAST_STEP),
    "ending": (LAST_STEP,),
    "ended": (LAST_STEP,),
    STAGING: (0,),
    DUMPING: (1, 3, 5),
    GIVEN_UP: (4,),
}
"""The committed steps at which a run comes to a state, at once where it is given up: those that are saved need no dump.
To other states it comes at every step."""
MOVING = ("collecting", "evaluating", *RECOVERY_STATES)
"""States in which groups move to a worker that comes."""
UNAIDED = ("sync", "RecordStep", "RecordEvaluation", "Finish")
"""What the master does by itself when it comes to where it does it at all; for the rest somebody must be lost."""


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
"""State → what the master asks of the ranks there."""


class Aim:
    """Adds to a plan what brings one pair about."""

    def __init__(self, draw: random.Random, plan: Plan, layout: Sequence[ProcessPlan]) -> None:
        self._draw, self._plan = draw, plan
        self._ranks, self._rollouts = named(layout, Role.MODEL), named(layout, Role.ROLLOUT)
        self._others = named(layout, Role.ROLLOUT, Role.SERVER)
        self._hosts = {each.process: each.host for each in layout}
        self._agents = {each.host: each.process for each in layout if each.role is Role.AGENT}

    # An event.

    def at_event(self, pair: Pair) -> None:
        """Hold a message back until the master stands in the state."""
        state, event = pair
        step, hold = self._step(state), Hold(event, state, self._draw.uniform(1.0, 8.0))
        self._plan.hold = hold
        if event == "StopRequested":
            self._add(Planned(Kind.SIGNAL, "master-0", state=state))
        elif event == "RequestFailed":
            self._let_fail(state, step=step)
        elif event in ("Exited", "Joined", "Suspected"):
            self._tell_of_somebody(hold, step=step)
        self._lead_to(state, step=step, to=hold.leads if hold.about else None)

    def _let_fail(self, state: str, *, step: int) -> None:
        """What the master asks in this state fails: an agent dies, a rank or a rollout worker can not do it."""
        if state == "starting":
            agent = self._draw.choice(list(self._agents.values()))
            self._add(Planned(Kind.KILL, agent, state=state, delay_s=self._draw.uniform(0.012, 0.06)))
        elif state in ASKED:
            self._add(Planned(Kind.FAIL, self._draw.choice(self._ranks), ASKED[state], "collecting"))
        else:
            worker = self._draw.choice(self._rollouts)
            self._add(Planned(Kind.FAIL, worker, "RunEpisodes", "collecting", max(0, step - 1)))

    def _tell_of_somebody(self, hold: Hold, *, step: int) -> None:
        """Somebody is lost or comes back. What the master hears of that while it recovers is held before it begins to,
        and so is an arrival, which takes a while; the rest happens where it is to be heard of."""
        kind, victim = Kind.STOP if hold.event == "Suspected" else Kind.KILL, self._draw.choice(self._others)
        if hold.state == "starting":
            delay_s = self._draw.uniform(0.1, 0.3)
            self._add(Planned(kind, victim, state=hold.state, delay_s=delay_s))
        elif hold.event == "Joined" or hold.state.startswith(RECOVERING):
            hold.about, early = victim, max(0, step - 3)
            self._add(Planned(kind, victim, state="collecting", step=early))
            if hold.state == STAGING:  # To which the master comes only before the first step.
                for process in self._rollouts:
                    self._slow_down(process, step=0, share=1.0)
        else:
            self._linger(hold.state, step=step, share=1.5 if kind is Kind.STOP else 0.1)
            self._add(Planned(kind, victim, state=hold.state, step=step))

    def at_scaling(self, pair: Pair) -> None:
        """Ask for more or fewer servers in the state."""
        state, _ = pair
        servers = self._draw.choice((1, 3, 4))
        self._plan.scalings.append(Planned(Kind.SCALE, state=state, servers=servers))
        self._lead_to(state, step=self._step(state))

    # A crash.

    def at_crash(self, pair: Pair) -> None:
        """End the master at the first opportunity at a boundary, and bring that about."""
        state, what = pair
        step, after = self._step(state), self._draw.random() < 0.5
        crash = Planned(Kind.CRASH, "master-0", what, state, self._draw.choice((0, step)), after=after)
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
                self._linger(state, step=step, share=self._draw.choice((0.1, 0.3)))
                self._lose_somebody(state, step=step)
            self._lead_to(state, step=step)
        if what in ("sync", "Tell", "Admit", "Request") and state in (PRE_LOCKING, WAITING, *HOPELESS_STATES):
            self._take_over(state)

    def _linger(self, state: str, *, step: int, share: float) -> None:
        """Whoever the master waits for in this state is slow, from some time before."""
        slow = self._rollouts if state in ("collecting", "evaluating") else self._ranks
        for process in slow:
            self._slow_down(process, step=max(0, step - 1), share=share)

    def _lose_somebody(self, state: str, *, step: int) -> None:
        """Once the master is in the state: it forgets a process, orders another, tells the others."""
        for victim in self._others if state == "starting" else [self._draw.choice(self._others)]:
            delay_s = self._draw.uniform(0.1, 0.3) if state == "starting" else 0.0
            self._add(Planned(Kind.KILL, victim, state=state, step=step, delay_s=delay_s))

    def _move_groups(self, state: str, *, step: int) -> None:
        """A rollout worker comes back in this state, and takes over what the others are slow with."""
        moved, *slow = self._draw.sample(self._rollouts, len(self._rollouts))
        self._add(Planned(Kind.KILL, moved, state="collecting", step=step))
        for process in slow:
            self._slow_down(process, step=step, share=1.0)
        self._plan.hold = Hold("Joined", state, LONGEST_HOLD_S, about=moved)
        self._lead_to(state, step=step, to=self._plan.hold.leads)

    def _take_over(self, state: str) -> None:
        """The master dies in the state, and its successor finds the run there."""
        if state == WAITING:  # Where a recovery begins if there is nobody to lock.
            for rank in self._ranks:
                self._add(Planned(Kind.KILL, rank, state=PRE_LOCKING))
        self._add(Planned(Kind.KILL, "master-0", state=state))

    def _end_with(self, what: str) -> None:
        """A second master may come upon the end, and the end may close the last incident."""
        if what in ("Admit", "ShareBook"):
            self._add(Planned(Kind.CRASH, "master-0", "Finish", "ended"))
        elif what == "Raise":
            rank = self._draw.choice(self._ranks)
            self._add(Planned(Kind.KILL, rank, state="evaluating", step=LAST_STEP))

    def _grow_back_after_an_evaluation(self) -> None:
        """A rank that can not be started for a while is back when an evaluation ends."""
        rank = self._draw.choice(self._ranks)
        agent = self._agents[self._hosts[rank]]
        self._add(
            Planned(Kind.FAIL, agent, "StartProcess", state="collecting", about=rank, times=3),
            Planned(Kind.KILL, rank, state="collecting"),
        )
        for process in self._rollouts:
            self._slow_down(process, step=0, share=0.3)
        self._plan.hold = Hold("Joined", "evaluating", LONGEST_HOLD_S, about=rank)

    # Both.

    def _step(self, state: str) -> int:
        """A step at which the master comes to this state, or is to."""
        return self._draw.choice(STEPS.get(state, tuple(range(LAST_STEP - 2))))

    def _lead_to(self, state: str, *, step: int, to: list[Planned] | None = None) -> None:
        """Make sure that the master comes to a state that an undisturbed run never sees."""
        rank, faults = self._draw.choice(self._ranks), self._plan.faults if to is None else to
        if state in HOPELESS_STATES:
            faults.append(Planned(Kind.POISON, rank, "RunCall", step=max(1, step)))
        elif state.startswith(RECOVERING):
            faults.append(Planned(Kind.KILL, rank, state="collecting", step=step))

    def _slow_down(self, process: str, *, step: int, share: float) -> None:
        self._add(Planned(Kind.SLOW, process, state="collecting", step=step, duration_s=15.0, share=share))

    def _add(self, *faults: Planned) -> None:
        self._plan.faults.extend(faults)


def aim(draw: random.Random, plan: Plan, seed: int, layout: Sequence[ProcessPlan]) -> None:
    """A third of the seeds aims at an event in a state, a third at a crash, each in turn; of the rest every second one
    at a scaling in a state, and the others at nothing."""
    if seed % 3 == 0:
        Aim(draw, plan, layout).at_event(EVENTS[(seed // 3) % len(EVENTS)])
    elif seed % 3 == 1:
        Aim(draw, plan, layout).at_crash(BOUNDARIES[(seed // 3) % len(BOUNDARIES)])
    elif seed % 2:
        Aim(draw, plan, layout).at_scaling(SCALINGS[(seed // 6) % len(SCALINGS)])
