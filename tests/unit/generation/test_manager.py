from array import array
from collections.abc import Iterator

import pytest

from kintsugi.config.schema import Strategy
from kintsugi.errors import DataError, DeadlineExceeded, RefusedError, RemoteError
from kintsugi.generation import server_fleet
from kintsugi.generation.manager import MAX_ATTEMPTS
from kintsugi.generation.weight_distribution import MAX_LOAD_ATTEMPTS
from kintsugi.protocol.generation import Generated
from kintsugi.protocol.membership import Ping
from kintsugi.protocol.weights import LoadWeights, WeightsLoaded
from kintsugi.transport import Delivery, PendingReply
from kintsugi.transport.sockets import QUEUED_MESSAGES
from kintsugi.types import StreamSource, WeightManifest
from tests.unit.generation.world import World, said


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def _texts(pending: PendingReply) -> list[list[int]]:
    return [array("i", part.tokens).tolist() for part in pending.result().expect(Generated).completions]


def _both(ticket: str) -> list[list[int]]:
    return [said(ticket, 0), said(ticket, 1)]


def _held(world: World) -> list[str]:
    return sorted(ticket for server in world.servers.values() for ticket in server.tickets)


def test_requests_are_spread_by_tokens_in_flight(world: World) -> None:
    world.load(1)
    big = world.generate("big", max_new_tokens=100)
    world.until(lambda: len(_held(world)) == 1)
    small = [world.generate(f"small-{index}") for index in range(3)]
    world.until(lambda: len(_held(world)) == 4)
    assert world.servers["server-0"].tickets == ["big"]
    assert len(world.servers["server-1"].tickets) == 3
    for server in world.servers.values():
        server.answer()
    world.until(lambda: big.done and all(pending.done for pending in small))
    assert _texts(big) == _both("big")
    assert world.manager.load == 0


@pytest.mark.parametrize(
    ("strategy", "shares"), [("least_loaded", [3, 3]), ("round_robin", [3, 3]), ("prefix_affine", [0, 6])]
)
def test_requests_that_begin_alike_are_spread_as_the_strategy_says(
    world: World, strategy: Strategy, shares: list[int]
) -> None:
    world.restart_manager(strategy=strategy)
    world.load(1)
    for index in range(6):
        world.generate(str(index))
    world.until(lambda: len(_held(world)) == 6)
    assert sorted(len(server.tickets) for server in world.servers.values()) == shares
    assert world.manager.gauges() == {"waiting": 0, "sent": 6, "servers": 2}


def test_a_dead_servers_requests_are_sent_again_and_answered_once(world: World) -> None:
    world.load(1)
    requested = {ticket: world.generate(ticket) for ticket in ("a", "b", "c", "d")}
    world.until(lambda: len(_held(world)) == 4)
    assert len(world.servers["server-0"].tickets) == 2
    answers: list[str] = []
    for ticket, pending in requested.items():
        pending.on_done = lambda _, ticket=ticket: answers.append(ticket)
    world.kill("server-0")
    world.publish_book()
    world.until(lambda: len(world.servers["server-1"].tickets) == 4)
    world.servers["server-1"].answer()
    world.until(lambda: all(pending.done for pending in requested.values()))
    assert sorted(answers) == ["a", "b", "c", "d"]
    assert "server-0 a has left" in world.notes
    assert all(_texts(pending) == _both(ticket) for ticket, pending in requested.items())


def test_a_request_that_a_server_fails_is_tried_on_another(world: World) -> None:
    world.load(1)
    pending = world.generate("a")
    world.until(lambda: world.servers["server-0"].held)
    world.servers["server-0"].fail(RefusedError("not now"))
    world.until(lambda: world.servers["server-1"].held)
    world.servers["server-1"].answer()
    world.until(lambda: pending.done)
    assert pending.result().expect(Generated).server == "server-1"


def test_a_request_that_every_server_fails_is_given_up_with_the_cause(world: World) -> None:
    world.load(1)
    pending = world.generate("a")
    num_failures = 0
    while not pending.done:
        world.until(lambda: _held(world) or pending.done)
        for server in world.servers.values():
            num_failures += len(server.held)
            server.fail(RefusedError("no"))
    assert num_failures == MAX_ATTEMPTS
    with pytest.raises(RemoteError, match="no"):
        pending.result()


def test_the_users_mistake_is_answered_at_once_as_it_is(world: World) -> None:
    world.load(1)
    pending = world.generate("a")
    world.until(lambda: world.servers["server-0"].held)
    world.servers["server-0"].fail(DataError("prompt too long"))
    world.until(lambda: pending.done)
    assert isinstance(pending.error, RemoteError) and pending.error.cause is not None
    assert (pending.error.cause.kind, pending.error.cause.process) == ("DataError", "server-0")


def test_an_answer_to_another_question_is_not_accepted(world: World) -> None:
    world.load(1)
    pending = world.generate("a")
    world.until(lambda: world.servers["server-0"].held)
    (delivery,) = world.servers["server-0"].held
    world.servers["server-0"].endpoint.reply(delivery, Generated("b", 0, (), "server-0"))
    world.until(lambda: world.servers["server-1"].held)
    world.servers["server-1"].answer()
    world.until(lambda: pending.done)
    assert _texts(pending) == _both("a")


def test_weights_reach_every_server_before_they_count_as_loaded(world: World) -> None:
    slow = world.servers["server-1"]
    slow.loads_weights = False
    pending = world.load(1, wait=False)
    world.until(lambda: world.servers["server-0"].loaded == [1])
    for _ in range(20):
        world.turn()
    assert not pending.done
    assert any(wait.whom == "server-1" and "version 1" in wait.what for wait in world.waits.declared())
    world.kill("server-1")
    world.publish_book()
    world.until(lambda: pending.done)
    assert pending.result().expect(WeightsLoaded) == WeightsLoaded(1, "digest-1", ("server-0",))
    assert world.waits.declared() == ()


def test_a_server_that_loads_other_bytes_is_found_out(world: World) -> None:
    world.servers["server-1"].digest = "something else"
    pending = world.load(1)
    with pytest.raises(RemoteError, match="server-1: expected version 1 with digest digest-1"):
        pending.result()
    assert world.servers["server-1"].loaded == [1] * MAX_LOAD_ATTEMPTS
    requested = [world.generate(str(index)) for index in range(4)]
    world.until(lambda: len(world.servers["server-0"].held) == 4)
    world.servers["server-0"].answer()
    world.until(lambda: all(pending.done for pending in requested))


def test_a_server_that_joins_later_is_not_used_until_it_has_loaded_the_weights(world: World) -> None:
    world.load(1)
    for process in ("server-0", "server-1"):
        world.kill(process)
    newcomer = world.add_server("server-0", incarnation="b")
    newcomer.loads_weights = False
    world.publish_book()
    pending = world.generate("a")
    world.until(lambda: any("server-0 stale at version -1" in wait.what for wait in world.waits.declared()))
    assert newcomer.held == []
    world.kill("server-0")
    replacement = world.add_server("server-0", incarnation="c")
    world.publish_book()
    world.until(lambda: replacement.held)
    assert replacement.loaded == [1]
    replacement.answer()
    world.until(lambda: pending.done)
    assert _texts(pending) == _both("a")


def test_a_request_for_a_newer_version_waits_for_it_and_does_not_hold_up_others(world: World) -> None:
    world.load(1)
    newer = world.generate("newer", version=2)
    older = world.generate("older", version=1)
    world.until(lambda: _held(world) == ["older"])
    for server in world.servers.values():
        server.answer()
    world.until(lambda: older.done)
    assert not newer.done
    world.load(2)
    world.until(lambda: _held(world) == ["newer"])


def test_a_request_that_no_server_can_serve_fails_at_its_deadline_with_the_reason(world: World) -> None:
    world.load(1)
    pending = world.generate("a", version=9, timeout_s=0.05)
    world.until(lambda: pending.done)
    with pytest.raises(RemoteError, match="no server can serve version 9"):
        pending.result()
    assert isinstance(pending.error, RemoteError) and pending.error.cause is not None
    assert pending.error.cause.kind == DeadlineExceeded.__name__


def test_newer_weights_supersede_those_that_are_still_being_loaded(world: World) -> None:
    world.servers["server-1"].loads_weights = False
    first = world.load(1, wait=False)
    world.until(lambda: world.servers["server-0"].loaded == [1])
    world.kill("server-1")
    second = world.load(2, wait=False)
    world.until(lambda: first.done)
    with pytest.raises(RemoteError, match="superseded by version 2"):
        first.result()
    world.publish_book()
    world.until(lambda: second.done)
    assert world.servers["server-0"].loaded == [1, 2]


def test_an_order_of_weights_that_comes_after_a_later_one_is_refused(world: World) -> None:
    given_up = LoadWeights(WeightManifest(1, 1, (), 0, "digest-1"), ())
    delivered: list[Delivery] = []
    handle = world.manager.handle

    def loses_the_first(delivery: Delivery) -> None:
        delivered.append(delivery) if delivery.body == given_up else handle(delivery)

    world.manager.handle = loses_the_first  # type: ignore[method-assign]
    pending = world.load(1, wait=False)
    world.until(lambda: delivered)
    assert world.load(2).done
    handle(delivered[0])
    world.until(lambda: pending.done)
    with pytest.raises(RemoteError, match="later weights have been ordered"):
        pending.result()
    assert all(server.loaded == [2] for server in world.servers.values())


def test_the_queue_is_bounded(world: World) -> None:
    world.restart_manager(max_requests=3)
    requested = [world.generate(str(index)) for index in range(4)]
    world.until(lambda: requested[3].done)
    with pytest.raises(RemoteError, match="3 requests are unanswered"):
        requested[3].result()
    assert not any(pending.done for pending in requested[:3])


def test_a_server_is_sent_no_more_than_its_endpoint_takes_beside_weights_and_cancels(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server_fleet.MAX_SENT < QUEUED_MESSAGES
    monkeypatch.setattr(server_fleet, "MAX_SENT", 2)
    world.load(1)
    requested = [world.generate(str(index)) for index in range(6)]
    world.until(lambda: world.manager.gauges() == {"waiting": 2, "sent": 4, "servers": 2})
    world.until(lambda: [len(server.held) for server in world.servers.values()] == [2, 2])
    assert any("server-0 full at version 1" in wait.what for wait in world.waits.declared())
    for server in world.servers.values():
        server.answer()
    world.until(lambda: sum(pending.done for pending in requested) == 4 and len(_held(world)) == 2)


def test_requests_of_a_process_that_is_gone_are_dropped(world: World) -> None:
    world.generate("a")
    world.until(lambda: world.manager.load > 0)
    world.forget("rollout-0")
    world.turn()
    assert world.manager.load == 0


def test_a_message_that_is_not_its_business_is_refused(world: World) -> None:
    pending = world.rollout.request("manager-0", Ping(), deadline_s=5)
    world.until(lambda: pending.done)
    with pytest.raises(RemoteError, match="does not answer Ping"):
        pending.result()


def test_a_server_that_joins_later_is_admitted_only_after_it_has_answered_a_probe(world: World) -> None:
    world.load(1)
    assert [server.probed for server in world.servers.values()] == [[], []]
    for process in ("server-0", "server-1"):
        world.kill(process)
    replacement = world.add_server("server-0", incarnation="b")
    replacement.answers_probes = False
    world.publish_book()
    world.generate("a")
    loaded = world.load(1, wait=False)
    world.until(lambda: replacement.probed == [1])
    for _ in range(20):
        world.turn()
    assert not loaded.done and replacement.held == []
    world.kill("server-0")
    replacement = world.add_server("server-0", incarnation="c")
    world.publish_book()
    world.until(lambda: loaded.done and replacement.held)
    assert "server-0 c is admitted: it answered the probe of version 1" in world.notes
    world.load(2)
    assert replacement.probed == [1]


def test_servers_that_were_there_before_the_first_weights_are_not_probed(world: World) -> None:
    """Not even when address book and weights arrive in one poll: a busy server would keep the run waiting."""
    pending = world.load(1, wait=False)
    while not (deliveries := world.manager_endpoint.poll(0.01)):
        world.master.turn(0)
    assert world.manager._fleet._book_number < world.manager_endpoint.book_number
    for delivery in deliveries:
        world.manager.handle(delivery)
    world.until(lambda: pending.done)
    assert [server.probed for server in world.servers.values()] == [[], []]


def test_a_server_that_fails_its_probe_has_not_loaded_the_weights(world: World) -> None:
    world.load(1)
    world.kill("server-1")
    replacement = world.add_server("server-1", incarnation="b")
    replacement.probe_version = 0
    world.publish_book()
    world.until(lambda: replacement.loaded == [1] * MAX_LOAD_ATTEMPTS)
    pending = world.load(2)
    with pytest.raises(RemoteError, match="server-1: expected tokens of version 2 as answer to the probe"):
        pending.result()
    for index in range(4):
        world.generate(str(index))
    world.until(lambda: len(world.servers["server-0"].held) == 4)
    replacement.probe_version = None
    world.load(3)
    world.until(lambda: world.servers["server-1"].loaded[-1] == 3)


def test_a_request_survives_more_deaths_than_it_may_meet_faults(world: World) -> None:
    world.load(1)
    world.kill("server-1")
    world.publish_book()
    pending = world.generate("a")
    for incarnation in range(MAX_ATTEMPTS + 2):
        world.until(lambda: world.servers["server-0"].held)
        world.kill("server-0")
        world.add_server("server-0", incarnation=f"r{incarnation}")
        world.publish_book()
    world.until(lambda: world.servers["server-0"].held)
    assert not pending.done
    world.servers["server-0"].answer()
    world.until(lambda: pending.done)
    assert _texts(pending) == _both("a")


def test_requests_and_weights_wait_for_a_stopped_server_until_it_is_killed(world: World) -> None:
    world.load(1)
    world.stopped.add("server-0")
    requested = [world.generate(str(index)) for index in range(4)]
    world.until(lambda: len(world.servers["server-1"].held) == 2)
    loaded = world.load(2, wait=False)
    world.until(lambda: world.servers["server-1"].loaded == [1, 2])
    assert not loaded.done and not any(pending.done for pending in requested)
    world.kill("server-0")
    world.publish_book()
    world.until(lambda: loaded.done and len(world.servers["server-1"].held) == 4)
    world.servers["server-1"].answer()
    world.until(lambda: all(pending.done for pending in requested))
    assert [_texts(pending) for pending in requested] == [_both(str(index)) for index in range(4)]
    assert loaded.result().expect(WeightsLoaded).servers == ("server-1",)
    assert not any("did not load" in note for note in world.notes)


def test_a_restarted_manager_keeps_requests_until_it_is_told_the_weights_again(world: World) -> None:
    world.load(1)
    world.generate("lost")
    world.until(lambda: _held(world) == ["lost"])
    world.restart_manager()
    pending = world.generate("a")
    world.until(lambda: any("stale at version -1" in wait.what for wait in world.waits.declared()))
    world.load(1)
    world.until(lambda: "a" in _held(world))
    for server in world.servers.values():
        server.answer()
    world.until(lambda: pending.done)
    assert _texts(pending) == _both("a")
    assert [server.probed for server in world.servers.values()] == [[], []]


def test_weights_that_are_published_again_are_loaded_only_by_newcomers_from_the_new_sources(
    world: World,
) -> None:
    world.load(1, sources=(StreamSource("model-0"),))
    again = world.load(1, sources=(StreamSource("model-1"),))
    assert again.result().expect(WeightsLoaded).servers == ("server-0", "server-1")
    newcomer = world.add_server("server-2")
    world.publish_book()
    world.until(lambda: newcomer.loaded == [1])
    assert newcomer.sources == [(StreamSource("model-1"),)]
    assert world.servers["server-0"].sources == [(StreamSource("model-0"),)]


def test_a_master_that_took_over_joins_the_loading_that_its_predecessor_began(world: World) -> None:
    world.stopped.add("server-1")
    world.load(1, wait=False)
    world.until(lambda: world.servers["server-0"].loaded == [1])
    world.restart_master()
    again = world.load(1, wait=False)
    world.until(lambda: len(world.manager._distribution._callbacks) == 2)
    world.stopped.clear()
    world.until(lambda: again.done)
    assert again.result().expect(WeightsLoaded).servers == ("server-0", "server-1")
    assert [server.loaded for server in world.servers.values()] == [[1], [1]]
