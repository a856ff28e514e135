"""Checkpoints of a rank whose host does not have the run folder: written here, then brought there, and fetched back.

rank ── StoreFile, an offer of its files and digests of a part ──► agent beside the master
rank ◄═════════════ pieces, over the bulk channel ════════════════ agent
rank ── KeepCheckpoint: verify, rename ──────────────────────────► agent ──► run folder

rank ── ListFiles ──► agent beside the master: sizes, an offer
rank ◄═════════════ pieces, over the bulk channel ════════════════ agent

Several parts are on their way at a time, each over a connection of its own. A connection that ends is replaced. If this
rank ends, another one that brings the same checkpoint sends only what has not arrived.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from kintsugi.bulk.client import Watch
from kintsugi.bulk.endpoint import BulkEndpoint
from kintsugi.bulk.files import FILE_PIECE_BYTES, DiskExport, Transfer, fetch_piece, file_digests
from kintsugi.checkpoint.store import Checkpoint
from kintsugi.errors import DeadlineExceeded, ProcessDied, StorageError, StorageFull, WorldError
from kintsugi.protocol.bulk import BulkOffer
from kintsugi.protocol.hosts import CheckpointKept, FilesListed, KeepCheckpoint, ListFiles, StoreFile
from kintsugi.protocol.messages import Body
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.disk import SYSTEM_DISK, storage_errors
from kintsugi.runtime.waits import wait
from kintsugi.transport import Reply

PART_BYTES = 4 * FILE_PIECE_BYTES
"""Bytes of a file in one request."""
PART_S = 600.0
"""Deadline of one part; a connection without any progress fails much earlier."""
KEEP_S = 1800.0
"""Deadline of the verification, which reads everything."""
MAX_ATTEMPTS, PAUSE_S = 6, 2.0
"""Attempts to bring a part while the agent beside the master is being replaced, and the pause between them."""

FETCHED = ".fetched-"
"""Begin of the name of a copy that a rank has fetched; its next one replaces it."""
EXPORT = "checkpoint"
"""Name of the offer of the checkpoint that is being brought."""

Ask = Callable[[str, Body], Reply]


class Call(Protocol):
    """`Shell.call`."""

    def __call__(self, process: str, body: Body, *, deadline_s: float) -> Reply: ...


class CheckpointDelivery:
    """Carries checkpoints between a folder of this host and the run folder."""

    def __init__(self, call: Call, bulk: BulkEndpoint, *, process: str, agent: str, folder: Path) -> None:
        """`agent` is the one beside the master; `folder` is for checkpoints on this host, of all its ranks."""
        self._call, self._bulk, self._agent = call, bulk, agent
        self._prefix = f"{FETCHED}{process}-"
        self.folder = folder
        self._fetching: tuple[Path, dict[str, int]] = Path(), {}
        self._arrived: set[tuple[int, int]] = set()
        """File and offset of the pieces that a fetch which was interrupted has written."""

    # To the run folder.

    def deliver(
        self,
        checkpoint: Checkpoint,
        *,
        keep: int,
        best_steps: tuple[int, ...],
        check: Callable[[], object] = lambda: None,
    ) -> Checkpoint:
        """Bring a checkpoint to the run folder; return it as it is there. The copy of this host stays until the next
        one. `check` raises if the checkpoint was given up: its step may have been undone meanwhile.

        A failure of the agent beside the master, such as a full disk, is one of storage.
        """
        with storage_errors(str(checkpoint.path)):
            paths = sorted(checkpoint.path.iterdir())
        export = DiskExport(paths, on_bytes=lambda size: COUNTERS.add("bytes_saved", size))
        server = self._bulk.server
        offer = server.offer(EXPORT, export)
        parts = (
            (path, StoreFile(checkpoint.step, path.name, size, offset, (), offer, index))
            for index, (path, size) in enumerate(zip(paths, export.sizes, strict=True))
            for offset in range(0, max(1, size), PART_BYTES)
        )
        Transfer(
            (partial(self._send_part, path, part, check) for path, part in parts),
            whom=self._agent,
            what=f"the checkpoint of step {checkpoint.step} on its way",
            check=check,
            stop=lambda: server.withdraw(EXPORT),
        ).run()
        server.withdraw(EXPORT)
        request = KeepCheckpoint(checkpoint.step, keep, best_steps)
        check()
        kept = self._send(request, deadline_s=KEEP_S).expect(CheckpointKept)
        if kept.digest != checkpoint.digest:
            raise StorageError(
                f"{kept.path}: expected the checkpoint of digest {checkpoint.digest}, got {kept.digest}"
            )
        return msgspec.structs.replace(checkpoint, path=Path(kept.path))

    def _send_part(self, path: Path, part: StoreFile, check: Callable[[], object], watch: Watch) -> None:
        """Body of a thread. The connections are those of the agent, which fetches."""
        size = min(PART_BYTES, part.size - part.offset)
        digests = file_digests(path, offset=part.offset, size=size)
        check()
        body = msgspec.structs.replace(part, digests=digests)
        for _ in range(MAX_ATTEMPTS - 1):
            try:
                self._send(body, deadline_s=PART_S)
                return
            except StorageError as error:
                if not isinstance(error.__cause__, ProcessDied):
                    raise
            self._pause()
            check()
        self._send(body, deadline_s=PART_S)

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

    def fetch(self, source: Path, *, ask: Ask, check: Callable[[], object] = lambda: None) -> Path:
        """Copy a checkpoint of the run folder to this host; return where it is. Loading it compares its digests.

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
            for name, size in listed.sizes.items():
                path = target / name
                with storage_errors(str(path)), closing(SYSTEM_DISK.open(path, create=True)) as file:
                    file.preallocate(max(1, size))
                    file.truncate(size)
        fetches = (
            partial(self._fetch_piece, listed.offer, index, target / name, offset, size)
            for index, (name, size) in enumerate(listed.sizes.items())
            for offset in range(0, size, FILE_PIECE_BYTES)
            if (index, offset) not in self._arrived
        )
        Transfer(fetches, whom=self._agent, what=f"the checkpoint {source.name}", check=check).run()
        # A copy that turns out to be damaged is fetched again as a whole.
        self._fetching, self._arrived = (Path(), {}), set()
        return target

    def _fetch_piece(
        self, offer: BulkOffer, index: int, path: Path, offset: int, size: int, watch: Watch
    ) -> None:
        """Body of a thread. The file is opened for each piece: one that comes after its fetch was given up, and the
        folder removed, is written nowhere."""
        content = memoryview(bytearray(min(FILE_PIECE_BYTES, size - offset)))
        arrived = self._arrived
        fetch_piece(self._bulk.client, offer, index=index, offset=offset, target=content, watch=watch)
        with storage_errors(str(path)), closing(SYSTEM_DISK.open(path)) as file:
            file.pwrite(content, offset=offset)
        COUNTERS.add("bytes_loaded", len(content))
        arrived.add((index, offset))
