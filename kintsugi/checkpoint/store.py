"""Durable checkpoints: folders that are either whole and verified, or not there.

    checkpoints/step-000123/
        config.json model.safetensors tokenizer.json …   a Hugging Face folder, usable as it is
        trainer.safetensors                              optimizer moments and master weights
        trainer.json                                     step, stage, schedule, random state, …
        manifest.json                                    size and digest of all of the above, and each tensor's place

A save writes into a hidden folder, syncs it, reads it back, and renames it: a crash at any point leaves the previous
checkpoints as they were. Older ones go only after the new one has its name. What a killed save or removal left behind
begins with a dot and is cleared away by the next save; a lock that ends with its process keeps two savers apart, so
nothing of a living one is ever touched. Every byte goes through `Disk`, so the tests may fail any write of a save.
Nothing here needs torch until tensors are saved or loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from kintsugi.checkpoint.manifest import (
    MANIFEST_FILE,
    Contents,
    StoredFile,
    decode_manifest,
    encode_manifest,
    tensor_pieces,
)
from kintsugi.disk import SYSTEM_DISK, Disk, storage_errors
from kintsugi.errors import RefusedError, StorageError

if TYPE_CHECKING:
    from torch import Tensor

STATE_FILE = "trainer.safetensors"
EXTRA_FILE = "trainer.json"
_LOCK_FILE = ".lock"
_CHUNK_SIZE = 16 << 20

log = logging.getLogger(__name__)


class Checkpoint(msgspec.Struct, frozen=True):
    """One that was verified: `Checkpoint(Path("…/step-000123"), step=123, stage="grpo", digest="9f…")`."""

    path: Path
    step: int
    stage: str
    digest: str
    """Of everything in it; equal for equal contents."""


class _Extra(msgspec.Struct, frozen=True):
    """`trainer.json`."""

    step: int
    stage: str
    extra: dict[str, Any]


Report = Callable[[Path, str], None]


def _log_damage(path: Path, reason: str) -> None:
    log.warning("checkpoint %s is passed over: %s", path, reason)


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    stage: str,
    state: Mapping[str, Tensor],
    extra: Mapping[str, Any],
    model_files: Iterable[tuple[str, bytes]],
    keep: int,
    disk: Disk = SYSTEM_DISK,
) -> Checkpoint:
    """Write, verify, and only then retire older ones. `model_files`: name and contents of the Hugging Face files.

    Anything the disk does wrong raises StorageError with the file's name, and leaves the previous checkpoints as they
    were. Saving a step again replaces it if the contents differ. Checkpoints of later steps belong to a history that
    was rolled back, and go with the older ones. While another process saves into the folder, RefusedError is raised.
    """
    assert keep >= 1, f"a save that keeps {keep} checkpoints would remove itself"
    with storage_errors(str(folder)):
        disk.mkdir(folder)
    with _alone(folder, disk=disk):
        _clear_leftovers(folder, disk=disk)
        unfinished = folder / f".saving-step-{step:06d}"
        files = chain(model_files, _trainer_files(step=step, stage=stage, state=state, extra=extra))
        try:
            _write(unfinished, files, step=step, stage=stage, disk=disk)
            checkpoint = _put_in_place(verify(unfinished, disk=disk), folder=folder, disk=disk)
        finally:
            with suppress(OSError):
                if disk.exists(unfinished):
                    _remove_folder(unfinished, disk=disk)
        _retire_others(checkpoint, folder=folder, keep=keep, disk=disk)
    return checkpoint


def load_checkpoint(path: Path, *, disk: Disk = SYSTEM_DISK) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The trainer's state and extra, as they were given to `save_checkpoint`; StorageError if they are damaged."""
    from safetensors.torch import load

    contents, _ = _read_manifest(path, disk=disk)
    state = load(_read_file(path, STATE_FILE, contents=contents, disk=disk))
    extra = msgspec.json.decode(_read_file(path, EXTRA_FILE, contents=contents, disk=disk), type=_Extra)
    return state, extra.extra


def verify(path: Path, *, disk: Disk = SYSTEM_DISK) -> Checkpoint:
    """Read everything back; StorageError names the first file that is missing or not what was written."""
    contents, digest = _read_manifest(path, disk=disk)
    for name in contents.files:
        _read_file(path, name, contents=contents, disk=disk)
    return Checkpoint(path, contents.step, contents.stage, digest)


def latest(
    folder: Path,
    *,
    at_most: int | None = None,
    disk: Disk = SYSTEM_DISK,
    report: Report = _log_damage,
) -> Checkpoint | None:
    """The newest checkpoint that verifies, of no later step than `at_most`; None when none was ever saved.

    Damaged ones on the way are reported with the reason, never chosen. If all are damaged, that is an error: starting
    from scratch would silently throw the run away.
    """
    if not disk.exists(folder):
        return None
    damaged = []
    paths = _checkpoint_folders(folder, disk=disk)
    for path in reversed([each for each in paths if at_most is None or _place(each)[0] <= at_most]):
        try:
            return verify(path, disk=disk)
        except StorageError as error:
            report(path, str(error))
            damaged.append(f"{path.name}: {error}")
    if damaged:
        raise StorageError(f"no checkpoint in {folder} can be read: {'; '.join(damaged)}")
    return None


@contextmanager
def _alone(folder: Path, *, disk: Disk) -> Iterator[None]:
    """Hold the folder against other savers; one that is killed lets go of it."""
    with storage_errors(str(folder / _LOCK_FILE)):
        lock = disk.open(folder / _LOCK_FILE, create=True)
    try:
        with storage_errors(str(folder / _LOCK_FILE)):
            try:
                lock.lock()
            except BlockingIOError as error:
                raise RefusedError(f"another process is saving into {folder}") from error
        yield
    finally:
        lock.close()


def _trainer_files(
    *, step: int, stage: str, state: Mapping[str, Tensor], extra: Mapping[str, Any]
) -> Iterator[tuple[str, bytes]]:
    from safetensors.torch import save

    yield STATE_FILE, save({name: tensor.detach().contiguous() for name, tensor in state.items()})
    yield EXTRA_FILE, msgspec.json.format(msgspec.json.encode(_Extra(step, stage, dict(extra))))


def _write(folder: Path, files: Iterable[tuple[str, bytes]], *, step: int, stage: str, disk: Disk) -> None:
    """Fill the folder and make all of it durable, the manifest last."""
    with storage_errors(str(folder)):
        disk.mkdir(folder)
        stored: dict[str, StoredFile] = {}
        for name, data in files:
            assert name not in stored, f"two files named {name}"
            pieces = tensor_pieces(data) if name.endswith(".safetensors") else ()
            stored[name] = StoredFile(len(data), xxhash.xxh3_64_hexdigest(data), pieces)
            _write_file(folder / name, data, disk=disk)
        _write_file(folder / MANIFEST_FILE, encode_manifest(Contents(step, stage, stored)), disk=disk)
        disk.sync_folder(folder)


def _put_in_place(unfinished: Checkpoint, *, folder: Path, disk: Disk) -> Checkpoint:
    """Give the folder its name. One that has it already and is good stays until this one is there too."""
    path = folder / f"step-{unfinished.step:06d}"
    number = 0
    while disk.exists(path):
        try:
            existing = verify(path, disk=disk)
        except StorageError:
            _retire(path, disk=disk)
            break
        if existing.digest == unfinished.digest:
            return existing
        number += 1
        path = folder / f"step-{unfinished.step:06d}.{number}"
    with storage_errors(str(path)):
        disk.rename(unfinished.path, path)
        disk.sync_folder(folder)
    return msgspec.structs.replace(unfinished, path=path)


def _retire_others(newest: Checkpoint, *, folder: Path, keep: int, disk: Disk) -> None:
    paths = _checkpoint_folders(folder, disk=disk)
    earlier = [path for path in paths if _place(path)[0] < newest.step]
    kept = {newest.path, *(earlier[-(keep - 1) :] if keep > 1 else ())}
    for path in paths:
        if path not in kept:
            _retire(path, disk=disk)


def _retire(path: Path, *, disk: Disk) -> None:
    """Take the name away first, so that a removal that is cut short does not look like a damaged checkpoint."""
    hidden = path.with_name(f".removed-{path.name}")
    with storage_errors(str(path)):
        if disk.exists(hidden):
            _remove_folder(hidden, disk=disk)
        disk.rename(path, hidden)
        disk.sync_folder(path.parent)
        _remove_folder(hidden, disk=disk)


def _clear_leftovers(folder: Path, *, disk: Disk) -> None:
    for name in _list(folder, disk=disk):
        if name.startswith((".saving-", ".removed-")):
            with storage_errors(str(folder / name)):
                _remove_folder(folder / name, disk=disk)


def _remove_folder(folder: Path, *, disk: Disk) -> None:
    for name in disk.list(folder):
        disk.remove(folder / name)
    disk.remove(folder)


def _checkpoint_folders(folder: Path, *, disk: Disk) -> list[Path]:
    """Oldest first."""
    names = [name for name in _list(folder, disk=disk) if name.startswith("step-")]
    return sorted((folder / name for name in names), key=_place)


def _place(path: Path) -> tuple[int, int]:
    """(step, which save of it): `_place(Path("step-000123.1")) == (123, 1)`."""
    step, _, number = path.name.removeprefix("step-").partition(".")
    return (int(step), int(number or 0)) if step.isdecimal() and (number or "0").isdecimal() else (-1, 0)


def _read_manifest(path: Path, *, disk: Disk) -> tuple[Contents, str]:
    with storage_errors(str(path / MANIFEST_FILE)):
        data = disk.read(path / MANIFEST_FILE)
    return decode_manifest(data, path=path / MANIFEST_FILE)


def _read_file(path: Path, name: str, *, contents: Contents, disk: Disk) -> bytes:
    expected = contents.files.get(name)
    if expected is None:
        raise StorageError(f"{path} has no {name}")
    with storage_errors(str(path / name)):
        data = disk.read(path / name)
    if len(data) != expected.size:
        raise StorageError(
            f"{path / name} is damaged on disk: expected {expected.size} bytes, got {len(data)}"
        )
    found = xxhash.xxh3_64_hexdigest(data)
    if found != expected.digest:
        raise StorageError(f"{path / name} is damaged on disk: expected xxh3 {expected.digest}, got {found}")
    return data


def _write_file(path: Path, data: bytes, *, disk: Disk) -> None:
    with storage_errors(str(path)):
        file = disk.open(path, create=True)
        try:
            view = memoryview(data)
            for start in range(0, len(data), _CHUNK_SIZE):
                file.pwrite(view[start : start + _CHUNK_SIZE], offset=start)
            file.sync()
        finally:
            file.close()


def _list(folder: Path, *, disk: Disk) -> list[str]:
    with storage_errors(str(folder)):
        return disk.list(folder)
