"""Weights between hosts: fetched once per host, from host to host while they arrive, around what is slow or gone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch

from kintsugi.bulk import pull
from kintsugi.cluster.weight_holder import WeightHolder
from kintsugi.errors import RefusedError, WorldError
from kintsugi.protocol.bulk import BulkOffer
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.messages import Body
from kintsugi.protocol.weights import FetchWeights, HoldWeights, Publish, Published, UploadWeights
from kintsugi.runtime.counters import COUNTERS
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.events import AlertEvent, BytesDamaged, NoteEvent, SlowLink
from kintsugi.transport import Reply
from kintsugi.types import Role, StreamSource, role_of
from kintsugi.weights.delta_choice import DeltaChoice
from kintsugi.weights.fetch import Fetched, Fetcher
from kintsugi.weights.publish import Publisher
from kintsugi.weights.selection import join
from kintsugi.weights.transports import relay
from kintsugi.weights.transports.relay import RelayTransport
from kintsugi.weights.transports.shared_memory import reopened
from kintsugi.weights.transports.stream import StreamFetch
from tests.unit.bulk.loop import LONGEST_S, Loop
from tests.unit.bulk.peers import Processes, processes
from tests.unit.weights.test_publish_and_fetch import MemorySegments

META = "agent-0"


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{index:02}": torch.randn(500 + index, generator=generator) for index in range(12)}


SIZE = sum(tensor.nbytes for tensor in weights().values())


class Uploaded:
    """Answer to an upload, as a `process.shell.Future`."""

    def __init__(self, call: Callable[[], Reply]) -> None:
        self._call = call
        self.done = True

    def result(self) -> Reply:
        return self._call()


class Hosts:
    """Agents, each with its host's memory, and the processes on their hosts. The test's thread is the agents' loop."""

    def __init__(self, made: Processes, num_hosts: int, *, choice: type[DeltaChoice] = DeltaChoice) -> None:
        self.made = made
        self.said: list[AlertEvent | NoteEvent] = []
        self.asked: list[tuple[str, str, str]] = []
        """(process that asked, process asked, message)"""
        self.loops: dict[str, Loop] = {}
        self.segments: dict[str, MemorySegments] = {}
        self.holders: dict[str, WeightHolder] = {}
        self.ranks: dict[str, Publisher] = {}
        self.transports: list[RelayTransport] = []
        self.is_over = False
        self.silent: set[str] = set()
        """Processes that do not answer."""
        for index in range(num_hosts):
            name = f"agent-{index}"
            self.segments[name] = MemorySegments()
            self._add_holder(name, choice=choice)

    def _add_holder(self, name: str, *, choice: type[DeltaChoice] = DeltaChoice) -> None:
        loop = self.loops[name] = Loop()
        calls: Any = _Calls(loop, self._caller(name))
        self.holders[name] = WeightHolder(
            calls,
            self.made.add(name),
            calls,
            process=name,
            segments=self.segments[name],
            emit=self.said.append,
            choice=choice(),
        )

    def call(self, sender: str, process: str, body: Body) -> Reply:
        """Send a request and wait for its answer, in a background thread."""
        self.asked.append((sender, process, type(body).__name__))
        if process not in self.made.book or process in self.silent:
            raise WorldError(f"{process} does not answer")
        if role_of(process) is Role.MODEL:
            assert isinstance(body, FetchWeights)
            return Reply(self.ranks[process].answer(body))
        loop = self.loops[process]
        delivery = loop.delivery(sender, body)
        loop.run(lambda: self.holders[process].handle(delivery))
        number, deadline = delivery.envelope.sequence, time.monotonic() + LONGEST_S
        while number not in loop.replies and number not in loop.errors:
            if self.is_over or time.monotonic() > deadline:
                raise WorldError(f"{process} did not answer")
            time.sleep(0.001)
        if number in loop.errors:
            raise loop.errors[number]
        return Reply(loop.replies[number])

    def _caller(self, sender: str) -> Callable[[str, Body, float], Reply]:
        return lambda process, body, s: self.call(sender, process, body)

    def rank(self, process: str, *, agent: str = META, shared: bool = True) -> Publisher:
        transport = RelayTransport(
            lambda meta, body, s: Uploaded(lambda: self.call(process, meta, body)),
            process=process,
            agent=agent,
            emit=self.said.append,
        )
        self.transports.append(transport)
        self.ranks[process] = Publisher(
            process=process,
            host=agent.replace("agent", "host"),
            segments=self.segments[agent] if shared else None,
            bulk=self.made.add(process).server,
            transports=(transport,),
        )
        return self.ranks[process]

    def fetch(self, published: Published, *servers: tuple[str, str]) -> dict[str, Fetched]:
        """Let these servers, each on the host of an agent, fetch a version at the same time."""
        found: dict[str, Fetched] = {}
        failed: list[BaseException] = []

        def work(server: str, agent: str) -> None:
            stream = StreamFetch(
                server,
                lambda process, body, s: self.call(server, process, body),
                self.made.endpoints[server].client,
                agent=agent,
                emit=self.said.append,
            )
            fetcher = Fetcher(process=server, host=agent.replace("agent", "host"), stream=stream)
            sources = [source for source in published.sources if isinstance(source, StreamSource)]
            try:
                found[server] = fetcher.fetch(published.manifest, sources[:1], segments=self.segments[agent])
            except WorldError as error:
                failed.append(error)

        for server, _ in servers:
            self.made.add(server)
        threads = [threading.Thread(target=work, args=each) for each in servers]
        for thread in threads:
            thread.start()
        self.pump(lambda: not any(thread.is_alive() for thread in threads))
        if failed:
            raise failed[0]
        return found

    def pump(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONGEST_S
        while not until():
            assert time.monotonic() < deadline
            for loop in list(self.loops.values()):
                loop.turn(0.002)

    def kill_agent(self, name: str) -> None:
        self.silent.add(name)
        self.made.endpoints[name].close()

    def replace_agent(self, name: str) -> None:
        """Kill an agent; its successor begins with empty memory."""
        self.kill_agent(name)
        self.holders[name].close()
        for segment in tuple(self.segments[name].descriptors):
            self.segments[name].remove(segment)
        self._add_holder(name)
        self.holders[name].succeed()
        self.silent.discard(name)

    def close(self) -> None:
        self.is_over = True
        for thread in [thread for each in self.transports for thread in each._threads]:
            thread.join(LONGEST_S)
        for holder in self.holders.values():
            holder.close()
        for publisher in self.ranks.values():
            publisher.close()
        for segments in self.segments.values():
            for name in tuple(segments.descriptors):
                segments.remove(name)


class _Calls:
    """A loop whose calls go to other processes of the test."""

    def __init__(self, loop: Loop, call: Callable[[str, Body, float], Reply]) -> None:
        self.call = call
        self.run, self.reply, self.fail = loop.run, loop.reply, loop.fail


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with processes() as made:
        opened = Hosts(made, 4)
        yield opened
        opened.close()


def published_whole(
    hosts: Hosts, *, chain: tuple[str, ...] = (), seed: int = 0, version: int = 3
) -> Published:
    rank = hosts.ranks.get("model-0") or hosts.rank("model-0")
    order = Publish(version, version, transports=("stream",), meta_server=META, chain=chain)
    return Published(*rank.publish(weights(seed), order))


def published_shares(hosts: Hosts, *agents: str, chain: tuple[str, ...] = ()) -> Published:
    """A version of which each rank, on the host of one of these agents, publishes a share."""
    found = {}
    for index, agent in enumerate(agents):
        rank = hosts.rank(f"model-{index}", agent=agent)
        order = Publish(
            3, 3, transports=("stream",), share=(index, len(agents)), meta_server=META, chain=chain
        )
        found[f"model-{index}"] = Published(*rank.publish(weights(), order))
    return join(found)


def assert_same(fetched: Fetched, expected: dict[str, torch.Tensor]) -> None:
    tensors = fetched.tensors()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    fetched.release()


def bytes_fetched() -> int:
    return COUNTERS.snapshot().counters.get("bulk.bytes_fetched", 0)


def test_a_host_fetches_a_version_once_and_its_servers_read_its_memory(hosts: Hosts) -> None:
    before = bytes_fetched()
    published = published_whole(hosts, chain=("agent-1",))
    found = hosts.fetch(published, ("server-0", "agent-1"), ("server-1", "agent-1"), ("server-2", META))
    for fetched in found.values():
        assert fetched.failures == ()
        assert_same(fetched, weights())
    assert bytes_fetched() - before == SIZE, "one copy went from host to host, none within a host"
    assert not hosts.said


def test_hosts_fetch_one_from_the_other(hosts: Hosts) -> None:
    before = bytes_fetched()
    published = published_whole(hosts, chain=("agent-1", "agent-2", "agent-3"))
    found = hosts.fetch(published, *((f"server-{index}", f"agent-{index}") for index in (3, 2, 1)))
    for fetched in found.values():
        assert_same(fetched, weights())
    assert bytes_fetched() - before == 3 * SIZE
    held = {(sender, process) for sender, process, body in hosts.asked if body == "HoldWeights"}
    between = {(sender, process) for sender, process in held if sender.startswith("agent")}
    assert between == {("agent-1", META), ("agent-2", "agent-1"), ("agent-3", "agent-2")}


def test_shares_of_several_ranks_are_one_version_at_the_meta_server_and_beyond(hosts: Hosts) -> None:
    published = published_shares(hosts, META, "agent-1", "agent-2", chain=("agent-1",))
    found = hosts.fetch(published, ("server-0", META), ("server-1", "agent-1"))
    for fetched in found.values():
        assert fetched.failures == ()
        assert_same(fetched, weights())
    assert not hosts.said


def test_one_version_after_the_other_uses_the_same_memory(hosts: Hosts) -> None:
    for version in range(3, 9):
        published = published_whole(hosts, chain=("agent-1",), seed=version, version=version)
        found = hosts.fetch(published, ("server-1", "agent-1"))
        assert_same(found["server-1"], weights(version))
    assert hosts.holders["agent-1"].versions == (7, 8)
    assert hosts.segments["agent-1"].num_created == 2


def test_a_host_that_asks_before_the_rank_has_announced_its_version_keeps_its_offer(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, late = hosts.holders[META]._take_upload, []
    monkeypatch.setattr(hosts.holders[META], "_take_upload", lambda *given: late.append(given))
    published = published_whole(hosts, chain=("agent-1",))
    hosts.pump(lambda: bool(late))
    real = hosts.holders[META]._hold

    def hold(*given: Any) -> None:
        real(*given)
        take(*late.pop())

    monkeypatch.setattr(hosts.holders[META], "_hold", hold)
    found = hosts.fetch(published, ("server-1", "agent-1"))
    assert_same(found["server-1"], weights())
    assert not hosts.said and not late


def test_an_agent_of_the_chain_that_does_not_answer_is_gone_around(hosts: Hosts) -> None:
    published = published_whole(hosts, chain=("agent-1", "agent-2"))
    hosts.kill_agent("agent-1")
    found = hosts.fetch(published, ("server-2", "agent-2"))
    assert_same(found["server-2"], weights())
    assert any(
        "through agent-1" in said.message and "agent-0 is asked now" in said.message for said in hosts.said
    )


def test_an_agent_that_ends_in_the_middle_is_gone_around_with_the_same_bits(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "REQUEST_BYTES", 2500)
    published = published_whole(hosts, chain=("agent-1", "agent-2"))
    holder = hosts.holders["agent-1"]
    real, num_given = holder._bulk.server._region, 0

    def ends(*given: Any) -> Any:
        nonlocal num_given
        num_given += 1
        if num_given == 4:
            hosts.silent.add("agent-1")
            del hosts.made.book["agent-1"]
            raise RefusedError("killed")
        if num_given > 4:
            raise RefusedError("killed")
        return real(*given)

    monkeypatch.setattr(holder._bulk.server, "_region", ends)
    found = hosts.fetch(published, ("server-2", "agent-2"))
    assert num_given >= 4
    assert_same(found["server-2"], weights())


def test_a_server_whose_agent_is_gone_fetches_for_itself(hosts: Hosts) -> None:
    published = published_whole(hosts)
    hosts.kill_agent("agent-1")
    fetched = hosts.fetch(published, ("server-1", "agent-1"))["server-1"]
    assert_same(fetched, weights())
    assert len(fetched.failures) == 1 and "agent-1 does not answer" in str(fetched.failures[0])


def test_a_rank_whose_upload_does_not_come_is_named_and_asked_itself(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not less: on a busy machine the other ranks would be slow too.
    monkeypatch.setattr(pull, "PATIENCE_S", 1.0)
    monkeypatch.setattr(pull, "SLOW_S", 0.8)
    take, late = hosts.holders[META]._take_upload, []

    def without_model_1(delivery: Any, upload: UploadWeights) -> None:
        late.append(delivery) if delivery.envelope.sender == "model-1" else take(delivery, upload)

    monkeypatch.setattr(hosts.holders[META], "_take_upload", without_model_1)
    published = published_shares(hosts, META, "agent-1", "agent-2", chain=("agent-1",))
    found = hosts.fetch(published, ("server-1", "agent-1"))
    assert late and role_of(late[0].envelope.sender) is Role.MODEL
    assert_same(found["server-1"], weights())
    messages = [said.message for said in hosts.said]
    assert any("slow to come from model-1 through agent-0" in message for message in messages)
    assert any("model-1 is asked now" in message for message in messages)
    assert not any("from model-0" in message or "from model-2" in message for message in messages)
    for delivery in late:  # The rank waits for the answers of its uploads.
        hosts.loops[META].reply(delivery, Ok())


def test_the_successor_of_a_killed_meta_server_fetches_what_was_uploaded_before_it(hosts: Hosts) -> None:
    published = published_shares(hosts, META, "agent-1", chain=("agent-1",))
    hosts.fetch(published, ("server-0", META))["server-0"].release()
    hosts.replace_agent(META)
    found = hosts.fetch(published, ("server-1", META), ("server-2", "agent-1"))
    for fetched in found.values():
        assert fetched.failures == (), "the agents have it, no server goes to the ranks"
        assert_same(fetched, weights())


def test_a_meta_server_killed_during_an_upload_is_followed_by_one_that_fetches_the_rest(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "UPLOAD_BYTES", 2000)
    handled: list[Any] = []
    real = hosts.holders[META].handle

    def takes_one(delivery: Any) -> None:
        handled.append(delivery)
        if len(handled) == 1:
            real(delivery)

    monkeypatch.setattr(hosts.holders[META], "handle", takes_one)
    published = published_shares(hosts, META, "agent-1")
    hosts.pump(lambda: len(handled) > 2)
    hosts.replace_agent(META)
    fetched = hosts.fetch(published, ("server-0", META))["server-0"]
    assert fetched.failures == ()
    assert_same(fetched, weights())


def test_what_is_announced_to_a_successor_while_it_fetches_it_is_fetched_once(hosts: Hosts) -> None:
    published = published_shares(hosts, META, "agent-1")
    hosts.fetch(published, ("server-0", META))["server-0"].release()
    hosts.replace_agent(META)
    before = bytes_fetched()
    holder, loop, source = hosts.holders[META], hosts.loops[META], published.sources[0]
    assert isinstance(source, StreamSource)
    delivery = loop.delivery("server-0", HoldWeights(published.manifest, source, is_awaited=True))
    holder.handle(delivery)
    pieces = dict(hosts.ranks["model-1"]._versions[3].pieces)
    offer = hosts.ranks["model-1"]._versions[3].offer
    assert upload(hosts, "model-1", UploadWeights(3, published.manifest.size, pieces, offer)) == Ok()
    loop.until_answered(delivery.envelope.sequence)
    assert bytes_fetched() - before == SIZE


def test_a_piece_that_was_damaged_at_the_meta_server_is_fetched_from_its_rank(hosts: Hosts) -> None:
    published = published_shares(hosts, META, "agent-1", chain=("agent-1",))
    hosts.pump(lambda: len(hosts.holders[META].versions) == 1)
    hosts.fetch(published, ("server-0", META))["server-0"].release()
    piece = published.manifest.pieces[-1]
    hosts.segments[META].flip("weights/agent-0/1", piece.offset)
    found = hosts.fetch(published, ("server-1", "agent-1"))
    assert_same(found["server-1"], weights())
    assert {said.origin for said in hosts.said if isinstance(said, BytesDamaged)} == {META}


def test_a_version_that_is_published_again_after_a_rollback_replaces_the_undone_one(hosts: Hosts) -> None:
    first = published_shares(hosts, META, "agent-1")
    assert_same(hosts.fetch(first, ("server-0", META))["server-0"], weights())
    found = {}
    for index, rank in enumerate(("model-0", "model-1")):
        order = Publish(3, 3, transports=("stream",), share=(index, 2), meta_server=META)
        found[rank] = Published(*hosts.ranks[rank].publish(weights(7), order))
    again = join(found)
    assert_same(hosts.fetch(again, ("server-0", META))["server-0"], weights(7))


def test_after_a_rollback_of_several_steps_the_versions_of_the_repeated_steps_are_held(hosts: Hosts) -> None:
    for version, seed in ((8, 8), (9, 9), (5, 5), (6, 6)):
        published = published_whole(hosts, version=version, seed=seed)
        assert_same(hosts.fetch(published, ("server-0", META))["server-0"], weights(seed))
    assert not [alert for alert in hosts.said if "too late" in str(alert)]


def upload(hosts: Hosts, sender: str, body: UploadWeights) -> Body:
    loop = hosts.loops[META]
    delivery = loop.delivery(sender, body)
    hosts.holders[META].handle(delivery)
    answer: Body = loop.until_answered(delivery.envelope.sequence)
    return answer


def test_what_does_not_fit_is_refused_before_memory_is_taken(hosts: Hosts) -> None:
    published = published_whole(hosts)
    piece = published.manifest.pieces[0]
    offer = BulkOffer("model-1", "weights-9")
    other = BulkOffer("model-2", "weights-9")
    cases: Sequence[tuple[str, UploadWeights, str]] = [
        ("server-0", UploadWeights(9, 9999, {0: piece}, offer), "expected weights of a rank"),
        ("model-1", UploadWeights(9, 1, {0: piece}, offer), "do not fit into 1"),
        (
            "model-1",
            UploadWeights(9, 9999, {0: msgspec.structs.replace(piece, offset=-4)}, offer),
            "do not fit",
        ),
        ("model-1", UploadWeights(9, 9999, {0: piece}), "offered no pieces"),
        ("model-1", UploadWeights(9, 9999, {0: piece}, other), "offered no pieces"),
        ("model-1", UploadWeights(9, 9999, {0: piece}, segment="weights/model-0/1"), "is not of model-1"),
        ("model-1", UploadWeights(9, 9999, {0: piece}, segment="weights/model-1/1"), "no segment"),
    ]
    for sender, body, message in cases:
        with pytest.raises(RefusedError, match=message):
            upload(hosts, sender, body)
    assert 9 not in hosts.holders[META].versions


def test_a_version_that_is_too_old_is_refused(hosts: Hosts) -> None:
    for version in (4, 5):
        published = published_whole(hosts, version=version)
        hosts.fetch(published, ("server-0", META))["server-0"].release()
    old = msgspec.structs.replace(published.manifest, version=3)
    loop = hosts.loops[META]
    delivery = loop.delivery("agent-1", HoldWeights(old, StreamSource(META, ("model-0",))))
    hosts.holders[META].handle(delivery)
    with pytest.raises(RefusedError, match="version 3 comes too late: version 5 is here"):
        loop.until_answered(delivery.envelope.sequence)


def test_memory_into_which_a_fetch_may_still_write_is_not_used_for_another_version(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "PATIENCE_S", 0.1)
    published = published_whole(hosts, chain=("agent-1",))
    loop, holder = hosts.loops["agent-1"], hosts.holders["agent-1"]
    source = published.sources[0]
    assert isinstance(source, StreamSource)
    holder.handle(loop.delivery("agent-2", HoldWeights(published.manifest, source)))
    descriptor = hosts.segments["agent-1"].open("weights/agent-1/1")
    before = reopened(descriptor)
    later = msgspec.structs.replace(published.manifest, version=5)
    holder.handle(loop.delivery("agent-2", HoldWeights(later, source)))
    after = hosts.segments["agent-1"].open("weights/agent-1/1")

    assert os.fstat(before).st_ino != os.fstat(after).st_ino
    for each in (descriptor, before, after):
        os.close(each)
    hosts.pump(lambda: not holder._versions or all(not each.num_pulls for each in holder._versions.values()))


def test_a_rank_says_that_its_link_is_slow() -> None:
    with processes() as made:
        hosts, clock, said = Hosts(made, 1), VirtualClock(), list[AlertEvent | NoteEvent]()
        publisher = hosts.rank("model-1", agent="agent-0")
        sent: list[Body] = []

        class Slow:
            done = True

            def result(self) -> Reply:
                clock.advance(2.0)
                return Reply(Ok())

        def submit(process: str, body: Body, deadline_s: float) -> Slow:
            sent.append(body)
            return Slow()

        transport = RelayTransport(submit, process="model-1", agent="agent-9", emit=said.append, clock=clock)
        order = Publish(3, 3, transports=(), share=(1, 2), meta_server=META, chain=("agent-1",))
        publisher.publish(weights(), order)
        source = StreamSource(META, owners=("model-1",), chain=("agent-1",))
        assert transport.publish(publisher._versions[3], order) == (source,)
        for thread in transport._threads:
            thread.join(10)
        assert [type(body) for body in sent] == [UploadWeights]
        (slow,) = said
        assert isinstance(slow, SlowLink) and (slow.of, slow.peer) == ("model-1", META)
        hosts.close()
