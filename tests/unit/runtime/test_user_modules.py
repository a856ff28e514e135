"""Import of user code by dotted path and from files, and the messages when it fails."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from kintsugi.errors import ConfigError
from kintsugi.rollout.rewards.builtin import exact_answer
from kintsugi.runtime.user_modules import function_name, import_function, scratch_folder


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_a_function_is_found_by_its_dotted_path() -> None:
    assert import_function("kintsugi.rollout.rewards.exact_answer") is exact_answer


def test_a_function_in_a_file_is_found_with_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_the_rewards.py").write_text("WEIGHT = 3.0\n")
    file = tmp_path / "rewards.py"
    file.write_text("from beside_the_rewards import WEIGHT\ndef three(completions): return [WEIGHT]\n")
    function = import_function(f"{file}:three")
    assert function([""]) == [3.0]
    assert import_function(f"{file}:three") is function


def test_files_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rewards.py").write_text(f"def which(completions): return {name!r}\n")
    assert [import_function(f"{tmp_path}/{name}/rewards.py:which")([]) for name in "ab"] == ["a", "b"]


def test_the_name_of_a_reward_is_that_of_its_function() -> None:
    assert function_name("package.module.right") == function_name("some/rewards.py:right") == "right"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("right", "expected dotted paths like `package.module.function` or files like `rewards.py:function`"),
        ("no_such_module_here.right", "no_such_module_here gives ModuleNotFoundError.*name its file"),
        (
            "kintsugi.rollout.rewards.wrong",
            "expected a function 'wrong' in kintsugi.rollout.rewards, found nothing",
        ),
        ("kintsugi.runtime.user_modules.IN_A_FILE", "found str"),
        ("nowhere/rewards.py:right", "nowhere/rewards.py gives FileNotFoundError: there is no such file"),
    ],
)
def test_a_path_that_leads_nowhere_is_named_with_module_and_reason(path: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"`algorithm.reward`.*{expected}"):
        import_function(path)


def test_a_trial_leaves_nothing_on_the_search_path() -> None:
    before = list(sys.path)
    with scratch_folder() as folder:
        (folder / "rewards.py").write_text("def right(completions): return []\n")
        import_function(f"{folder}/rewards.py:right")
        assert str(folder) in sys.path
    assert sys.path == before and not folder.exists()


def test_a_file_that_breaks_is_named_with_what_it_raised_and_tried_again_next_time(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("raise RuntimeError('no licence')\n")
    with pytest.raises(ConfigError, match="RuntimeError: no licence"):
        import_function(f"{file}:right")
    file.write_text("def right(completions): return []  # This is another length.\n")
    assert import_function(f"{file}:right")([]) == []


def test_a_file_that_exits_when_it_is_imported_does_not_end_who_imports_it(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match="SystemExit: 0"):
        import_function(f"{file}:right")


PACKAGE = Path(__file__).parents[3] / "kintsugi"


def test_a_module_of_the_current_folder_is_found_after_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `msgspec.py` that lies about must not be taken for the library."""
    (tmp_path / "rewards_lying_about.py").write_text("def right(completions): return [1.0]\n")
    monkeypatch.chdir(tmp_path)
    assert import_function("rewards_lying_about.right")([]) == [1.0]
    assert sys.path[-1] == str(tmp_path) and sys.path[0] != str(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="the rule is root's")
@pytest.mark.parametrize(("mode", "owner"), [(0o777, 0), (0o1777, 0), (0o770, 0), (0o755, 65534)])
def test_root_imports_nothing_from_a_folder_that_others_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, owner: int
) -> None:
    (tmp_path / "planted_rewards.py").write_text("raise SystemError('it was executed')\n")
    tmp_path.chmod(mode)
    os.chown(tmp_path, owner, -1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"as root nothing is imported from .*, which other users can write"
    ):
        import_function("planted_rewards.right")
    assert str(tmp_path) not in sys.path


def test_every_process_of_the_package_is_started_without_the_current_folder_on_its_path() -> None:
    """`python -m` and `python -c` put it first; `-P` and `-I` do not."""
    call = re.compile(r"(?:sys\.executable\)?|python\S*),\s*\*?(?:flags|\"-(\w)\"),")
    found = [
        (path.name, flag)
        for path in PACKAGE.rglob("*.py")
        for flag in call.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(found) >= 15
    assert [each for each in found if each[1] not in ("P", "I", "s", "")] == []
