"""Savers as real processes on a real disk: killed between any two system calls, replaced, or two at a time."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from kintsugi.checkpoint.store import Checkpoint, latest, load_checkpoint, save_checkpoint
from kintsugi.errors import RefusedError, StorageFull
from kintsugi.runtime.disk import SYSTEM_DISK, Disk, SystemDisk, SystemFile
from tests.unit.conftest import SmallDisk


def save_step(step: int, *, folder: Path, disk: Disk = SYSTEM_DISK, size: int = 50) -> Checkpoint:
    weights = {"w": torch.full((size,), float(step))}
    return save_checkpoint(
        folder,
        step=step,
        stage="grpo",
        state=weights,
        extra={"step": step},
        model_files=iter([("config.json", b"{}"), ("model.safetensors", save(weights))]),
        keep=2,
        disk=disk,
    )


def is_good(checkpoint: Checkpoint | None, *, steps: tuple[int, ...]) -> bool:
    assert checkpoint is not None and checkpoint.step in steps
    state, extra = load_checkpoint(checkpoint.path)
    weights = torch.empty(state.places["w"].shape)
    state.read({"w": weights})
    return extra == {"step": checkpoint.step} and set(weights.tolist()) == {float(checkpoint.step)}


class WatchedDisk(SystemDisk):
    """The machine's disk; `before` is called with the number of every operation that is about to happen."""

    def __init__(self, before: Callable[[int], None]) -> None:
        self.num_operations = 0
        self._before = before

    def count(self) -> None:
        self.num_operations += 1
        self._before(self.num_operations)

    def open(self, path: Path, *, create: bool = False) -> SystemFile:
        self.count()
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return WatchedFile(os.open(path, flags, 0o644), disk=self)

    def open_to_read(self, path: Path, *, uncached: bool = False) -> SystemFile:
        self.count()
        return super().open_to_read(path, uncached=uncached)

    def read(self, path: Path) -> bytes:
        self.count()
        return super().read(path)

    def list(self, folder: Path) -> list[str]:
        self.count()
        return super().list(folder)

    def mkdir(self, folder: Path) -> None:
        self.count()
        super().mkdir(folder)

    def rename(self, source: Path, target: Path) -> None:
        self.count()
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self.count()
        super().remove(path)

    def sync_folder(self, folder: Path) -> None:
        self.count()
        super().sync_folder(folder)


class WatchedFile(SystemFile):
    def __init__(self, descriptor: int, *, disk: WatchedDisk) -> None:
        super().__init__(descriptor)
        self._disk = disk

    def pwrite(self, data: bytes | memoryview, *, offset: int) -> None:
        """In two halves, so that a kill may come in the middle of a file."""
        half = len(data) // 2
        for part, place in ((data[:half], offset), (data[half:], offset + half)):
            self._disk.count()
            super().pwrite(part, offset=place)

    def sync(self) -> None:
        self._disk.count()
        super().sync()

    def lock(self) -> None:
        self._disk.count()
        super().lock()


def in_a_process(action: Callable[[], object]) -> int:
    """Run it in a forked child; gives how that ended: 0, or minus the signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def kill_at(number: int) -> Callable[[int], None]:
    def before(operation: int) -> None:
        if operation == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return before


def test_a_saver_killed_at_any_operation_leaves_a_good_checkpoint_and_the_next_saves_the_same_step(
    tmp_path: Path,
) -> None:
    for step in (1, 2):
        save_step(step, folder=tmp_path / "before")
    num_killed = 0
    while True:
        folder = tmp_path / str(num_killed)
        shutil.copytree(tmp_path / "before", folder)
        disk = WatchedDisk(kill_at(num_killed + 1))
        ended = in_a_process(lambda disk=disk, folder=folder: save_step(3, folder=folder, disk=disk))  # type: ignore[misc]
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        assert is_good(latest(folder), steps=(2, 3)), f"operation {num_killed + 1}"
        again = save_step(3, folder=folder)
        assert again == latest(folder) and is_good(again, steps=(3,)), f"operation {num_killed + 1}"
        assert sorted(os.listdir(folder)) == [".lock", "step-000002", "step-000003"]
        num_killed += 1
    assert num_killed > 30


def test_nothing_of_a_living_saver_is_touched_and_the_other_is_told_at_once(tmp_path: Path) -> None:
    """Tried at every operation of the first one that it does while it holds the folder."""
    refused = []

    def save_too(operation: int) -> None:
        if operation > 3:
            with pytest.raises(RefusedError, match="another process is saving into"):
                save_step(3, folder=tmp_path)
            refused.append(operation)

    saved = save_step(3, folder=tmp_path, disk=WatchedDisk(save_too))
    assert len(refused) > 10 and is_good(saved, steps=(3,))
    assert save_step(3, folder=tmp_path) == saved


def test_a_save_for_which_the_disk_is_too_small_fails_loudly_wherever_it_runs_full(
    small_disk: SmallDisk,
) -> None:
    folder = small_disk.folder / "checkpoints"
    saved = save_step(1, folder=folder)
    outcomes = []
    for room in range(0, 24 * 4096, 4096):
        small_disk.fill(room=room)
        try:
            saved = save_step(2, folder=folder, size=5_000)
            outcomes.append("saved")
        except StorageFull as error:
            outcomes.append(str(error))
        assert latest(folder) == saved and is_good(saved, steps=(1, 2))
        assert [name for name in os.listdir(folder) if name.startswith(".")] == [".lock"]
    failed = [outcome for outcome in outcomes if outcome != "saved"]
    assert len(failed) > 5 and outcomes == [*failed, *["saved"] * (len(outcomes) - len(failed))]
    assert all("No space left on device" in each and str(folder) in each for each in failed)
    assert len(set(failed)) > 2, "always the same file ran into the full disk"
