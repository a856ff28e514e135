from pathlib import Path

import pytest

from kintsugi.config import DataSection
from kintsugi.data.source import Order, open_source
from kintsugi.errors import DataError


def test_held_out_problems_are_never_trained_on() -> None:
    data = DataSection(num_eval=500)
    train, held_out = open_source(data, split="train"), open_source(data, split="eval")
    prompts = {train.row(i).prompt for i in range(len(train))}
    questions = {held_out.row(i).prompt for i in range(len(held_out))}
    assert len(questions) == 500
    assert len(prompts) == 90 * 90 - 500
    assert not prompts & questions


def test_answers_are_sums_with_reversed_digits() -> None:
    source = open_source(DataSection(num_eval=10), split="eval")
    for index in range(10):
        row = source.row(index)
        first, second = row.prompt.removesuffix("=").split("+")
        assert int(row.columns["answer"][::-1]) == int(first) + int(second)


def test_every_epoch_meets_every_row_once_in_another_order() -> None:
    order = Order(num_rows=50, seed=3, stage="grpo", shuffle=True)
    first = [order.index(epoch=0, position=i) for i in range(50)]
    second = [order.index(epoch=1, position=i) for i in range(50)]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first == [
        Order(num_rows=50, seed=3, stage="grpo", shuffle=True).index(epoch=0, position=i) for i in range(50)
    ]


def lines(path: Path, *rows: str) -> DataSection:
    path.write_text("\n".join(rows))
    return DataSection(source=str(path), num_eval=1)


def test_rows_of_a_file_keep_their_columns(tmp_path: Path) -> None:
    data = lines(tmp_path / "d.jsonl", '{"prompt": "a", "answer": "1"}', "", '{"prompt": "b", "answer": "2"}')
    assert open_source(data, split="train").row(0).columns == {"answer": "1"}
    assert open_source(data, split="eval").row(0).prompt == "b"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (['{"prompt": "a"}', "nonsense"], "line 2: expected a JSON object"),
        (
            ['{"prompt": "a"}', '{"question": "b"}'],
            "line 2: expected text in column 'prompt', columns there: question",
        ),
        (['{"prompt": "a"}'], "expected more rows than data.num_eval=1, found 1"),
        ([], "expected more rows than data.num_eval=1, found 0"),
    ],
)
def test_a_malformed_file_is_named_with_its_line(tmp_path: Path, rows: list[str], expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        open_source(lines(tmp_path / "d.jsonl", *rows), split="train")
