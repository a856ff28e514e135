"""Copies of finished checkpoints in another folder or in an object store (`checkpoint.copy_to`), through fsspec.

    TARGET/RUN/run.json               identity of the run: another run of the same name does not write here
    TARGET/RUN/step-000123/…          the files of a checkpoint; its manifest.json comes last

    python -m kintsugi.checkpoint.copies RUN_DIR TARGET

The launcher starts this program when a checkpoint has been saved (`cluster/checkpoint_copier.py`): training does not
wait for it. Every file is read back, and its digest compared with the manifest, before the manifest is written: a copy
without one is unfinished and is made again. A copy whose checkpoint the run has removed is removed too, manifest first.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import xxhash

from kintsugi.checkpoint.manifest import MANIFEST_FILE, StoredFile, decode_manifest
from kintsugi.checkpoint.store import Checkpoint, keep_checkpoint, unfinished_folder
from kintsugi.errors import ConfigError, StorageError
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.disk import write_atomically
from kintsugi.runtime.proc import die_with_parent

RUN_FILE = "run.json"
PIECE_BYTES = 8 << 20
NICENESS = 10

log = logging.getLogger(__name__)


class CopiedRun(msgspec.Struct, frozen=True):
    """`run.json`, in the run folder as `copies.json`."""

    identity: str


def open_target(target: str) -> tuple[Any, str]:
    """Return the file system of a folder or URL, and the path in it. ConfigError names what is missing."""
    if importlib.util.find_spec("fsspec") is None:
        raise ConfigError("`checkpoint.copy_to`: expected fsspec for it: pip install 'kintsugi[store]'")
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(target)
    except ImportError as error:
        raise ConfigError(f"`checkpoint.copy_to`: {target} needs another package: {error}") from error
    except ValueError as error:
        raise ConfigError(
            f"`checkpoint.copy_to`: expected a folder or a URL, got {target}: {error}"
        ) from error
    return system, str(path).rstrip("/")


class CheckpointCopies:
    """The copies of one run. Methods raise OSError, StorageError, and what the store's own library raises."""

    def __init__(self, target: str, *, run_dir: Path) -> None:
        self._system, folder = open_target(target)
        self._run_dir, self._checkpoints = run_dir, RunFolder(run_dir).checkpoints_folder
        self._folder = f"{folder}/{run_dir.name}"

    def copy_missing(self) -> list[str]:
        """Copy what is not there, the oldest first, and remove what the run has removed; return the names copied."""
        self._claim()
        there, here = set(self._finished()), _names(self._checkpoints)
        copied = []
        for name in here:
            if name not in there:
                # Another save may remove it meanwhile.
                with suppress(_Removed):
                    self._copy(name)
                    copied.append(name)
        kept = _names(self._checkpoints)
        for name in self._names_there():
            if kept and name not in kept:
                self._remove(name)
        return copied

    def take_back(self, *, keep: int) -> Checkpoint | None:
        """Fetch the newest copy that is whole into the run folder, which has no checkpoint; None if there is none."""
        assert not _names(self._checkpoints), "a run continues from its own checkpoints"
        self._claim(adopt=True)
        damaged = []
        for name in reversed(self._finished()):
            try:
                return self._fetch(name, keep=keep)
            except StorageError as error:
                damaged.append(f"{name}: {error}")
        if damaged:
            raise StorageError(f"no copy in {self._folder} can be read: {'; '.join(damaged)}")
        return None

    def _claim(self, *, adopt: bool = False) -> None:
        """Compare the identity of the run with that of the copies, and write it where there is none."""
        own, there = RunFolder(self._run_dir).copies_file, f"{self._folder}/{RUN_FILE}"
        found = (
            msgspec.json.decode(self._system.cat_file(there), type=CopiedRun) if self._exists(there) else None
        )
        if own.exists():
            identity = msgspec.json.decode(own.read_bytes(), type=CopiedRun)
        else:
            identity = found if adopt and found is not None else CopiedRun(uuid4().hex)
            write_atomically(own, msgspec.json.encode(identity), durable=False)
        if found is None:
            self._system.makedirs(self._folder, exist_ok=True)
            self._system.pipe_file(there, msgspec.json.encode(identity))
        elif found != identity:
            raise StorageError(
                f"{self._folder} has copies of another run of this name: expected a folder of its own at "
                "`checkpoint.copy_to`"
            )

    def _exists(self, path: str) -> bool:
        # Object stores keep lists for a while; another process may have written since.
        self._system.invalidate_cache()
        return bool(self._system.exists(path))

    def _names_there(self) -> list[str]:
        self._system.invalidate_cache()
        with suppress(FileNotFoundError):
            entries = self._system.ls(self._folder, detail=False)
            return sorted(
                name for each in entries if (name := str(each).rstrip("/").rpartition("/")[2])[:5] == "step-"
            )
        return []

    def _finished(self) -> list[str]:
        return [
            name for name in self._names_there() if self._exists(f"{self._folder}/{name}/{MANIFEST_FILE}")
        ]

    def _copy(self, name: str) -> None:
        source, target = self._checkpoints / name, f"{self._folder}/{name}"
        manifest = _read(source / MANIFEST_FILE)
        contents, _ = decode_manifest(manifest, path=source / MANIFEST_FILE)
        self._system.makedirs(target, exist_ok=True)
        for file, stored in contents.files.items():
            try:
                self._system.put_file(str(source / file), f"{target}/{file}")
            except FileNotFoundError as error:
                if not source.exists():
                    raise _Removed from error
                raise
            self._verify(f"{target}/{file}", stored)
        self._system.pipe_file(f"{target}/{MANIFEST_FILE}", manifest)

    def _verify(self, path: str, stored: StoredFile) -> None:
        """Read a file back and compare it with its entry in the manifest."""
        digest, size = xxhash.xxh3_64(), 0
        for piece in self._pieces(path):
            digest.update(piece)
            size += len(piece)
        found = digest.hexdigest()
        if (size, found) != (stored.size, stored.digest):
            raise StorageError(
                f"{path}: expected {stored.size} bytes with xxh3 {stored.digest}, got {size} with {found}"
            )

    def _pieces(self, path: str) -> Iterator[bytes]:
        with self._system.open(path, "rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece

    def _remove(self, name: str) -> None:
        folder = f"{self._folder}/{name}"
        if self._exists(manifest := f"{folder}/{MANIFEST_FILE}"):
            self._system.rm_file(manifest)
        self._system.rm(folder, recursive=True)

    def _fetch(self, name: str, *, keep: int) -> Checkpoint:
        folder = f"{self._folder}/{name}"
        manifest = self._system.cat_file(f"{folder}/{MANIFEST_FILE}")
        contents, _ = decode_manifest(manifest, path=Path(folder) / MANIFEST_FILE)
        arriving = unfinished_folder(self._checkpoints, step=contents.step)
        arriving.mkdir(parents=True, exist_ok=True)
        for file in contents.files:
            with (arriving / file).open("wb") as output:
                for piece in self._pieces(f"{folder}/{file}"):
                    output.write(piece)
        (arriving / MANIFEST_FILE).write_bytes(manifest)
        return keep_checkpoint(self._checkpoints, step=contents.step, keep=keep)


class _Removed(Exception):
    """The checkpoint was removed while it was copied."""


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise _Removed from error


def _names(checkpoints: Path) -> list[str]:
    """Return the names of finished checkpoints of the run folder, oldest first."""
    return sorted(path.name for path in checkpoints.glob("step-*")) if checkpoints.exists() else []


def main(arguments: list[str]) -> int:
    """Body of the process. What fails is its last line, which the launcher tells."""
    run_dir, target = arguments
    die_with_parent()
    os.nice(NICENESS)
    try:
        CheckpointCopies(target, run_dir=Path(run_dir)).copy_missing()
    except Exception as error:  # noqa: BLE001 - the process's outermost boundary: stores raise errors of their own.
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
