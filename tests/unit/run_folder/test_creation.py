"""Creation of run folders."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kintsugi.config.recipe import given, load_config
from kintsugi.config.schema import AlgorithmSection, Config
from kintsugi.errors import ConfigError
from kintsugi.run_folder.creation import create_run_dir, make_run_folder, next_run_dir


def test_run_folders_are_numbered_from_the_highest_on(tmp_path: Path) -> None:
    assert next_run_dir("mine", folder=tmp_path) == tmp_path / "mine-1"
    for name in ("mine-1", "mine-12", "mine-old", "mine"):
        (tmp_path / name).mkdir()
    assert next_run_dir("mine", folder=tmp_path) == tmp_path / "mine-13"


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    create_run_dir(tmp_path / "a" / "b")
    with pytest.raises(ConfigError, match="does not exist yet"):
        create_run_dir(tmp_path / "a" / "b")


def test_captured_rewards_are_copied_into_the_folder_and_named_by_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rewards = tmp_path / "scratch.py"
    rewards.write_text("def brevity(completions): ...\n")
    algorithm = AlgorithmSection(reward=(f"{rewards}:brevity * 0.5", "a.module.function"))
    config, folder = make_run_folder(given(Config(name="mine", algorithm=algorithm)), rewards=rewards)
    assert folder == Path("runs/mine-1")
    copied = folder.resolve() / "rewards.py"
    assert config.algorithm.reward == (f"{copied}:brevity * 0.5", "a.module.function")
    assert copied.read_text() == rewards.read_text()
    assert config.run_dir == str(folder.resolve())
    assert load_config(folder / "config.yaml") == config


def test_a_run_without_captured_rewards_has_no_file_of_rewards(tmp_path: Path) -> None:
    config = Config(name="mine", run_dir=str(tmp_path / "run"))
    _, folder = make_run_folder(given(config), rewards=tmp_path / "not there.py")
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "origins.json"]
    origins = msgspec.json.decode((folder / "origins.json").read_bytes())
    assert origins["name"] != "default"
