"""Copies of checkpoints: whole or unfinished, pruned as the run's own, taken back, and never another run's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import xxhash

from kintsugi.checkpoint.copies import CheckpointCopies, open_target
from kintsugi.checkpoint.manifest import MANIFEST_FILE, Contents, StoredFile, encode_manifest
from kintsugi.checkpoint.store import verify
from kintsugi.errors import ConfigError, StorageError
from kintsugi.run_folder.layout import RunFolder

fsspec = pytest.importorskip("fsspec")


def write_checkpoint(run_dir: Path, step: int, content: bytes = b"weights") -> Path:
    """Write a checkpoint of two files."""
    folder = RunFolder(run_dir).checkpoints_folder / f"step-{step:06d}"
    folder.mkdir(parents=True)
    files = {"model.safetensors": content * 1000, "trainer.json": b"{}"}
    stored = {}
    for name, data in files.items():
        (folder / name).write_bytes(data)
        stored[name] = StoredFile(len(data), xxhash.xxh3_64_hexdigest(data))
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(Contents(step, "grpo", stored)))
    return folder


@pytest.fixture(params=["folder", "memory"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "shared")
        return
    name = f"memory://{uuid4().hex}"
    yield name
    fsspec.filesystem("memory").rm(name, recursive=True)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "grpo-1"
    folder.mkdir(parents=True)
    return folder


def names_in(target: str, run_dir: Path) -> list[str]:
    system, path = open_target(target)
    found = system.ls(f"{path}/{run_dir.name}", detail=False)
    return sorted(name for each in found if (name := each.rpartition("/")[2]).startswith("step-"))


def test_finished_checkpoints_are_copied_once_and_pruned_as_the_run_prunes_its_own(
    target: str, run_dir: Path
) -> None:
    copies = CheckpointCopies(target, run_dir=run_dir)
    first = write_checkpoint(run_dir, 5)
    write_checkpoint(run_dir, 10)
    assert copies.copy_missing() == ["step-000005", "step-000010"]
    assert copies.copy_missing() == []
    for path in (*first.iterdir(), first):
        path.unlink() if path.is_file() else path.rmdir()
    write_checkpoint(run_dir, 15)
    assert copies.copy_missing() == ["step-000015"]
    assert names_in(target, run_dir) == ["step-000010", "step-000015"]


def test_a_copy_without_its_manifest_is_made_again(target: str, run_dir: Path) -> None:
    copies = CheckpointCopies(target, run_dir=run_dir)
    write_checkpoint(run_dir, 5)
    copies.copy_missing()
    system, path = open_target(target)
    system.rm_file(f"{path}/{run_dir.name}/step-000005/{MANIFEST_FILE}")
    assert copies.copy_missing() == ["step-000005"]


def test_the_newest_whole_copy_is_taken_back_and_verified(target: str, run_dir: Path) -> None:
    for step, content in ((5, b"old"), (10, b"new")):
        write_checkpoint(run_dir, step, content)
    CheckpointCopies(target, run_dir=run_dir).copy_missing()
    lost = run_dir.parent.parent / "other" / run_dir.name
    lost.mkdir(parents=True)
    taken = CheckpointCopies(target, run_dir=lost).take_back(keep=2)
    assert taken is not None and (taken.step, taken.path.name) == (10, "step-000010")
    assert verify(taken.path).digest == taken.digest
    assert CheckpointCopies(target, run_dir=lost).copy_missing() == [], (
        "it goes on with the copies of the run"
    )


def test_a_damaged_copy_is_passed_over_and_no_copy_is_none(target: str, run_dir: Path) -> None:
    assert CheckpointCopies(target, run_dir=run_dir).take_back(keep=2) is None
    for step in (5, 10):
        write_checkpoint(run_dir, step)
    CheckpointCopies(target, run_dir=run_dir).copy_missing()
    system, path = open_target(target)
    system.pipe_file(f"{path}/{run_dir.name}/step-000010/model.safetensors", b"damaged")
    lost = run_dir.parent.parent / "other" / run_dir.name
    lost.mkdir(parents=True)
    taken = CheckpointCopies(target, run_dir=lost).take_back(keep=2)
    assert taken is not None and taken.step == 5


def test_another_run_of_the_same_name_is_refused_and_its_copies_stay(target: str, run_dir: Path) -> None:
    write_checkpoint(run_dir, 5)
    CheckpointCopies(target, run_dir=run_dir).copy_missing()
    other = run_dir.parent.parent / "elsewhere" / run_dir.name
    write_checkpoint(other, 7)
    with pytest.raises(StorageError, match="another run of this name"):
        CheckpointCopies(target, run_dir=other).copy_missing()
    assert names_in(target, run_dir) == ["step-000005"]


def test_a_file_that_arrives_with_other_bytes_is_an_error_and_leaves_no_finished_copy(
    run_dir: Path, tmp_path: Path
) -> None:
    copies = CheckpointCopies(str(tmp_path / "shared"), run_dir=run_dir)
    folder = write_checkpoint(run_dir, 5)
    (folder / "model.safetensors").write_bytes(b"changed on this disk since it was saved")
    with pytest.raises(StorageError, match=r"model.safetensors: expected 7000 bytes"):
        copies.copy_missing()
    assert not (tmp_path / "shared" / run_dir.name / "step-000005" / MANIFEST_FILE).exists()


@pytest.mark.parametrize("url", ["nosuch://bucket/runs", "s3://bucket/runs"])
def test_a_store_that_can_not_be_used_here_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.copy_to"):
        open_target(url)
