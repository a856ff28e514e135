"""Files that the hosts of a session get: kept by its first host manager, whatever is edited afterwards."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kintsugi.cluster import run_files
from kintsugi.cluster.run_files import RunFiles, remove_kept_files
from kintsugi.config.schema import AlgorithmSection, Config, ModelSection
from kintsugi.errors import ConfigError, StorageError
from kintsugi.run_folder.layout import RunFolder

OLD, NEW = "def brevity(): return 0.0\n", "def brevity(): return 1.0\n"


class Run:
    """A run whose reward is in a file, and whose model is in a folder."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.reward, self.model = folder / "run", folder / "rewards.py", folder / "model"
        self.run_dir.mkdir(mode=0o700)
        self.model.mkdir()
        self.reward.write_text(OLD)
        (self.model / "tokenizer.json").write_text("{}")
        (self.model / "weights").write_bytes(b"w" * 1000)
        algorithm = AlgorithmSection(reward=(f"{self.reward}:brevity",))
        self.config = Config(name="a", algorithm=algorithm, model=ModelSection(path=str(self.model)))

    def files(self, job: str = "job") -> RunFiles:
        """Files as the next host manager has them."""
        return RunFiles(self.config, run_dir=self.run_dir, job=job)

    def kept(self) -> set[str]:
        folder = RunFolder(self.run_dir).host_files_folder
        return {path.name for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def content(files: RunFiles, name: str) -> bytes:
    (file,) = [each for each in files.files if Path(each.path).name == name]
    found, size = files.read(file.digest, offset=0, size=1 << 20)
    assert size == file.size == len(found)
    return found


def test_hosts_that_are_ordered_after_an_edit_get_the_code_that_all_others_have(run: Run) -> None:
    first = run.files()
    run.reward.write_text(NEW)
    (run.reward.parent / "new_neighbour.py").write_text("")
    assert content(first, "rewards.py") == OLD.encode(), "under the same host manager"
    successor = run.files()
    assert successor.files == first.files and content(successor, "rewards.py") == OLD.encode()
    assert (successor.imports, successor.python_path) == (first.imports, first.python_path)
    run.reward.unlink()
    assert content(run.files(), "rewards.py") == OLD.encode()


def test_a_resumed_run_takes_the_code_as_it_is_then(run: Run) -> None:
    run.files("stopped in order")
    remove_kept_files(run.run_dir)
    assert not RunFolder(run.run_dir).host_files_folder.exists()
    run.files("killed with everything")
    run.reward.write_text(NEW)
    assert content(run.files("resumed"), "rewards.py") == NEW.encode()


def test_large_files_of_a_model_stay_in_their_place_and_small_ones_are_copied(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "MOST_COPIED_FILE_BYTES", 100)
    files = run.files()
    assert run.kept() == {"index.json", "config.yaml", "rewards.py", "tokenizer.json"}
    assert content(files, "weights") == b"w" * 1000
    (run.model / "tokenizer.json").write_text("changed")
    assert content(run.files(), "tokenizer.json") == b"{}"


def test_copies_of_models_and_data_are_bounded_together_and_code_is_always_copied(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "MOST_COPIED_BYTES", 1000)
    run.files()  # The tokenizer has two bytes and comes first.
    assert run.kept() == {"index.json", "config.yaml", "rewards.py", "tokenizer.json"}


def test_files_that_lie_in_the_run_folder_are_not_copied_again(run: Run) -> None:
    stream = RunFolder(run.run_dir).streams_folder / "rows.jsonl"
    stream.parent.mkdir()
    stream.write_text("{}\n")
    RunFolder(run.run_dir).data_file.write_bytes(msgspec.json.encode({"file": str(stream)}))
    assert content(run.files(), "rows.jsonl") == b"{}\n"
    assert "rows.jsonl" not in run.kept() and "data.json" in run.kept()


def test_kept_files_are_readable_by_their_owner_only(run: Run) -> None:
    run.files()
    folder = RunFolder(run.run_dir).host_files_folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o600}


def test_a_file_that_can_not_be_read_is_named_and_nothing_is_left(run: Run) -> None:
    run.config = msgspec.structs.replace(run.config, model=ModelSection(path=str(run.model / "absent")))
    with pytest.raises(ConfigError, match="absent: expected a file to copy to the hosts"):
        run.files()
    assert list(run.run_dir.iterdir()) == []


def test_kept_files_that_can_not_be_read_are_not_replaced_by_new_ones(run: Run) -> None:
    run.files()
    index = RunFolder(run.run_dir).host_files_index_file
    index.unlink()
    index.mkdir()
    with pytest.raises(StorageError, match=r"could not read .*index.json"):
        run.files()
    assert "rewards.py" in run.kept()
