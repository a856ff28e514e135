"""Checkpoints whose state was written in boxes, by several ranks, and read by any layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from kintsugi.checkpoint.manifest import MANIFEST_FILE, StoredFile, decode_manifest, encode_manifest
from kintsugi.checkpoint.store import (
    Checkpoint,
    is_trainer_file,
    latest,
    load_checkpoint,
    save_checkpoint,
    state_file,
    verify,
    write_box,
)
from kintsugi.errors import RefusedError, StorageError
from kintsugi.model.seats import Seat
from kintsugi.model.tensor_file import FileContent
from tests.unit.checkpoint.drawn_state import DrawnState

SHAPES = {"embed.weight": (37, 16), "layer.weight": (24, 16), "norm.weight": (16,), "wide.weight": (8, 100)}
STATE = DrawnState(SHAPES)
LAYOUT, FLAT, box_of = STATE.layout, STATE.flat, STATE.box_of


class Ranks:
    """The other ranks, which write when they are asked."""

    def __init__(self, shards: int, *, write: Callable[[Path, int], tuple[str, StoredFile]]) -> None:
        self._shards, self._write = shards, write
        self._files: dict[str, StoredFile] = {}
        self.folder = Path()

    def ask(self, folder: Path) -> None:
        self.folder = folder
        for shard in range(1, self._shards):
            name, stored = self._write(folder, shard)
            self._files[name] = stored

    def wait(self) -> Mapping[str, StoredFile]:
        return self._files


def save(
    folder: Path, shards: int, *, step: int = 3, damage: Callable[[Path], None] | None = None
) -> Checkpoint:
    def write(unfinished: Path, shard: int) -> tuple[str, StoredFile]:
        box, live = box_of(shard, shards)
        return write_box(unfinished, seat=box.seat, state=box.by_name(live))

    def model_files() -> Iterator[tuple[str, FileContent]]:
        if damage is not None:
            damage(others.folder)
        yield from STATE.model_files(lambda: others.folder)

    box, live = box_of(0, shards)
    others = Ranks(shards, write=write)
    return save_checkpoint(
        folder,
        step=step,
        stage="grpo",
        state=box.by_name(live),
        extra={"step": step},
        model_files=model_files(),
        keep=2,
        seat=box.seat,
        others=others,
    )


@pytest.mark.parametrize("shards", [2, 3, 4])
@pytest.mark.parametrize("readers", [1, 2, 3, 5])
def test_what_was_saved_with_one_number_of_shards_is_read_with_another(
    tmp_path: Path, shards: int, readers: int
) -> None:
    checkpoint = save(tmp_path, shards)
    stored, extra = load_checkpoint(checkpoint.path)
    assert extra == {"step": 3}
    assert stored.places.keys() == LAYOUT.by_name(FLAT).keys()
    for shard in range(readers):
        box, expected = box_of(shard, readers)
        live = torch.full((box.size,), float("nan"))
        box.zero_filling(live)
        stored.read(box.by_name(live))
        assert torch.equal(live, expected)


def test_a_state_in_one_file_is_read_in_boxes(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(
        tmp_path,
        step=1,
        stage="grpo",
        state=LAYOUT.by_name(FLAT),
        extra={},
        model_files=(),
        keep=1,
    )
    stored, _ = load_checkpoint(checkpoint.path)
    for shard in range(4):
        box, expected = box_of(shard, 4)
        live = torch.zeros(box.size)
        box.zero_filling(live)
        stored.read(box.by_name(live))
        assert torch.equal(live, expected)


def test_the_manifest_names_the_file_of_every_box(tmp_path: Path) -> None:
    path = save(tmp_path, 3).path
    contents, _ = decode_manifest((path / MANIFEST_FILE).read_bytes(), path=path)
    boxes = [state_file(Seat(shard, 3)) for shard in range(3)]
    assert sorted(name for name in contents.files if name.startswith("trainer-")) == boxes
    assert all(contents.files[name].pieces for name in boxes)
    assert json.loads((path / "trainer.json").read_bytes())["step"] == 3
    assert [each.name for each in path.iterdir() if not is_trainer_file(each.name)] == ["config.json"]


def test_a_checkpoint_without_one_of_its_boxes_is_passed_over(tmp_path: Path) -> None:
    earlier, later = save(tmp_path, 2, step=2), save(tmp_path, 2, step=3)
    (later.path / state_file(Seat(1, 2))).unlink()
    reasons: list[str] = []
    found = latest(tmp_path, report=lambda path, reason: reasons.append(reason))
    assert found == earlier
    assert "trainer-00002-of-00002.safetensors" in reasons[0]


def test_boxes_of_another_version_of_the_state_are_refused_before_the_checkpoint_has_its_name(
    tmp_path: Path,
) -> None:
    def replace(folder: Path) -> None:
        """Another attempt writes the same box, of a state with other moments, after this one was answered."""
        box, live = box_of(1, 2)
        box.moments(live)[1, 0] += 1.0
        write_box(folder, seat=box.seat, state=box.by_name(live))

    with pytest.raises(StorageError, match=r"trainer-00002-of-00002\.safetensors is damaged"):
        save(tmp_path, 2, damage=replace)
    assert latest(tmp_path) is None


def test_a_manifest_that_mixes_layouts_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 2).path
    contents, _ = decode_manifest((path / MANIFEST_FILE).read_bytes(), path=path)
    box, live = box_of(1, 3)
    name, stored = write_box(path, seat=box.seat, state=box.by_name(live))
    contents.files[name] = stored
    (path / MANIFEST_FILE).write_bytes(encode_manifest(contents))
    verify(path)
    with pytest.raises(StorageError, match="expected the 2 boxes of one state, got another set"):
        load_checkpoint(path)


def test_a_rank_that_does_not_write_its_box_fails_the_save_and_leaves_nothing(tmp_path: Path) -> None:
    def write(folder: Path, shard: int) -> tuple[str, StoredFile]:
        raise RefusedError("model-1 has no snapshot of step 3 any more")

    box, live = box_of(0, 2)
    with pytest.raises(RefusedError, match="no snapshot of step 3"):
        save_checkpoint(
            tmp_path,
            step=3,
            stage="grpo",
            state=box.by_name(live),
            extra={},
            model_files=(),
            keep=1,
            seat=box.seat,
            others=Ranks(2, write=write),
        )
    assert not [path for path in tmp_path.iterdir() if path.name != ".lock"]
