"""`started.json`: the configuration that a run was started with, so that a resume can say what has changed since.

A resume continues in the same bits only with the same configuration, and only if its generation servers compute as
before (the note `steps`). A run of an earlier version has no such file, and is not checked.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kintsugi.config.recipe import fields_of, shown
from kintsugi.config.schema import Config
from kintsugi.errors import StorageError
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.reader import read_samples
from kintsugi.runtime.disk import write_atomically

_ABSENT = object()


class _Started(msgspec.Struct, frozen=True):
    fields: dict[str, object]
    """Dotted field → value."""


def record_start(folder: Path, config: Config) -> None:
    """Write the configuration with which the run starts, or with which it was resumed in spite of changes."""
    path = RunFolder(folder).started_file
    try:
        write_atomically(path, msgspec.json.encode(_Started(_plain(config))), durable=False, mode=0o600)
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}") from error


def changes_since_start(folder: Path, config: Config) -> list[str]:
    """Return what differs from the start of the run, a sentence each; empty if nothing is known to differ."""
    return [*_changed_fields(folder, config), *_lost_note(folder, config)]


def _changed_fields(folder: Path, config: Config) -> list[str]:
    try:
        started = msgspec.json.decode(RunFolder(folder).started_file.read_bytes(), type=_Started).fields
    except (FileNotFoundError, msgspec.DecodeError):
        return []
    now = _plain(config)
    return [
        f"{field}: {_shown(started.get(field, _ABSENT))} at the start, {_shown(now.get(field, _ABSENT))} now"
        for field in dict.fromkeys((*started, *now))
        # A field that this version has and the version of the start had not is at its default.
        if field in started and now.get(field, _ABSENT) != started[field]
    ]


def _lost_note(folder: Path, config: Config) -> list[str]:
    """Return a sentence if the servers of a deterministic run on a CPU have sampled and their note is gone."""
    run = RunFolder(folder)
    has_note = config.deterministic and config.generation.backend == "embedded"
    if not has_note or run.devices_file.exists() or run.decode_step_file.exists():
        return []
    if not any(sample.version >= 0 for sample in read_samples(folder, last=1)):
        return []
    why = "whether the servers compiled their steps is not known, and the first server would decide again"
    return [f"{run.decode_step_file} is missing: {why}"]


def _plain(config: Config) -> dict[str, object]:
    fields: dict[str, object] = msgspec.json.decode(msgspec.json.encode(fields_of(config)))
    return {field: value for field, value in fields.items() if field != "run_dir"}


def _shown(value: object) -> str:
    return "absent" if value is _ABSENT else shown(value)
