"""Durable checkpoints: folders that are either complete and verified, or do not exist.

    checkpoints/step-000123/
        config.json model.safetensors tokenizer.json …   a Hugging Face folder, usable as it is
        trainer.safetensors                              optimizer moments and master weights, or instead
        trainer-00001-of-00004.safetensors …             the boxes of them, each written by a rank that holds it
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

A state that is cut into boxes (`model/seats.py`) is written by one rank of each box into the same hidden folder, to
which ranks on other hosts bring theirs. The rank that was asked to save writes the rest when the others are done: the
Hugging Face files, from the boxes, and the manifest, with the digests that the other ranks computed as they wrote. A
tensor that lies in several boxes is stored in parts: "weights/lm_head.weight@4096" begins at element 4,096. Any layout
of ranks can load such a checkpoint, as it can load one in a single file.
"""

from __future__ import annotations

import logging
import math
import mmap
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
import xxhash

from kintsugi.checkpoint.manifest import (
    MANIFEST_FILE,
    Contents,
    StoredFile,
    decode_manifest,
    describe_tensor,
    encode_manifest,
    stored_places,
)
from kintsugi.errors import DataDamaged, RefusedError, StorageError
from kintsugi.model.arrays import Array, flat_bytes, from_buffer
from kintsugi.model.seats import WHOLE, Seat
from kintsugi.model.tensor_file import (
    PIECE_BYTES,
    FileContent,
    TensorFile,
    TensorPlace,
    head_size,
    places_of,
    torch_dtype,
)
from kintsugi.model.tensor_slices import SliceName, join, slice_shape, view
from kintsugi.runtime.disk import SYSTEM_DISK, Disk, File, storage_errors

STATE_FILE = "trainer.safetensors"
PART_MARK = "@"
"""`weights/lm_head.weight@4096`: the elements of a tensor from this one on."""
EXTRA_FILE = "trainer.json"
_LOCK_FILE = ".lock"
_BOX_FILE = r"trainer-\d{5}-of-\d{5}\.safetensors"
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


class OtherBoxes(Protocol):
    """The boxes that other ranks write."""

    def ask(self, folder: Path) -> None:
        """Ask the ranks to write into this folder, which exists."""
        ...

    def wait(self) -> Mapping[str, StoredFile]:
        """Wait until all files are durable."""
        ...


def state_file(seat: Seat) -> str:
    """`state_file(Seat(1, 4)) == "trainer-00002-of-00004.safetensors"`."""
    if seat.is_whole:
        return STATE_FILE
    return f"trainer-{seat.number + 1:05d}-of-{seat.boxes:05d}.safetensors"


def is_trainer_file(name: str) -> bool:
    """Whether a file of a checkpoint is no part of its Hugging Face folder."""
    return name in (STATE_FILE, EXTRA_FILE, MANIFEST_FILE) or re.fullmatch(_BOX_FILE, name) is not None


Report = Callable[[Path, str], None]
OnBytes = Callable[[int], object]
"""Called with the size of every piece that was written or read; what it raises ends the save or the load."""


Obtain = Callable[[Sequence[str]], object]
"""Called with the names of files of a checkpoint before they are read: on another host they are fetched then."""
Bring = Callable[[Path, Sequence[str]], Checkpoint]
"""Brings these files of a folder to another host, where they are verified with those that other ranks have brought, and
the checkpoint is put into its place."""


def _ignore(size: int) -> None:
    """Default of `OnBytes`."""


def _is_here(names: Sequence[str]) -> None:
    """Default of `Obtain`."""


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
    seat: Seat = WHOLE,
    others: OtherBoxes | None = None,
    bring: Bring | None = None,
) -> Checkpoint:
    """Write and verify a checkpoint, then remove old ones. `model_files`: name and contents of the Hugging Face files.
    With several boxes `state` is that of the `seat`; the `others` are written by other ranks, and the model files are
    taken when all boxes are in the folder. With `bring` only the writing is done here.

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
        unfinished = unfinished_folder(folder, step=step)
        trainer_files = _trainer_files(step=step, stage=stage, state=state, extra=extra, seat=seat)
        stored: dict[str, StoredFile] = {}
        boxes: dict[str, StoredFile] = {}
        """Files that other ranks have written."""

        def all_boxes() -> Iterator[tuple[str, FileContent]]:
            assert others is not None
            others.ask(unfinished)
            yield from trainer_files
            on_read()
            boxes.update(others.wait())
            if bring is None:  # What came from other hosts was only written.
                _sync_files(unfinished, boxes, disk=disk)
            stored.update(boxes)
            yield from model_files

        files = chain(model_files, trainer_files) if others is None else all_boxes()
        try:
            writer = _Writer(unfinished, disk=disk, on_bytes=on_bytes, ahead_bytes=ahead_bytes)
            writer.write(files, step=step, stage=stage, stored=stored, on_read=on_read)
            if bring is not None:
                return bring(unfinished, [*(name for name in stored if name not in boxes), MANIFEST_FILE])
            written = verify(unfinished, disk=disk, on_bytes=on_bytes, uncached=True)
            checkpoint = _put_in_place(written, folder=folder, disk=disk)
        finally:
            with suppress(OSError):
                if disk.exists(unfinished):
                    _remove_folder(unfinished, disk=disk)
        _retire_others(checkpoint, folder=folder, keep=keep, best_steps=best_steps, disk=disk)
    return checkpoint


def write_box(
    folder: Path,
    *,
    seat: Seat,
    state: Mapping[str, Array],
    disk: Disk = SYSTEM_DISK,
    on_bytes: OnBytes = _ignore,
    on_read: Callable[[], object] = lambda: None,
    ahead_bytes: int = FLUSH_BYTES,
) -> tuple[str, StoredFile]:
    """Write the box of this rank into the folder of a checkpoint that another rank saves, and make it durable; return
    its entry in the manifest."""
    with storage_errors(str(folder)):
        disk.mkdir(folder)
    writer = _Writer(folder, disk=disk, on_bytes=on_bytes, ahead_bytes=ahead_bytes)
    name = state_file(seat)
    return name, writer.write_one(name, TensorFile(state), on_read=on_read)


UNFINISHED = ".saving-step-"
"""Begin of the name of a folder in which a checkpoint is written, or arrives from other hosts."""


def unfinished_folder(folder: Path, *, step: int) -> Path:
    """Return where the files of a checkpoint are before all of them are there and verified."""
    return folder / f"{UNFINISHED}{step:06d}"


def keep_checkpoint(
    folder: Path, *, step: int, keep: int, best_steps: Sequence[int] = (), disk: Disk = SYSTEM_DISK
) -> Checkpoint:
    """Verify a checkpoint whose files have arrived, put it in place, and remove old ones as `save_checkpoint` does.
    Files that its manifest does not name are those of an earlier save of this step, and removed.

    StorageError if a file is missing or damaged, or there are boxes of several states: what has arrived is removed.
    """
    assert keep >= 1, f"a save that keeps {keep} checkpoints would remove itself"
    arrived = unfinished_folder(folder, step=step)
    with _alone(folder, disk=disk):
        _clear_leftovers(folder, disk=disk, arriving_from=step)
        try:
            contents, _ = _read_manifest(arrived, disk=disk)
            if any(re.fullmatch(_BOX_FILE, name) for name in contents.files):
                _state_files(arrived, contents=contents)
            named = {MANIFEST_FILE, *contents.files}
            for name in _list(arrived, disk=disk):
                if name not in named:
                    with storage_errors(str(arrived / name)):
                        disk.remove(arrived / name)
            _sync_files(arrived, named, disk=disk)
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
    """State of a checkpoint. Names, dtypes and shapes are known; the bytes are read straight into their place. Whether
    it was saved in one file or in boxes, the whole of it can be read, or any box; files without a part of what is read
    are not touched."""

    has_any_box, box = True, ""

    def __init__(
        self,
        path: Path,
        *,
        contents: Contents,
        disk: Disk,
        on_bytes: OnBytes = _ignore,
        obtain: Obtain = _is_here,
    ) -> None:
        self._path, self._contents, self._disk, self._on_bytes = path, contents, disk, on_bytes
        self._obtain = obtain
        self._files = {
            name: stored_places(contents.files[name], path=path / name)
            for name in _state_files(path, contents=contents)
        }
        self._stored = _joined_parts(path, self._files)
        self.places: Mapping[str, TensorPlace] = _joined_slices(path, self._stored)
        """Tensors of the whole state. One that is stored in parts or slices has one dimension here."""

    def read(
        self,
        into: Mapping[str, Array],
        *,
        shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> None:
        """Fill contiguous tensors of the same names and dtypes, or slices ("name#1/4") or parts ("name@4096") of them;
        StorageError if a file is damaged, after which their contents are undefined. `shapes` are those of the whole
        tensors."""
        kinds: dict[str, dict[str, Array]] = {}
        for name, array in into.items():
            base = _part(name)[0]
            assert SliceName.parse(base).name in self.places, "the caller has compared the names"
            kinds.setdefault("" if base in self._stored else base.partition("/")[0], {})[name] = array
        self._read_stored(kinds.pop("", {}))
        for (
            cut_otherwise
        ) in kinds.values():  # One after another: all slices of a kind are in memory together.
            self._read_slices(cut_otherwise, shapes)

    def _read_slices(self, into: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Fill tensors that are stored in another number of slices."""
        import torch

        names = {SliceName.parse(_part(name)[0]).name for name in into}
        slices: dict[str, dict[str, Any]] = {name: {} for name in names}
        for base, place in self._stored.items():
            where = SliceName.parse(base)
            if where.name in names:
                shape = slice_shape(where, shapes[where.name])
                slices[where.name][base] = torch.empty(shape, dtype=torch_dtype(place))
        self._read_stored({base: each for own in slices.values() for base, each in own.items()})
        for name, array in into.items():
            base, first = _part(name)
            where = SliceName.parse(base)
            own = slices[where.name]
            whole = join(where.name, shapes[where.name], own)
            target: Any = array
            found = view(whole, where).reshape(-1)[first : first + target.numel()]
            target.copy_(found.view(target.shape))

    def _read_stored(self, into: Mapping[str, Array]) -> None:
        """Fill tensors of stored names, or parts of them."""
        targets: dict[str, tuple[int, Any]] = {}
        for name, array in into.items():
            base, first = _part(name)
            targets[base] = first * array.itemsize, flat_bytes(array)
        sources = {file: [_Source(place) for place in places] for file, places in self._files.items()}
        needed = {
            file: deque(own)
            for file, found in sources.items()
            if (own := [each for each in found if each.overlaps(targets)])
        }
        self._obtain([*needed])
        for file, ahead in needed.items():
            self._read_file(file, ahead, targets)

    def _read_file(self, file: str, ahead: deque[_Source], targets: Mapping[str, tuple[int, Any]]) -> None:
        pieces = _read_verified(
            self._path, file, contents=self._contents, disk=self._disk, on_bytes=self._on_bytes
        )
        for offset, piece in pieces:
            end = offset + len(piece)
            while ahead and ahead[0].place.offset < end:
                place, begin = ahead[0].place, ahead[0].begin
                at, target = targets[ahead[0].base]
                # Bytes of the tensor that are wanted, stored in this part, and in this piece of the file.
                start = max(begin + max(0, offset - place.offset), at)
                stop = min(begin + min(place.size, end - place.offset), at + len(target))
                if start < stop:
                    here = place.offset - offset - begin
                    wanted = piece[start + here : stop + here]
                    target[start - at : stop - at] = from_buffer(wanted, like=target)
                if end < place.offset + place.size:
                    break
                ahead.popleft()


class _Source:
    """A tensor, or a part of one, in a file."""

    def __init__(self, place: TensorPlace) -> None:
        self.place = place
        self.base, first = _part(place.name)
        count = math.prod(place.shape)
        self.begin = first * (place.size // count if count else 1)
        """Its first byte within the whole tensor."""

    def overlaps(self, targets: Mapping[str, tuple[int, Array]]) -> bool:
        at, target = targets.get(self.base, (0, ()))
        return self.begin < at + len(target) and at < self.begin + self.place.size


def tensor_of(name: str) -> str:
    """`tensor_of("weights/lm_head.weight#1/4@4096") == "weights/lm_head.weight#1/4"`"""
    return _part(name)[0]


def _part(name: str) -> tuple[str, int]:
    """`_part("weights/lm_head.weight@4096") == ("weights/lm_head.weight", 4096)`"""
    base, _, first = name.partition(PART_MARK)
    return base, int(first or 0)


def _state_files(path: Path, *, contents: Contents) -> list[str]:
    """The file of the state, or those of all its boxes; StorageError if one is missing, or there are several states."""
    if STATE_FILE in contents.files:
        return [STATE_FILE]
    found = sorted(name for name in contents.files if re.fullmatch(_BOX_FILE, name))
    if not found:
        raise StorageError(f"{path} has no {STATE_FILE}")
    boxes = int(found[0].removesuffix(".safetensors").rpartition("-")[2])
    expected = [state_file(Seat(number, boxes)) for number in range(boxes)]
    if found != expected:
        odd = sorted(set(expected) ^ set(found))
        raise StorageError(
            f"{path}: expected the {boxes} boxes of one state, got another set: {', '.join(odd)}"
        )
    return found


def _joined_slices(path: Path, stored: Mapping[str, TensorPlace]) -> dict[str, TensorPlace]:
    """Whole tensors by name, from their logical slices (`model/tensor_slices.py`); StorageError if one is missing."""
    slices: dict[str, list[tuple[SliceName, TensorPlace]]] = {}
    for base, place in stored.items():
        where = SliceName.parse(base)
        slices.setdefault(where.name, []).append((where, place))
    found = {}
    for name, own in slices.items():
        count, dtype = own[0][0].count, own[0][1].dtype
        expected = {SliceName(name, index, count) for index in range(count)}
        if {where for where, _ in own} != expected or any(place.dtype != dtype for _, place in own):
            names = ", ".join(sorted(str(where) for where, _ in own))
            raise StorageError(f"{path}: the slices of {name} do not make a whole: {names}")
        if count > 1:
            size = sum(math.prod(place.shape) for _, place in own)
            found[name] = TensorPlace(name, dtype, (size,), 0, sum(place.size for _, place in own))
        else:
            found[name] = own[0][1]
    return found


def _joined_parts(path: Path, files: Mapping[str, Sequence[TensorPlace]]) -> dict[str, TensorPlace]:
    """Tensors or slices by name, from their parts in all files; StorageError if parts do not make one."""
    parts: dict[str, list[_Source]] = {}
    for places in files.values():
        for place in places:
            source = _Source(place)
            parts.setdefault(source.base, []).append(source)
    found: dict[str, TensorPlace] = {}
    for base, sources in parts.items():
        sources.sort(key=lambda source: source.begin)
        first = sources[0].place
        if [source.place.name for source in sources] == [base]:
            found[base] = first
            continue
        end = 0
        for source in sources:
            if source.begin != end or source.place.dtype != first.dtype:
                raise StorageError(f"{path}: the parts of {base} do not follow each other at byte {end}")
            end += source.place.size
        count = sum(math.prod(source.place.shape) for source in sources)
        found[base] = TensorPlace(base, first.dtype, (count,), 0, end)
    return found


def stored_weights(folder: Path, *, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Weights of the actor in the boxes of a checkpoint that is being written, by Hugging Face name: views of the
    files, but for tensors that lie in several of them or are cut into slices."""
    import torch

    parts: dict[str, dict[str, list[tuple[int, Any]]]] = {name: {} for name in shapes}
    for path in sorted(path for path in folder.iterdir() if re.fullmatch(_BOX_FILE, path.name)):
        places = _tensor_places(folder, path.name, disk=SYSTEM_DISK)
        with storage_errors(str(path)), path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        for place in places:
            base, first = _part(place.name)
            local = base.removeprefix("weights/")
            name = SliceName.parse(local).name
            if base.startswith("weights/") and name in parts:
                dtype, count = torch_dtype(place), math.prod(place.shape)
                view = torch.frombuffer(content, dtype=dtype, count=count, offset=place.offset)
                parts[name].setdefault(local, []).append((first, view))
    weights = {}
    for name, shape in shapes.items():
        slices = {local: _joined(views) for local, views in parts[name].items()}
        if sum(each.numel() for each in slices.values()) != math.prod(shape):
            raise StorageError(f"{folder}: the boxes do not have all of {name}")
        if name in slices:
            weights[name] = slices[name].view(shape)
        else:
            shaped = {
                local: each.view(slice_shape(SliceName.parse(local), shape)) for local, each in slices.items()
            }
            weights[name] = join(name, shape, shaped)
    return weights


def _joined(parts: Sequence[tuple[int, Any]]) -> Any:
    """Parts of a tensor, with their first elements, as one; a view if there is only one."""
    import torch

    views = [view for _, view in sorted(parts, key=lambda part: part[0])]
    return views[0] if len(views) == 1 else torch.cat(views)


def load_checkpoint(
    path: Path, *, disk: Disk = SYSTEM_DISK, on_bytes: OnBytes = _ignore, obtain: Obtain = _is_here
) -> tuple[CheckpointState, dict[str, Any]]:
    """Open the state and load the extra that were given to `save_checkpoint`; StorageError if they are damaged."""
    obtain([MANIFEST_FILE, EXTRA_FILE])
    contents, _ = _read_manifest(path, disk=disk)
    parts = [bytes(piece) for _, piece in _read_verified(path, EXTRA_FILE, contents=contents, disk=disk)]
    extra = msgspec.json.decode(b"".join(parts), type=_Extra)
    return CheckpointState(path, contents=contents, disk=disk, on_bytes=on_bytes, obtain=obtain), extra.extra


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
    *, step: int, stage: str, state: Mapping[str, Array], extra: Mapping[str, Any], seat: Seat
) -> Iterator[tuple[str, FileContent]]:
    yield state_file(seat), TensorFile(state)
    yield EXTRA_FILE, msgspec.json.format(msgspec.json.encode(_Extra(step, stage, dict(extra))))


def _sync_files(folder: Path, names: Iterable[str], *, disk: Disk) -> None:
    """Make files durable that others have written."""
    for name in sorted(names):
        with storage_errors(str(folder / name)), closing(disk.open(folder / name)) as file:
            file.sync()


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
        stored: dict[str, StoredFile],
        on_read: Callable[[], object],
    ) -> None:
        """`stored`: where the files are noted; those that others have written are there when these have been."""
        with storage_errors(str(self._folder)):
            self._disk.mkdir(self._folder)
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

    def write_one(self, name: str, content: FileContent, *, on_read: Callable[[], object]) -> StoredFile:
        """Write one file into a folder that exists, and make it durable."""
        path = self._folder / name
        with storage_errors(str(path)), closing(self._disk.open(path, create=True)) as file:
            stored = self._write_content(path, file, content)
            file.truncate(stored.size)  # An earlier save of this step may have left a larger file.
            on_read()
            self._make_durable([(path, file)])
        return stored

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


def _clear_leftovers(folder: Path, *, disk: Disk, arriving_from: int | None = None) -> None:
    """Remove what killed saves and removals have left; checkpoints of `arriving_from` and later steps may still be
    arriving."""
    for name in _list(folder, disk=disk):
        step = name.removeprefix(UNFINISHED)
        is_arriving = arriving_from is not None and step.isdecimal() and int(step) >= arriving_from
        if name.startswith((".saving-", ".removed-")) and not is_arriving:
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


def _tensor_places(path: Path, name: str, *, disk: Disk) -> list[TensorPlace]:
    """Tensors of a file of the state, by its header; its digest is compared when it is read."""
    with storage_errors(str(path / name)), closing(disk.open_to_read(path / name)) as file:
        try:
            return places_of(file.pread(head_size(file.pread(8, offset=0)), offset=0))
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"{path / name} is damaged on disk: {error}",
                detail=DataDamaged(path=str(path / name)),
            ) from error


def _list(folder: Path, *, disk: Disk) -> list[str]:
    with storage_errors(str(folder)):
        return disk.list(folder)
