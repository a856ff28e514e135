"""What a server was doing goes on elsewhere: every token comes once, and none is sampled again that is known."""

from array import array
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kintsugi.errors import RefusedError, RemoteError
from kintsugi.generation import server_fleet
from kintsugi.generation.router import ServerHealth
from kintsugi.generation.server import GenerationServer
from kintsugi.protocol.generation import Generate, Generated, Interrupt, Produced, Retire
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.wire import MessageKind
from kintsugi.runtime.counters import COUNTERS
from kintsugi.transport import Endpoint
from kintsugi.types import FinishReason, FolderSource, SamplingParams
from kintsugi.weights.fetch import Fetched
from tests.unit.generation.fake_backend import FakeBackend
from tests.unit.generation.loopback import Loopback
from tests.unit.generation.world import Cluster, FakeAsker, World, said


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def _tokens(requester: FakeAsker) -> dict[int, list[int]]:
    assert requester.generated is not None
    return {part.sample: array("i", part.tokens).tolist() for part in requester.generated.completions}


def _kill(world: World, process: str) -> str:
    """Gives who is left."""
    world.kill(process)
    world.publish_book()
    (other,) = world.servers
    return other


def _finish(world: World, process: str, requester: FakeAsker) -> None:
    world.servers[process].answer()
    world.until(lambda: requester.ended)
    assert _tokens(requester) == requester.streamed == {0: said("a", 0), 1: said("a", 1)}
    assert set(requester.finishes.values()) == {FinishReason.EOS}


def test_a_stream_goes_on_from_the_tokens_that_a_dead_server_produced(world: World) -> None:
    world.load(1)
    _, requester = world.ask("a")
    first = world.holder("a")
    world.servers[first].tell("a", {0: 2, 1: 1})
    world.until(lambda: len(requester.streamed) == 2)
    other = _kill(world, first)
    assert world.holder("a") == other
    request = world.servers[other].request("a")
    assert [array("i", part.tokens).tolist() for part in request.produced] == [
        said("a", 0, count=2),
        said("a", 1, count=1),
    ]
    _finish(world, other, requester)


def test_a_request_whose_server_dies_before_the_first_token_begins_elsewhere(world: World) -> None:
    world.load(1)
    _, requester = world.ask("a")
    other = _kill(world, world.holder("a"))
    world.holder("a")
    assert world.servers[other].request("a").produced == ()
    _finish(world, other, requester)


def test_samples_that_a_dead_server_had_finished_are_not_asked_for_again(world: World) -> None:
    world.load(1)
    _, requester = world.ask("a")
    first = world.holder("a")
    world.servers[first].tell("a", {0: 2, 1: 3}, finished=(1,))
    world.until(lambda: requester.finishes)
    other = _kill(world, first)
    world.holder("a")
    request = world.servers[other].request("a")
    assert request.wanted == (0,) and [part.sample for part in request.produced] == [0]
    _finish(world, other, requester)


def test_a_request_whose_samples_were_all_told_finished_is_still_answered_once(world: World) -> None:
    world.load(1)
    _, requester = world.ask("a")
    first = world.holder("a")
    world.servers[first].tell("a", {0: 3, 1: 3}, finished=(0, 1))
    world.until(lambda: len(requester.finishes) == 2)
    _kill(world, first)
    world.until(lambda: requester.ended)
    assert _tokens(requester) == {0: said("a", 0), 1: said("a", 1)}


def test_what_comes_late_of_an_attempt_that_was_given_up_is_ignored(world: World) -> None:
    world.load(1)
    _, requester = world.ask("a")
    first = world.holder("a")
    number = world.servers[first].request("a").number
    world.servers[first].fail(RefusedError("not now"))
    world.until(lambda: world.holder("a") != first)
    world.servers[first].endpoint.send("manager-0", Produced({number: ()}))
    second = world.holder("a")
    world.servers[first].held = list(world.servers[second].held)
    world.servers[first].tell("a", {0: 2})
    for _ in range(20):
        world.turn()
    assert requester.streamed == {}
    world.servers[first].held = []
    _finish(world, second, requester)


def test_an_answer_that_contradicts_what_was_streamed_is_not_accepted(world: World) -> None:
    world.load(1)
    _, requester = world.ask("a")
    first = world.holder("a")
    world.servers[first].tell("a", {0: 2})
    world.until(lambda: requester.streamed)
    world.servers[first].give_back({0: 1, 1: 1})
    world.until(lambda: world.servers[first].tickets == [] and world.holder("a") != first)
    assert any(f"{first} is suspect: sample 0 of a turn 0" in note for note in world.notes)
    _finish(world, world.holder("a"), requester)


def test_a_suspect_server_is_probed_and_healthy_again_when_it_answers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_fleet, "SUSPICION_S", 0.02)
    world.load(1)
    world.ask("a")
    first = world.holder("a")
    world.servers[first].fail(RefusedError("not now"))

    def health() -> ServerHealth:
        (view,) = [view for view in world.manager.servers() if view.process == first]
        return view.health

    world.until(lambda: health() is ServerHealth.SUSPECT)
    world.until(lambda: health() is ServerHealth.HEALTHY)
    assert world.servers[first].probed == [1]


def test_a_retired_server_gives_back_what_it_has_and_gets_nothing_more(world: World) -> None:
    world.load(1)
    _, requester = world.ask("a")
    first = world.holder("a")
    pending = world.master.request("manager-0", Retire(first, "a"), deadline_s=20)
    world.until(lambda: world.servers[first].interrupts)
    assert isinstance(world.servers[first].interrupts[0].body, Interrupt) and not pending.done
    world.servers[first].give_back({0: 2, 1: 0})
    world.until(lambda: pending.done)
    assert pending.result().body == Ok()
    other = world.holder("a")
    assert other != first
    for index in range(3):
        world.ask(f"b{index}")
    world.until(lambda: len(world.servers[other].held) == 4)
    assert requester.streamed == {0: said("a", 0, count=2)}
    world.servers[other].held = [world.servers[other].held[0]]
    _finish(world, other, requester)
    world.load(2)
    assert world.servers[first].loaded == [1]
    world.kill(first)
    world.publish_book()
    world.turn()
    assert [view.process for view in world.manager.servers()] == [other]


def test_retiring_a_server_that_dies_meanwhile_is_over_too(world: World) -> None:
    world.load(1)
    _, requester = world.ask("a")
    first = world.holder("a")
    called: list[str] = []
    world.manager.retire(first, lambda: called.append("first"))
    world.manager.retire("server-9", lambda: called.append("nobody"))
    world.turn()
    assert called == ["nobody"]
    other = _kill(world, first)
    world.until(lambda: len(called) == 2)
    world.holder("a")
    _finish(world, other, requester)


def test_a_dead_server_is_listed_as_dead_until_its_name_is_taken_again(world: World) -> None:
    world.load(1)
    _kill(world, "server-0")
    world.turn()
    assert [str(view) for view in world.manager.servers()] == [
        "server-0 dead at version 1",
        "server-1 healthy at version 1",
    ]
    world.add_server("server-0", incarnation="b")
    world.publish_book()
    world.until(lambda: all(view.health is ServerHealth.HEALTHY for view in world.manager.servers()))


def test_the_versions_are_listed_with_who_holds_them(world: World) -> None:
    world.load(1)
    world.servers["server-1"].loads_weights = False
    world.load(2, wait=False)
    world.until(lambda: len(world.manager.versions()) == 2 and world.manager.versions()[1].servers)
    assert [(each.version, each.digest, each.servers) for each in world.manager.versions()] == [
        (1, "digest-1", ("server-1",)),
        (2, "digest-2", ("server-0",)),
    ]


def test_who_cancels_hears_nothing_more_and_its_server_is_told(world: World) -> None:
    world.load(1)
    job, requester = world.ask("a")
    waiting, unsent = world.ask("b")
    world.manager.cancel(waiting)
    first = world.holder("a")
    number = world.servers[first].request("a").number
    world.manager.cancel(job)
    world.manager.cancel(job)
    assert world.manager.load == 0 and world.manager.num_unanswered == 0
    world.until(lambda: world.servers[first].cancelled == [number])
    world.servers[first].tell("a", {0: 2})
    world.servers[first].answer()
    for _ in range(20):
        world.turn()
    assert requester.streamed == {} and not requester.ended and not unsent.ended


def test_the_requests_of_a_process_that_is_gone_are_cancelled_at_their_server(world: World) -> None:
    world.load(1)
    world.generate("a")
    first = world.holder("a")
    world.forget("rollout-0")
    world.until(lambda: world.servers[first].cancelled)


def test_a_request_that_is_out_of_time_is_cancelled_at_its_server(world: World) -> None:
    world.load(1)
    pending = world.generate("a", timeout_s=0.05)
    first = world.holder("a")
    world.until(lambda: pending.done and world.servers[first].cancelled)
    with pytest.raises(RemoteError, match="waited"):
        pending.result()


def test_what_was_drawn_with_weights_that_were_taken_back_does_not_count(world: World) -> None:
    world.load(3)
    _, requester = world.ask("a", stream=False)
    first = world.holder("a")
    world.servers[first].tell("a", {0: 2})
    for _ in range(20):
        world.turn()
    world.load(2)
    other = _kill(world, first)
    world.holder("a")
    assert world.servers[other].request("a").produced == ()
    world.servers[other].answer()
    world.until(lambda: requester.ended)
    assert requester.streamed == {} and _tokens(requester)[0] == said("a", 0)


def test_what_runs_with_weights_that_were_taken_back_is_drawn_again_when_its_version_is_there(
    world: World,
) -> None:
    """Its server would go on with the older weights, and whoever asked for version 3 would get tokens of version 2."""
    world.load(3)
    pending = world.generate("a", version=3)
    first = world.servers[world.holder("a")]
    number = first.request("a").number
    first.tell("a", {0: 2})
    world.load(2)
    world.until(lambda: first.cancelled == [number])
    first.answer()
    for _ in range(20):
        world.turn()
    assert not pending.done
    world.load(3)
    again = world.servers[world.holder("a")]
    assert again.request("a").produced == ()
    again.answer()
    world.until(lambda: pending.done)
    assert len(pending.result().expect(Generated).completions) == 2


class _RealServer:
    """A server whose back end says other things than anyone else's would: only what is handed over can be the same."""

    num_servers = 0

    def __init__(self, endpoint: Endpoint) -> None:
        _RealServer.num_servers += 1
        self.endpoint = endpoint
        self.backend = FakeBackend(salt=_RealServer.num_servers)
        self.loopback = Loopback(endpoint)
        self.withholds = False
        self._server = GenerationServer(
            self.loopback,
            self.backend,
            fetch=lambda manifest, sources: Fetched(manifest, FolderSource("nowhere")),
            background=lambda work: work(),
        )

    def turn(self) -> None:
        self._server.turn(0)
        if not self.withholds:
            self.loopback.flush()


_ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["work", "kill", "retire", "load", "withhold", "repeat", "reorder", "cancel"]),
        st.integers(0, 1),
    ),
    max_size=25,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_ACTIONS)
def test_whatever_dies_is_retired_or_comes_twice_every_token_is_told_once(
    actions: list[tuple[str, int]],
) -> None:
    cluster = Cluster(_RealServer)
    try:
        cluster.load(1)
        requested = [cluster.ask(name, num_samples=3, max_new_tokens=24) for name in "abcd"]
        given_up: set[int] = set()
        for number, (action, index) in enumerate(actions):
            process = f"server-{index}"
            _act(cluster, action, process, number)
            if action == "cancel":
                cluster.manager.cancel(requested[index][0])
                given_up.add(index)
            for _ in range(3):
                cluster.turn()
        cluster.until(
            lambda: all(
                requester.ended for index, (_, requester) in enumerate(requested) if index not in given_up
            )
        )
        for index, (_, requester) in enumerate(requested):
            if index not in given_up or requester.ended:
                assert requester.error is None
                assert requester.streamed == _tokens(requester)
                assert set(requester.finishes) == {0, 1, 2}
        assert cluster.manager.num_unanswered == 0 and cluster.manager.load == 0
        cluster.until(lambda: all(server.backend.idle for server in cluster.servers.values()))
    finally:
        cluster.close()


def _act(cluster: Cluster[_RealServer], action: str, process: str, number: int) -> None:
    server = cluster.servers[process]
    unsent = server.loopback.unsent
    match action:
        case "kill":
            cluster.kill(process)
            cluster.add_server(process, incarnation=f"r{number}")
            cluster.publish_book()
        case "retire":
            # The other one must live: nobody else would go on.
            cluster.manager.retire(process, lambda: None)
            for _ in range(5):
                cluster.turn()
            _act(cluster, "kill", process, number)
        case "load":
            cluster.load(number + 2, wait=False)
        case "withhold":
            server.withholds = True
        case "repeat":
            unsent.extend(list(unsent))
            server.withholds = False
        case "reorder":
            unsent.reverse()
            server.withholds = False
        case _:
            cluster.turn()


def test_a_request_that_is_repeated_is_answered_and_not_computed_again() -> None:
    cluster = Cluster(_RealServer, servers=1)
    try:
        cluster.load(1)
        (server,) = cluster.servers.values()
        _, requester = cluster.ask("a", max_new_tokens=8)
        cluster.until(lambda: requester.ended)
        num_sampled, repeated = server.backend.num_sampled, "transport.answered_again"
        before = COUNTERS.snapshot().counters.get(repeated, 0)
        endpoint = cluster.manager_endpoint
        link = endpoint._links["server-0"]
        body = Generate("a", 0, b"", SamplingParams(), 1)
        endpoint._transmit(link, link.sequence, MessageKind.REQUEST, body, None)
        cluster.until(lambda: COUNTERS.snapshot().counters.get(repeated, 0) > before)
        assert server.backend.idle and server.backend.num_sampled == num_sampled
    finally:
        cluster.close()


def test_a_stream_over_two_servers_is_the_answer_though_each_alone_would_say_something_else() -> None:
    cluster = Cluster(_RealServer)
    try:
        cluster.load(1)
        _, requester = cluster.ask("a", num_samples=2, max_new_tokens=40, endless=True)
        cluster.until(lambda: len(requester.streamed.get(1, [])) >= 5)
        (first,) = [name for name, server in cluster.servers.items() if not server.backend.idle]
        cluster.kill(first)
        cluster.publish_book()
        before = {sample: list(tokens) for sample, tokens in requester.streamed.items()}
        cluster.until(lambda: requester.ended)
        assert requester.streamed == _tokens(requester)
        assert all(requester.streamed[sample][: len(tokens)] == tokens for sample, tokens in before.items())
        (other,) = cluster.servers.values()
        assert other.backend.num_sampled == 80 - sum(map(len, before.values()))
        assert isinstance(requester.generated, Generated) and requester.generated.server != first
    finally:
        cluster.close()
