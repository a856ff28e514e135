"""Weights through a meta-server: uploads and downloads overlap, and a slow rank is named and gone around."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from kintsugi.cluster.weight_relay import WeightRelay
from kintsugi.errors import DeadlineExceeded, IntegrityError, KintsugiError, RefusedError
from kintsugi.process.membership import ShuttingDown
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.messages import Body
from kintsugi.protocol.weights import FetchWeights, Publish, Published, UploadWeights, WeightsFetched
from kintsugi.protocol.wire import Envelope, MessageKind
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.events import Alert, BytesDamaged, Note, SlowLink
from kintsugi.transport import Blob, Delivery, Reply
from kintsugi.types import Peer, StreamSource
from kintsugi.weights.manifest import verify
from kintsugi.weights.publish import Publisher
from kintsugi.weights.selection import join
from kintsugi.weights.transports import stream as stream_module
from kintsugi.weights.transports.relay import RelayTransport
from kintsugi.weights.transports.stream import IN_FLIGHT, PATIENCE_S, SLOW_S, Pull, StreamAnswered

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
        self.server = WeightRelay(self.endpoint, capacity=1 << 20)  # type: ignore[arg-type]

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
    """An answer of the meta-server; with every look at it an upload arrives, or time passes."""

    meta: Meta
    number: int
    deadline_s: float

    def __post_init__(self) -> None:
        self.until = self.meta.clock.monotonic() + self.deadline_s

    @property
    def done(self) -> bool:
        if not self._is_answered and not self.meta.let_arrive():
            self.meta.clock.advance(0.01)
        return self._is_answered or self.meta.clock.monotonic() >= self.until

    @property
    def _is_answered(self) -> bool:
        return self.number in self.meta.endpoint.replies or self.number in self.meta.endpoint.errors

    def result(self) -> Reply:
        if not self._is_answered:
            raise DeadlineExceeded(whom=META, what="FetchWeights", waited_s=self.deadline_s)
        if self.number in self.meta.endpoint.errors:
            raise self.meta.endpoint.errors[self.number]
        return self.meta.endpoint.replies[self.number]


@dataclass
class Direct:
    """An answer of a rank itself."""

    publisher: Publisher
    request: FetchWeights
    answered: list[FetchWeights]
    done: bool = True

    def result(self) -> Reply:
        self.answered.append(self.request)
        body, blobs = self.publisher.answer(self.request)
        return Reply(body, tuple(blobs))


class Timed(list[Alert | Note]):
    """What was said, and when."""

    def __init__(self, clock: VirtualClock, came: list[tuple[float, Alert | Note]]) -> None:
        self._clock, self._came = clock, came

    def append(self, said: Alert | Note) -> None:
        super().append(said)
        self._came.append((self._clock.monotonic(), said))


class Setting:
    """Ranks that publish shares of a version to one meta-server, and a server that fetches."""

    def __init__(self, num_ranks: int) -> None:
        self.meta = Meta()
        self.said: list[Alert | Note] = []
        self.asked: list[str] = []
        self.asked_at: list[tuple[float, str]] = []
        self.answered: list[FetchWeights] = []
        """By ranks themselves."""
        self.most_under_way = 0
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
        version_layout = publisher._versions[3]
        for index in version_layout.pieces:
            data = version_layout.bytes_of(index)
            body = UploadWeights(3, version_layout.manifest.digest, {index: data.nbytes})
            if now:
                self.meta.send(rank, body, [data])
            else:
                self.meta.late.append((rank, body, [data]))

    def ask(self, process: str, request: FetchWeights, deadline_s: float) -> Waiting | Direct:
        self.asked.append(process)
        self.asked_at.append((self.meta.clock.monotonic(), process))
        if process == META:
            return Waiting(self.meta, self.meta.send("server-0", request), deadline_s)
        under_way = len(self.asked) - self.asked.count(META) - len(self.answered)
        self.most_under_way = max(self.most_under_way, under_way)
        return Direct(self.publishers[process], request, self.answered)

    def pull(self) -> memoryview:
        into = memoryview(bytearray(self.version.manifest.size))
        (source,) = self.version.sources
        assert isinstance(source, StreamSource)
        Pull(
            self.version.manifest,
            source,
            into=lambda piece: into[piece.offset : piece.offset + piece.size],
            send_request=self.ask,
            emit=self.said.append,
            clock=self.meta.clock,
        ).run()
        verify(self.version.manifest, into, source="test")
        return into


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "STREAM_BYTES", 500)
    monkeypatch.setattr(stream_module, "POLL_S", 0.0)


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
    assert any("slow to come from model-1 through agent-0" in said.message for said in setting.said)
    assert not any("from model-0" in said.message or "from model-2" in said.message for said in setting.said)
    # What the others gave did not wait for it, and it was waited for once, not once per piece.
    assert setting.meta.clock.monotonic() <= 2 * PATIENCE_S


def test_a_piece_that_was_damaged_in_the_meta_server_is_fetched_from_its_rank() -> None:
    setting = Setting(2)
    setting.upload("model-0", now=True)
    version_layout = setting.publishers["model-1"]._versions[3]
    for index in version_layout.pieces:
        damaged = bytearray(version_layout.bytes_of(index))
        damaged[0] ^= 1
        setting.meta.send(
            "model-1",
            UploadWeights(3, version_layout.manifest.digest, {index: len(damaged)}),
            [bytes(damaged)],
        )
    setting.pull()
    assert any("expected xxh3" in said.message for said in setting.said)
    assert {said.origin for said in setting.said if isinstance(said, BytesDamaged)} == {META}


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
        (UploadWeights(3, "d", {0: 2 << 20}), [b""], IntegrityError),
        (UploadWeights(3, "d", {0: 2 << 20}), [bytes(2 << 20)], RefusedError),
        (FetchWeights(3), [], RefusedError),
    ],
)
def test_what_does_not_fit_is_refused(body: Body, blobs: list[bytes], error: type[KintsugiError]) -> None:
    meta = Meta()
    assert isinstance(meta.endpoint.errors[meta.send("model-0", body, blobs)], error)
    assert meta.server.size == 0


def test_only_ranks_upload() -> None:
    meta = Meta()
    error = meta.endpoint.errors[meta.send("rollout-0", UploadWeights(3, "d", {0: 2}), [b"ab"])]
    assert isinstance(error, RefusedError) and "from rollout-0" in str(error)
    assert meta.server.size == 0


def test_a_version_fits_into_the_room_that_those_leave_which_nobody_wants_any_more() -> None:
    meta = Meta()
    # The last comes twice, as a rank that was replaced uploads again, and takes no further room.
    for version in (0, 1, 2, 3, 3):
        sent = meta.send("model-0", UploadWeights(version, "d", {0: 1 << 19}), [bytes(1 << 19)])
        assert sent in meta.endpoint.replies
    assert meta.server.size == 1 << 20


def test_a_late_piece_of_an_earlier_version_takes_nothing_from_the_others() -> None:
    meta = Meta()
    meta.send("model-0", UploadWeights(4, "d", {0: 2}), [b"ab"])
    late = meta.send("model-1", UploadWeights(3, "d", {1: 1}), [b"c"])
    assert late in meta.endpoint.replies
    assert meta.send("server-0", FetchWeights(4, (0,))) in meta.endpoint.replies
    too_late = meta.send("model-2", UploadWeights(2, "d", {1: 1}), [b"c"])
    assert "version 2 comes too late: version 4 is here" in str(meta.endpoint.errors[too_late])


def test_a_rank_that_goes_back_takes_along_what_came_later() -> None:
    meta = Meta()
    for version in (3, 4):
        meta.send("model-0", UploadWeights(version, "old", {0: 2}), [b"ab"])
    meta.send("model-0", UploadWeights(3, "new", {0: 2}), [b"xy"])
    assert meta.send("server-0", FetchWeights(4, (0,))) not in meta.endpoint.replies
    assert meta.server.size == 2


def test_who_is_slow_is_named_before_it_answers_and_holds_up_nobody_else() -> None:
    setting = Setting(3)
    for rank in ("model-0", "model-2"):
        setting.upload(rank, now=True)
    came: list[tuple[float, Alert | Note]] = []
    setting.said = Timed(setting.meta.clock, came)
    setting.pull()
    named_at, said = came[0]
    assert named_at < PATIENCE_S and "slow to come from model-1" in said.message
    last_of_others = max(at for at, process in setting.asked_at if process == META)
    assert last_of_others < SLOW_S


def test_who_is_gone_around_is_asked_for_little_at_a_time_and_said_so_once() -> None:
    setting = Setting(1)
    setting.pull()
    assert sum("it is asked itself now" in said.message for said in setting.said) == 1
    assert setting.asked.count(META) == IN_FLIGHT
    assert setting.most_under_way <= IN_FLIGHT


@pytest.mark.filterwarnings("error")
def test_an_upload_ends_quietly_with_its_process() -> None:
    setting = Setting(1)
    said: list[Alert | Note] = []

    def submit(process: str, body: Body, blobs: Sequence[Blob], deadline_s: float) -> StreamAnswered:
        raise ShuttingDown("the run is over")

    transport = RelayTransport(submit, process="model-0", emit=said.append)
    transport.publish(
        setting.publishers["model-0"]._versions[3],
        Publish(3, 3, transports=("stream",), meta_server=META),
    )
    for thread in transport._threads:
        thread.join(10)
    assert not said


def test_a_rank_uploads_its_share_in_the_background_and_says_that_its_link_is_slow() -> None:
    setting = Setting(2)
    said: list[Alert | Note] = []

    class Slow:
        done = True

        def result(self) -> Reply:
            setting.meta.clock.advance(2.0)
            return Reply(Ok())

    def submit(process: str, body: Body, blobs: Sequence[Blob], deadline_s: float) -> Slow:
        setting.meta.send("model-1", body, blobs)
        return Slow()

    transport = RelayTransport(submit, process="model-1", emit=said.append, clock=setting.meta.clock)
    version_layout = setting.publishers["model-1"]._versions[3]
    order = Publish(3, 3, transports=("stream",), share=(1, 2), meta_server=META)
    assert transport.publish(version_layout, order) == (StreamSource(META, owners=("model-1",)),)
    for thread in transport._threads:
        thread.join(10)
    assert isinstance(said[0], SlowLink) and (said[0].of, said[0].peer) == ("model-1", "agent-0")
    assert said[0].message.startswith("the link from model-1 to agent-0 is slow: uploading version 3")
    assert len(said) == 1
    setting.upload("model-0", now=True)
    setting.pull()
