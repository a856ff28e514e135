"""The faults of a simulated run, drawn from its seed: what breaks, whom it hits, and when.

Every run has a fault that makes the master recover, one in the middle of that recovery, and at least one more. What
chance would hardly ever bring about, `aims.py` adds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from kintsugi.control.layout import ProcessPlan
from kintsugi.simulation.coverage import HOPELESS_STATES, NORMAL_STATES, RECOVERY_STATES
from kintsugi.types import Role, process_id

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
    CHIP = "chip"
    """The accelerator of a process breaks; its host has another."""
    FAIL = "fail"
    """The next request of some kind to a process is answered with a fault."""
    CRASH = "crash"
    """The master ends at a boundary of a decision."""
    POISON = "poison"
    """A rank finds the user's mistake: repeating and replacing can not help, the run must end with this cause."""
    SIGNAL = "signal"
    """Someone asks for a stop; the run is resumed afterwards."""
    SCALE = "scale"
    """Someone asks for another number of generation servers: no fault, but it may come at any time."""


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
    """Of messages that are hit, of a large torn write that is left; seconds by which each message is late."""
    after: bool = False
    """Of a crash: behind the boundary, not before it."""
    about: str = ""
    """Of a start that fails: the process that is to be started; empty for any."""
    times: int = 1
    """Of a request that fails: how often."""
    servers: int = 0
    """That are asked for."""
    or_last: bool = False
    """In a recovery that does not come to `state`: in its last state."""
    fired_in: str | None = None
    """The master's state when it happened; None as long as it has hit nothing."""


class Hold(msgspec.Struct):
    """Keep an event of a kind away from the master until it stands in a state, for a bounded time."""

    event: str
    state: str
    longest_s: float
    about: str = ""
    """The process that the event is about; empty for any."""
    leads: list[Planned] = []
    """Faults that lead the master to the state, once an event is held."""


class Plan(msgspec.Struct):
    """Everything that befalls one run."""

    faults: list[Planned]
    scalings: list[Planned] = []
    hold: Hold | None = None
    weather: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Shares of lost, repeated and late messages, as long as there are faults."""


def draw_faults(draw: random.Random, layout: Sequence[ProcessPlan], *, num_steps: int) -> Plan:
    """What befalls a run by chance."""
    faults = [_first(draw, layout, num_steps)]
    in_recovery = draw.choice([state for state in RECOVERY_STATES if state not in HOPELESS_STATES])
    faults.append(_any(draw, layout, state=in_recovery, step=0))
    faults[-1].or_last = True
    for _ in range(draw.choice((1, 1, 2, 3))):
        step, often = draw.randint(0, num_steps - 1), draw.random() < 0.7
        state = draw.choice(STEP_STATES if often else NORMAL_STATES[2:])
        faults.append(_any(draw, layout, state=state, step=step))
    plan = Plan(faults)
    if draw.random() < 0.4:
        plan.weather = (draw.uniform(0, 0.04), draw.uniform(0, 0.05), draw.uniform(0, 0.05))
    return plan


def draw_scalings(draw: random.Random, plan: Plan, layout: Sequence[ProcessPlan], *, num_steps: int) -> None:
    """Half of the runs are scaled, once or several times; often a server that comes or goes is hit meanwhile."""
    num_servers, asked = len(named(layout, Role.SERVER)), draw.choice((0, 0, 0, 1, 1, 3))
    for _ in range(asked):
        state = draw.choice(("", *STEP_STATES, *NORMAL_STATES[2:], *RECOVERY_STATES))
        step, delay_s = draw.randint(0, num_steps - 1), draw.choice((0.0, 0.01, 0.3))
        servers = draw.choice((1, 1, num_servers + 1, num_servers + 2, num_servers + 2, 2 * num_servers, 99))
        scaling = Planned(Kind.SCALE, state=state, step=step, delay_s=delay_s, servers=servers)
        plan.scalings.append(scaling)
        if draw.random() < 0.5:
            kind = draw.choice((Kind.KILL, Kind.KILL, Kind.STOP, Kind.PAUSE))
            target = process_id(Role.SERVER, draw.randrange(num_servers + 2))
            later_s = delay_s + draw.choice((0.0, 0.05, 0.2, 0.5, 1.0))
            hit = Planned(kind, target, state=state, step=step, delay_s=later_s)
            hit.duration_s = draw.choice((0.3, 4.0, 12.0))
            plan.faults.append(hit)


def named(layout: Sequence[ProcessPlan], *roles: Role) -> list[str]:
    return [plan.process for plan in layout if plan.role in roles]


def _first(draw: random.Random, layout: Sequence[ProcessPlan], num_steps: int) -> Planned:
    """What makes the master recover for sure."""
    kind = draw.choice((Kind.KILL, Kind.KILL, Kind.KILL, Kind.STOP, Kind.KILL_HOST))
    target = draw.choice([*named(layout, Role.MODEL), "master-0"])
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
            *(Kind.SPIKES, Kind.SLOW, Kind.CHIP, Kind.KILL_HOST, Kind.POWER_CUT, Kind.FAIL),
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
        case Kind.CHIP:
            fault.target = draw.choice(named(layout, Role.MODEL, Role.SERVER))
        case Kind.POWER_CUT:
            fault.target, fault.share = "host-0", draw.choice((0.0, 0.01, 1.0))
        case Kind.FAIL:
            fault.target, fault.other = draw.choice(_failures(layout))
        case _:
            pass
    return fault


def _failures(layout: Sequence[ProcessPlan]) -> list[tuple[str, str]]:
    """(process, request) pairs whose failure a run must survive."""
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
