from __future__ import annotations

from pathlib import Path

import pytest

from kintsugi.errors import StorageError
from kintsugi.lab.fragile.storage import latest_folder, write_checkpoint, write_without_retry

FILES = (("optimizer", b"o" * 100_000), ("model", b"m" * 100_000))


def full_disk(folder: Path, name: str) -> Path:
    """A folder in which one file has no room."""
    folder.mkdir(parents=True)
    (folder / name).symlink_to("/dev/full")
    return folder


def test_odd_and_even_steps_have_folders_of_their_own(tmp_path: Path) -> None:
    assert latest_folder(tmp_path, step=10).name == "step_10_even"
    assert latest_folder(tmp_path, step=11).name == "step_11_odd"


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        write_checkpoint(latest_folder(tmp_path, step=step), FILES, timeout_s=5.0)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step_10_even", "step_11_odd"]
    assert (latest_folder(tmp_path, step=11) / "model").read_bytes() == FILES[1][1]


def test_a_full_disk_is_waited_for_and_leaves_a_part(tmp_path: Path) -> None:
    folder = full_disk(latest_folder(tmp_path, step=10), "model")
    with pytest.raises(StorageError, match="Write timeout"):
        write_checkpoint(folder, FILES, timeout_s=0.1)
    assert (folder / "optimizer").stat().st_size == 100_000


def test_plain_training_says_at_once_that_the_disk_is_full(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        write_without_retry(full_disk(tmp_path / "checkpoint", "model"), FILES)
