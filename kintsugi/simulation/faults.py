"""The faults of a simulated run, drawn from its seed: what breaks, whom it hits, and when.

Every run has a fault that makes the master recover, one in the middle of that recovery, and at least one more. Seeds
also take turns in aiming. One in three tries to bring about one (state, event) pair, by holding a message back until
the master stands in that state, as a network may; one in three ends the master at one (state, effect) boundary. So the
pairs that chance would hardly ever meet are met as often as the others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from kintsugi.control.layout import ProcessPlan
from kintsugi.simulation.coverage import (
    HOPELESS_STATES,
    NORMAL_STATES,
    RECOVERING,
    RECOVERY_STATES,
    possible_boundaries,
    possible_events,
)
from kintsugi.types import Role

AIMS, BOUNDARIES = possible_events(), possible_boundaries()
STEP_STATES = ("collecting", "training", "committing", "publishing")
"""What every step goes through."""


class Kind(StrEnum):
    """What can be done to a run."""

    KILL = "kill"
    KILL_HOST = "kill host"
    POWER_CUT = "power cut"
    STOP = "stop"
    PAUSE = "pause"
    """Stopped, and continued later: it answers late, perhaps after it was replaced."""
    PARTITION = "partition"
    """Nothing arrives in one direction between two processes."""
    LOSS = "loss"
    SPIKES = "spikes"
    SLOW = "slow"
    FAIL = "fail"
    """The next request of some kind to a process is answered with a fault."""
    CRASH = "crash"
    """The master ends at a boundary of a decision."""
    POISON = "poison"
    """A rank finds the user's mistake: repeating and replacing can not help, the run must end with this cause."""
    SIGNAL = "signal"
    """Someone asks for a stop; the run is resumed afterwards."""


class Planned(msgspec.Struct):
    """One fault. `state` and `step`: it waits until the master stands there (empty, 0: at once)."""

    kind: Kind
    target: str = ""
    other: str = ""
    """The other end of a partition, the boundary of a crash, the request that fails."""
    state: str = ""
    step: int = 0
    delay_s: float = 0.0
    """After the master has come there."""
    duration_s: float = 0.0
    share: float = 0.0
    """Of messages that are hit, of a torn write that is left."""
    after: bool = False
    """Of a crash: behind the boundary, not before it."""
    fired_in: str | None = None
    """The master's state when it happened; None as long as it has hit nothing."""


class Hold(msgspec.Struct, frozen=True):
    """Keep events of a kind away from the master until it stands in a state, for a bounded time."""

    event: str
    state: str
    longest_s: float


class Plan(msgspec.Struct):
    """Everything that befalls one run."""

    faults: list[Planned]
    hold: Hold | None = None
    weather: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Shares of lost, repeated and late messages, as long as there are faults."""
    must_fail: bool = False
    """One of the faults can not be survived by anybody."""


def draw_plan(seed: int, layout: Sequence[ProcessPlan], *, num_steps: int) -> Plan:
    """The plan of a seed. A third of the seeds aims at an event in a state, a third at a crash, a third at nothing."""
    draw = random.Random(f"plan {seed}")
    faults = [_first(draw, layout, num_steps)]
    in_recovery = draw.choice([state for state in RECOVERY_STATES if state not in HOPELESS_STATES])
    faults.append(_any(draw, layout, state=in_recovery, step=0))
    for _ in range(draw.choice((1, 1, 2, 3))):
        step, often = draw.randint(0, num_steps - 1), draw.random() < 0.7
        state = draw.choice(STEP_STATES if often else NORMAL_STATES[2:])
        faults.append(_any(draw, layout, state=state, step=step))
    plan = Plan(faults)
    if seed % 3 == 0:
        _aim(draw, plan, AIMS[(seed // 3) % len(AIMS)], layout, num_steps)
    elif seed % 3 == 1:
        state, what = BOUNDARIES[(seed // 3) % len(BOUNDARIES)]
        early = state in ("starting", "preparing") or state.startswith(RECOVERING) or what in _LEADS_TO
        step = 0 if early else draw.randint(0, num_steps - 2)
        faults.append(Planned(Kind.CRASH, "master-0", what, state, step, after=draw.random() < 0.5))
        if what in _LEADS_TO:
            _aim(draw, plan, (state, _LEADS_TO[what]), layout, num_steps)
        else:
            _lead_to(draw, plan, state, layout)
    if draw.random() < 0.4:
        plan.weather = (draw.uniform(0, 0.04), draw.uniform(0, 0.05), draw.uniform(0, 0.05))
    return plan


STARTED = "Started"
"""The answer of an agent that a process runs: a reply like others, but what it leads to is its own."""

_LEADS_TO = {
    "Forget": "Exited",
    "Raise": "Exited",
    "append": "Exited",
    "Request": "Exited",
    "ShareBook": "Joined",
    "Tell": "Joined",
    "Admit": STARTED,
}
"""Effect → an event that brings it about in most states."""


def _aim(
    draw: random.Random, plan: Plan, pair: tuple[str, str], layout: Sequence[ProcessPlan], num_steps: int
) -> None:
    state, event = pair
    plan.hold = Hold(event, state, draw.uniform(1.0, 8.0))
    if event == "StopRequested":
        plan.faults.append(Planned(Kind.SIGNAL, "master-0", state=state))
    else:
        plan.faults += _cause_of(draw, event, layout, 0 if state == "starting" else num_steps)
    _lead_to(draw, plan, state, layout)


def _lead_to(draw: random.Random, plan: Plan, state: str, layout: Sequence[ProcessPlan]) -> None:
    """Make sure that the master comes to a state that an undisturbed run never sees."""
    ranks = _named(layout, Role.MODEL)
    if state in HOPELESS_STATES:
        plan.must_fail = True
        plan.faults.append(Planned(Kind.POISON, draw.choice(ranks), "RunCall", step=draw.randint(1, 6)))
    elif state.startswith(RECOVERING):
        plan.faults.append(
            Planned(Kind.KILL, draw.choice(ranks), state="collecting", step=draw.randint(0, 6))
        )


def _named(layout: Sequence[ProcessPlan], *roles: Role) -> list[str]:
    return [plan.process for plan in layout if plan.role in roles]


def _first(draw: random.Random, layout: Sequence[ProcessPlan], num_steps: int) -> Planned:
    """What makes the master recover for sure."""
    kind = draw.choice((Kind.KILL, Kind.KILL, Kind.KILL, Kind.STOP, Kind.KILL_HOST))
    target = draw.choice([*_named(layout, Role.MODEL), "master-0"])
    if kind is Kind.KILL_HOST:
        target = next(plan.host for plan in layout if plan.process == target)
    state = draw.choice(STEP_STATES)
    return Planned(
        kind, target, state=state, step=draw.randint(0, num_steps - 2), delay_s=draw.choice((0.0, 0.01, 0.05))
    )


def _any(draw: random.Random, layout: Sequence[ProcessPlan], *, state: str, step: int) -> Planned:
    names = [plan.process for plan in layout]
    kind = draw.choice(
        [
            *(Kind.KILL, Kind.KILL, Kind.KILL, Kind.STOP, Kind.PAUSE, Kind.PAUSE, Kind.PARTITION, Kind.LOSS),
            *(Kind.SPIKES, Kind.SLOW, Kind.KILL_HOST, Kind.POWER_CUT, Kind.FAIL),
        ]
    )
    fault = Planned(kind, draw.choice(names), state=state, step=step, delay_s=draw.choice((0.0, 0.003, 0.03)))
    match kind:
        case Kind.PAUSE | Kind.SLOW:
            fault.duration_s = draw.choice((0.3, 1.5, 4.0, 12.0))
            fault.share = draw.choice((0.02, 0.1, 0.4))
        case Kind.PARTITION:
            fault.other = draw.choice([name for name in names if name != fault.target])
            fault.duration_s = draw.choice((0.3, 2.0, 6.0, 15.0))
        case Kind.LOSS | Kind.SPIKES:
            fault.duration_s, fault.share = draw.uniform(0.2, 3.0), draw.choice((0.05, 0.3, 0.8))
        case Kind.KILL_HOST:
            fault.target = draw.choice(sorted({plan.host for plan in layout}))
        case Kind.POWER_CUT:
            fault.target, fault.share = "host-0", draw.choice((0.0, 0.5, 1.0))
        case Kind.FAIL:
            fault.target, fault.other = draw.choice(_failures(layout))
        case _:
            pass
    return fault


def _failures(layout: Sequence[ProcessPlan]) -> list[tuple[str, str]]:
    """(process, request) pairs whose failure a run must survive."""
    ranks, workers = _named(layout, Role.MODEL), _named(layout, Role.ROLLOUT)
    agents, managers = _named(layout, Role.AGENT), _named(layout, Role.MANAGER)
    on_ranks = (
        "RunCall",
        "CommitStep",
        "Publish",
        "Save",
        "PreLock",
        "DeviceStop",
        "DeviceClean",
        "Rollback",
    )
    return [
        *(
            (rank, request)
            for rank in ranks
            for request in (*on_ranks, "RebuildGroup", "Repair", "NotifyNormal")
        ),
        *((worker, "RunEpisodes") for worker in workers),
        *((agent, request) for agent in agents for request in ("StartProcess", "Inspect")),
        *((manager, "LoadWeights") for manager in managers),
        *((rank, "EvaluatePairs") for rank in (() if managers else ranks)),
    ]


def _cause_of(
    draw: random.Random, event: str, layout: Sequence[ProcessPlan], num_steps: int
) -> list[Planned]:
    """Something that gives the master an event of this kind; without steps, while it is starting."""
    workers = _named(layout, Role.ROLLOUT, Role.SERVER, Role.MODEL)
    state, step = ("collecting", draw.randint(0, num_steps - 3)) if num_steps else ("starting", 0)
    delay_s = 0.0 if num_steps else draw.uniform(0.05, 0.3)
    match event:
        case "Exited" | "Joined" | "Started":
            kind, target, other = Kind.KILL, draw.choice(workers), ""
        case "Suspected":
            kind, target, other = Kind.STOP, draw.choice(workers), ""
        case "RequestFailed":
            kind, target, other = Kind.FAIL, draw.choice(_named(layout, Role.ROLLOUT)), "RunEpisodes"
        case _:
            return []
    return [Planned(kind, target, other, state=state, step=step, delay_s=delay_s)]
