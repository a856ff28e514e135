"""Weights that no rank has, read by those that need some of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

from kintsugi.training.gathered_weights import OwnWeights

NAMES = ["a", "b", "c", "d"]


class Recorded(Mapping[str, Tensor]):
    """Weights that note what is read."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return torch.tensor(float(NAMES.index(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


@pytest.mark.parametrize("own", [set(), {"b"}, {"a", "c"}, set(NAMES)])
def test_every_rank_reads_all_weights_in_one_order_whichever_it_needs(own: set[str]) -> None:
    weights = Recorded()
    mine = OwnWeights(weights, names=NAMES, own=own)
    assert {name: float(tensor) for name, tensor in mine.items()} == {
        name: float(NAMES.index(name)) for name in own
    }
    mine.finish()
    assert weights.read == NAMES


def test_asking_whether_a_weight_is_needed_reads_nothing() -> None:
    weights = Recorded()
    mine = OwnWeights(weights, names=NAMES, own={"c"})
    assert "c" in mine and "a" not in mine and list(mine) == ["c"] and len(mine) == 1
    assert weights.read == []
