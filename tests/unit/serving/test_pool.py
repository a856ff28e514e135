"""Servers that start, end and are replaced; real processes without an engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kintsugi.cluster.handover import Programs
from kintsugi.cluster.orphans import subreaper
from kintsugi.errors import KintsugiError, ProcessDied, UserError
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.processes import SystemProcesses
from kintsugi.serving import pool as pools
from kintsugi.serving.pool import ServerPool
from kintsugi.transport import Endpoint, new_key_pair
from kintsugi.types import Role

PROGRAMS = Programs(entries={Role.SERVER: "tests.unit.serving.tiny_server:main"})
PATIENCE_S = 30.0


class World:
    """A pool, its endpoint, and the loop that a gateway would run."""

    def __init__(self, pool: ServerPool, endpoint: Endpoint, notes: list[str], retired: list[str]) -> None:
        self.pool, self.notes, self.retired = pool, notes, retired
        self.endpoint = endpoint

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = SYSTEM_CLOCK.monotonic() + PATIENCE_S
        while not condition():
            assert SYSTEM_CLOCK.monotonic() < deadline, (self.notes, self.states())
            self.pool.turn()
            for delivery in self.endpoint.poll(min(0.05, self.pool.next_turn_s())):
                self.pool.handle(delivery)

    def states(self) -> dict[str, str]:
        return {process: slot.state.value for process, slot in self.pool.slots.items()}

    def listed(self) -> set[str]:
        """As the manager sees them."""
        return {process for process, peer in self.endpoint.peers.items() if peer.address}


@contextmanager
def world(folder: Path) -> Iterator[World]:
    public_key, secret_key = new_key_pair()
    endpoint = Endpoint(
        job="test", process="manager-0", incarnation="0", public_key=public_key, secret_key=secret_key
    )
    notes: list[str] = []
    retired: list[str] = []
    reader, writer = os.pipe2(os.O_CLOEXEC)
    with subreaper():
        pool = ServerPool(
            endpoint,
            run_dir=str(folder),
            programs=PROGRAMS,
            processes=SystemProcesses(),
            lifeline=reader,
            note=notes.append,
            on_stop=retired.append,
        )
        try:
            yield World(pool, endpoint, notes, retired)
        finally:
            pool.close()
            endpoint.close()
            os.close(reader)
            os.close(writer)


def test_a_server_that_is_killed_is_replaced_and_known_by_its_new_address(tmp_path: Path) -> None:
    with world(tmp_path) as each:
        each.pool.begin(1)
        each.until(lambda: each.listed() == {"server-0"})
        slot = each.pool.slots["server-0"]
        pid, address = slot.pid, each.endpoint.peers["server-0"].address
        os.kill(pid, signal.SIGKILL)
        each.until(lambda: slot.pid not in (0, pid) and each.listed() == {"server-0"})
        assert each.endpoint.peers["server-0"].address != address
        assert slot.num_restarts == 1
        assert each.notes == ["server-0 killed by SIGKILL; another one takes its place"]


def test_a_server_that_is_stopped_in_its_tracks_is_replaced(tmp_path: Path) -> None:
    with world(tmp_path) as each:
        each.pool.begin(1)
        each.until(lambda: each.listed() == {"server-0"})
        slot = each.pool.slots["server-0"]
        pid = slot.pid
        os.kill(pid, signal.SIGSTOP)
        each.until(lambda: slot.pid not in (0, pid) and each.listed() == {"server-0"})


def test_servers_that_are_too_many_are_retired_before_they_are_ended(tmp_path: Path) -> None:
    with world(tmp_path) as each:
        each.pool.begin(2)
        each.until(lambda: each.listed() == {"server-0", "server-1"})
        each.pool.resize(1)
        assert each.retired == ["server-1"]
        assert each.states() == {"server-0": "running", "server-1": "stopping"}
        each.pool.dismiss("server-1")
        each.until(lambda: each.listed() == {"server-0"} and len(each.states()) == 1)
        each.pool.resize(2)
        each.until(lambda: each.listed() == {"server-0", "server-1"})


@pytest.mark.parametrize(
    ("behaviour", "error", "why"),
    [("die", ProcessDied, "exited with code 3"), ("refuse", UserError, "this model is no good")],
)
def test_a_server_that_can_not_live_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str, error: type[KintsugiError], why: str
) -> None:
    monkeypatch.setattr(pools, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(pools, "MAX_FAILURES", 2)
    (tmp_path / "behaviour").write_text(behaviour)
    with world(tmp_path) as each:
        each.pool.begin(1)
        each.until(lambda: each.pool.fatal is not None)
        assert isinstance(each.pool.fatal, error) and why in str(each.pool.fatal)
        assert each.states() == {"server-0": "failed"}
