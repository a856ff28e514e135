"""Differences of pieces, and when they pay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kintsugi.errors import IntegrityError
from kintsugi.runtime.digests import piece_digest
from kintsugi.weights import delta
from kintsugi.weights.delta_choice import MAX_SKIPPED, DeltaChoice

SIZE = 1 << 30


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("count", [0, 1, 255, 70_001, 1_100_003])
def test_a_difference_leads_to_the_same_bytes(item_bytes: int, share: float, count: int) -> None:
    random = np.random.default_rng(0)
    base = random.integers(0, 1 << 8 * item_bytes - 1, count, f"u{item_bytes}")
    new = base.copy()
    new[random.random(count) < share] += 1
    content, old = memoryview(new.tobytes()), memoryview(base.tobytes())
    difference = delta.encode(content, old, item_bytes=item_bytes)
    target = memoryview(bytearray(len(content)))
    found = delta.apply(memoryview(difference), old, target, item_bytes=item_bytes, origin="agent-0")
    assert bytes(target) == bytes(content) and found == piece_digest(content)
    assert len(difference) <= len(content) + 4 * (1 + len(content) // delta.CHUNK_BYTES)


def test_one_element_of_a_hundred_takes_less_than_two_percent_of_the_bytes_in_bfloat16() -> None:
    random = np.random.default_rng(0)
    base = random.integers(0, 1 << 15, 1 << 20, "u2")
    new = base.copy()
    new[random.random(len(new)) < 0.01] += 1
    size = len(delta.encode(memoryview(new.tobytes()), memoryview(base.tobytes()), item_bytes=2))
    assert 0.01 < size / new.nbytes < 0.02


@given(st.binary(max_size=200), st.integers(1, 300))
def test_other_bytes_are_refused_or_fill_the_target_and_nothing_else(content: bytes, size: int) -> None:
    memory = bytearray(b"\xaa" * (size + 64))
    target = memoryview(memory)[32 : 32 + size]
    try:
        found = delta.apply(memoryview(content), memoryview(bytes(size)), target, item_bytes=1, origin="x")
    except IntegrityError:
        pass
    else:
        assert found == piece_digest(target)
    assert memory[:32] == memory[32 + size :] == b"\xaa" * 32


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\0\0\0",
        b"\xfe\xff\xff\xff" + bytes(40),
        b"\x01\0\0\0\xff\x07",
        b"\x00\0\0\0trailing",
        b"\xff\xff\xff\xff",
    ],
)
def test_a_difference_that_does_not_fit_its_piece_is_refused(content: bytes) -> None:
    with pytest.raises(IntegrityError, match="from agent-3"):
        delta.apply(
            memoryview(content),
            memoryview(bytes(20)),
            memoryview(bytearray(20)),
            item_bytes=1,
            origin="agent-3",
        )


def at(gigabytes_per_s: float) -> DeltaChoice:
    choice = DeltaChoice()
    choice.note_whole(SIZE, SIZE / gigabytes_per_s / 1e9)
    return choice


def test_a_difference_is_asked_for_only_after_a_whole_version_was_measured() -> None:
    assert not DeltaChoice().is_worth_asking(SIZE)
    assert at(1.0).is_worth_asking(SIZE)


@pytest.mark.parametrize(("gigabytes_per_s", "pays"), [(0.125, True), (1.25, True), (12.5, False)])
def test_a_difference_pays_where_the_link_is_slow_beside_the_memory(
    gigabytes_per_s: float, pays: bool
) -> None:
    choice = at(gigabytes_per_s)
    choice.note_difference(SIZE, SIZE // 50, made_s=SIZE / 4e9, applied_s=SIZE / 8e9)
    assert choice.pays(SIZE, SIZE // 50) is pays
    assert choice.is_worth_asking(SIZE) is pays


def test_a_difference_that_did_not_pay_is_tried_again_ever_more_rarely() -> None:
    choice = at(0.1)
    asked = []
    for version in range(400):
        if choice.is_worth_asking(SIZE):
            asked.append(version)
            choice.note_refused()
    assert np.diff(asked).tolist() == [2, 3, 5, 9, 17, 33, *[MAX_SKIPPED + 1] * (len(asked) - 7)]


def test_one_that_pays_ends_the_series_of_skipped_ones() -> None:
    choice = at(0.1)
    for _ in range(3):
        choice.note_refused()
    while not choice.is_worth_asking(SIZE):
        pass
    choice.note_difference(SIZE, SIZE // 100, made_s=SIZE / 4e9, applied_s=SIZE / 8e9)
    assert all(choice.is_worth_asking(SIZE) for _ in range(3))
