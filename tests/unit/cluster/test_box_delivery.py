"""Boxes of a state that ranks of several hosts bring to the run folder, and fetch from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kintsugi.bulk import files
from kintsugi.checkpoint.manifest import MANIFEST_FILE, StoredFile
from kintsugi.checkpoint.store import (
    Checkpoint,
    latest,
    load_checkpoint,
    save_checkpoint,
    state_file,
    stored_weights,
    unfinished_folder,
    verify,
    write_box,
)
from kintsugi.errors import RefusedError, StorageError, WorldError
from kintsugi.model.seats import Seat
from kintsugi.model.tensor_file import FileContent
from kintsugi.protocol.hosts import KeepCheckpoint
from kintsugi.training import checkpoint_delivery
from kintsugi.training.boxes import Box
from kintsugi.training.layout import ACTOR, Layout, LayoutPart
from tests.unit.cluster.delivering import PIECE_BYTES, Run, contents, num_read, opened_run

STEP = 3
SHAPES = {"embed.weight": (1024, 1500), "layer.weight": (24, 16), "norm.weight": (16,)}
"""A box of two has more than one piece of the bulk channel, and so have its weights."""
LAYOUT = Layout({ACTOR: LayoutPart.of(SHAPES)}, has_reference=False)
FLAT = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(5))
Box(LAYOUT).zero_filling(FLAT)
SECOND = state_file(Seat(1, 2))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    with opened_run(tmp_path, monkeypatch) as opened:
        yield opened


def box_of(shard: int, shards: int) -> tuple[Box, torch.Tensor]:
    """A box of the state, filled."""
    box = Box(LAYOUT, Seat(shard, shards))
    live = torch.zeros(box.size)
    box.take(box.weights(live), LAYOUT.weights(FLAT))
    for row in (0, 1):
        box.take(box.moments(live)[row], LAYOUT.moments(FLAT)[row])
    return box, live


def write(folder: Path, *, shard: int, shards: int = 2, changed: float = 0.0) -> tuple[str, StoredFile]:
    """Write a box; one with a `changed` moment is of another version of the state."""
    box, live = box_of(shard, shards)
    box.moments(live)[1, 0] += changed
    return write_box(folder, seat=box.seat, state=box.by_name(live))


class OtherRanks:
    """Ranks with the other boxes: some beside the run folder, some on hosts of their own."""

    def __init__(
        self, run: Run, *, shards: int, saver: str = "", beside: frozenset[int] = frozenset()
    ) -> None:
        """`saver` is the rank that saves, if its host does not have the run folder."""
        self._run, self._shards, self._saver, self._beside = run, shards, saver, beside
        self._found: dict[str, StoredFile] = {}
        self.folder = Path()
        self.after: Callable[[], object] = lambda: None
        """What happens when all boxes have arrived."""

    def ask(self, folder: Path) -> None:
        self.folder = folder
        for shard in range(1, self._shards):
            work = partial(write, shard=shard, shards=self._shards)
            if shard in self._beside:
                name, stored = work(unfinished_folder(self._run.run_folder, step=STEP))
            else:
                name, stored = bring(self._run, f"model-{shard}", work)
            self._found[name] = stored

    def wait(self) -> Mapping[str, StoredFile]:
        if self._saver:
            self._run.rank(self._saver).fetch_weights(
                self._found, step=STEP, into=self.folder, check=lambda: None
            )
        self.after()
        return self._found


def bring(
    run: Run, rank: str, work: Callable[[Path], tuple[str, StoredFile]], *, step: int = STEP
) -> tuple[str, StoredFile]:
    return run.rank(rank).bring_box(work, step=step, check=lambda: None)


def save(run: Run, others: OtherRanks, *, shards: int, saver: str = "") -> Checkpoint:
    """Save as the rank with the first box, beside the run folder or, with its name, on another host."""

    def model_files() -> Iterator[tuple[str, FileContent]]:
        weights = stored_weights(others.folder, shapes=SHAPES)
        for name, tensor in LAYOUT.actor.views(LAYOUT.weights(FLAT)).items():
            assert torch.equal(weights[name], tensor), name
        yield "config.json", b"{}"

    box, live = box_of(0, shards)
    rank = run.rank(saver) if saver else None
    return save_checkpoint(
        rank.folder if rank is not None else run.run_folder,
        step=STEP,
        stage="grpo",
        state=box.by_name(live),
        extra={"step": STEP},
        model_files=model_files(),
        keep=2,
        seat=box.seat,
        others=others,
        bring=None if rank is None else partial(rank.deliver, step=STEP, keep=2, best_steps=()),
    )


def save_from_hosts(run: Run, *, shards: int = 2, saver: str = "model-0", **given: Any) -> Checkpoint:
    return save(run, OtherRanks(run, shards=shards, saver=saver, **given), shards=shards, saver=saver)


def save_in_one_place(folder: Path, *, shards: int) -> Checkpoint:
    class Beside(OtherRanks):
        def ask(self, folder: Path) -> None:
            self.folder = folder
            self._found = dict(write(folder, shard=shard, shards=shards) for shard in range(1, shards))

    run: Any = None
    box, live = box_of(0, shards)
    return save_checkpoint(
        folder,
        step=STEP,
        stage="grpo",
        state=box.by_name(live),
        extra={"step": STEP},
        model_files=[("config.json", b"{}")],
        keep=2,
        seat=box.seat,
        others=Beside(run, shards=shards),
    )


@pytest.mark.parametrize("saver", ["model-0", ""])
@pytest.mark.parametrize("beside", [frozenset(), frozenset({1}), frozenset({1, 2})])
def test_parts_of_several_hosts_make_the_checkpoint_that_one_machine_writes(
    run: Run, tmp_path: Path, saver: str, beside: frozenset[int]
) -> None:
    saved = save_from_hosts(run, shards=3, saver=saver, beside=beside)
    expected = save_in_one_place(tmp_path / "one", shards=3)
    assert saved.digest == expected.digest
    assert contents(saved.path) == contents(expected.path)
    assert saved.path.parent == run.run_folder
    hosts = [path for path in (tmp_path / "host-1").rglob("*") if path.is_file() and path.name != ".lock"]
    assert not hosts, "nothing stays on the hosts"


def test_the_rank_that_saves_fetches_the_weights_and_not_the_moments_of_the_other_boxes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = OtherRanks(run, shards=2, saver="model-0")
    read: list[int] = []
    others.ask(run.root / "there")
    others.folder.mkdir()
    read = num_read(monkeypatch)
    others.wait()
    size = (others.folder / SECOND).stat().st_size
    assert size > 2 * PIECE_BYTES
    assert size / 3 <= sum(read) < size / 3 + 4096


def test_weights_whose_connection_ends_are_fetched_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_delivery, "PAUSE_S", 0.01)
    others = OtherRanks(run, shards=2, saver="model-0")
    others.ask(run.root / "there")
    others.folder.mkdir()
    original, ended = files.DiskExport.attempt_region, list[Any]()

    def ending(self: files.DiskExport, part: Any, remaining_s: float) -> Any:
        if len(ended) < files.MAX_ATTEMPTS:
            ended.append(part)
            raise WorldError("the connection ends here")
        return original(self, part, remaining_s)

    monkeypatch.setattr(files.DiskExport, "attempt_region", ending)
    others.wait()
    assert len(ended) == files.MAX_ATTEMPTS


def test_weights_that_were_damaged_in_the_run_folder_are_refused_and_named(run: Run) -> None:
    others = OtherRanks(run, shards=2, saver="model-0")
    others.ask(run.root / "there")
    others.folder.mkdir()
    name, stored = write(run.root / "again", shard=1)
    weights = next(piece for piece in stored.pieces if piece.name.startswith("weights/"))
    flip(unfinished_folder(run.run_folder, step=STEP) / name, weights.offset)
    with pytest.raises(StorageError, match=rf"weights/.* in {SECOND} from agent-0: expected xxh3"):
        others.wait()


@pytest.mark.parametrize("saver", ["model-0", ""])
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("missing", rf"{SECOND}"),
        ("a missing piece", rf"{SECOND} is damaged on disk: expected \d+ bytes with xxh3"),
        ("damaged", rf"{SECOND} is damaged on disk: expected \d+ bytes with xxh3"),
        ("of another version", rf"{SECOND} is damaged on disk: expected \d+ bytes with xxh3"),
    ],
)
def test_a_part_that_is_not_the_one_that_its_rank_has_written_fails_the_save_by_name(
    run: Run, saver: str, what: str, said: str
) -> None:
    """The checkpoint before it stays, and nothing is left of the failed one."""
    earlier = save_checkpoint(
        run.run_folder, step=2, stage="grpo", state=LAYOUT.by_name(FLAT), extra={}, model_files=(), keep=2
    )
    others = OtherRanks(run, shards=2, saver=saver)
    path = unfinished_folder(run.run_folder, step=STEP) / SECOND

    def happens() -> None:
        match what:
            case "missing":
                path.unlink()
            case "a missing piece":
                size = path.stat().st_size
                content = path.read_bytes()
                hole = range(4096, PIECE_BYTES // 2)  # Of the moments.
                path.write_bytes(content[: hole.start] + bytes(len(hole)) + content[hole.stop :])
                assert path.stat().st_size == size
            case "damaged":
                flip(path, 4096)
            case _:  # Another attempt of this step, after a rollback, brings its box over this one.
                bring(run, "model-3", partial(write, shard=1, changed=1.0))

    others.after = happens
    with pytest.raises(StorageError, match=said):
        save(run, others, shards=2, saver=saver)
    assert latest(run.run_folder) == earlier
    assert not list(run.run_folder.glob(".saving-*"))


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_parts_of_two_layouts_are_not_kept_as_one_checkpoint(run: Run) -> None:
    """The manifest of a save that failed to notice it."""
    others = OtherRanks(run, shards=2, saver="model-0")
    original = others.wait

    def wait() -> Mapping[str, StoredFile]:
        name, stored = bring(run, "model-2", partial(write, shard=2, shards=3))
        return {**original(), name: stored}

    others.wait = wait  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="expected the 2 boxes of one state, got another set"):
        save(run, others, shards=2, saver="model-0")
    assert latest(run.run_folder) is None


def test_a_part_that_another_layout_has_left_is_no_part_of_the_checkpoint(run: Run) -> None:
    bring(run, "model-2", partial(write, shard=2, shards=3))
    saved = save_from_hosts(run)
    assert state_file(Seat(2, 3)) not in contents(saved.path)
    verify(saved.path)


def test_a_box_that_another_rank_brings_again_sends_only_what_has_not_arrived(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        if len(run.loop.replies) >= 1:
            raise RefusedError("this process ends")

    with pytest.raises(RefusedError, match="this process ends"):
        run.rank("model-1").bring_box(partial(write, shard=1), step=STEP, check=check)
    read = num_read(monkeypatch)
    _, stored = bring(run, "model-3", partial(write, shard=1))
    assert sum(read) <= stored.size - PIECE_BYTES


def test_a_save_without_one_of_its_parts_asks_for_nothing_to_be_kept(run: Run) -> None:
    others = OtherRanks(run, shards=2, saver="model-0")

    def wait() -> Mapping[str, StoredFile]:
        raise RefusedError("no rank has written box 1/2 of step 3: model-1: is gone")

    others.wait = wait  # type: ignore[method-assign]
    with pytest.raises(RefusedError, match="no rank has written box 1/2"):
        save(run, others, shards=2, saver="model-0")
    assert not any(isinstance(body, KeepCheckpoint) for body in run.requests)
    assert latest(run.run_folder) is None


def test_a_killed_rank_leaves_a_box_on_its_host_that_its_successor_removes(run: Run) -> None:
    folder = run.rank("model-1").folder
    left = [folder / f".box-{name}" for name in ("model-1-0", "model-1-7", "model-10-0")]
    for each in left:
        each.mkdir(parents=True)
    del run.ranks["model-1"]
    run.rank("model-1")
    assert [each.exists() for each in left] == [False, False, True]


def test_a_rank_that_brings_a_box_removes_no_other_one_that_it_is_bringing(run: Run) -> None:
    others = run.rank("model-1").folder / ".box-model-1-7"
    others.mkdir(parents=True)
    bring(run, "model-1", partial(write, shard=1))
    assert others.exists()


@pytest.mark.parametrize(("shard", "shards", "fetched"), [(1, 2, {SECOND}), (3, 4, {SECOND}), (0, 1, None)])
def test_a_rank_fetches_the_files_with_a_part_of_its_box_and_no_others(
    run: Run, shard: int, shards: int, fetched: set[str] | None
) -> None:
    saved = save_from_hosts(run)
    rank = run.rank("model-1")
    stored, extra = rank.open(saved.path, ask=lambda process, body: run.ask("model-1", body))
    assert extra == {"step": STEP}
    box, expected = box_of(shard, shards)
    live = torch.full((box.size,), float("nan"))
    box.zero_filling(live)
    stored.read(box.by_name(live))
    assert torch.equal(live, expected)
    here = {path.name for path in (rank.folder / f".fetched-model-1-{saved.path.name}").iterdir()}
    whole = {state_file(Seat(0, 2)), SECOND}
    assert here == {MANIFEST_FILE, "trainer.json", *(whole if fetched is None else fetched)}


def test_a_part_that_is_damaged_in_the_run_folder_is_refused_by_the_rank_that_reads_it(run: Run) -> None:
    saved = save_from_hosts(run)
    flip(saved.path / SECOND, 4096)
    box, live = box_of(1, 2)
    stored, _ = run.rank("model-1").open(saved.path, ask=lambda process, body: run.ask("model-1", body))
    with pytest.raises(StorageError, match=rf"{SECOND} is damaged on disk"):
        stored.read(box.by_name(live))
    load_checkpoint(saved.path)
