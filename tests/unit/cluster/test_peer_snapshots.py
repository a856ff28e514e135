from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import xxhash

from kintsugi.cluster.peer_snapshots import PeerSnapshotStore
from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.messages import Body
from kintsugi.protocol.recovery import FetchState, KeepState, StateFetched
from kintsugi.protocol.weights import WeightsFetched
from kintsugi.protocol.wire import Envelope, MessageKind
from kintsugi.transport import Blob, Delivery
from kintsugi.types import Peer, Piece, PieceKind, WeightManifest

PARTS = (b"abcd", b"efghij")


def state(step: int, parts: tuple[bytes, ...] = PARTS) -> StateFetched:
    """Pieces whose places in the sender's buffer have gaps; the stream has none."""
    pieces = tuple(
        Piece(
            f"p{index}",
            "uint8",
            (len(part),),
            ((0, len(part)),),
            {},
            PieceKind.FULL,
            64 * index,
            len(part),
            xxhash.xxh3_64_hexdigest(part),
        )
        for index, part in enumerate(parts)
    )
    return StateFetched(WeightManifest(step, step, pieces, 128, "whole"), "grpo", step, 0)


def kept(keeper: PeerSnapshotStore, step: int) -> bytes:
    body, blobs = keeper.answer(FetchState(step, (1, 0), owner="model-0"))
    assert body == WeightsFetched(step)
    return b"".join(bytes(blob) for blob in blobs)


def test_what_is_kept_is_given_back_by_piece() -> None:
    keeper = PeerSnapshotStore(capacity=100)
    keeper.keep(KeepState("model-0", state(3)), [b"abcdef", b"ghij"])
    assert keeper.answer(FetchState(3, owner="model-0")) == (state(3), ())
    assert kept(keeper, 3) == b"efghijabcd"
    with pytest.raises(RefusedError, match="2 pieces, not one 2"):
        keeper.answer(FetchState(3, (2,), owner="model-0"))


@pytest.mark.parametrize("blobs", [[b"abcdefghiX"], [b"abc"], [b"abcdefghij", b"k"], []])
def test_a_state_that_was_damaged_on_the_way_leaves_what_is_there(blobs: list[bytes]) -> None:
    keeper = PeerSnapshotStore(capacity=100)
    keeper.keep(KeepState("model-0", state(3)), list(PARTS))
    with pytest.raises(IntegrityError, match="state of model-0"):
        keeper.keep(KeepState("model-0", state(4)), blobs)
    assert kept(keeper, 3) == b"efghijabcd"


def test_the_latest_two_steps_are_kept_whoever_sent_them_and_whoever_asks() -> None:
    keeper = PeerSnapshotStore(capacity=100)
    for owner, step in (("model-1", 3), ("model-1", 4), ("model-2", 5)):
        keeper.keep(KeepState(owner, state(step)), list(PARTS))
    for step in (4, 5):
        assert keeper.answer(FetchState(step, owner="model-0"))[0] == state(step)
    with pytest.raises(RefusedError, match="no state of step 3 is kept; there are: 4, 5"):
        keeper.answer(FetchState(3, owner="model-0"))


@pytest.mark.parametrize("parts", [(b"x" * 60, b"x" * 41), ()])
def test_a_state_of_no_sensible_size_is_refused_before_memory_is_taken(parts: tuple[bytes, ...]) -> None:
    with pytest.raises(RefusedError, match="expected 1 to 100 bytes"):
        PeerSnapshotStore(capacity=100).keep(KeepState("model-0", state(3, parts)), list(parts))


class Refusals:
    """Stands in for an endpoint that answers."""

    def __init__(self) -> None:
        self.replies: list[Body] = []
        self.errors: list[BaseException] = []

    def reply(self, delivery: Delivery, body: Body, *, blobs: Sequence[Blob] = ()) -> None:
        self.replies.append(body)

    def fail(self, delivery: Delivery, error: BaseException) -> None:
        self.errors.append(error)


@pytest.mark.parametrize(
    ("sender", "owner", "taken"),
    [("model-0", "model-0", True), ("model-1", "model-0", False), ("rollout-0", "rollout-0", False)],
)
def test_only_a_rank_gives_a_state_and_only_its_own(sender: str, owner: str, taken: bool) -> None:
    envelope = Envelope("job", 0, sender, "a", 1, MessageKind.REQUEST)
    peer = Peer(sender, "a", "host-0", "", b"")
    delivery = Delivery(envelope, KeepState(owner, state(3)), tuple(map(memoryview, PARTS)), peer, b"")
    endpoint: Any = Refusals()
    PeerSnapshotStore(capacity=100).handle(delivery, endpoint=endpoint)
    assert endpoint.replies == ([Ok()] if taken else [])
    assert [type(error) for error in endpoint.errors] == ([] if taken else [RefusedError])


def test_a_run_that_went_back_leaves_no_later_step_behind() -> None:
    keeper = PeerSnapshotStore(capacity=100)
    for step in (3, 4, 2):
        keeper.keep(KeepState("model-1", state(step)), list(PARTS))
    assert keeper.answer(FetchState(2, owner="model-1"))[0] == state(2)
    with pytest.raises(RefusedError, match="no state of step 4"):
        keeper.answer(FetchState(4, owner="model-1"))
