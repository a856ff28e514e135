from __future__ import annotations

import os
from pathlib import Path

import pytest

from kintsugi.config.recipe import dump, load
from kintsugi.errors import UserError
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.pruning import prune, sizes
from kintsugi.run_folder.reader import best_step, checkpoint_folders, write_launcher


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of four steps, of which the second was the best."""
    dump(load("grpo_arithmetic").config, RunFolder(tmp_path).config_file)
    for step in (25, 50, 75, 100):
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"x" * 100)
    accuracies = {25: 0.2, 50: 0.9, 100: 0.5}
    lines = [f'{{"step": {step}, "eval/accuracy": {value}}}\n' for step, value in accuracies.items()]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    (tmp_path / "store.db").write_bytes(b"i" * 1000)
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "model-0.jsonl").write_bytes(b"f" * 10)
    return tmp_path


def test_the_newest_and_the_best_checkpoint_are_kept(run: Path) -> None:
    assert best_step(run) == 50
    assert prune(run, ["checkpoints"]) == 200
    assert list(checkpoint_folders(run)) == [50, 100]


def test_sizes_add_up_and_a_part_that_was_removed_is_gone(run: Path) -> None:
    by_name = {part.name: part.size for part in sizes(run)}
    assert (by_name["index"], by_name["telemetry"]) == (1000, 10)
    total = sum(by_name.values())
    assert prune(run, ["index", "telemetry"]) == 1010
    assert sum(part.size for part in sizes(run)) == total - 1010


def test_a_running_run_and_an_unknown_part_are_refused(run: Path) -> None:
    with pytest.raises(UserError, match=r"expected parts of a run folder \(index, .*got 'journal'"):
        prune(run, ["journal"])
    write_launcher(run, pid=os.getpid())
    with pytest.raises(UserError, match="expected a run that has ended"):
        prune(run, ["index"])
    assert (run / "store.db").exists()
