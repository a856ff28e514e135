"""The tables of moves: nothing in them that can not happen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kintsugi.device_lease import arbiter as deciding
from kintsugi.device_lease import holder as holding
from kintsugi.device_lease.states import CLAIM_MOVES, HOLD_MOVES, OCCUPIED, Claim, Side, side_of
from tests.unit.device_lease.test_exploration import CALM, SMALL, explore


class Used(dict[Any, Any]):
    """A table that notes which of its moves are made."""

    def __init__(self, moves: Mapping[Any, Any]) -> None:
        super().__init__(moves)
        self.made: set[tuple[str, str]] = set()

    def __getitem__(self, move: tuple[str, str]) -> Any:
        self.made.add(move)
        return super().__getitem__(move)


@pytest.mark.slow
def test_every_move_of_both_tables_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    claims, holds = Used(CLAIM_MOVES), Used(HOLD_MOVES)
    monkeypatch.setattr(deciding, "CLAIM_MOVES", claims)
    monkeypatch.setattr(holding, "HOLD_MOVES", holds)
    for bounds in (*SMALL.values(), CALM._replace(expiries=1, fences=1, withdrawals=1)):
        explore(bounds, fair_every=1000)
    assert claims.made == set(CLAIM_MOVES)
    assert holds.made == set(HOLD_MOVES)


def test_only_who_waits_or_is_idle_is_surely_not_on_the_device() -> None:
    assert set(Claim) - OCCUPIED == {Claim.IDLE, Claim.WAITING}


def test_ranks_are_one_side_and_servers_the_other() -> None:
    assert (side_of("model-3"), side_of("server-0")) == (Side.TRAINING, Side.GENERATION)
