"""Durable checkpoints: folders that are either complete and verified, or do not exist.

    checkpoints/step-000123/
        config.json model.safetensors tokenizer.json …   a Hugging Face folder, usable as it is
        trainer.safetensors                              optimizer moments and master weights
        trainer.json                                     step, stage, schedule, random state, …
        manifest.json                                    size and digest of all of the above, and each tensor's slice

A save writes into a hidden folder, syncs it, reads it back, and renames it: a crash at any point leaves the previous
checkpoints as they were. Older ones are removed only after the new one has its name. Leftovers of a killed save or
removal begin with a dot and are removed by the next save. A file lock, which the kernel releases when its process ends,
excludes a second saver. All I/O goes through `Disk`, so that tests can fail any write of a save. torch is imported only
when tensors are saved or loaded.

Files are written, digested, read back and loaded in pieces of `PIECE_BYTES`, none of which holds the interpreter's
lock: no file is ever a whole in memory, and the other threads of the process keep running. While a piece is written,
the device writes those before: at most `ahead_bytes` are in the page cache only, so that it holds no second copy of the
state. The more may be there, the sooner all tensors have been read, and the longer the sync after that. Files are read
back from the device, not from that cache.
"""

from __future__ import annotations

import logging
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from kintsugi.checkpoint.manifest import (
    MANIFEST_FILE,
    Contents,
    StoredFile,
    decode_manifest,
    describe_tensor,
    encode_manifest,
)
from kintsugi.errors import DataDamaged, RefusedError, StorageError
from kintsugi.model.arrays import Array, flat_bytes, from_buffer
from kintsugi.model.tensor_file import (
    PIECE_BYTES,
    FileContent,
    TensorFile,
    TensorPlace,
    head_size,
    places_of,
)
from kintsugi.runtime.disk import SYSTEM_DISK, Disk, File, storage_errors

STATE_FILE = "trainer.safetensors"
EXTRA_FILE = "trainer.json"
_LOCK_FILE = ".lock"
FLUSH_BYTES = 128 << 20
"""Bytes that may be on their way to the device if no number is given: enough to keep it busy, little beside a state."""
SMALL_BYTES = 1 << 20
"""Smaller pieces (norms, biases) are written together."""

log = logging.getLogger(__name__)


class Checkpoint(msgspec.Struct, frozen=True):
    """A verified checkpoint: `Checkpoint(Path("…/step-000123"), step=123, stage="grpo", digest="9f…")`."""

    path: Path
    step: int
    stage: str
    digest: str
    """Digest of all files; equal for equal contents."""


class _Extra(msgspec.Struct, frozen=True):
    """Contents of `trainer.json`."""

    step: int
    stage: str
    extra: dict[str, Any]


Report = Callable[[Path, str], None]
OnBytes = Callable[[int], object]
"""Called with the size of every piece that was written or read; what it raises ends the save or the load."""


def _ignore(size: int) -> None:
    """Default of `OnBytes`."""


def _log_damage(path: Path, reason: str) -> None:
    log.warning("checkpoint %s is passed over: %s", path, reason)


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    stage: str,
    state: Mapping[str, Array],
    extra: Mapping[str, Any],
    model_files: Iterable[tuple[str, FileContent]],
    keep: int,
    best_steps: Sequence[int] = (),
    disk: Disk = SYSTEM_DISK,
    on_bytes: OnBytes = _ignore,
    on_read: Callable[[], object] = lambda: None,
    ahead_bytes: int = FLUSH_BYTES,
) -> Checkpoint:
    """Write and verify a checkpoint, then remove old ones. `model_files`: name and contents of the Hugging Face files.

    Of `best_steps`, the first that has a checkpoint is kept too, however old.
    `on_read` is called as soon as all tensors have been read: they may change while the files are synced and verified.
    `ahead_bytes` of them may not be at the device by then.

    A disk error raises StorageError with the file's name and leaves the previous checkpoints as they were. Saving a
    step again replaces it if the contents differ. Checkpoints of later steps belong to a history that was rolled back
    and are removed with the old ones. RefusedError is raised while another process saves into the folder.
    """
    assert keep >= 1, f"a save that keeps {keep} checkpoints would remove itself"
    with storage_errors(str(folder)):
        disk.mkdir(folder)
    with _alone(folder, disk=disk):
        _clear_leftovers(folder, disk=disk)
        unfinished = folder / f".saving-step-{step:06d}"
        files = chain(model_files, _trainer_files(step=step, stage=stage, state=state, extra=extra))
        try:
            writer = _Writer(unfinished, disk=disk, on_bytes=on_bytes, ahead_bytes=ahead_bytes)
            writer.write(files, step=step, stage=stage, on_read=on_read)
            written = verify(unfinished, disk=disk, on_bytes=on_bytes, uncached=True)
            checkpoint = _put_in_place(written, folder=folder, disk=disk)
        finally:
            with suppress(OSError):
                if disk.exists(unfinished):
                    _remove_folder(unfinished, disk=disk)
        _retire_others(checkpoint, folder=folder, keep=keep, best_steps=best_steps, disk=disk)
    return checkpoint


ARRIVING = ".saving-arriving-step-"
"""Begin of the name of a folder whose files are on their way from another host."""


def arriving_folder(folder: Path, *, step: int) -> Path:
    """Return where the files of a checkpoint arrive that another host has written."""
    return folder / f"{ARRIVING}{step:06d}"


def keep_checkpoint(
    folder: Path, *, step: int, keep: int, best_steps: Sequence[int] = (), disk: Disk = SYSTEM_DISK
) -> Checkpoint:
    """Verify a checkpoint whose files have arrived, put it in place, and remove old ones as `save_checkpoint` does.

    StorageError if a file is missing or damaged: the files that have arrived are removed then.
    """
    assert keep >= 1, f"a save that keeps {keep} checkpoints would remove itself"
    arrived = arriving_folder(folder, step=step)
    with _alone(folder, disk=disk):
        try:
            for name in _list(arrived, disk=disk):
                with storage_errors(str(arrived / name)), closing(disk.open(arrived / name)) as file:
                    file.sync()
            with storage_errors(str(arrived)):
                disk.sync_folder(arrived)
            checkpoint = _put_in_place(verify(arrived, disk=disk, uncached=True), folder=folder, disk=disk)
        finally:
            with suppress(OSError):
                if disk.exists(arrived):
                    _remove_folder(arrived, disk=disk)
        _retire_others(checkpoint, folder=folder, keep=keep, best_steps=best_steps, disk=disk)
    return checkpoint


class CheckpointState:
    """State of a checkpoint. Names, dtypes and shapes are known; the bytes are read straight into their place."""

    def __init__(self, path: Path, *, contents: Contents, disk: Disk, on_bytes: OnBytes = _ignore) -> None:
        self._path, self._contents, self._disk, self._on_bytes = path, contents, disk, on_bytes
        self.places: Mapping[str, TensorPlace] = {
            place.name: place for place in _tensor_places(path, contents=contents, disk=disk)
        }

    def read(self, into: Mapping[str, Array]) -> None:
        """Fill contiguous tensors of the same names, dtypes and shapes; StorageError if the file is damaged, after
        which their contents are undefined."""
        assert into.keys() == self.places.keys(), "the caller has compared the names"
        ahead = deque(sorted(self.places.values(), key=lambda place: place.offset))
        targets = {name: flat_bytes(array) for name, array in into.items()}
        pieces = _read_verified(
            self._path, STATE_FILE, contents=self._contents, disk=self._disk, on_bytes=self._on_bytes
        )
        for offset, piece in pieces:
            end = offset + len(piece)
            while ahead and ahead[0].offset < end:
                place = ahead[0]
                start, stop = max(place.offset, offset), min(place.offset + place.size, end)
                target = targets[place.name][start - place.offset : stop - place.offset]
                target[...] = from_buffer(piece[start - offset : stop - offset], like=target)
                if stop < place.offset + place.size:
                    break
                ahead.popleft()


def load_checkpoint(
    path: Path, *, disk: Disk = SYSTEM_DISK, on_bytes: OnBytes = _ignore
) -> tuple[CheckpointState, dict[str, Any]]:
    """Open the state and load the extra that were given to `save_checkpoint`; StorageError if they are damaged."""
    contents, _ = _read_manifest(path, disk=disk)
    parts = [bytes(piece) for _, piece in _read_verified(path, EXTRA_FILE, contents=contents, disk=disk)]
    extra = msgspec.json.decode(b"".join(parts), type=_Extra)
    return CheckpointState(path, contents=contents, disk=disk, on_bytes=on_bytes), extra.extra


def verify(
    path: Path, *, disk: Disk = SYSTEM_DISK, on_bytes: OnBytes = _ignore, uncached: bool = False
) -> Checkpoint:
    """Read all files and compare digests; StorageError names the first file that is missing or damaged. `uncached`:
    read from the device what the page cache may hold."""
    contents, digest = _read_manifest(path, disk=disk)
    for name in contents.files:
        pieces = _read_verified(
            path, name, contents=contents, disk=disk, on_bytes=on_bytes, uncached=uncached
        )
        deque(pieces, maxlen=0)
    return Checkpoint(path, contents.step, contents.stage, digest)


def latest(
    folder: Path,
    *,
    at_most: int | None = None,
    disk: Disk = SYSTEM_DISK,
    report: Report = _log_damage,
) -> Checkpoint | None:
    """Find the newest intact checkpoint, of no later step than `at_most`; None if there are no checkpoints.

    Damaged ones are reported with the reason and skipped. If all are damaged, StorageError is raised: starting from
    scratch would silently discard the run.
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
        raise StorageError(
            f"no checkpoint in {folder} can be read: {'; '.join(damaged)}",
            detail=DataDamaged(path=str(folder)),
        )
    return None


@contextmanager
def _alone(folder: Path, *, disk: Disk) -> Iterator[None]:
    """Lock the folder against other savers; the kernel releases the lock of a killed process."""
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
    *, step: int, stage: str, state: Mapping[str, Array], extra: Mapping[str, Any]
) -> Iterator[tuple[str, FileContent]]:
    yield STATE_FILE, TensorFile(state)
    yield EXTRA_FILE, msgspec.json.format(msgspec.json.encode(_Extra(step, stage, dict(extra))))


class _Writer:
    """Writes the files of a checkpoint and makes them durable, the manifest last."""

    def __init__(self, folder: Path, *, disk: Disk, on_bytes: OnBytes, ahead_bytes: int) -> None:
        self._folder, self._disk, self._on_bytes = folder, disk, on_bytes
        self._flushes = _Flushes(most_bytes=ahead_bytes)

    def write(
        self,
        files: Iterable[tuple[str, FileContent]],
        *,
        step: int,
        stage: str,
        on_read: Callable[[], object],
    ) -> None:
        with storage_errors(str(self._folder)):
            self._disk.mkdir(self._folder)
        stored: dict[str, StoredFile] = {}
        with ExitStack() as resources:
            opened: list[tuple[Path, File]] = []
            for name, content in files:
                assert name not in stored, f"two files named {name}"
                path = self._folder / name
                with storage_errors(str(path)):
                    file = resources.enter_context(closing(self._disk.open(path, create=True)))
                    stored[name] = self._write_content(path, file, content)
                opened.append((path, file))
            on_read()
            self._make_durable(opened)
        manifest = self._folder / MANIFEST_FILE
        with storage_errors(str(manifest)), closing(self._disk.open(manifest, create=True)) as file:
            self._write_content(manifest, file, encode_manifest(Contents(step, stage, stored)))
            self._make_durable([(manifest, file)])
        with storage_errors(str(self._folder)):
            self._disk.sync_folder(self._folder)

    def _make_durable(self, opened: Sequence[tuple[Path, File]]) -> None:
        while self._flushes.num_bytes:
            self._flushes.finish_first()
            self._on_bytes(0)  # The save may be ended here.
        for path, file in opened:
            with storage_errors(str(path)):
                file.sync()

    def _write_content(self, path: Path, file: File, content: FileContent) -> StoredFile:
        """Write a file in pieces; its digests are computed on the way."""
        whole = xxhash.xxh3_64()
        digests: dict[str, Any] = {}
        writer = _PieceWriter(path, file, flushes=self._flushes, on_bytes=self._on_bytes)
        if isinstance(content, bytes):
            whole.update(content)
            writer.write(memoryview(content))
        else:
            digests = {place.name: xxhash.xxh3_64() for place in content.places}
            for place, piece in content.pieces():
                whole.update(piece)
                if place is not None:
                    digests[place.name].update(piece)
                writer.write(piece)
        writer.finish()
        places = () if isinstance(content, bytes) else sorted(content.places, key=lambda place: place.name)
        pieces = tuple(describe_tensor(place, digest=digests[place.name].hexdigest()) for place in places)
        return StoredFile(writer.end, whole.hexdigest(), pieces)


class _Flushes:
    """Ranges of files that are on their way to the device, oldest first."""

    def __init__(self, *, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._ranges: deque[tuple[Path, File, int, int]] = deque()
        self.num_bytes = 0

    def start(self, path: Path, file: File, *, offset: int, size: int) -> None:
        """Start to write a range to the device; wait for older ones while there are too many bytes."""
        file.start_flush(offset=offset, size=size)
        self._ranges.append((path, file, offset, size))
        self.num_bytes += size
        while self.num_bytes - self._ranges[0][3] >= self._most_bytes:
            self.finish_first()

    def finish_first(self) -> None:
        path, file, offset, size = self._ranges.popleft()
        self.num_bytes -= size
        with storage_errors(str(path)):
            file.finish_flush(offset=offset, size=size)


class _PieceWriter:
    """Writes the pieces of one file, while the device writes those before."""

    def __init__(self, path: Path, file: File, *, flushes: _Flushes, on_bytes: OnBytes) -> None:
        self._path, self._file, self._flushes, self._on_bytes = path, file, flushes, on_bytes
        self._small = bytearray()
        self.end = 0
        """Size of the file so far."""

    def write(self, piece: memoryview) -> None:
        if len(self._small) + len(piece) <= SMALL_BYTES:
            self._small += piece
            return
        self.finish()
        for start in range(0, len(piece), PIECE_BYTES):
            self._write(piece[start : start + PIECE_BYTES])

    def finish(self) -> None:
        """Write the small pieces that wait for company."""
        if self._small:
            small, self._small = self._small, bytearray()
            self._write(memoryview(small))

    def _write(self, piece: memoryview) -> None:
        start, self.end = self.end, self.end + len(piece)
        self._file.pwrite(piece, offset=start)
        self._flushes.start(self._path, self._file, offset=start, size=len(piece))
        self._on_bytes(len(piece))


def _put_in_place(unfinished: Checkpoint, *, folder: Path, disk: Disk) -> Checkpoint:
    """Rename the folder to its final name. An intact checkpoint of the same step stays until this one is in place."""
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


def _retire_others(
    newest: Checkpoint, *, folder: Path, keep: int, best_steps: Sequence[int], disk: Disk
) -> None:
    paths = _checkpoint_folders(folder, disk=disk)
    earlier = [path for path in paths if _place(path)[0] < newest.step]
    by_step = {_place(path)[0]: path for path in [*earlier, newest.path]}
    best = [by_step[step] for step in best_steps if step in by_step]
    kept = {newest.path, *(earlier[-(keep - 1) :] if keep > 1 else ()), *best[:1]}
    for path in paths:
        if path not in kept:
            _retire(path, disk=disk)


def _retire(path: Path, *, disk: Disk) -> None:
    """Remove a checkpoint. It is renamed first, so that an interrupted removal does not look like a damaged one."""
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
    """Folders of all checkpoints, oldest first."""
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


def _read_verified(
    path: Path,
    name: str,
    *,
    contents: Contents,
    disk: Disk,
    on_bytes: OnBytes = _ignore,
    uncached: bool = False,
) -> Iterator[tuple[int, memoryview]]:
    """Offset and bytes of every piece of a file; a piece is valid until the next one is taken. StorageError at the end
    if the file as a whole is not the one that was saved."""
    expected = contents.files.get(name)
    if expected is None:
        raise StorageError(f"{path} has no {name}")
    digest, offset = xxhash.xxh3_64(), 0
    with storage_errors(str(path / name)):
        file = disk.open_to_read(path / name, uncached=uncached)
    buffer = memoryview(mmap.mmap(-1, _buffer_size(expected.size)))
    with closing(file):
        while True:
            with storage_errors(str(path / name)):
                count = file.pread_into(buffer, offset=offset)
            digest.update(buffer[:count])
            on_bytes(count)
            yield offset, buffer[:count]
            offset += count
            if count < len(buffer):
                break
    found = digest.hexdigest()
    if (offset, found) != (expected.size, expected.digest):
        raise StorageError(
            f"{path / name} is damaged on disk: expected {expected.size} bytes with xxh3 {expected.digest}, "
            f"got {offset} with {found}",
            detail=DataDamaged(path=str(path / name)),
        )


def _buffer_size(size: int) -> int:
    """Whole pages, as reads past the page cache need them, and room for one byte too many."""
    return min(PIECE_BYTES, mmap.PAGESIZE * (size // mmap.PAGESIZE + 1))


def _tensor_places(path: Path, *, contents: Contents, disk: Disk) -> list[TensorPlace]:
    """Tensors of the state's file, by its header; its digest is compared when it is read."""
    if STATE_FILE not in contents.files:
        raise StorageError(f"{path} has no {STATE_FILE}")
    with storage_errors(str(path / STATE_FILE)), closing(disk.open_to_read(path / STATE_FILE)) as file:
        try:
            return places_of(file.pread(head_size(file.pread(8, offset=0)), offset=0))
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"{path / STATE_FILE} is damaged on disk: {error}",
                detail=DataDamaged(path=str(path / STATE_FILE)),
            ) from error


def _list(folder: Path, *, disk: Disk) -> list[str]:
    with storage_errors(str(folder)):
        return disk.list(folder)
