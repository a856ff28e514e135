"""Everything that can happen to an arbiter and its holders, within bounds: every interleaving, by exhaustion.

The network is a set that only grows: whatever was ever said may arrive at any later time, again, in any order, or
never; to say it again adds nothing. Expiry and the loss of patience may come at any moment, as no promise rests on a
clock. Bounded are the tokens granted and how often processes are killed, stopped, interrupted in their wait, and the
arbiter restarted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kintsugi.device_lease import arbiter as deciding
from kintsugi.device_lease import holder as holding
from kintsugi.device_lease.arbiter import LEASE_S, Arbiter, Decision, Effect, Fence, LeaseMember
from kintsugi.device_lease.holder import Holder
from kintsugi.device_lease.states import CLAIM_MOVES, Hold, Side, side_of
from kintsugi.protocol.device_lease import ToArbiter, ToHolder

NOW = -LEASE_S
"""Time stands still: states that differ only in it are the same."""
DEVICE = "cpu"


class Bounds(NamedTuple):
    names: tuple[str, ...]
    tokens: int = 3
    works: int = 1
    """Pieces of work that each process does."""
    kills: int = 0
    stops: int = 0
    withdrawals: int = 0
    restarts: int = 0
    expiries: int = 1
    fences: int = 1
    together: bool = False
    """Ranks wait for each other within a piece of work, as in a collective."""


class Process(NamedTuple):
    name: str
    holder: Holder
    incarnation: int = 0
    done: int = 0
    computing: bool = False
    alive: bool = True
    stopped: bool = False

    @property
    def is_rank(self) -> bool:
        return side_of(self.name) is Side.TRAINING


class Said(NamedTuple):
    whose: int
    """Index of the process that said it or is to hear it."""
    incarnation: int
    body: ToArbiter | ToHolder


class Left(NamedTuple):
    kills: int
    stops: int
    withdrawals: int
    restarts: int
    expiries: int
    fences: int


class World(NamedTuple):
    arbiter: Arbiter
    processes: tuple[Process, ...]
    said: frozenset[Said]
    condemned: frozenset[tuple[int, int]]
    """To be killed by the agent: index and incarnation."""
    buried: frozenset[tuple[int, int]]
    """Whose end the arbiter has seen."""
    left: Left


def first(bounds: Bounds) -> World:
    processes = tuple(Process(name, Holder(DEVICE)) for name in bounds.names)
    left = Left(*(getattr(bounds, name) for name in Left._fields))
    return World(Arbiter(DEVICE, 0), processes, frozenset(), frozenset(), frozenset(), left)


def member_of(process: Process) -> LeaseMember:
    return LeaseMember(process.name, str(process.incarnation))


def order_of(process: Process, bounds: Bounds) -> int:
    return process.done if bounds.together and process.is_rank else -1


class Explorer:
    """The moves of a world: each gives its name and the world after it."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._decisions: dict[Arbiter, dict[Said, Decision]] = {}
        """What each arbiter makes of each message: the same pair occurs in many worlds."""
        self._steps: dict[Holder, dict[ToHolder, holding.Step]] = {}

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        for index, process in enumerate(world.processes):
            if process.alive and not process.stopped:
                yield from self.own_moves(world, index, process)
            yield from self.faults(world, index, process)
        for said in world.said:
            after = self.arrive(world, said)
            if after is not world and after != world:
                yield "arrive", after
        for member in world.arbiter.members:
            if (member.claim, "overdue") in CLAIM_MOVES and world.left.fences:
                spent = _spend(world, "fences")
                yield "overdue", decided(spent, deciding.overdue(world.arbiter, member, now=NOW))
        if world.left.restarts:
            yield "restart", self.restart(_spend(world, "restarts"))

    def own_moves(self, world: World, index: int, process: Process) -> Iterator[tuple[str, World]]:
        holder = process.holder
        order = order_of(process, self.bounds)
        if self.has_work(process):
            if holder.hold is Hold.IDLE or (holder.may_begin and holder.order != order):
                yield "want", stepped(world, index, holding.want(holder, order=order))
            elif holder.may_begin and not process.computing:
                began = process._replace(computing=True, holder=holding.begin(holder))
                yield "begin", put(world, index, began)
        if process.computing and self.can_end(world, process):
            yield "done", put(world, index, process._replace(computing=False, done=process.done + 1))
        if holder.hold is Hold.YIELDING and not process.computing:
            yield "yielded", stepped(world, index, holding.yielded(holder))
            if not holder.unused and self.has_work(process):
                yield "prolong", put(world, index, process._replace(holder=holding.prolong(holder)))
        if holder.hold is Hold.HOLDING and world.left.expiries:
            yield "expire", stepped(_spend(world, "expiries"), index, holding.expire(holder))
        if holder.hold is Hold.WAITING and world.left.withdrawals:
            yield "withdraw", stepped(_spend(world, "withdrawals"), index, (holding.withdraw(holder), ()))

    def faults(self, world: World, index: int, process: Process) -> Iterator[tuple[str, World]]:
        name = (index, process.incarnation)
        if process.alive:
            if world.left.kills:
                yield "kill", killed(_spend(world, "kills"), index)
            if name in world.condemned:
                yield "fenced", killed(world, index)
            if world.left.stops and not process.stopped:
                yield "stop", put(_spend(world, "stops"), index, process._replace(stopped=True))
        elif name not in world.buried:
            yield "end is seen", buried(world, index)
        else:
            yield "born again", self.born_again(world, index)

    def has_work(self, process: Process) -> bool:
        return process.done < self.bounds.works and not process.computing

    def can_end(self, world: World, process: Process) -> bool:
        """In a collective, only when every other rank has begun the same."""
        if not self.bounds.together or not process.is_rank:
            return True
        return all(
            other.done > process.done or (other.computing and other.done == process.done)
            for other in world.processes
            if other.is_rank
        )

    def arrive(self, world: World, said: Said) -> World:
        process = world.processes[said.whose]
        if isinstance(said.body, ToArbiter):
            if (said.whose, said.incarnation) in world.buried:
                return world
            return decided(world, self.decision(world.arbiter, process.name, said))
        if not process.alive or process.stopped or process.incarnation != said.incarnation:
            return world
        return stepped(world, said.whose, self.step(process.holder, said.body))

    def decision(self, arbiter: Arbiter, name: str, said: Said) -> Decision:
        decisions = self._decisions.setdefault(arbiter, {})
        if (decision := decisions.get(said)) is None:
            assert isinstance(said.body, ToArbiter)
            sender = LeaseMember(name, str(said.incarnation))
            decision = decisions[said] = deciding.receive(arbiter, sender, said.body, now=NOW)
        return decision

    def step(self, holder: Holder, body: ToHolder) -> holding.Step:
        steps = self._steps.setdefault(holder, {})
        if (step := steps.get(body)) is None:
            step = steps[body] = holding.receive(holder, body)
        return step

    def restart(self, world: World) -> World:
        """A successor knows who was ever let in, from the table, and which of them live, from the kernel."""
        alive = {(process.name, str(process.incarnation)) for process in world.processes if process.alive}
        dead = {
            (index, process.incarnation) for index, process in enumerate(world.processes) if not process.alive
        }
        known = [each for each in world.arbiter.members if (each.process, each.incarnation) in alive]
        world = world._replace(condemned=frozenset(), buried=world.buried | dead)
        return decided(world, deciding.succeed(DEVICE, token=world.arbiter.last_token, members=known))

    def born_again(self, world: World, index: int) -> World:
        """The step that was under way is done again; what was finished stays so."""
        before = world.processes[index]
        new = Process(before.name, Holder(DEVICE), before.incarnation + 1, before.done)
        return put(world, index, new)


def index_of(world: World, name: str) -> int:
    return next(index for index, process in enumerate(world.processes) if process.name == name)


def _spend(world: World, what: str) -> World:
    return world._replace(left=world.left._replace(**{what: getattr(world.left, what) - 1}))


def put(world: World, index: int, process: Process) -> World:
    before = world.processes
    return World(world[0], (*before[:index], process, *before[index + 1 :]), *world[2:])


def say(world: World, index: int, bodies: tuple[ToArbiter, ...]) -> World:
    if not bodies:
        return world
    incarnation = world.processes[index].incarnation
    news = frozenset(Said(index, incarnation, body) for body in bodies)
    return world._replace(said=world.said | news) if news - world.said else world


def stepped(world: World, index: int, step: tuple[Holder, tuple[ToArbiter, ...]]) -> World:
    holder, bodies = step
    process = world.processes[index]
    if holder != process.holder:
        world = put(world, index, Process(process.name, holder, *process[2:]))
    return say(world, index, bodies)


def decided(world: World, decision: Decision) -> World:
    arbiter, effects = decision
    if arbiter != world.arbiter:
        world = World(arbiter, *world[1:])
    return effected(world, effects)


def effected(world: World, effects: tuple[Effect, ...]) -> World:
    if not effects:
        return world
    said, condemned = set(world.said), set(world.condemned)
    for effect in effects:
        if isinstance(effect, Fence):
            condemned.add((index_of(world, effect.member.process), int(effect.member.incarnation)))
        else:
            index = index_of(world, effect.process)
            incarnation = world.processes[index].incarnation
            said.add(Said(index, incarnation, effect.body))
    return world._replace(said=frozenset(said), condemned=frozenset(condemned))


def killed(world: World, index: int) -> World:
    process = world.processes[index]._replace(alive=False, computing=False)
    return put(world, index, process)


def buried(world: World, index: int) -> World:
    process = world.processes[index]
    name = (index, process.incarnation)
    world = world._replace(buried=world.buried | {name}, condemned=world.condemned - {name})
    return decided(world, deciding.end(world.arbiter, member_of(process), now=NOW))


def users(world: World) -> set[Side]:
    """The sides that have something on the device: a process that is stopped has, too."""
    return {
        side_of(process.name) for process in world.processes if process.alive and process.holder.token > 0
    }


def fair_run(explorer: Explorer, world: World, *, rounds: int) -> World:
    """From here on everything that is said arrives, nobody else dies, and who is stopped is given up when it stands in
    the way: the world once everyone has done its work, or after so many rounds."""
    for said in world.said:
        world = explorer.arrive(world, said)
    for _ in range(rounds):
        world = _one_round(explorer, world)
        if all(process.done >= explorer.bounds.works or process.stopped for process in world.processes):
            break
    return world


def _one_round(explorer: Explorer, world: World) -> World:
    for index, process in enumerate(world.processes):
        if (index, process.incarnation) in world.condemned and process.alive:
            world = killed(world, index)
        if not world.processes[index].alive:
            if (index, process.incarnation) not in world.buried:
                world = buried(world, index)
            world = explorer.born_again(world, index)
    for index in range(len(world.processes)):
        for _ in range(6):
            process = world.processes[index]
            names = ("want", "begin", "done", "yielded")
            if not process.alive or process.stopped:
                break
            own = dict(explorer.own_moves(world, index, process))
            chosen = next((own[name] for name in names if name in own), None)
            if chosen is None:
                break
            world = chosen
    before = world.said
    world = world._replace(said=frozenset())
    for index, process in enumerate(world.processes):
        if process.alive and not process.stopped:
            world = say(world, index, holding.resend(process.holder))
    world = effected(world, deciding.remind(world.arbiter))
    for _ in range(3):
        for said in world.said:
            world = explorer.arrive(world, said)
    for member in world.arbiter.members:
        if world.processes[index_of(world, member.process)].stopped:
            world = decided(world, deciding.overdue(world.arbiter, member, now=NOW))
    return world._replace(said=before | world.said)
