import pytest

from kintsugi.data import order as order_module
from kintsugi.data.order import RowOrder, SourceMixing, scattered


@pytest.mark.parametrize("num_rows", [1, 2, 5, 64, 1000])
def test_rows_are_scattered_without_a_table_each_to_its_own_place(num_rows: int) -> None:
    places = [scattered(position, num_rows=num_rows, key=b"a") for position in range(num_rows)]
    assert sorted(places) == list(range(num_rows))
    if num_rows > 5:
        assert places != [scattered(position, num_rows=num_rows, key=b"b") for position in range(num_rows)]


def test_many_rows_have_another_order_in_every_epoch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "_LARGEST_TABLE", 10)
    order = RowOrder(num_rows=50, seed=3, stage="grpo", shuffle=True)
    first, second = ([order.index(epoch=epoch, position=at) for at in range(50)] for epoch in range(2))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


@pytest.mark.parametrize(
    "weights", [[1.0], [1.0, 1.0], [0.7, 0.3], [5.0, 1.0, 0.5], [0.001, 1.0], [0.1, 0.333]]
)
def test_at_every_moment_no_source_is_more_than_one_row_from_its_share(weights: list[float]) -> None:
    mixing, met = SourceMixing(weights), [0] * len(weights)
    for number in range(2000):
        source, before = mixing.place(number)
        assert before == met[source]
        met[source] += 1
        for count, weight in zip(met, weights, strict=True):
            # Weights without a common measure are taken to a thousandth.
            assert abs(count - (number + 1) * weight / sum(weights)) < len(weights) + number * 1e-3


def test_an_epoch_meets_every_row_of_every_source() -> None:
    mixing, lengths = SourceMixing([3.0, 1.0]), [7, 5]
    places = [mixing.place(number) for number in range(mixing.epoch_length(lengths))]
    for source, length in enumerate(lengths):
        assert {before % length for each, before in places if each == source} == set(range(length))
