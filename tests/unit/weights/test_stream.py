"""Weights through a meta-server: uploads and downloads overlap, and a slow rank is named and gone around."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from kintsugi.cluster.metaserver import MetaServer
from kintsugi.errors import DeadlineExceeded, IntegrityError, KintsugiError, RefusedError
from kintsugi.messages import Body, FetchWeights, Ok, Publish, Published, UploadWeights, WeightsFetched
from kintsugi.runtime import VirtualClock
from kintsugi.transport import Blob, Delivery, Reply
from kintsugi.types import Peer, StreamSource
from kintsugi.weights import stream as stream_module
from kintsugi.weights.choice import join
from kintsugi.weights.manifest import verify
from kintsugi.weights.publish import Publisher
from kintsugi.weights.stream import PATIENCE_S, Pull
from kintsugi.weights.upload import UploadOutlet
from kintsugi.wire import Envelope, MessageKind

META = "agent-0"


class FakeEndpoint:
    """Keeps answers by the number of the request."""

    def __init__(self) -> None:
        self.replies: dict[int, Reply] = {}
        self.errors: dict[int, BaseException] = {}

    def reply(self, delivery: Delivery, body: Body, *, blobs: Sequence[Blob] = ()) -> None:
        self.replies[delivery.envelope.sequence] = Reply(body, tuple(memoryview(blob) for blob in blobs))

    def fail(self, delivery: Delivery, error: BaseException) -> None:
        self.errors[delivery.envelope.sequence] = error


@dataclass
class Meta:
    """A meta-server and who speaks to it, on a clock that moves when somebody has to wait."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    endpoint: FakeEndpoint = field(default_factory=FakeEndpoint)
    num_sent: int = 0
    late: list[tuple[str, UploadWeights, Sequence[Blob]]] = field(default_factory=list)
    """Uploads that have not arrived yet."""

    def __post_init__(self) -> None:
        self.server = MetaServer(self.endpoint, capacity=1 << 20)  # type: ignore[arg-type]

    def send(self, sender: str, body: Body, blobs: Sequence[Blob] = ()) -> int:
        self.num_sent += 1
        envelope = Envelope("job", 0, sender, "a", self.num_sent, MessageKind.REQUEST)
        frames = tuple(memoryview(blob).cast("B") for blob in blobs)
        self.server.handle(Delivery(envelope, body, frames, Peer(sender, "a", "host", "", b""), b""))
        return self.num_sent

    def let_arrive(self) -> bool:
        if not self.late:
            return False
        sender, body, blobs = self.late.pop(0)
        self.send(sender, body, blobs)
        return True


@dataclass
class Waiting:
    """An answer of the meta-server; while it is awaited, uploads arrive, or time passes."""

    meta: Meta
    number: int
    deadline_s: float

    @property
    def done(self) -> bool:
        return self.number in self.meta.endpoint.replies or self.number in self.meta.endpoint.errors

    def result(self) -> Reply:
        while not self.done:
            if not self.meta.let_arrive():
                self.meta.clock.advance(self.deadline_s)
                raise DeadlineExceeded(whom=META, what="FetchWeights", waited_s=self.deadline_s)
        if self.number in self.meta.endpoint.errors:
            raise self.meta.endpoint.errors[self.number]
        return self.meta.endpoint.replies[self.number]


@dataclass
class Direct:
    """An answer of a rank itself."""

    publisher: Publisher
    request: FetchWeights
    done: bool = True

    def result(self) -> Reply:
        body, blobs = self.publisher.answer(self.request)
        return Reply(body, tuple(blobs))


class Setting:
    """Ranks that publish shares of a version to one meta-server, and a server that fetches."""

    def __init__(self, num_ranks: int) -> None:
        self.meta = Meta()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.weights = {f"layer.{index:02}": torch.randn(50 + index) for index in range(12)}
        self.publishers = {
            f"model-{index}": Publisher(process=f"model-{index}", host="host-0", segments=None)
            for index in range(num_ranks)
        }
        published = {}
        for index, (rank, publisher) in enumerate(self.publishers.items()):
            order = Publish(3, 3, transports=("stream",), share=(index, num_ranks), meta_server=META)
            manifest, _ = publisher.publish(self.weights, order)
            published[rank] = Published(manifest, (StreamSource(META, owners=(rank,)),))
        self.version = join(published)

    def upload(self, rank: str, *, now: bool) -> None:
        publisher = self.publishers[rank]
        laid_out = publisher._versions[3]
        for index in laid_out.pieces:
            data = laid_out.bytes_of(index)
            body = UploadWeights(3, laid_out.manifest.digest, {index: data.nbytes})
            if now:
                self.meta.send(rank, body, [data])
            else:
                self.meta.late.append((rank, body, [data]))

    def ask(self, process: str, request: FetchWeights, deadline_s: float) -> Waiting | Direct:
        self.asked.append(process)
        if process == META:
            return Waiting(self.meta, self.meta.send("server-0", request), deadline_s)
        return Direct(self.publishers[process], request)

    def pull(self) -> memoryview:
        into = memoryview(bytearray(self.version.manifest.size))
        (source,) = self.version.sources
        assert isinstance(source, StreamSource)
        Pull(
            self.version.manifest,
            source,
            into=into,
            ask=self.ask,
            say=self.said.append,
            clock=self.meta.clock,
        ).run()
        verify(self.version.manifest, into, source="test")
        return into


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "STREAM_BYTES", 500)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_what_all_ranks_uploaded_arrives_whole(num_ranks: int) -> None:
    setting = Setting(num_ranks)
    for rank in setting.publishers:
        setting.upload(rank, now=True)
    setting.pull()
    assert set(setting.asked) == {META} and not setting.said


def test_download_begins_before_the_first_piece_is_uploaded() -> None:
    setting = Setting(3)
    for rank in setting.publishers:
        setting.upload(rank, now=False)
    setting.pull()
    assert set(setting.asked) == {META} and not setting.meta.late


def test_a_rank_whose_upload_does_not_come_is_named_and_asked_itself() -> None:
    setting = Setting(3)
    for rank in ("model-0", "model-2"):
        setting.upload(rank, now=True)
    setting.pull()
    assert {"model-1"} == set(setting.asked) - {META}
    assert any("slow to come from model-1 through agent-0" in said for said in setting.said)
    assert not any("from model-0" in said or "from model-2" in said for said in setting.said)
    # What the others gave did not wait for it, and it was waited for once, not once per piece.
    assert setting.meta.clock.monotonic() <= 2 * PATIENCE_S


def test_a_piece_that_was_damaged_in_the_meta_server_is_fetched_from_its_rank() -> None:
    setting = Setting(2)
    setting.upload("model-0", now=True)
    laid_out = setting.publishers["model-1"]._versions[3]
    for index in laid_out.pieces:
        damaged = bytearray(laid_out.bytes_of(index))
        damaged[0] ^= 1
        setting.meta.send(
            "model-1", UploadWeights(3, laid_out.manifest.digest, {index: len(damaged)}), [bytes(damaged)]
        )
    setting.pull()
    assert any("expected xxh3" in said for said in setting.said)


def test_a_version_that_was_withdrawn_is_refused_to_who_waits_for_it() -> None:
    meta = Meta()
    waiting = meta.send("server-0", FetchWeights(3, (0,)))
    assert waiting not in meta.endpoint.replies
    meta.send("model-0", UploadWeights(5, "d", {0: 2}), [b"ab"])
    error = meta.endpoint.errors[waiting]
    assert isinstance(error, RefusedError) and "version 3 is not here; there are [5]" in str(error)


def test_a_version_that_a_rank_begins_anew_replaces_what_it_had_uploaded_of_it() -> None:
    meta = Meta()
    meta.send("model-0", UploadWeights(3, "old", {0: 2, 1: 1}), [b"ab", b"c"])
    meta.send("model-0", UploadWeights(3, "new", {0: 2}), [b"xy"])
    got = meta.endpoint.replies[meta.send("server-0", FetchWeights(3, (0, 1)))]
    assert got.expect(WeightsFetched).pieces == (0,)
    assert b"".join(bytes(blob) for blob in got.blobs) == b"xy"


@pytest.mark.parametrize(
    ("body", "blobs", "error"),
    [
        (UploadWeights(3, "d", {0: 3}), [b"ab"], IntegrityError),
        (UploadWeights(3, "d", {0: 2}), [b"ab", b"c"], IntegrityError),
        (UploadWeights(3, "d", {0: 2 << 20}), [b""], RefusedError),
        (FetchWeights(3), [], RefusedError),
    ],
)
def test_what_does_not_fit_is_refused(body: Body, blobs: list[bytes], error: type[KintsugiError]) -> None:
    meta = Meta()
    assert isinstance(meta.endpoint.errors[meta.send("model-0", body, blobs)], error)
    assert meta.server.size == 0


def test_a_rank_uploads_its_share_in_the_background_and_says_that_its_link_is_slow() -> None:
    setting = Setting(2)
    said: list[str] = []

    class Slow:
        done = True

        def result(self) -> Reply:
            setting.meta.clock.advance(2.0)
            return Reply(Ok())

    def submit(process: str, body: Body, blobs: Sequence[Blob], deadline_s: float) -> Slow:
        setting.meta.send("model-1", body, blobs)
        return Slow()

    outlet = UploadOutlet(submit, process="model-1", say=said.append, clock=setting.meta.clock)
    laid_out = setting.publishers["model-1"]._versions[3]
    order = Publish(3, 3, transports=("stream",), share=(1, 2), meta_server=META)
    assert outlet.offer(laid_out, order) == (StreamSource(META, owners=("model-1",)),)
    for thread in outlet._threads:
        thread.join(10)
    assert said[0].startswith("the link from model-1 to agent-0 is slow: uploading version 3")
    assert len(said) == 1
    setting.upload("model-0", now=True)
    setting.pull()
