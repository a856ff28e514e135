"""States that an agent keeps for the ranks of another host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import xxhash

from kintsugi.bulk.exports import ViewExport, slices
from kintsugi.cluster.peer_snapshots import PeerSnapshotStore
from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.recovery import FetchState, KeepState, StateFetched
from kintsugi.types import Piece, PieceKind, WeightManifest
from tests.unit.bulk.loop import Loop
from tests.unit.bulk.peers import Processes, processes

PARTS = (b"abcd", b"efghij")


def manifest_of(step: int, parts: tuple[bytes, ...] = PARTS) -> WeightManifest:
    """Pieces whose places in the sender's buffer have gaps; the copy has none."""
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
    return WeightManifest(step, step, pieces, 128, "whole")


class Keeper:
    """A store, and ranks that offer states to it."""

    def __init__(self, made: Processes) -> None:
        self.made = made
        self.loop = Loop()
        loop: Any = self.loop
        self.store = PeerSnapshotStore(loop, made.add("agent-1"), loop, capacity=100)

    def offered(
        self, owner: str, step: int, parts: tuple[bytes, ...] = PARTS, sent: tuple[bytes, ...] | None = None
    ) -> StateFetched:
        """State that a rank announces; `sent` is what it sends instead."""
        rank = self.made.endpoints.get(owner) or self.made.add(owner)
        contents = parts if sent is None else sent
        sizes = {index: len(part) for index, part in enumerate(contents)}
        offer = rank.server.offer("state", ViewExport(sizes, lambda index: memoryview(contents[index])))
        return StateFetched(manifest_of(step, parts), "grpo", step, 0, offer=offer)

    def ask(self, sender: str, body: KeepState | FetchState) -> Any:
        delivery = self.loop.delivery(sender, body)
        self.store.handle(delivery)
        return self.loop.until_answered(delivery.envelope.sequence)

    def keep(self, owner: str, step: int, **given: Any) -> Any:
        return self.ask(owner, KeepState(owner, self.offered(owner, step, **given)))

    def kept(self, step: int, *, by: str = "model-9") -> bytes:
        """Fetch a state from the keeper, as a replacement does."""
        fetched = self.ask(by, FetchState(step, owner="model-0"))
        assert isinstance(fetched, StateFetched) and fetched.offer is not None
        assert fetched.offer.process == "agent-1"
        rank = self.made.endpoints.get(by) or self.made.add(by)
        content = b""
        for index, piece in enumerate(fetched.manifest.pieces):
            target = bytearray(piece.size)
            rank.client.fetch(fetched.offer, slices(index, piece.size), [memoryview(target)])
            content += target
        return content


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    with processes() as made:
        keeper = Keeper(made)
        yield keeper
        keeper.store.close()


def test_what_is_kept_is_given_back(keeper: Keeper) -> None:
    assert keeper.keep("model-0", 3) == Ok()
    keeper.made.kill("model-0")
    assert keeper.kept(3) == b"".join(PARTS)


@pytest.mark.parametrize("sent", [(b"abcd", b"efghiX"), (b"abc", b"efghij"), (b"abcd",)])
def test_a_state_that_arrives_damaged_leaves_what_is_there(keeper: Keeper, sent: tuple[bytes, ...]) -> None:
    keeper.keep("model-0", 3)
    with pytest.raises((IntegrityError, RefusedError)):
        keeper.keep("model-0", 4, sent=sent)
    assert keeper.store.steps == (3,)
    assert keeper.kept(3) == b"".join(PARTS)


def test_the_latest_two_steps_are_kept_from_any_rank_and_for_any(keeper: Keeper) -> None:
    for owner, step in (("model-1", 3), ("model-1", 4), ("model-2", 5)):
        keeper.keep(owner, step)
    assert keeper.kept(4) == keeper.kept(5) == b"".join(PARTS)
    with pytest.raises(RefusedError, match="no state of step 3 is kept; there are: 4, 5"):
        keeper.ask("model-0", FetchState(3))


def test_states_to_which_the_run_does_not_return_are_forgotten_of_every_box(keeper: Keeper) -> None:
    for box in ("0/2", "1/2"):
        for step in (3, 4):
            state = msgspec.structs.replace(keeper.offered("model-0", step), box=box)
            assert keeper.ask("model-0", KeepState("model-0", state)) == Ok()
    keeper.keep("model-0", 5)  # The state is not cut any more.
    assert sorted(keeper.store.steps) == [3, 4, 5]
    keeper.store.forget_before(4)
    assert sorted(keeper.store.steps) == [4, 5]
    keeper.store.forget_before(5)
    assert keeper.store.steps == (5,)
    assert keeper.kept(5) == b"".join(PARTS)


@pytest.mark.parametrize("parts", [(b"x" * 60, b"x" * 41), ()])
def test_a_state_of_no_sensible_size_is_refused_before_memory_is_taken(
    keeper: Keeper, parts: tuple[bytes, ...]
) -> None:
    with pytest.raises(RefusedError, match="expected 1 to 100 bytes"):
        keeper.keep("model-0", 3, parts=parts)
    assert not keeper.store._arriving


@pytest.mark.parametrize(
    ("sender", "owner", "is_kept"),
    [("model-0", "model-0", True), ("model-1", "model-0", False), ("rollout-0", "rollout-0", False)],
)
def test_a_rank_gives_only_its_own_state(keeper: Keeper, sender: str, owner: str, is_kept: bool) -> None:
    body = KeepState(owner, keeper.offered(owner, 3))
    if is_kept:
        assert keeper.ask(sender, body) == Ok()
    else:
        with pytest.raises(RefusedError, match="can not give the state"):
            keeper.ask(sender, body)


def test_a_state_that_another_process_offers_is_refused(keeper: Keeper) -> None:
    state = keeper.offered("model-1", 3)
    with pytest.raises(RefusedError, match="model-0 offered no state of step 3"):
        keeper.ask("model-0", KeepState("model-0", state))
    with pytest.raises(RefusedError, match="offered no state"):
        keeper.ask("model-0", KeepState("model-0", msgspec.structs.replace(state, offer=None)))


def test_a_run_that_went_back_leaves_no_later_step_behind(keeper: Keeper) -> None:
    for step in (3, 4, 2):
        keeper.keep("model-1", step)
    assert keeper.store.steps == (2,)
    with pytest.raises(RefusedError, match="no state of step 4"):
        keeper.ask("model-1", FetchState(4))
