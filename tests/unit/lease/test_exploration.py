"""No order of lost, late, repeated and reordered messages, deaths and restarts lets both sides use a device at once, or
leaves anyone waiting for ever."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import pytest

from kintsugi.leasing import LeaseGranted
from tests.unit.lease.exploration import Bounds, Explorer, World, fair_run, first, users

ROUNDS = 40


class Found(NamedTuple):
    states: int
    moves: int
    kinds: frozenset[str]
    """The names of all moves that were made."""
    checked: int
    """States from which a fair run was tried."""
    beyond: int
    """States at the bound of tokens, whose moves were not followed."""


def explore(bounds: Bounds, *, fair_every: int = 1) -> Found:
    """Visit every reachable state; check it, and from every `fair_every`th of them that all work gets done."""
    explorer = Explorer(bounds)
    world = first(bounds)
    seen = {world}
    ahead = deque([world])
    kinds: set[str] = set()
    moves = checked = beyond = 0
    while ahead:
        world = ahead.popleft()
        check(world)
        if len(seen) % fair_every == 0:
            check_work_gets_done(explorer, world)
            checked += 1
        if world.arbiter.last_token > bounds.tokens:
            beyond += 1
            continue
        for name, after in explorer.moves(world):
            moves += 1
            kinds.add(name)
            if after not in seen:
                seen.add(after)
                ahead.append(after)
    return Found(len(seen), moves, frozenset(kinds), checked, beyond)


def check(world: World) -> None:
    if len(users(world)) > 1:
        pytest.fail(f"both sides are on the device: {world}")
    granted = [said.body.token for said in world.said if isinstance(said.body, LeaseGranted)]
    assert max(granted, default=0) <= world.arbiter.last_token
    for process in world.processes:
        assert process.holder.token <= process.holder.fence, "a token is its own fence"


def check_work_gets_done(explorer: Explorer, world: World) -> None:
    after = fair_run(explorer, world, rounds=ROUNDS)
    for process in after.processes:
        if process.done < explorer.bounds.works and not process.stopped:
            pytest.fail(f"a process waits for ever, from {world} on")


RANK_AND_SERVER = ("model-0", "server-0")
SMALL = {
    "messages alone": Bounds(RANK_AND_SERVER, tokens=4, works=2),
    "a death": Bounds(RANK_AND_SERVER, tokens=3, kills=1),
    "a process that is stopped": Bounds(RANK_AND_SERVER, tokens=3, stops=1),
    "a wait that is given up": Bounds(RANK_AND_SERVER, tokens=3, withdrawals=1),
    "an arbiter that is replaced": Bounds(RANK_AND_SERVER, tokens=3, restarts=1),
}


@pytest.mark.parametrize("name", SMALL)
def test_two_sides_never_share_the_device_and_nobody_waits_for_ever(name: str) -> None:
    found = explore(SMALL[name], fair_every=7)
    assert {"arrive", "overdue", "expire", "remind", "say again"} <= found.kinds
    print(name, found)
