"""The norm of a gradient has the same bits for every cut and every order of its elements."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kintsugi.training import norms
from kintsugi.training.norms import (
    exponent_of,
    gradient_norm,
    largest,
    norm_of,
    sum_of_squares,
    total_of,
    words_of,
)
from kintsugi.training.process_group import ProcessGroup
from tests.unit.training.world import in_world

SIZE = 50_021
SMALLEST = 2.0**-149


def gradient(kind: str, *, size: int = SIZE, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(size, generator=generator)
    match kind:
        case "normal":
            return normal * 1e-3
        case "of many sizes":
            return normal * 10.0 ** torch.randint(-12, 3, (size,), generator=generator)
        case "one large element":
            normal[17] = 1e6
            return normal
        case "cubes":
            return normal**3 * 1e-20
        case "sparse":
            return normal * (torch.rand(size, generator=generator) < 1e-3)
        case "denormal":
            return normal.mul(4).round() * SMALLEST
        case _:
            assert kind == "huge"
            return normal * 1e37


KINDS = ["normal", "of many sizes", "one large element", "cubes", "sparse", "denormal", "huge"]


def exact(values: Tensor) -> float:
    return math.sqrt(math.fsum(float(value) ** 2 for value in values.double()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_agrees_with_that_in_float64(kind: str) -> None:
    values = gradient(kind)
    bound = SIZE * 2.0**-49 + 2.0**-52
    assert gradient_norm([values]) == pytest.approx(exact(values), rel=min(bound, 1e-6), abs=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_has_the_same_bits_for_every_order_and_every_cut(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = gradient(kind)
    expected = gradient_norm([values])
    for seed in range(3):
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(seed))
        assert gradient_norm([values[order]]) == expected
    for cut in (0, 1, 63, 4096, 20_000, SIZE):
        assert gradient_norm([values[:cut], values[cut:]]) == expected
        assert gradient_norm([values[cut:], values[:cut], torch.zeros(64)]) == expected
    for chunk, piece in ((1, 10), (64, 1000), (4096, 1 << 20)):
        monkeypatch.setattr(norms, "CHUNK_ELEMENTS", chunk)
        monkeypatch.setattr(norms, "CPU_PIECE_ELEMENTS", piece)
        assert gradient_norm([values]) == expected
        assert gradient_norm([values.numpy()]) == expected, "numpy arrays as well"


def test_the_error_stays_within_its_bound_where_all_squares_but_one_round_to_nothing() -> None:
    values = torch.full((SIZE,), 2.0**-25 * 0.999)
    values[5] = 1.0
    found, expected = gradient_norm([values]), exact(values)
    assert found == 1.0 < expected
    assert expected - found <= expected * SIZE * 2.0**-49


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_has_no_finite_norm(value: float) -> None:
    for position in (0, 4096, SIZE - 1):
        values = gradient("normal")
        values[position] = value
        for parts in ([values], [values[:7], values[7:]], [values.numpy()]):
            assert not math.isfinite(gradient_norm(parts))


def test_not_a_number_is_found_beside_an_infinity() -> None:
    values = torch.tensor([math.inf, math.nan, 1.0])
    assert math.isnan(gradient_norm([values])) and math.isnan(gradient_norm([values[:1], values[1:]]))


def test_a_gradient_of_zeros_has_the_norm_zero() -> None:
    assert (
        gradient_norm([torch.zeros(5)])
        == gradient_norm([torch.zeros(0)])
        == gradient_norm([-torch.zeros(5)])
        == 0
    )
    assert gradient_norm([torch.zeros(0), torch.tensor([-3.0, 4.0])]) == 5.0


def test_extreme_elements_alone_keep_their_magnitude() -> None:
    highest = float(torch.finfo(torch.float32).max)
    for value in (SMALLEST, 2.0**-126, 1.0, 2.0**127, highest):
        assert gradient_norm([torch.tensor([-value])]) == value


def test_sums_survive_being_sent_as_words() -> None:
    totals = [0, 1, (1 << 62) - 1, 1 << 62, (1 << 100) + 12345]
    words = [words_of(total) for total in totals]
    assert all(0 <= word < 1 << 63 for pair in words for word in pair)
    assert total_of(words) == sum(totals)


def test_the_parts_of_a_rank_are_combined_by_hand_as_by_a_group() -> None:
    values = gradient("of many sizes")
    parts = values.split(7_000)
    exponent = exponent_of(max(largest(part) for part in parts))
    total = sum(sum_of_squares(part, exponent=exponent) for part in parts)
    assert norm_of(total, exponent=exponent) == gradient_norm([values])


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_come_to_the_norm_of_one_and_replicas_are_counted_once(world_size: int) -> None:
    values = gradient("of many sizes", size=5_001)
    parts = list(values.split(-(-5_001 // world_size)))

    def cut(rank: int, group: ProcessGroup) -> float:
        return gradient_norm([parts[rank]], group=group, counted=range(group.size), timeout_s=10.0)

    def copied(rank: int, group: ProcessGroup) -> float:
        return gradient_norm([values], group=group, counted=[1], timeout_s=10.0)

    def broken(rank: int, group: ProcessGroup) -> float:
        mine = parts[rank].clone()
        mine[0] = math.nan if rank == 1 else mine[0]
        return gradient_norm([mine], group=group, counted=range(group.size), timeout_s=10.0)

    alone = gradient_norm([values])
    assert in_world(world_size, cut) == in_world(world_size, copied) == [alone] * world_size
    assert all(math.isnan(norm) for norm in in_world(world_size, broken))


def test_numbers_of_both_frameworks_have_the_same_norm() -> None:
    values = gradient("normal")
    assert gradient_norm([np.asarray(values)]) == gradient_norm([values])
