"""Faults of a simulated run, drawn from its seed: kind, target, time.

Every run has a fault that makes the ranks recover, one in the middle of that recovery, and at least one more; every
third also loses its master, which alone makes no rank recover: its successor takes their group over.
`targeted_faults.py` adds combinations that chance would hardly produce.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from kintsugi.control.placement import ProcessPlan
from kintsugi.simulation.coverage import HOPELESS_STATES, NORMAL_STATES, RECOVERY_STATES
from kintsugi.types import Role, process_id

STEP_STATES = ("collecting", "training", "committing", "publishing")
"""States that every step passes through."""


class SimulatedFaultKind(StrEnum):
    """Kind of a simulated fault."""

    KILL = "kill"
    KILL_HOST = "kill host"
    POWER_CUT = "power cut"
    STOP = "stop"
    PAUSE = "pause"
    """A process is stopped and continued later: it answers late, perhaps after it was replaced."""
    BUSY = "busy"
    """One call keeps a process for a time: it says nothing and is not to be replaced for that."""
    PARTITION = "partition"
    """No message arrives in one direction between two processes."""
    LOSS = "loss"
    SPIKES = "spikes"
    SLOW = "slow"
    CHIP = "chip"
    """The accelerator of a process breaks; its host has another."""
    FAIL = "fail"
    """The next request of some kind to a process is answered with a fault."""
    CRASH = "crash"
    """The master crashes at a boundary of a decision."""
    POISON = "poison"
    """A rank reports the user's mistake: repeating and replacing cannot help, the run must end with this cause."""
    SIGNAL = "signal"
    """A stop is requested; the run is resumed afterwards."""
    SCALE = "scale"
    """Another number of generation servers is requested: no fault, but it may come at any time."""


class PlannedSimFault(msgspec.Struct):
    """One fault. It waits until the master is in `state` at `step` (empty, 0: immediately)."""

    kind: SimulatedFaultKind
    target: str = ""
    other: str = ""
    """Other end of a partition, boundary of a crash, or kind of the request that fails."""
    state: str = ""
    step: int = 0
    delay_s: float = 0.0
    """Delay after the master has reached the state."""
    duration_s: float = 0.0
    share: float = 0.0
    """Share of messages that are hit, or of a large torn write that is kept; or seconds by which each message is
    late."""
    after: bool = False
    """Whether a crash comes after the boundary instead of before it."""
    about: str = ""
    """Process of a start that fails; empty for any."""
    times: int = 1
    """Number of requests that fail."""
    servers: int = 0
    """Number of servers that is requested."""
    or_last: bool = False
    """Whether a recovery that does not reach `state` is hit in its last state instead."""
    fired_in: str | None = None
    """State of the master when the fault took effect; None before."""


class EventBarrier(msgspec.Struct):
    """Holds events of a kind back until the master is in a state, for a bounded time."""

    event: str
    state: str
    longest_s: float
    about: str = ""
    """Process that the event is about; empty for any."""
    leads: list[PlannedSimFault] = []
    """Faults that lead the master to the state, once an event is held."""


class SimulatedFaultPlan(msgspec.Struct):
    """All faults of one run."""

    faults: list[PlannedSimFault]
    scalings: list[PlannedSimFault] = []
    hold: EventBarrier | None = None
    conditions: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Shares of lost, repeated and late messages, while faults occur."""


def draw_faults(draw: random.Random, layout: Sequence[ProcessPlan], *, num_steps: int) -> SimulatedFaultPlan:
    """Draw random faults."""
    faults = [_in_step(draw, layout, num_steps, target=draw.choice(named(layout, Role.MODEL)))]
    in_recovery = draw.choice([state for state in RECOVERY_STATES if state not in HOPELESS_STATES])
    faults.append(_any(draw, layout, state=in_recovery, step=0))
    faults[-1].or_last = True
    for _ in range(draw.choice((1, 1, 2, 3))):
        step, often = draw.randint(0, num_steps - 1), draw.random() < 0.7
        state = draw.choice(STEP_STATES if often else NORMAL_STATES[2:])
        faults.append(_any(draw, layout, state=state, step=step))
    if draw.random() < 1 / 3:
        faults.append(_in_step(draw, layout, num_steps, target="master-0"))
    plan = SimulatedFaultPlan(faults)
    if draw.random() < 0.4:
        plan.conditions = (draw.uniform(0, 0.04), draw.uniform(0, 0.05), draw.uniform(0, 0.05))
    return plan


def draw_scalings(
    draw: random.Random, plan: SimulatedFaultPlan, layout: Sequence[ProcessPlan], *, num_steps: int
) -> None:
    """Scale half of the runs, once or several times; often a server that starts or retires is hit meanwhile."""
    num_servers, asked = len(named(layout, Role.SERVER)), draw.choice((0, 0, 0, 1, 1, 3))
    for _ in range(asked):
        state = draw.choice(("", *STEP_STATES, *NORMAL_STATES[2:], *RECOVERY_STATES))
        step, delay_s = draw.randint(0, num_steps - 1), draw.choice((0.0, 0.01, 0.3))
        servers = draw.choice((1, 1, num_servers + 1, num_servers + 2, num_servers + 2, 2 * num_servers, 99))
        scaling = PlannedSimFault(
            SimulatedFaultKind.SCALE, state=state, step=step, delay_s=delay_s, servers=servers
        )
        plan.scalings.append(scaling)
        if draw.random() < 0.5:
            kind = draw.choice(
                (
                    SimulatedFaultKind.KILL,
                    SimulatedFaultKind.KILL,
                    SimulatedFaultKind.STOP,
                    SimulatedFaultKind.PAUSE,
                )
            )
            target = process_id(Role.SERVER, draw.randrange(num_servers + 2))
            later_s = delay_s + draw.choice((0.0, 0.05, 0.2, 0.5, 1.0))
            hit = PlannedSimFault(kind, target, state=state, step=step, delay_s=later_s)
            hit.duration_s = draw.choice((0.3, 4.0, 12.0))
            plan.faults.append(hit)


def draw_absences(
    draw: random.Random, plan: SimulatedFaultPlan, layout: Sequence[ProcessPlan], *, num_steps: int
) -> None:
    """In every fourth run lose some ranks in the middle of a step whose replacements can not be started for a while, on
    any host: the others may go on without them."""
    if draw.random() >= 0.25:
        return
    ranks = named(layout, Role.MODEL)
    step = draw.randint(0, num_steps - 3)
    for rank in draw.sample(ranks, draw.randint(1, len(ranks) - 1)):
        for agent in named(layout, Role.AGENT):
            plan.faults.append(
                PlannedSimFault(
                    SimulatedFaultKind.FAIL,
                    agent,
                    "StartProcess",
                    "collecting",
                    step,
                    about=rank,
                    times=draw.choice((3, 4, 5)),
                )
            )
        plan.faults.append(PlannedSimFault(SimulatedFaultKind.KILL, rank, state="collecting", step=step))


def named(layout: Sequence[ProcessPlan], *roles: Role) -> list[str]:
    return [plan.process for plan in layout if plan.role in roles]


def _in_step(
    draw: random.Random, layout: Sequence[ProcessPlan], num_steps: int, *, target: str
) -> PlannedSimFault:
    """Draw a fault that surely loses this process in the middle of a step, alone or with its host."""
    kind = draw.choice(
        (
            SimulatedFaultKind.KILL,
            SimulatedFaultKind.KILL,
            SimulatedFaultKind.KILL,
            SimulatedFaultKind.STOP,
            SimulatedFaultKind.KILL_HOST,
        )
    )
    if kind is SimulatedFaultKind.KILL_HOST:
        target = next(plan.host for plan in layout if plan.process == target)
    state = draw.choice(STEP_STATES)
    return PlannedSimFault(
        kind, target, state=state, step=draw.randint(0, num_steps - 2), delay_s=draw.choice((0.0, 0.01, 0.05))
    )


def _any(draw: random.Random, layout: Sequence[ProcessPlan], *, state: str, step: int) -> PlannedSimFault:
    names = [plan.process for plan in layout]
    kind = draw.choice(
        [
            *(
                SimulatedFaultKind.KILL,
                SimulatedFaultKind.KILL,
                SimulatedFaultKind.KILL,
                SimulatedFaultKind.STOP,
                SimulatedFaultKind.PAUSE,
                SimulatedFaultKind.BUSY,
                SimulatedFaultKind.PARTITION,
                SimulatedFaultKind.LOSS,
            ),
            *(
                SimulatedFaultKind.SPIKES,
                SimulatedFaultKind.SLOW,
                SimulatedFaultKind.CHIP,
                SimulatedFaultKind.KILL_HOST,
                SimulatedFaultKind.POWER_CUT,
                SimulatedFaultKind.FAIL,
            ),
        ]
    )
    fault = PlannedSimFault(
        kind, draw.choice(names), state=state, step=step, delay_s=draw.choice((0.0, 0.003, 0.03))
    )
    match kind:
        case SimulatedFaultKind.PAUSE | SimulatedFaultKind.BUSY | SimulatedFaultKind.SLOW:
            fault.duration_s = draw.choice((0.3, 1.5, 4.0, 12.0))
            fault.share = draw.choice((0.02, 0.1, 0.4))
        case SimulatedFaultKind.PARTITION:
            fault.other = draw.choice([name for name in names if name != fault.target])
            fault.duration_s = draw.choice((0.3, 2.0, 6.0, 15.0))
        case SimulatedFaultKind.LOSS | SimulatedFaultKind.SPIKES:
            fault.duration_s, fault.share = draw.uniform(0.2, 3.0), draw.choice((0.05, 0.3, 0.8))
        case SimulatedFaultKind.KILL_HOST:
            fault.target = draw.choice(sorted({plan.host for plan in layout}))
        case SimulatedFaultKind.CHIP:
            fault.target = draw.choice(named(layout, Role.MODEL, Role.SERVER))
        case SimulatedFaultKind.POWER_CUT:
            fault.target, fault.share = "host-0", draw.choice((0.0, 0.01, 1.0))
        case SimulatedFaultKind.FAIL:
            fault.target, fault.other = draw.choice(_failures(layout))
        case _:
            pass
    return fault


def _failures(layout: Sequence[ProcessPlan]) -> list[tuple[str, str]]:
    """Return (process, request) pairs that may fail without ending the run."""
    ranks, workers = named(layout, Role.MODEL), named(layout, Role.ROLLOUT)
    agents, managers = named(layout, Role.AGENT), named(layout, Role.MANAGER)
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
