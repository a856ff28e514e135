"""Every kind of file, and what can be wrong with one. Real libraries, small files."""

import json
import os
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from kintsugi.config.schema import Config, DataSection
from kintsugi.data import jsonl_rows
from kintsugi.data.dataset import DataSet, open_data, pin_data
from kintsugi.errors import DataError

ROWS = [{"prompt": f"p{number}", "n": number} for number in range(4)]


def opened(source: Path | str, tmp_path: Path, **data: Any) -> DataSet:
    section = DataSection(
        source=str(source), num_eval=1, shuffle=False, cache_dir=str(tmp_path / "cache"), **data
    )
    return open_data(Config(name="t", data=section))


def prompts(data: DataSet) -> list[str]:
    rows = [
        data.training_row(stage="s", seed=0, epoch=0, position=position)
        for position in range(data.num_positions)
    ]
    return [row.prompt for row in [*rows, *(data.held_out_row(index) for index in range(data.num_held_out))]]


def refusal(source: Path | str, tmp_path: Path, **data: Any) -> str:
    with pytest.raises(DataError) as caught:
        opened(source, tmp_path, **data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def parquet(path: Path, **columns: list[Any]) -> Path:
    import pyarrow as pa
    from pyarrow import parquet as library

    library.write_table(pa.table(columns), path, row_group_size=2)
    return path


def as_lines(rows: list[Any]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


@pytest.mark.parametrize("text", [json.dumps(ROWS), json.dumps(ROWS, indent=2), as_lines(ROWS)])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_json_is_an_array_or_lines_whatever_the_file_is_called(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert prompts(opened(tmp_path / name, tmp_path)) == ["p0", "p1", "p2", "p3"]


def test_rows_of_an_array_are_named_by_their_number(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([*ROWS, 7]))
    assert "a.json, row 5: expected a JSON object" in refusal(tmp_path / "a.json", tmp_path)


def test_a_parquet_file_is_read_with_its_types(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": f"p{number}"}] for number in range(5)]
    path = parquet(tmp_path / "a.parquet", prompt=messages, day=[date(2026, 1, 2)] * 5, score=[0.5] * 5)
    row = opened(path, tmp_path).held_out_row(0)
    assert (row.prompt, row.messages) == ("p4", ({"role": "user", "content": "p4"},))
    assert row.columns == {"day": "2026-01-02", "score": 0.5}


def test_a_folder_and_a_pattern_are_their_files_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    parquet(tmp_path / "data" / "b.parquet", prompt=["p2", "p3"])
    (tmp_path / "data" / "a.jsonl").write_text(as_lines(ROWS[:2]))
    for source in ("data", "data/*"):
        assert prompts(opened(tmp_path / source, tmp_path)) == ["p0", "p1", "p2", "p3"]


def test_a_saved_data_set_is_read_by_folder_or_by_split(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": saved, "test": saved.select([0, 2])}).save_to_disk(str(tmp_path / "two"))
    assert prompts(opened(tmp_path / "one", tmp_path)) == ["p0", "p1", "p2", "p3"]
    assert prompts(opened(f"{tmp_path}/two:test", tmp_path)) == ["p0", "p2"]
    assert "one of its splits (train, test)" in refusal(tmp_path / "two", tmp_path)


class TestHub:
    """The hub is played by a function: tests have no network."""

    @pytest.fixture
    def rows(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        import datasets

        served = list(ROWS)

        def load(name: str, config: str | None, *, split: str | None) -> datasets.Dataset:
            assert (name, config, split) == ("openai/gsm8k", "main", "train")
            if not served:
                raise ConnectionError("no network")
            return datasets.Dataset.from_list(served)

        monkeypatch.setattr(datasets, "load_dataset", load)
        return served

    def test_a_data_set_is_taken_by_name(self, tmp_path: Path, rows: list[dict[str, Any]]) -> None:
        assert prompts(opened("hf:openai/gsm8k:main:train", tmp_path)) == ["p0", "p1", "p2", "p3"]

    def test_a_run_goes_on_with_what_it_began_with(self, tmp_path: Path, rows: list[dict[str, Any]]) -> None:
        section = DataSection(
            source="hf:openai/gsm8k:main:train", num_eval=1, shuffle=False, cache_dir=str(tmp_path / "cache")
        )
        config = Config(name="t", data=section)
        pin_data(config, run_dir=tmp_path)
        rows.clear()
        pin_data(config, run_dir=tmp_path)
        assert prompts(open_data(config, run_dir=tmp_path)) == ["p0", "p1", "p2", "p3"]

    def test_without_a_network_there_is_one_clear_error(
        self, tmp_path: Path, rows: list[dict[str, Any]]
    ) -> None:
        rows.clear()
        message = refusal("hf:openai/gsm8k:main:train", tmp_path)
        assert "'hf:openai/gsm8k:main:train'" in message and "no network" in message


class TestBadInput:
    def test_a_line_that_is_not_utf8_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
        message = refusal(tmp_path / "a.jsonl", tmp_path)
        assert "a.jsonl, line 2: expected UTF-8, got byte 0xe9 after 15 bytes" in message

    def test_half_a_character_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": "\\ud800"}\n')
        assert "a.jsonl, line 2: " in refusal(tmp_path / "a.jsonl", tmp_path)

    def test_a_byte_order_mark_is_no_part_of_the_first_row(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text(as_lines(ROWS), encoding="utf-8-sig")
        assert prompts(opened(tmp_path / "a.jsonl", tmp_path)) == ["p0", "p1", "p2", "p3"]

    @pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
    def test_a_file_in_utf16_is_refused_with_the_way_out(self, tmp_path: Path, encoding: str) -> None:
        (tmp_path / "a.jsonl").write_text(as_lines(ROWS), encoding=encoding)
        assert "expected UTF-8 text" in refusal(tmp_path / "a.jsonl", tmp_path)

    def test_a_line_of_a_hundred_megabytes_is_refused_without_being_loaded(self, tmp_path: Path) -> None:
        import tracemalloc

        path = tmp_path / "a.jsonl"
        with path.open("w") as file:
            file.write(as_lines(ROWS[:2]) + '{"prompt": "')
            for _ in range(100):
                file.write("a" * (1 << 20))
            file.write('"}\n' + as_lines(ROWS[2:]))
        tracemalloc.start()
        try:
            data = opened(path, tmp_path, max_bad_share=0.2)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert prompts(data) == ["p0", "p1", "p2", "p3"]
        assert peak < 20 << 20
        assert "line 3: expected at most 4 MiB" in refusal(path, tmp_path)

    def test_a_row_that_repeats_an_id_is_left_out(self, tmp_path: Path) -> None:
        rows = [{**row, "id": number} for row, number in zip(ROWS, [1, 2, 1, 3], strict=True)]
        (tmp_path / "a.jsonl").write_text(as_lines(rows))
        assert prompts(opened(tmp_path / "a.jsonl", tmp_path, max_bad_share=0.3)) == ["p0", "p1", "p3"]
        message = refusal(tmp_path / "a.jsonl", tmp_path)
        assert "a.jsonl, line 3: expected an `id` of its own, got that of " in message and "line 1" in message

    def test_a_parquet_column_of_the_wrong_type_is_named_by_row(self, tmp_path: Path) -> None:
        path = parquet(tmp_path / "a.parquet", prompt=[1, 2, 3])
        assert "a.parquet, row 1: expected text in column 'prompt' (which has the number 1)" in refusal(
            path, tmp_path
        )

    def test_a_truncated_parquet_file_is_refused(self, tmp_path: Path) -> None:
        path = parquet(tmp_path / "a.parquet", prompt=["a"] * 100)
        path.write_bytes(path.read_bytes()[:-20])
        assert "a.parquet: expected a whole Parquet file" in refusal(path, tmp_path)

    def test_a_broken_array_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_text('[{"prompt": "a"}, {"prompt": ')
        assert "expected one JSON array, or one object per line" in refusal(tmp_path / "a.json", tmp_path)

    @pytest.mark.parametrize("source", ["nowhere.jsonl", "nothing/*.parquet"])
    def test_what_is_not_there_is_named(self, tmp_path: Path, source: str) -> None:
        assert f"'{source}'" in refusal(source, tmp_path)
        assert refusal(source, tmp_path).startswith("`data.source`: ")

    def test_a_pipe_is_refused_at_once_with_the_name_for_streams(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        message = refusal(tmp_path / "pipe", tmp_path)
        assert message.startswith("`data.source`: expected a file") and f"'stream:{tmp_path}/pipe'" in message

    def test_folders_that_are_named_like_files_are_none(self, tmp_path: Path) -> None:
        (tmp_path / "rows" / "sub.jsonl").mkdir(parents=True)
        (tmp_path / "rows" / "a.jsonl").write_text(as_lines(ROWS))
        for source in ("rows", "rows/*"):
            assert prompts(opened(tmp_path / source, tmp_path)) == ["p0", "p1", "p2", "p3"]

    @pytest.mark.parametrize("start", ["[", '{"prompt": '])
    def test_values_that_are_nested_without_end_are_refused(self, tmp_path: Path, start: str) -> None:
        (tmp_path / "a.json").write_text(start + "[" * 100_000)
        assert refusal(tmp_path / "a.json", tmp_path).startswith("`data.source`: ")

    def test_the_field_is_named_also_where_the_way_out_is_a_command(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text(as_lines(ROWS), encoding="utf-16")
        assert refusal(tmp_path / "a.jsonl", tmp_path).startswith("`data.source`: ")

    def test_a_damaged_saved_data_set_is_refused(self, tmp_path: Path) -> None:
        from datasets import Dataset

        Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
        next((tmp_path / "saved").glob("*.arrow")).write_bytes(b"nonsense")
        assert "expected a whole saved data set" in refusal(tmp_path / "saved", tmp_path)

    def test_a_missing_library_is_named_with_its_extra(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = parquet(tmp_path / "a.parquet", prompt=["a"] * 3)
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        assert "kintsugi[data]" in refusal(path, tmp_path)


class TestCache:
    def test_a_file_is_converted_once(self, tmp_path: Path) -> None:
        path = parquet(tmp_path / "a.parquet", prompt=["p0", "p1"])
        opened(path, tmp_path)
        (lines,) = (tmp_path / "cache" / "lines").glob("*.jsonl")
        before = lines.stat()
        opened(path, tmp_path)
        assert (lines.stat().st_ino, lines.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)

    def test_new_content_under_an_old_name_is_never_answered_from_the_cache(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        assert prompts(opened(parquet(path, prompt=["p0", "p1"]), tmp_path)) == ["p0", "p1"]
        assert prompts(opened(parquet(path, prompt=["p2", "p3"]), tmp_path)) == ["p2", "p3"]

    def test_a_damaged_conversion_is_made_again(self, tmp_path: Path) -> None:
        path = parquet(tmp_path / "a.parquet", prompt=["p0", "p1"])
        opened(path, tmp_path)
        (lines,) = (tmp_path / "cache" / "lines").glob("*.jsonl")
        lines.write_text(lines.read_text().replace("p1", "p7"))
        assert prompts(opened(path, tmp_path)) == ["p0", "p1"]


class TestIndex:
    @pytest.fixture(autouse=True)
    def keep_every_index(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jsonl_rows, "_WORTH_KEEPING", 0)

    def index(self, tmp_path: Path) -> Path:
        (path,) = (tmp_path / "cache" / "index").glob("*")
        return path

    def test_a_large_file_is_looked_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "a.jsonl").write_text(as_lines(ROWS))
        opened(tmp_path / "a.jsonl", tmp_path)
        monkeypatch.setattr(jsonl_rows, "_look", None)
        assert prompts(opened(tmp_path / "a.jsonl", tmp_path)) == ["p0", "p1", "p2", "p3"]

    def test_other_content_or_other_columns_are_looked_at_again(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text(as_lines(ROWS))
        opened(tmp_path / "a.jsonl", tmp_path)
        assert "line 1" in refusal(tmp_path / "a.jsonl", tmp_path, prompt_column="n")
        (tmp_path / "a.jsonl").write_text(as_lines(ROWS[::-1]))
        assert prompts(opened(tmp_path / "a.jsonl", tmp_path)) == ["p3", "p2", "p1", "p0"]

    def test_a_damaged_index_is_made_again(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text(as_lines(ROWS))
        opened(tmp_path / "a.jsonl", tmp_path)
        path = self.index(tmp_path)
        whole = path.read_bytes()
        path.write_bytes(whole[:-30] + b"\x01" + whole[-29:])
        assert prompts(opened(tmp_path / "a.jsonl", tmp_path)) == ["p0", "p1", "p2", "p3"]
        assert path.read_bytes() == whole
