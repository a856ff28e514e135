import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kintsugi.config.schema import AlgorithmSection, Config, DataSection, MixedSource
from kintsugi.data.dataset import DataSet, open_data, pin_data
from kintsugi.errors import DataError, UserError
from kintsugi.types import Row


def config(algorithm: str = "grpo", **data: Any) -> Config:
    return Config(name="t", algorithm=AlgorithmSection(name=algorithm), data=DataSection(**data))  # type: ignore[arg-type]


def write_lines(path: Path, *rows: object) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def numbered(path: Path, count: int) -> str:
    return write_lines(path, *({"prompt": f"p{number}", "answer": str(number)} for number in range(count)))


def epoch(data: DataSet, *, number: int = 0, stage: str = "grpo", seed: int = 0) -> list[Row]:
    return [
        data.training_row(stage=stage, seed=seed, epoch=number, position=position)
        for position in range(data.num_positions)
    ]


def held_out(data: DataSet) -> list[Row]:
    return [data.held_out_row(position) for position in range(data.num_held_out)]


class TestArithmetic:
    def test_held_out_problems_are_never_trained_on(self) -> None:
        data = open_data(config(num_eval=500))
        prompts, questions = {row.prompt for row in epoch(data)}, {row.prompt for row in held_out(data)}
        assert (len(prompts), len(questions)) == (90 * 90 - 500, 500)
        assert not prompts & questions

    def test_answers_are_sums_with_reversed_digits(self) -> None:
        for row in held_out(open_data(config(num_eval=10))):
            first, second = row.prompt.removesuffix("=").split("+")
            assert int(row.columns["answer"][::-1]) == int(first) + int(second)

    def test_in_words_it_is_a_question_and_its_sum(self) -> None:
        row = held_out(open_data(config(source="arithmetic:words", num_eval=1)))[0]
        first, second = row.prompt.removeprefix("What is ").removesuffix("?").split(" + ")
        assert int(row.columns["answer"]) == int(first) + int(second)

    @pytest.mark.parametrize("digits", [1, 2])
    def test_every_problem_has_a_right_and_a_wrong_answer_that_stay_the_same(self, digits: int) -> None:
        one, two = (held_out(open_data(config(num_eval=60, max_digits=digits))) for _ in range(2))
        assert one == two
        for row in one:
            assert row.columns["chosen"] == row.columns["answer"] != row.columns["rejected"]
            assert row.columns["rejected"].isdigit()


def test_products_of_sums_have_their_value_as_answer_and_none_that_is_held_out_is_trained_on() -> None:
    data = open_data(config(source="arithmetic:products", max_digits=1, num_eval=100))
    rows = [data.training_row(stage="s", seed=0, epoch=0, position=n) for n in range(data.num_positions)]
    assert len({row.prompt for row in rows}) == len(rows) == 9 * 9 * 8 - 100
    assert {row.prompt for row in rows}.isdisjoint(row.prompt for row in held_out(data))
    for row in rows[:20]:
        first, second, third = map(int, re.findall(r"\d", row.prompt))
        assert row.columns["answer"] == str((first + second) * third) == row.columns["completion"]


def test_every_epoch_meets_every_row_once_in_another_order(tmp_path: Path) -> None:
    settings = config(source=numbered(tmp_path / "a.jsonl", 51), num_eval=1)
    data = open_data(settings)
    first, second = epoch(data), epoch(data, number=1)
    assert sorted(row.prompt for row in first) == sorted(row.prompt for row in second)
    assert len({row.prompt for row in first}) == 50
    assert first != second
    assert first == epoch(open_data(settings))
    assert first != epoch(data, seed=1) and first != epoch(data, stage="warmup")


def test_without_shuffling_rows_come_as_they_stand(tmp_path: Path) -> None:
    data = open_data(config(source=numbered(tmp_path / "a.jsonl", 5), num_eval=2, shuffle=False))
    assert [row.prompt for row in epoch(data)] == ["p0", "p1", "p2"]
    assert [row.prompt for row in held_out(data)] == ["p3", "p4"]


def test_held_out_rows_can_come_from_their_own_file(tmp_path: Path) -> None:
    train, test = numbered(tmp_path / "train.jsonl", 3), write_lines(tmp_path / "test.jsonl", {"prompt": "t"})
    data = open_data(config(source=train, eval_source=test))
    assert data.num_positions == 3
    assert [row.prompt for row in held_out(data)] == ["t"]


def test_held_out_rows_need_nothing_to_learn(tmp_path: Path) -> None:
    train = write_lines(tmp_path / "train.jsonl", {"prompt": "a", "text": "b"})
    test = write_lines(tmp_path / "test.jsonl", {"prompt": "t"})
    data = open_data(config("sft", source=train, eval_source=test, completion_column="text"))
    assert data.held_out_row(0).columns == {}


def test_held_out_rows_that_are_generated_are_not_trained_on(tmp_path: Path) -> None:
    data = open_data(config(eval_source="arithmetic", num_eval=50, max_digits=1))
    assert (data.num_positions, data.num_held_out) == (81 - 50, 50)
    assert not {row.prompt for row in epoch(data)} & {row.prompt for row in held_out(data)}


class TestMixing:
    def mixed(self, tmp_path: Path) -> Config:
        few, many = (
            numbered(tmp_path / "few.jsonl", 5),
            write_lines(tmp_path / "many.jsonl", *({"q": f"q{number}"} for number in range(12))),
        )
        sources = (
            MixedSource(source=few, num_eval=1, weight=2.0),
            MixedSource(source=many, num_eval=2, prompt_column="q"),
        )
        return config(sources=sources)

    def test_sources_come_in_the_proportion_of_their_weights_at_any_moment(self, tmp_path: Path) -> None:
        names = [row.columns["source"] for row in epoch(open_data(self.mixed(tmp_path)))]
        for end in range(3, len(names), 3):
            assert Counter(names[:end]) == {"few.jsonl": 2 * end // 3, "many.jsonl": end // 3}

    def test_each_source_is_gone_through_whole_before_it_begins_again(self, tmp_path: Path) -> None:
        data = open_data(self.mixed(tmp_path))
        rows = [*epoch(data), *epoch(data, number=1)]
        for name, count in (("few.jsonl", 4), ("many.jsonl", 10)):
            prompts = [row.prompt for row in rows if row.columns["source"] == name]
            for start in range(0, len(prompts) - count, count):
                assert len(set(prompts[start : start + count])) == count

    def test_a_position_is_the_same_row_in_another_process(self, tmp_path: Path) -> None:
        settings = self.mixed(tmp_path)
        assert epoch(open_data(settings), number=3)[7] == epoch(open_data(settings), number=3)[7]

    def test_rows_are_held_out_of_every_source(self, tmp_path: Path) -> None:
        rows = held_out(open_data(self.mixed(tmp_path)))
        assert [(row.prompt, row.columns["source"]) for row in rows] == [
            ("p4", "few.jsonl"),
            ("q10", "many.jsonl"),
            ("q11", "many.jsonl"),
        ]


class TestBadRows:
    def test_too_many_are_an_error_that_names_the_first_ones(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "a.jsonl", {"prompt": "a"}, {"question": "b"}, [1], {"prompt": 3})
        with pytest.raises(DataError) as caught:
            open_data(config(source=path, num_eval=1))
        message = str(caught.value)
        assert "`data.source`: 3 of 4 rows" in message and "`data.max_bad_share`=0.01" in message
        assert "a.jsonl, line 2: expected text in column 'prompt', columns there: question" in message
        assert "a.jsonl, line 3: expected a JSON object" in message
        assert "a.jsonl, line 4: expected text in column 'prompt' (which has the number 3)" in message
        assert "\n" not in message

    def test_of_rows_that_are_bad_for_one_reason_the_first_is_named(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "a.jsonl", {"q": 1}, {"q": 2}, [1], {"q": 3})
        with pytest.raises(DataError) as caught:
            open_data(config(source=path, num_eval=1))
        assert [f"line {number}:" in str(caught.value) for number in range(1, 5)] == [
            True,
            False,
            True,
            False,
        ]

    def test_few_are_left_out_and_recorded(self, tmp_path: Path) -> None:
        path = numbered(tmp_path / "a.jsonl", 9)
        (tmp_path / "a.jsonl").write_text("nonsense\n\n" + (tmp_path / "a.jsonl").read_text())
        settings = config(source=path, num_eval=1, max_bad_share=0.2, shuffle=False)
        (tmp_path / "run").mkdir()
        table = pin_data(settings, run_dir=tmp_path / "run").found[0].table
        assert (table.num_rows, table.num_bad) == (9, 1)
        assert table.bad[0].place.endswith("a.jsonl, line 1")
        assert [row.prompt for row in epoch(open_data(settings))] == [f"p{number}" for number in range(8)]

    def test_a_file_without_rows_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").touch()
        with pytest.raises(DataError, match=r"`data.source`: expected rows in '.*a.jsonl', found none"):
            open_data(config(source=str(tmp_path / "a.jsonl")))

    def test_fewer_rows_than_are_held_out_are_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"`data.num_eval`: expected fewer than the 3 rows"):
            open_data(config(source=numbered(tmp_path / "a.jsonl", 3), num_eval=3))


class TestRecord:
    @pytest.fixture
    def run_dir(self, tmp_path: Path) -> Path:
        folder = tmp_path / "run"
        folder.mkdir()
        return folder

    def test_a_run_that_is_resumed_with_other_rows_is_refused(self, tmp_path: Path, run_dir: Path) -> None:
        settings = config(source=numbered(tmp_path / "a.jsonl", 9), num_eval=1)
        pin_data(settings, run_dir=run_dir)
        pin_data(settings, run_dir=run_dir)
        numbered(tmp_path / "a.jsonl", 10)
        with pytest.raises(UserError, match=r"`data.source`: .*content has changed \(10 rows now\)"):
            pin_data(settings, run_dir=run_dir)

    def test_the_same_rows_written_again_are_taken(self, tmp_path: Path, run_dir: Path) -> None:
        settings = config(source=numbered(tmp_path / "a.jsonl", 9), num_eval=1)
        before = pin_data(settings, run_dir=run_dir)
        (tmp_path / "a.jsonl").unlink()
        numbered(tmp_path / "a.jsonl", 9)
        after = pin_data(settings, run_dir=run_dir)
        assert after.found[0].table.digest == before.found[0].table.digest
        assert epoch(open_data(settings, run_dir=run_dir)) == epoch(open_data(settings))

    def test_a_file_that_changes_under_a_run_is_noticed(self, tmp_path: Path, run_dir: Path) -> None:
        settings = config(source=numbered(tmp_path / "a.jsonl", 9), num_eval=1)
        pin_data(settings, run_dir=run_dir)
        data = open_data(settings, run_dir=run_dir)
        numbered(tmp_path / "a.jsonl", 8)
        with pytest.raises(UserError, match="changed since"):
            data.held_out_row(0)
        with pytest.raises(UserError, match="changed since"):
            open_data(settings, run_dir=run_dir)

    def test_the_record_is_readable_and_says_what_was_found(self, tmp_path: Path, run_dir: Path) -> None:
        record = pin_data(config(source=numbered(tmp_path / "a.jsonl", 9), num_eval=1), run_dir=run_dir)
        written = msgspec.json.decode((run_dir / "data.json").read_bytes())
        assert (written["num_positions"], written["num_held_out"]) == (8, 1)
        assert written["found"][0]["field"] == "data.source"
        assert written["found"][0]["table"]["files"][0]["digest"] == record.found[0].table.files[0].digest


def test_libraries_for_some_sources_are_imported_for_those_only() -> None:
    program = (
        "import sys, kintsugi.data.prefetch, kintsugi.rollout.rewards.reasoning_gym\n"
        "from kintsugi.config.schema import Config\n"
        "from kintsugi.data.dataset import open_data\n"
        "open_data(Config(name='t'))\n"
        "sys.exit(', '.join({'pyarrow', 'datasets', 'reasoning_gym', 'numpy'} & sys.modules.keys()))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.stderr.strip() == ""
