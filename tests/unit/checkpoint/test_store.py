"""Whatever happens while a checkpoint is saved, a good one can be loaded afterwards, and a bad one never is."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save

from kintsugi.checkpoint.manifest import Contents, decode_manifest
from kintsugi.checkpoint.store import Checkpoint, latest, load_checkpoint, save_checkpoint, verify
from kintsugi.errors import StorageError, StorageFull
from kintsugi.model.tensor_file import torch_dtype
from kintsugi.runtime.disk import Disk, SystemDisk
from kintsugi.simulation.memory_disk import Crashed, MemoryDisk, MemoryFile

FOLDER = Path("/run/checkpoints")
EXTRA = {"updates": 7, "random": [1, 2, 3], "nested": {"lr": 0.5}}


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"weights": torch.full((6,), float(step)), "moments": torch.arange(12.0).view(2, 6) * step}


def write_file(path: Path, data: bytes, *, disk: Disk) -> None:
    file = disk.open(path, create=True)
    file.pwrite(data, offset=0)
    file.close()


def model_files(step: int) -> Iterator[tuple[str, bytes]]:
    yield "config.json", b'{"model_type": "llama"}'
    yield "model.safetensors", save({"w": torch.full((4,), step)})


def save_step(
    step: int,
    *,
    disk: Disk,
    folder: Path = FOLDER,
    keep: int = 2,
    salt: int = 0,
    best_steps: tuple[int, ...] = (),
) -> Checkpoint:
    return save_checkpoint(
        folder,
        step=step,
        stage="grpo",
        state=state_of(step + salt),
        extra=EXTRA,
        model_files=model_files(step + salt),
        keep=keep,
        best_steps=best_steps,
        disk=disk,
    )


def names(folder: Path = FOLDER, *, disk: Disk) -> list[str]:
    """What is in the folder, besides its lock."""
    return [name for name in disk.list(folder) if name != ".lock"]


def loads_as(checkpoint: Checkpoint | None, step: int, *, disk: Disk) -> bool:
    assert checkpoint is not None and checkpoint.step == step
    state, extra = load_whole(checkpoint.path, disk=disk)
    return all(torch.equal(state[name], tensor) for name, tensor in state_of(step).items()) and extra == EXTRA


def load_whole(path: Path, *, disk: Disk) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The saved tensors in memory of their own, and the extra."""
    state, extra = load_checkpoint(path, disk=disk)
    tensors = {
        name: torch.empty(place.shape, dtype=torch_dtype(place)) for name, place in state.places.items()
    }
    state.read(tensors)
    return tensors, extra


def flip(path: Path, place: int, *, disk: Disk) -> None:
    file = disk.open(path)
    byte = file.pread(1, offset=place)[0]
    file.pwrite(bytes([byte ^ 1]), offset=place)
    file.close()


@pytest.fixture(params=["memory", "system"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Disk, Path]:
    return (MemoryDisk(), FOLDER) if request.param == "memory" else (SystemDisk(), tmp_path / "checkpoints")


def test_a_checkpoint_is_loaded_as_it_was_saved(place: tuple[Disk, Path]) -> None:
    disk, folder = place
    saved = save_step(3, disk=disk, folder=folder)
    assert saved.path == folder / "step-000003" and saved.stage == "grpo"
    assert latest(folder, disk=disk) == saved == verify(saved.path, disk=disk)
    assert loads_as(saved, 3, disk=disk)
    assert names(folder, disk=disk) == ["step-000003"]


def test_the_folder_is_a_hugging_face_folder_with_the_trainers_state_beside(tmp_path: Path) -> None:
    saved = save_step(1, disk=SystemDisk(), folder=tmp_path)
    assert torch.equal(load_file(saved.path / "model.safetensors")["w"], torch.full((4,), 1))
    assert torch.equal(load_file(saved.path / "trainer.safetensors")["weights"], state_of(1)["weights"])


@pytest.mark.parametrize(("ahead_mib", "unfinished"), [(1, 2), (5, 4), (100, 10)])
def test_tensors_have_been_read_while_so_many_bytes_are_not_at_the_device(
    ahead_mib: int, unfinished: int
) -> None:
    disk = MemoryDisk()
    seen: list[int] = []
    synced: list[int] = []

    def note() -> None:
        seen.append(disk.operations.count("start_flush") - disk.operations.count("finish_flush"))
        synced.append(disk.operations.count("sync"))

    save_checkpoint(
        FOLDER,
        step=1,
        stage="grpo",
        state={f"part{index}": torch.full((1 << 19,), float(index)) for index in range(6)},
        extra=EXTRA,
        model_files=model_files(1),
        keep=1,
        disk=disk,
        on_read=note,
        ahead_bytes=ahead_mib << 20,
    )
    assert (seen, synced) == ([unfinished], [0]), "six pieces of 2 MiB and four small ones"
    assert disk.operations.count("start_flush") == disk.operations.count("finish_flush")
    assert disk.operations.count("sync") == 5, "four files, and the manifest after them"
    assert latest(FOLDER, disk=disk) is not None


def test_the_manifest_names_every_file_and_every_tensor() -> None:
    disk = MemoryDisk()
    path = save_step(3, disk=disk).path
    contents, _ = decode_manifest(disk.read(path / "manifest.json"), path=path)
    assert set(contents.files) == {"config.json", "model.safetensors", "trainer.safetensors", "trainer.json"}
    pieces = {piece.name: piece for piece in contents.files["trainer.safetensors"].pieces}
    assert pieces["moments"].shape == (2, 6) and pieces["moments"].slice == ((0, 2), (0, 6))
    assert pieces["moments"].dtype == "float32" and set(pieces["moments"].mesh) == {"dp", "tp", "pp"}
    piece = pieces["weights"]
    stored = disk.read(path / "trainer.safetensors")[piece.offset : piece.offset + piece.size]
    assert torch.equal(torch.frombuffer(bytearray(stored), dtype=torch.float32), state_of(3)["weights"])


def test_only_as_many_as_asked_for_are_kept(place: tuple[Disk, Path]) -> None:
    disk, folder = place
    for step in range(1, 6):
        save_step(step, disk=disk, folder=folder, keep=2)
    assert names(folder, disk=disk) == ["step-000004", "step-000005"]
    save_step(6, disk=disk, folder=folder, keep=1)
    assert names(folder, disk=disk) == ["step-000006"]


def test_the_same_contents_have_the_same_digest_and_are_kept_once() -> None:
    disk = MemoryDisk()
    first, second = save_step(3, disk=disk), save_step(3, disk=disk)
    assert first == second and names(FOLDER, disk=disk) == ["step-000003"]


def test_a_step_that_was_repeated_with_another_result_replaces_the_first(place: tuple[Disk, Path]) -> None:
    disk, folder = place
    save_step(2, disk=disk, folder=folder)
    save_step(3, disk=disk, folder=folder, salt=5)
    again = save_step(3, disk=disk, folder=folder)
    assert names(folder, disk=disk) == ["step-000002", "step-000003.1"]
    assert latest(folder, disk=disk) == again and loads_as(again, 3, disk=disk)


def test_checkpoints_of_a_history_that_was_rolled_back_are_not_chosen() -> None:
    disk = MemoryDisk()
    for step in (2, 4, 6):
        save_step(step, disk=disk, keep=3)
    save_step(3, disk=disk, keep=3)
    assert names(FOLDER, disk=disk) == ["step-000002", "step-000003"]


def test_a_checkpoint_of_steps_that_were_undone_is_not_the_latest() -> None:
    disk = MemoryDisk()
    saved = {step: save_step(step, disk=disk, keep=3) for step in (2, 4)}
    assert latest(FOLDER, at_most=3, disk=disk) == saved[2]
    assert latest(FOLDER, at_most=4, disk=disk) == saved[4]
    assert latest(FOLDER, at_most=0, disk=disk) is None


def test_no_folder_and_an_empty_folder_have_no_latest() -> None:
    disk = MemoryDisk()
    assert latest(FOLDER, disk=disk) is None
    disk.mkdir(FOLDER)
    assert latest(FOLDER, disk=disk) is None


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "trainer.safetensors", "trainer.json", "manifest.json"]
)
def test_damage_to_any_byte_of_any_file_is_reported_and_the_previous_one_chosen(name: str) -> None:
    disk = MemoryDisk()
    save_step(2, disk=disk)
    path = save_step(3, disk=disk).path
    for place in range(len(disk.read(path / name))):
        flip(path / name, place, disk=disk)
        damaged: list[tuple[Path, str]] = []
        chosen = latest(FOLDER, disk=disk, report=lambda path, why, to=damaged: to.append((path, why)))  # type: ignore[misc]
        assert chosen is not None and chosen.step == 2, f"byte {place}"
        ((where, reason),) = damaged
        assert where == path and name in reason
        flip(path / name, place, disk=disk)
    assert loads_as(latest(FOLDER, disk=disk), 3, disk=disk)


@pytest.mark.parametrize("name", ["config.json", "trainer.safetensors", "manifest.json"])
def test_a_missing_or_cut_file_is_damage(name: str) -> None:
    disk = MemoryDisk()
    path = save_step(3, disk=disk).path
    disk.open(path / name).truncate(5)
    with pytest.raises(StorageError, match=name):
        verify(path, disk=disk)
    disk.remove(path / name)
    with pytest.raises(StorageError, match=name):
        verify(path, disk=disk)


def test_damaged_state_is_never_loaded() -> None:
    disk = MemoryDisk()
    path = save_step(3, disk=disk).path
    flip(path / "trainer.safetensors", 200, disk=disk)
    with pytest.raises(StorageError, match=r"trainer\.safetensors is damaged on disk"):
        load_whole(path, disk=disk)


def test_damage_is_logged_when_nobody_asked_for_the_report(caplog: pytest.LogCaptureFixture) -> None:
    disk = MemoryDisk()
    good = save_step(3, disk=disk)
    flip(save_step(4, disk=disk).path / "config.json", 0, disk=disk)
    assert latest(FOLDER, disk=disk) == good
    assert "config.json is damaged" in caplog.text


def test_checkpoints_that_are_all_damaged_are_an_error_and_not_a_fresh_start() -> None:
    disk = MemoryDisk()
    for step in (3, 4):
        flip(save_step(step, disk=disk).path / "config.json", 0, disk=disk)
    with pytest.raises(StorageError, match=r"no checkpoint in .* can be read: step-000004.*step-000003"):
        latest(FOLDER, disk=disk)


def test_a_damaged_checkpoint_of_the_same_step_is_replaced() -> None:
    disk = MemoryDisk()
    flip(save_step(3, disk=disk).path / "config.json", 0, disk=disk)
    assert loads_as(save_step(3, disk=disk), 3, disk=disk)
    assert names(FOLDER, disk=disk) == ["step-000003"]


def prepared() -> MemoryDisk:
    """Two checkpoints, the older of which the next save retires, and what a killed save left."""
    disk = MemoryDisk()
    save_step(1, disk=disk)
    save_step(2, disk=disk)
    disk.mkdir(FOLDER / ".saving-step-000003")
    write_file(FOLDER / ".saving-step-000003" / "config.json", b"{", disk=disk)
    disk.sync_folder(FOLDER)
    return disk


def each_operation() -> range:
    disk = prepared()
    before = len(disk.operations)
    save_step(3, disk=disk)
    return range(before + 1, len(disk.operations) + 1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_an_error_at_any_operation_is_loud_and_leaves_a_good_checkpoint(code: int, keep: float) -> None:
    for operation in each_operation():
        disk = prepared()
        disk.fail_at(operation, code=code, keep=keep)
        with pytest.raises(StorageError, match=f"on disk: {os.strerror(code)}") as caught:
            save_step(3, disk=disk)
        name = disk.operations[operation - 1]
        assert str(FOLDER) in str(caught.value), name
        assert isinstance(caught.value, StorageFull) == (code == errno.ENOSPC), name
        found = latest(FOLDER, disk=disk)
        assert found is not None and loads_as(found, found.step, disk=disk) and found.step in (2, 3), name
        assert "step-000002" in names(disk=disk), name
        again = save_step(3, disk=disk)
        assert again.step == 3 and loads_as(again, 3, disk=disk), name
        assert loads_as(save_step(4, disk=disk), 4, disk=disk)
        assert names(disk=disk) == ["step-000003", "step-000004"], name


@pytest.mark.parametrize(
    "keep_names",
    [lambda _: False, lambda _: True, lambda folder: folder == FOLDER, lambda folder: folder != FOLDER],
    ids=["no names", "all names", "names of checkpoints", "names in checkpoints"],
)
@pytest.mark.parametrize(("power_cut", "torn_bytes"), [(False, 0), (True, 0), (True, 20), (True, 1 << 30)])
def test_a_crash_at_any_operation_leaves_a_good_checkpoint(
    power_cut: bool, torn_bytes: int, keep_names: Callable[[Path], bool]
) -> None:
    for operation in each_operation():
        disk = prepared()
        disk.crash_at(operation, keep=0.5)
        with pytest.raises(Crashed):
            save_step(3, disk=disk)
        name = disk.operations[operation - 1]
        disk = disk.restarted(power_cut=power_cut, torn_bytes=torn_bytes, keep_names=keep_names)
        found = latest(FOLDER, disk=disk)
        assert found is not None and loads_as(found, found.step, disk=disk) and found.step in (2, 3), name
        for entry in names(disk=disk):
            if entry.startswith("step-"):
                verify(FOLDER / entry, disk=disk)
        again = save_step(3, disk=disk)
        assert again.step == 3 and loads_as(again, 3, disk=disk), name
        assert loads_as(save_step(4, disk=disk), 4, disk=disk)
        assert names(disk=disk) == ["step-000003", "step-000004"], name


@pytest.mark.parametrize("num_saves", [1, 3])
def test_a_saved_checkpoint_survives_a_power_cut(num_saves: int) -> None:
    disk = MemoryDisk()
    for step in range(1, num_saves + 1):
        save_step(step, disk=disk)
    disk = disk.restarted(power_cut=True, torn_bytes=0)
    assert loads_as(latest(FOLDER, disk=disk), num_saves, disk=disk)


def test_our_own_mistake_while_the_model_is_written_leaves_nothing_and_stays_what_it_is() -> None:
    def broken() -> Iterator[tuple[str, bytes]]:
        yield from model_files(2)
        raise ZeroDivisionError

    disk = MemoryDisk()
    with pytest.raises(ZeroDivisionError):
        save_checkpoint(
            FOLDER, step=2, stage="s", state={}, extra={}, model_files=broken(), keep=2, disk=disk
        )
    assert names(disk=disk) == []


class LyingDisk(MemoryDisk):
    """Loses a byte of what it reads back from the checkpoint of step 3."""

    def open_to_read(self, path: Path, *, uncached: bool = False) -> MemoryFile:
        if "step-000003" in path.parent.name and path.name == "model.safetensors":
            assert uncached, "a cache would return what was written"
            file = self.open(path)
            file.truncate(file.size() - 1)
        return super().open_to_read(path)


def test_a_checkpoint_that_does_not_read_back_gets_no_name_and_the_previous_stay() -> None:
    disk = LyingDisk()
    save_step(1, disk=disk)
    save_step(2, disk=disk)
    with pytest.raises(StorageError, match=r"model\.safetensors is damaged"):
        save_step(3, disk=disk)
    assert names(FOLDER, disk=disk) == ["step-000001", "step-000002"]


def test_foreign_names_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    save_step(1, disk=SystemDisk(), folder=tmp_path)
    found = latest(tmp_path)
    assert found is not None and found.step == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_finding_the_latest_needs_no_torch() -> None:
    script = (
        "import sys; from pathlib import Path; from kintsugi.checkpoint.store import latest\n"
        "latest(Path('/nonexistent')); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=20).returncode == 0


def test_a_manifest_survives_its_own_encoding() -> None:
    disk = MemoryDisk()
    path = save_step(3, disk=disk).path
    raw = msgspec.json.decode(disk.read(path / "manifest.json"))
    assert msgspec.convert(raw["contents"], Contents).step == 3


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path: Path) -> None:
    disk, folder = SystemDisk(), tmp_path / "checkpoints"
    for step, best in ((1, ()), (2, (2, 1)), (3, (2, 1)), (4, (2, 1)), (5, (2, 4, 1)), (6, (9, 6, 2))):
        save_step(step, disk=disk, folder=folder, keep=1, best_steps=best)
        kept = [path.name for path in sorted(folder.glob("step-*"))]
        assert (
            kept
            == {
                1: ["step-000001"],
                2: ["step-000002"],
                3: ["step-000002", "step-000003"],
                4: ["step-000002", "step-000004"],
                5: ["step-000002", "step-000005"],
                6: ["step-000006"],
            }[step]
        )
