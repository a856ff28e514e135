"""Processes of a run in the laboratory that can be made to grow."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from kintsugi.cluster.handover import PROGRAMS
from kintsugi.lab.faults.memory import GrowingProcess
from kintsugi.lab.testbed.growth import POLL_S, ROLES, Growth, GrowthOrder, order_file, with_growth
from kintsugi.lab.testbed.run import cold
from kintsugi.types import Role

MIB = 1 << 20


def test_a_process_grows_at_the_rate_of_its_order_up_to_the_limit_and_gives_all_back(tmp_path: Path) -> None:
    path = order_file(1, folder=tmp_path)
    growth = Growth(path)
    growth.step(0.0)
    assert growth.size == 0
    path.write_bytes(msgspec.json.encode(GrowthOrder(rate=4.0 * MIB, limit=2.5 * MIB)))
    sizes = []
    for number in range(1, 5):
        growth.step(number * POLL_S)
        sizes.append(growth.size / MIB)
    assert sizes == [1.0, 2.0, 2.5, 2.5]
    path.unlink()
    growth.step(9.0)
    assert growth.size == 0


def test_a_pause_of_the_process_is_not_made_up_for_at_once(tmp_path: Path) -> None:
    path = order_file(1, folder=tmp_path)
    growth = Growth(path)
    growth.step(0.0)
    path.write_bytes(msgspec.json.encode(GrowthOrder(rate=1.0 * MIB, limit=100.0 * MIB)))
    growth.step(50.0)
    assert growth.size == MIB


def test_the_programs_of_a_laboratory_grow_and_are_otherwise_the_same() -> None:
    programs = with_growth(PROGRAMS)
    changed = {role for role, entry in programs.entries.items() if entry != PROGRAMS.entries[role]}
    assert changed == set(ROLES) and Role.MASTER not in changed
    assert set(programs.preload) > set(PROGRAMS.preload)
    assert with_growth(cold(PROGRAMS)).preload == ()


def test_a_process_that_the_laboratory_has_not_started_can_not_be_made_to_grow() -> None:
    reason = GrowingProcess.unsupported_for(os.getpid())
    assert reason is not None and "that the laboratory has started" in reason
