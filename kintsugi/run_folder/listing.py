"""List of runs: sorted, filtered, with the tags that users gave them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import msgspec

from kintsugi.errors import KintsugiError, StorageError, UserError
from kintsugi.run_folder import reader
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.disk import write_atomically


class RunLine(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a list."""

    folder: str
    state: str = ""
    step: int = 0
    total_steps: int = 0
    reward: float | None = None
    accuracy: float | None = None
    """Accuracy of the last evaluation."""
    started: float = 0.0
    """Wall clock."""
    algorithm: str = ""
    tags: tuple[str, ...] = ()
    problem: str = ""
    """Why it cannot be read; the other values are empty then."""


def _low(value: float | None) -> tuple[bool, float]:
    """Order of a value that may be missing: missing ones last, larger ones first."""
    return value is None, -(value or 0.0)


ORDERS: dict[str, Callable[[RunLine], tuple[object, ...]]] = {
    "started": lambda line: (-line.started, line.folder),
    "name": lambda line: (line.folder,),
    "state": lambda line: (line.state, -line.started),
    "step": lambda line: (-line.step,),
    "reward": lambda line: _low(line.reward),
    "accuracy": lambda line: _low(line.accuracy),
}
"""Orders of a list, by name: the newest, the first letter, the most steps, the highest value first."""


def list_runs(
    folder: Path,
    *,
    sort: str = "started",
    states: Collection[str] = (),
    tags: Collection[str] = (),
    name: str = "",
) -> list[RunLine]:
    """List the runs in a folder that have one of the states, all of the tags, and the text in their name."""
    if sort not in ORDERS:
        raise UserError(f"--sort: expected one of {', '.join(ORDERS)}, got {sort!r}")
    known = [state.value for state in reader.RunState]
    for state in states:
        if state not in known:
            raise UserError(f"--state: expected one of {', '.join(known)}, got {state!r}")
    lines = (_line(path, status) for path, status in reader.list_runs(folder))
    chosen = (
        line
        for line in lines
        if (not states or line.state in states)
        and set(tags) <= set(line.tags)
        and name in Path(line.folder).name
    )
    return sorted(chosen, key=ORDERS[sort])


def _line(path: Path, status: reader.RunStatus | KintsugiError) -> RunLine:
    started = RunFolder(path).config_file.stat().st_mtime
    if isinstance(status, KintsugiError):
        return RunLine(folder=str(path), started=started, problem=str(status))
    return RunLine(
        folder=str(path),
        state=status.state.value,
        step=status.step,
        total_steps=status.total_steps,
        reward=status.metrics.get("reward/mean"),
        accuracy=status.metrics.get("eval/accuracy"),
        started=started,
        algorithm=status.config.algorithm.name,
        tags=read_tags(path),
    )


def read_tags(folder: Path) -> tuple[str, ...]:
    """Tags of a run; none if there are none, or if the file is damaged."""
    try:
        return msgspec.json.decode(RunFolder(folder).tags_file.read_bytes(), type=tuple[str, ...])
    except (FileNotFoundError, msgspec.MsgspecError):
        return ()


def change_tags(folder: Path, *, add: Iterable[str] = (), remove: Iterable[str] = ()) -> tuple[str, ...]:
    """Add and remove tags of a run; returns those it has then."""
    gone = set(remove)
    tags = tuple(dict.fromkeys(tag for tag in (*read_tags(folder), *add) if tag not in gone))
    for tag in tags:
        if not tag or tag != tag.strip() or "," in tag:
            raise UserError(f"expected a tag without commas and outer spaces, got {tag!r}")
    path = RunFolder(folder).tags_file
    try:
        write_atomically(path, msgspec.json.encode(tags), durable=False)
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}") from error
    return tags
