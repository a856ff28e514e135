from __future__ import annotations

import pytest
import xxhash

from kintsugi.cluster.keeper import Keeper
from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.messages import FetchState, KeepState, StateFetched, WeightsFetched
from kintsugi.types import Piece, PieceKind, WeightManifest

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
            "",
        )
        for index, part in enumerate(parts)
    )
    digest = xxhash.xxh3_64_hexdigest(b"".join(parts))
    return StateFetched(WeightManifest(step, step, pieces, 128, digest), "grpo", step, 0)


def kept(keeper: Keeper, step: int) -> bytes:
    body, blobs = keeper.answer(FetchState(step, (1, 0), owner="model-0"))
    assert body == WeightsFetched(step)
    return b"".join(bytes(blob) for blob in blobs)


def test_what_is_kept_is_given_back_by_piece() -> None:
    keeper = Keeper()
    keeper.keep(KeepState("model-0", state(3)), [b"abcdef", b"ghij"])
    assert keeper.answer(FetchState(3, owner="model-0")) == (state(3), ())
    assert kept(keeper, 3) == b"efghijabcd"
    with pytest.raises(RefusedError, match="2 pieces, not one 2"):
        keeper.answer(FetchState(3, (2,), owner="model-0"))


@pytest.mark.parametrize("blobs", [[b"abcdefghiX"], [b"abc"], [b"abcdefghij", b"k"], []])
def test_a_state_that_was_damaged_on_the_way_leaves_what_is_there(blobs: list[bytes]) -> None:
    keeper = Keeper()
    keeper.keep(KeepState("model-0", state(3)), list(PARTS))
    with pytest.raises(IntegrityError, match="state of model-0"):
        keeper.keep(KeepState("model-0", state(4)), blobs)
    assert kept(keeper, 3) == b"efghijabcd"


def test_the_latest_two_states_of_a_rank_are_kept_and_a_sibling_may_have_them() -> None:
    keeper = Keeper()
    for step in (3, 4, 5):
        keeper.keep(KeepState("model-1", state(step)), list(PARTS))
    for step in (4, 5):
        assert keeper.answer(FetchState(step, owner="model-0"))[0] == state(step)
    with pytest.raises(
        RefusedError, match=r"no state of step 3 is kept for model-0, only \{'model-1': \[4, 5\]\}"
    ):
        keeper.answer(FetchState(3, owner="model-0"))


def test_a_run_that_went_back_leaves_no_later_step_behind() -> None:
    keeper = Keeper()
    for step in (3, 4, 2):
        keeper.keep(KeepState("model-1", state(step)), list(PARTS))
    assert keeper.answer(FetchState(2, owner="model-1"))[0] == state(2)
    with pytest.raises(RefusedError, match="no state of step 4"):
        keeper.answer(FetchState(4, owner="model-1"))
