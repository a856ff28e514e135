"""Sizes of a run folder by what they are for, and removal of what an ended run can do without."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from kintsugi.errors import StorageError, UserError
from kintsugi.run_folder import reader
from kintsugi.run_folder.layout import RELATIVE


class Part(msgspec.Struct, frozen=True):
    """Files of a run folder that are kept or removed together."""

    name: str
    contents: str
    without: str
    """Commands that do not work any more without them; empty if they must stay."""
    paths: Callable[[Path], list[Path]]


class PartSize(msgspec.Struct, frozen=True):
    name: str
    contents: str
    without: str
    size: int


def _files(*names: str | Path) -> Callable[[Path], list[Path]]:
    """Files and folders by their names, or patterns of names, in a run folder."""
    return lambda folder: [path for name in names for path in sorted(folder.glob(str(name)))]


def _old_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints but the newest and the best."""
    checkpoints = reader.checkpoint_folders(folder)
    kept = {max(checkpoints, default=0)}
    try:
        kept.add(reader.best_step(folder))
    except UserError:
        pass  # None of them was evaluated.
    return [path for step, path in checkpoints.items() if step not in kept]


PARTS = (
    Part(
        "index", "search index", "nothing: `kintsugi logs` builds it again", _files(f"{RELATIVE.index_file}*")
    ),
    Part(
        "telemetry",
        "spans, readings and recorded inputs",
        "`diagnose`, `trace` and the replay of this run; incidents and events stay",
        _files(
            f"{RELATIVE.spans_file('*').with_suffix('')}*",
            RELATIVE.readings_folder,
            f"{RELATIVE.inputs_file}*",
        ),
    ),
    Part(
        "evaluations",
        "folders of `kintsugi eval`",
        "the details of these evaluations",
        _files(RELATIVE.evaluations_folder),
    ),
    Part(
        "checkpoints",
        "checkpoints besides the newest and the best",
        "`export`, `eval` and `serve` of those steps",
        _old_checkpoints,
    ),
    Part(
        "samples",
        "trained samples",
        "`kintsugi samples`",
        _files(
            *(f"{path.stem}*{path.suffix}" for path in (RELATIVE.samples_file, RELATIVE.samples_index_file)),
            RELATIVE.rollouts_folder,
        ),
    ),
)
"""Parts that can be removed, the least missed first."""


def sizes(folder: Path) -> list[PartSize]:
    """Sizes of the parts, and of everything else, which stays."""
    found = [PartSize(part.name, part.contents, part.without, _size(part.paths(folder))) for part in PARTS]
    rest = _size([folder]) - sum(part.size for part in found)
    return [*found, PartSize("", "the rest: journal, events, metrics, last checkpoints", "", rest)]


def prune(folder: Path, names: Iterable[str]) -> int:
    """Remove parts of an ended run; returns the number of bytes that were freed."""
    known = {part.name: part for part in PARTS}
    chosen = []
    for name in names:
        if name not in known:
            raise UserError(f"expected parts of a run folder ({', '.join(known)}), got {name!r}")
        chosen.append(known[name])
    if (launcher := reader.living_launcher(folder)) is not None:
        raise UserError(f"{folder}: expected a run that has ended, process {launcher.pid} runs it")
    freed = 0
    for path in (path for part in chosen for path in part.paths(folder)):
        freed += _size([path])
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:
            raise StorageError(f"could not remove {path}: {error.strerror or error}") from error
    return freed


def _size(paths: Iterable[Path]) -> int:
    return sum(
        each.lstat().st_size
        for path in paths
        for each in ([path] if not path.is_dir() else path.rglob("*"))
        if not each.is_dir()
    )
