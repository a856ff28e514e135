"""Checkpoints of ranks whose hosts do not have the run folder: written there, then brought here, and fetched back.

rank ── StoreFile, an offer of its files and digests of a part ──► agent beside the master
rank ◄═════════════ pieces, over the bulk channel ════════════════ agent
rank ── KeepCheckpoint: verify, rename ──────────────────────────► agent ──► run folder

rank ── ListFiles ──► agent beside the master: sizes, an offer
rank ◄═════════════ pieces, over the bulk channel ════════════════ agent

Several parts are on their way at a time, each over a connection of its own. A connection that ends is replaced. If this
rank ends, another one that brings the same checkpoint sends only what has not arrived.

Of a state that is cut into boxes every rank brings its own. The rank that saves brings the other files; for the Hugging
Face folder it fetches the weights, without the moments, of the boxes that have arrived. A rank that loads a checkpoint
fetches the files with a part of its box.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import msgspec
import xxhash

from kintsugi.bulk.client import Watch
from kintsugi.bulk.endpoint import BulkEndpoint
from kintsugi.bulk.files import FILE_PIECE_BYTES, DiskExport, Transfer, fetch_piece, file_digests
from kintsugi.checkpoint.manifest import MANIFEST_FILE, StoredFile, decode_manifest
from kintsugi.checkpoint.store import Checkpoint, CheckpointState, load_checkpoint, unfinished_folder
from kintsugi.errors import (
    DeadlineExceeded,
    ProcessDied,
    RefusedError,
    StorageError,
    StorageFull,
    WorldError,
)
from kintsugi.protocol.bulk import BulkOffer
from kintsugi.protocol.hosts import CheckpointKept, FilesListed, KeepCheckpoint, ListFiles, StoreFile
from kintsugi.protocol.messages import Body
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.disk import SYSTEM_DISK, File, storage_errors
from kintsugi.runtime.waits import wait
from kintsugi.transport import Reply

PART_BYTES = 4 * FILE_PIECE_BYTES
"""Bytes of a file in one request."""
PART_S = 600.0
"""Deadline of one part; a connection without any progress fails much earlier."""
KEEP_S = 1800.0
"""Deadline of the verification, which reads everything."""
MAX_ATTEMPTS, PAUSE_S = 6, 2.0
"""Attempts to bring or fetch while the agent beside the master is being replaced, and the pause between them."""

FETCHED, WRITTEN = ".fetched-", ".box-"
"""Begin of the names of what a rank has fetched, which its next fetch replaces, and of the box that it brings."""
WEIGHTS = "weights/"
"""Begin of the names of weights in a state."""

Ask = Callable[[str, Body], Reply]
Check = Callable[[], object]
"""Raises if what is under way was given up."""


class Call(Protocol):
    """`Shell.call`."""

    def __call__(self, process: str, body: Body, *, deadline_s: float) -> Reply: ...


def _go_on() -> None:
    """Default of `Check`."""


class CheckpointDelivery:
    """Carries checkpoints, and boxes of them, between a folder of this host and the run folder."""

    def __init__(self, call: Call, bulk: BulkEndpoint, *, process: str, agent: str, folder: Path) -> None:
        """`agent` is the one beside the master; `folder` is for checkpoints on this host, of all its ranks."""
        self._call, self._bulk, self._agent = call, bulk, agent
        self._process = process
        self._prefix = f"{FETCHED}{process}-"
        self.folder = folder
        self._numbers = count()
        """Numbers of transfers: a rank may still bring a box when it is asked for another one."""
        self._fetching: tuple[Path, dict[str, int]] = Path(), {}
        self._arrived: set[tuple[int, int]] = set()
        """File and offset of the pieces that a fetch which was interrupted has written."""
        for left in folder.glob(f"{WRITTEN}{process}-*"):  # By a predecessor that was killed.
            shutil.rmtree(left, ignore_errors=True)

    # To the run folder.

    def deliver(
        self,
        folder: Path,
        names: Sequence[str],
        *,
        step: int,
        keep: int,
        best_steps: tuple[int, ...],
        check: Check = _go_on,
        on_sent: Callable[[int], object] = lambda size: None,
    ) -> Checkpoint:
        """Bring files of a checkpoint, the manifest among them, to the run folder, and have it verified and kept there
        together with the boxes that other ranks have brought; return it as it is there. `check` raises if the
        checkpoint was given up: its step may have been undone meanwhile. `on_sent` is called, by any thread, with
        the size of every part.

        A failure of the agent beside the master, such as a full disk, is one of storage.
        """
        self._send_files([folder / name for name in names], step=step, check=check, on_sent=on_sent)
        request = KeepCheckpoint(step, keep, best_steps)
        check()
        kept = self._send(request, deadline_s=KEEP_S).expect(CheckpointKept)
        manifest = folder / MANIFEST_FILE
        with storage_errors(str(manifest)):
            contents, digest = decode_manifest(manifest.read_bytes(), path=manifest)
        if kept.digest != digest:
            raise StorageError(f"{kept.path}: expected the checkpoint of digest {digest}, got {kept.digest}")
        return Checkpoint(Path(kept.path), contents.step, contents.stage, kept.digest)

    def bring_box(
        self, write: Callable[[Path], tuple[str, StoredFile]], *, step: int, check: Check
    ) -> tuple[str, StoredFile]:
        """Have the box of this rank written on this host, and bring it to the run folder; return its entry in the
        manifest. Nothing of it stays here."""
        folder = self.folder / f"{WRITTEN}{self._process}-{next(self._numbers)}"
        try:
            name, stored = write(folder)
            self._send_files([folder / name], step=step, check=check)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return name, stored

    def _send_files(
        self,
        paths: Sequence[Path],
        *,
        step: int,
        check: Check,
        on_sent: Callable[[int], object] = lambda size: None,
    ) -> None:
        def on_bytes(size: int) -> None:
            COUNTERS.add("bytes_saved", size)
            on_sent(size)

        export = DiskExport(sorted(paths), on_bytes=on_bytes)
        name = f"checkpoint-{next(self._numbers)}"
        server = self._bulk.server
        offer = server.offer(name, export)
        parts = (
            (path, StoreFile(step, path.name, size, offset, (), offer, index))
            for index, (path, size) in enumerate(zip(sorted(paths), export.sizes, strict=True))
            for offset in range(0, max(1, size), PART_BYTES)
        )
        Transfer(
            (partial(self._send_part, path, part, check) for path, part in parts),
            whom=self._agent,
            what=f"the checkpoint of step {step} on its way",
            check=check,
            stop=lambda: server.withdraw(name),
        ).run()
        server.withdraw(name)

    def _send_part(self, path: Path, part: StoreFile, check: Check, watch: Watch) -> None:
        """Body of a thread. The connections are those of the agent, which fetches."""
        size = min(PART_BYTES, part.size - part.offset)
        digests = file_digests(path, offset=part.offset, size=size)
        check()
        body = msgspec.structs.replace(part, digests=digests)
        self._repeat(partial(self._send, body, deadline_s=PART_S), check=check)

    def _repeat(self, work: Callable[[], object], *, check: Check) -> None:
        """Repeat what fails while the agent beside the master is being replaced."""
        for _ in range(MAX_ATTEMPTS - 1):
            try:
                work()
                return
            except StorageError as error:
                if not isinstance(error.__cause__, ProcessDied) and type(error.__cause__) is not WorldError:
                    raise
            self._pause()
            check()
        work()

    def _pause(self) -> None:
        idle = threading.Event()
        with suppress(DeadlineExceeded):
            wait(
                lambda remaining_s: True if idle.wait(remaining_s) else None,
                whom=self._agent,
                what="its successor",
                timeout_s=PAUSE_S,
            )

    def _send(self, body: Body, *, deadline_s: float) -> Reply:
        try:
            return self._call(self._agent, body, deadline_s=deadline_s)
        except WorldError as error:
            is_full = error.cause is not None and error.cause.kind == StorageFull.__name__
            raise (StorageFull if is_full else StorageError)(f"{self._agent}: {error}") from error

    # From the run folder.

    def fetch_weights(self, boxes: Mapping[str, StoredFile], *, step: int, into: Path, check: Check) -> None:
        """Fetch the weights of boxes that have arrived in the run folder: files with their names and sizes, in which
        only the head and the weights are filled. Every tensor is verified. StorageError if they can not be had."""
        self._repeat(partial(self._fetch_weights, boxes, step=step, into=into, check=check), check=check)
        for file, stored in boxes.items():
            _verify_weights(into / file, stored, source=self._agent)

    def _fetch_weights(self, boxes: Mapping[str, StoredFile], *, step: int, into: Path, check: Check) -> None:
        name = unfinished_folder(Path(), step=step).name
        listed = self._send(ListFiles(name), deadline_s=PART_S).expect(FilesListed)
        indices = {file: index for index, file in enumerate(listed.sizes)}
        spans = {file: list(_weight_spans(stored)) for file, stored in boxes.items()}
        for file, stored in boxes.items():
            if listed.sizes.get(file) != stored.size:
                raise StorageError(
                    f"{name}/{file} in the run folder: expected {stored.size} bytes, as its rank has brought, got "
                    f"{listed.sizes.get(file)}"
                )
            with storage_errors(str(into / file)), closing(_created(into / file)) as target:
                target.truncate(stored.size)
        fetches = (
            partial(self._fetch_piece, listed.offer, indices[file], into / file, piece)
            for file, own in spans.items()
            for span in own
            for piece in _pieces(span)
        )
        what = f"the weights of the checkpoint of step {step}"
        try:
            Transfer(fetches, whom=self._agent, what=what, check=check).run()
        except (RefusedError, StorageError):
            raise
        except WorldError as error:
            raise StorageError(f"{self._agent}: {error}") from error

    def open(
        self, source: Path, *, ask: Ask, check: Check = _go_on
    ) -> tuple[CheckpointState, dict[str, Any]]:
        """Open a checkpoint of the run folder, as `load_checkpoint` does. Its files are copied to this host when they
        are read, which compares their digests.

        `ask` and `check` are called by this thread; `check` raises if the fetch has to be given up. The next one of
        the same checkpoint goes on where this one ended.
        """
        listed = ask(self._agent, ListFiles(source.name)).expect(FilesListed)
        target = self.folder / f"{self._prefix}{source.name}"
        if self._fetching != (target, listed.sizes):
            self._fetching, self._arrived = (target, listed.sizes), set()
            with storage_errors(str(target)):
                for earlier in self.folder.glob(f"{self._prefix}*"):
                    shutil.rmtree(earlier)
                target.mkdir(parents=True)
        here: set[str] = set()

        def obtain(names: Sequence[str]) -> None:
            missing = [name for name in names if name not in here]
            self._fetch_files(missing, listed, target=target, check=check)
            here.update(missing)

        return load_checkpoint(
            target, on_bytes=lambda size: COUNTERS.add("bytes_loaded", size), obtain=obtain
        )

    def _fetch_files(self, names: Sequence[str], listed: FilesListed, *, target: Path, check: Check) -> None:
        """Copy files of a checkpoint. One that it does not have is missed by its reader, which names it."""
        wanted = [(index, name) for index, name in enumerate(listed.sizes) if name in names]
        for _, name in wanted:
            size = listed.sizes[name]
            with storage_errors(str(target / name)), closing(_created(target / name)) as file:
                file.preallocate(max(1, size))
                file.truncate(size)
        arrived = self._arrived

        def fetch(index: int, name: str, piece: range, watch: Watch) -> None:
            self._fetch_piece(listed.offer, index, target / name, piece, watch)
            arrived.add((index, piece.start))

        fetches = (
            partial(fetch, index, name, piece)
            for index, name in wanted
            for piece in _pieces(range(listed.sizes[name]))
            if (index, piece.start) not in arrived
        )
        Transfer(fetches, whom=self._agent, what=f"the checkpoint {target.name}", check=check).run()
        # A copy that turns out to be damaged is fetched again as a whole.
        indices = {index for index, _ in wanted}
        self._arrived = {piece for piece in arrived if piece[0] not in indices}

    def _fetch_piece(self, offer: BulkOffer, index: int, path: Path, piece: range, watch: Watch) -> None:
        """Body of a thread. The file is opened for each piece: one that comes after its fetch was given up, and the
        folder removed, is written nowhere."""
        content = memoryview(bytearray(len(piece)))
        fetch_piece(self._bulk.client, offer, index=index, offset=piece.start, target=content, watch=watch)
        with storage_errors(str(path)), closing(SYSTEM_DISK.open(path)) as file:
            file.pwrite(content, offset=piece.start)
        COUNTERS.add("bytes_loaded", len(content))


def _created(path: Path) -> File:
    return SYSTEM_DISK.open(path, create=True)


def _pieces(span: range) -> Iterator[range]:
    """Cut bytes of a file into pieces.

    >>> [len(piece) for piece in _pieces(range(5, 5 + FILE_PIECE_BYTES + 1))]
    [16777216, 1]
    """
    for start in range(span.start, span.stop, FILE_PIECE_BYTES):
        yield range(start, min(start + FILE_PIECE_BYTES, span.stop))


def _weight_spans(stored: StoredFile) -> Iterator[range]:
    """Bytes of the head of a box's file, and of its weights: each as one range where they follow each other."""
    span = range(min((piece.offset for piece in stored.pieces), default=stored.size))
    for piece in sorted(stored.pieces, key=lambda piece: piece.offset):
        if not piece.name.startswith(WEIGHTS) or not piece.size:
            continue
        if piece.offset != span.stop:
            yield span
            span = range(piece.offset, piece.offset)
        span = range(span.start, piece.offset + piece.size)
    yield span


def _verify_weights(path: Path, stored: StoredFile, *, source: str) -> None:
    """Compare the weights of a box, as they have arrived, with the digests that its rank computed as it wrote."""
    with storage_errors(str(path)), closing(SYSTEM_DISK.open_to_read(path)) as file:
        for piece in stored.pieces:
            if not piece.name.startswith(WEIGHTS):
                continue
            digest = xxhash.xxh3_64()
            for part in _pieces(range(piece.offset, piece.offset + piece.size)):
                digest.update(file.pread(len(part), offset=part.start))
            if digest.hexdigest() != piece.digest:
                raise StorageError(
                    f"{piece.name} in {path.name} from {source}: expected xxh3 {piece.digest}, got "
                    f"{digest.hexdigest()}"
                )
