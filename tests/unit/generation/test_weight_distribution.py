"""Weights on their way to servers of which one is slow: it is named, left behind, and catches up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kintsugi.errors import RemoteError
from kintsugi.generation import weight_distribution
from kintsugi.generation.router import ServerHealth
from kintsugi.protocol.weights import WeightsLoaded
from tests.unit.generation.world import World


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(weight_distribution, "SLOW_S", 0.05)
    world = World()
    world.manager._distribution._deadline_s = 0.4
    world.load(1)
    yield world
    world.close()


def health(world: World) -> dict[str, ServerHealth]:
    return {view.process: view.health for view in world.manager.servers()}


def test_a_slow_server_is_named_before_it_is_left_behind_and_then_the_others_go_on(world: World) -> None:
    world.stopped.add("server-1")
    pending = world.load(2, wait=False)
    world.until(lambda: any("server-1 is slow to load version 2" in note for note in world.notes))
    assert not pending.done
    waits = [wait for wait in world.waits.declared() if wait.what == "loading version 2"]
    assert [wait.whom for wait in waits] == ["server-1"]
    world.until(lambda: pending.done)
    loaded = pending.result().expect(WeightsLoaded)
    assert (loaded.servers, loaded.late) == (("server-0",), ("server-1",))
    assert "server-1 is left behind: it has not loaded version 2 within 0.4 s" in world.notes
    assert health(world) == {"server-0": ServerHealth.HEALTHY, "server-1": ServerHealth.STALE}


def test_a_server_that_was_left_behind_gets_nothing_until_it_has_caught_up(world: World) -> None:
    world.stopped.add("server-1")
    world.load(2)
    requested = [world.generate(str(index), version=2) for index in range(4)]
    world.until(lambda: len(world.servers["server-0"].held) == 4)
    world.stopped.clear()
    world.until(lambda: health(world)["server-1"] is ServerHealth.HEALTHY)
    assert "server-1 has caught up with version 2" in world.notes
    world.servers["server-0"].answer()
    world.until(lambda: all(pending.done for pending in requested))
    assert not world.servers["server-1"].held


def test_a_later_version_is_sent_to_who_has_not_answered_for_an_earlier_one(world: World) -> None:
    world.stopped.add("server-1")
    world.load(2)
    pending = world.load(3, wait=False)
    world.until(lambda: world.servers["server-0"].loaded == [1, 2, 3])
    world.stopped.clear()
    world.until(lambda: pending.done)
    assert pending.result().expect(WeightsLoaded).servers == ("server-0", "server-1")
    assert world.servers["server-1"].loaded == [1, 2, 3]


def test_when_no_server_loads_in_time_that_is_a_failure_that_names_them(world: World) -> None:
    world.stopped |= {"server-0", "server-1"}
    pending = world.load(2, wait=False)
    world.until(lambda: pending.done)
    with pytest.raises(RemoteError, match=r"server-0, server-1: loading version 2"):
        pending.result()


@pytest.mark.parametrize("follows", [2, 1], ids=["the next version", "the same one after a rollback"])
def test_a_server_that_finds_its_version_overwritten_waits_for_the_one_that_follows(
    world: World, follows: int
) -> None:
    world.kill("server-1")
    replacement = world.add_server("server-1", incarnation="b")
    replacement.overwritten = {1}
    world.publish_book()
    world.until(lambda: any("did not load version 1" in note for note in world.notes))
    for _ in range(20):
        world.turn()
    assert replacement.loaded == [1], "it is not tried again"
    replacement.overwritten = set()
    loaded = world.load(follows).result().expect(WeightsLoaded)
    assert loaded.servers == ("server-0", "server-1") and replacement.loaded == [1, follows]


def test_a_version_that_is_published_again_while_a_server_still_loads_the_overwritten_one_is_loaded_again(
    world: World,
) -> None:
    world.kill("server-1")
    replacement = world.add_server("server-1", incarnation="b")
    replacement.overwritten = {1}
    world.stopped.add("server-1")
    world.publish_book()
    for _ in range(5):
        world.turn()
    repeated = world.load(1, wait=False)
    for _ in range(5):
        world.turn()
    world.stopped.clear()
    world.until(lambda: replacement.loaded == [1])
    replacement.overwritten = set()
    world.until(lambda: repeated.done)
    assert repeated.result().expect(WeightsLoaded).servers == ("server-0", "server-1")
    assert replacement.loaded == [1, 1]


def test_a_new_manager_whose_servers_find_the_version_overwritten_reports_no_failure(world: World) -> None:
    world.manager._distribution._deadline_s = 60.0
    for process in ("server-0", "server-1"):
        world.kill(process)
        world.add_server(process, incarnation="b").overwritten = {1}
    world.publish_book()
    repeated = world.load(1, wait=False)
    world.until(lambda: sum("did not load version 1" in note for note in world.notes) >= 2)
    for _ in range(20):
        world.turn()
    assert not repeated.done, "a failure would end a server, and after some more the run"
    assert world.load(2).result().expect(WeightsLoaded).servers == ("server-0", "server-1")
