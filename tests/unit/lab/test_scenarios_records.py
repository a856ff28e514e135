from __future__ import annotations

from pathlib import Path

import pytest

from kintsugi.errors import StorageError, UserError
from kintsugi.lab.scenarios.records import check_writable, write_json


def test_results_replace_what_was_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "runs.json"
    write_json({"runs": 1}, path)
    write_json({"runs": 2}, path)
    assert path.read_text() == '{\n  "runs": 2\n}\n'
    assert [each.name for each in path.parent.iterdir()] == ["runs.json"]


def test_where_nothing_can_be_written_it_is_said_before_and_after() -> None:
    nowhere = Path("/proc/nope/x.json")
    with pytest.raises(UserError, match=r"/proc/nope/x\.json: the results can not be written there"):
        check_writable(nowhere)
    with pytest.raises(StorageError, match=r"could not write /proc/nope/x\.json"):
        write_json({}, nowhere)


def test_a_folder_is_no_file_for_results(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a file"):
        check_writable(tmp_path)


def test_to_look_whether_results_can_be_written_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    check_writable(path)
    assert list(tmp_path.iterdir()) == []
    path.write_text("before")
    check_writable(path)
    assert path.read_text() == "before"
