"""No order of lost, late, repeated and reordered messages, deaths and restarts lets both sides use a device at once, or
leaves anyone waiting for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest

from kintsugi.device_lease import arbiter as deciding
from kintsugi.device_lease import holder as holding
from kintsugi.protocol.device_lease import LeaseGranted
from tests.unit.device_lease.exploration import Bounds, Explorer, World, fair_run, first, users

ROUNDS = 40


class Broken(AssertionError):
    """A promise does not hold."""


class Found(NamedTuple):
    states: int
    moves: int
    kinds: frozenset[str]
    """The names of all moves that were made."""
    checked: int
    """States from which a fair run was tried."""


def explore(bounds: Bounds, *, fair_every: int = 1) -> Found:
    """Visit every reachable state; check it, and from every `fair_every`th of them that all work gets done.

    States at the bound of tokens are checked like all others; only what follows from them is left out.
    """
    explorer = Explorer(bounds)
    world = first(bounds)
    seen = {world}
    ahead = deque([world])
    kinds: set[str] = set()
    visited = moves = checked = 0
    while ahead:
        world = ahead.popleft()
        visited += 1
        check(world)
        if visited % fair_every == 0:
            check_work_gets_done(explorer, world)
            checked += 1
        if world.arbiter.last_token > bounds.tokens:
            continue
        for name, after in explorer.moves(world):
            moves += 1
            kinds.add(name)
            if after not in seen:
                seen.add(after)
                ahead.append(after)
    return Found(len(seen), moves, frozenset(kinds), checked)


def check(world: World) -> None:
    if len(users(world)) > 1:
        raise Broken(f"both sides are on the device: {world}")
    granted = [said.body.token for said in world.said if isinstance(said.body, LeaseGranted)]
    if max(granted, default=0) > world.arbiter.last_token:
        raise Broken(f"a token was granted twice, or will be: {world}")
    for process in world.processes:
        if process.holder.token > process.holder.fence:
            raise Broken(f"a token is not its own fence: {world}")


def check_work_gets_done(explorer: Explorer, world: World) -> None:
    for process in fair_run(explorer, world, rounds=ROUNDS).processes:
        if process.done < explorer.bounds.works and not process.stopped:
            raise Broken(f"{process.name} waits for ever, from here on: {world}")


ONE_EACH = ("model-0", "server-0")
TWO_RANKS = ("model-0", "model-1", "server-0")
CALM = Bounds(ONE_EACH, tokens=2, expiries=0, fences=0)
SMALL = {
    "messages alone": CALM._replace(tokens=3, works=2),
    "a lease that runs out": CALM._replace(expiries=1),
    "a holder that is given up": CALM._replace(fences=1),
    "a process that is killed": CALM._replace(kills=1),
    "a process that is stopped": CALM._replace(stops=1, fences=1),
    "a wait that is given up": CALM._replace(tokens=3, withdrawals=1),
    "an arbiter that is replaced": CALM._replace(restarts=1),
    "ranks that wait for each other": CALM._replace(names=TWO_RANKS, together=True),
}
LARGE = {
    "more work and a lease that runs out": CALM._replace(tokens=4, works=2, expiries=1),
    "a holder that is killed, or given up though it lives": CALM._replace(kills=1, expiries=1, fences=1),
    "a death and a new arbiter": CALM._replace(kills=1, restarts=1),
    "a new arbiter and a lease that runs out": CALM._replace(restarts=1, expiries=1),
    "a holder that is stopped, and a new arbiter": CALM._replace(stops=1, fences=1, restarts=1),
    "two new arbiters": CALM._replace(restarts=2),
    "ranks that wait for each other, twice": CALM._replace(names=TWO_RANKS, together=True, works=2, tokens=3),
}


@pytest.mark.parametrize("name", SMALL)
def test_two_sides_never_share_the_device_and_nobody_waits_for_ever(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    found = explore(SMALL[name], fair_every=20)
    assert {"want", "begin", "done", "yielded", "arrive"} <= found.kinds
    assert found.states > 100
    record_property("states", found.states)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_nor_do_they_in_larger_worlds(name: str, record_property: Callable[[str, object], None]) -> None:
    found = explore(LARGE[name], fair_every=50)
    assert found.states > 10_000
    record_property("states", found.states)


def test_every_fault_is_among_the_moves() -> None:
    everything = CALM._replace(kills=1, stops=1, withdrawals=1, restarts=1, expiries=1, fences=1)
    explorer, ahead = Explorer(everything), deque([first(everything)])
    names: set[str] = set()
    seen: set[World] = set()
    while ahead and len(seen) < 2000:
        for name, after in explorer.moves(ahead.popleft()):
            names.add(name)
            if after not in seen:
                seen.add(after)
                ahead.append(after)
    assert {"kill", "stop", "withdraw", "restart", "expire", "end is seen", "born again"} <= names


def grant_whatever_was_asked(holder: holding.Holder, message: LeaseGranted) -> holding.Step:
    """Wrong: takes a grant of a token that is fenced."""
    holder = msgspec.structs.replace(
        holder, fence=min(holder.fence, message.token - 1), number=message.number
    )
    return RIGHT_GRANTED(holder, message)


RIGHT_GRANTED = holding._granted
WRONG: dict[str, tuple[Any, str, object, str]] = {
    "who is given up counts as gone before it is": (
        deciding,
        "overdue",
        deciding.end,
        "a holder that is given up",
    ),
    "a successor believes any request": (
        deciding.LeaseMember,
        "is_presumed",
        False,
        "an arbiter that is replaced",
    ),
    "late grants are taken": (holding, "_granted", grant_whatever_was_asked, "messages alone"),
    "a recall is said once": (deciding, "remind", lambda arbiter: (), "messages alone"),
    "nobody is let into a turn that is over": (
        deciding,
        "_joins",
        lambda arbiter, member: False,
        "ranks that wait for each other",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_machine_with_a_mistake_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, attribute, wrong, where = WRONG[name]
    monkeypatch.setattr(target, attribute, wrong)
    with pytest.raises((Broken, AssertionError)):
        explore(SMALL[where])
