from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kintsugi.telemetry.jsonl_log import (
    MOST_READ,
    NUM_OLD,
    LineFile,
    LineTail,
    lines_backwards,
    lines_between,
    old_path,
    paths_of,
)


def test_a_bounded_file_is_put_aside_and_only_some_old_ones_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "agent-0.jsonl"
    file = LineFile(path, largest_size=10)
    for number in range(9):
        file.append(b"line %d\n" % number)
    file.close()
    assert [each.read_bytes() for each in paths_of(path)] == [b"line %d\n" % number for number in range(5, 9)]
    assert len(list(tmp_path.iterdir())) == 1 + NUM_OLD


def test_a_bounded_file_grows_on_until_the_old_ones_hold_the_time_that_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "agent-0.jsonl"
    file = LineFile(path, largest_size=10, kept_s=3 * NUM_OLD, most_size=1000)
    for number in range(8):
        file.append(b"line %d\n" % number)
    assert old_path(path, 1).read_bytes() == b"line 0\n", "before the first one nothing is lost"
    assert path.read_bytes().count(b"\n") == 7
    ago_s = path.stat().st_mtime - 3.0
    os.utime(old_path(path, 1), (ago_s, ago_s))
    file.append(b"line 8\n")
    file.close()
    assert [each.read_bytes().count(b"\n") for each in paths_of(path)] == [1, 7, 1]


def test_a_bounded_file_does_not_grow_without_end_whatever_time_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "agent-0.jsonl"
    file = LineFile(path, largest_size=10, kept_s=1e9, most_size=30)
    for number in range(20):
        file.append(b"line %d\n" % (number % 10))
    file.close()
    assert [each.stat().st_size for each in paths_of(path)] == [28, 28, 28, 21]


def test_who_follows_a_file_reads_its_end_before_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "agent-0.jsonl"
    file, tail = LineFile(path, largest_size=10), LineTail(path)
    file.append(b"first\n")
    assert tail.lines() == [b"first"]
    file.append(b"second\n")
    assert old_path(path, 1).read_bytes() == b"first\n"
    file.append(b"3\n")
    assert tail.lines() == [b"second", b"3"]
    assert tail.lines() == []
    tail.close()
    file.close()


def test_a_file_that_somebody_removed_is_written_anew_and_followed_on(tmp_path: Path) -> None:
    path = tmp_path / "figures" / "agent-0.jsonl"
    file, tail = LineFile(path), LineTail(path)
    file.append(b"first\n")
    assert tail.lines() == [b"first"]
    shutil.rmtree(path.parent)
    file.append(b"second\n")
    assert path.read_bytes() == b"second\n"
    assert tail.lines() == [b"second"]
    tail.close()
    file.close()


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"whole\nhal")
    tail = LineTail(path)
    assert tail.lines() == [b"whole"]
    path.write_bytes(b"whole\nhalf\n")
    assert tail.lines() == [b"half"]
    tail.close()


def test_a_torn_end_does_not_swallow_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"whole\nto")
    file = LineFile(path)
    file.append(b"next\n")
    file.close()
    assert path.read_bytes().split(b"\n") == [b"whole", b"to", b"next", b""]


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"first\n" + b"x" * (2 * MOST_READ) + b"\nlast\n")
    tail = LineTail(path)
    assert tail.lines() == [b"first"]
    assert [line.strip(b"x") for line in tail.lines()] == [b"", b"last"]
    tail.close()


def test_zeros_that_a_crash_left_in_the_middle_hide_nothing_that_follows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"before\n" + bytes(100))
    file, tail = LineFile(path), LineTail(path)
    assert tail.lines() == [b"before"]
    file.append(b"after\n")
    assert tail.lines() == [b"", b"after"]
    assert tail.offset == path.stat().st_size
    file.close()
    tail.close()


def test_following_can_go_on_where_somebody_stopped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"one\ntwo\n")
    tail = LineTail(path, offset=4)
    assert (tail.lines(), tail.offset) == ([b"two"], 8)
    tail.close()


def test_a_disk_that_refuses_is_told_to_who_writes(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        LineFile(tmp_path / "folder").append(b"line\n")


CONTENTS = [
    b"",
    b"no end",
    b"\n",
    b"one\n",
    b"one\ntwo\nthree",
    b"\n\n\n",
    b"a\n" * 100_000,
    b"x" * 300_000 + b"\n" + b"y" * 10 + b"\n" + b"z" * 70_000,
    bytes(200_000) + b"\nlast\n",
]


@pytest.mark.parametrize("content", CONTENTS, ids=range(len(CONTENTS)))
def test_lines_are_read_backwards_as_they_are_read_forwards(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(content)
    forwards = [(offset, line.removesuffix(b"\n")) for offset, line in lines_between(path)]
    assert forwards == list(lines_backwards(path))[::-1]
    assert [line for _, line in forwards] == content.split(b"\n")[:-1]
    assert all(content[offset : offset + len(line)] == line for offset, line in forwards)


def test_a_line_that_is_far_too_long_costs_that_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kintsugi.telemetry.jsonl_log.LONGEST_LINE", 1000)
    path = tmp_path / "lines"
    path.write_bytes(b"one\n" + b"x" * 500_000 + b"\ntwo\n")
    assert [line for _, line in lines_between(path)] == [b"one\n", b"two\n"]
    backwards = list(lines_backwards(path))
    assert (backwards[0], backwards[-1]) == ((500_005, b"two"), (0, b"one"))
    assert len(backwards[1][1]) < 500_000
