"""Checkpoints of a rank whose host does not have the run folder: written here, then brought there, and fetched back.

rank ── StoreFile, a part at a time ──► agent beside the master ── KeepCheckpoint: verify, rename ──► run folder
rank ◄── ListFiles, FetchFile ── agent beside the master
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from kintsugi.checkpoint.store import Checkpoint
from kintsugi.errors import StorageError, StorageFull, WorldError
from kintsugi.protocol.hosts import (
    PART_BYTES,
    CheckpointKept,
    FetchFile,
    FilePart,
    FilesListed,
    KeepCheckpoint,
    ListFiles,
    StoreFile,
)
from kintsugi.protocol.messages import Body
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.disk import storage_errors
from kintsugi.transport import Reply

PART_S = 120.0
"""Deadline of one part."""
KEEP_S = 1800.0
"""Deadline of the verification, which reads everything."""

FETCHED = ".fetched-"
"""Begin of the name of a copy that was fetched; the next one replaces it."""

Ask = Callable[[str, Body], Reply]


class Call(Protocol):
    """`Shell.call`."""

    def __call__(self, process: str, body: Body, *, deadline_s: float) -> Reply: ...


class CheckpointDelivery:
    """Carries checkpoints between a folder of this host and the run folder."""

    def __init__(self, call: Call, *, agent: str, folder: Path) -> None:
        """`agent` is the one beside the master; `folder` is for checkpoints on this host."""
        self._call, self._agent = call, agent
        self.folder = folder

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
        for path in sorted(checkpoint.path.iterdir()):
            with storage_errors(str(path)), path.open("rb") as file:
                offset = 0
                while (part := file.read(PART_BYTES)) or offset == 0:
                    body = StoreFile(checkpoint.step, path.name, offset, part)
                    check()
                    self._send(body, deadline_s=PART_S)
                    COUNTERS.add("bytes_saved", len(part))
                    offset += len(part)
                    if not part:
                        break
        request = KeepCheckpoint(checkpoint.step, keep, best_steps)
        check()
        kept = self._send(request, deadline_s=KEEP_S).expect(CheckpointKept)
        if kept.digest != checkpoint.digest:
            raise StorageError(
                f"{kept.path}: expected the checkpoint of digest {checkpoint.digest}, got {kept.digest}"
            )
        return msgspec.structs.replace(checkpoint, path=Path(kept.path))

    def _send(self, body: Body, *, deadline_s: float) -> Reply:
        try:
            return self._call(self._agent, body, deadline_s=deadline_s)
        except WorldError as error:
            is_full = error.cause is not None and error.cause.kind == StorageFull.__name__
            raise (StorageFull if is_full else StorageError)(f"{self._agent}: {error}") from error

    def fetch(self, source: Path, *, ask: Ask) -> Path:
        """Copy a checkpoint of the run folder to this host; return where it is. Loading it compares its digests."""
        sizes = ask(self._agent, ListFiles(source.name)).expect(FilesListed).sizes
        target = self.folder / f"{FETCHED}{source.name}"
        with storage_errors(str(target)):
            for earlier in self.folder.glob(f"{FETCHED}*"):
                shutil.rmtree(earlier)
            target.mkdir(parents=True)
            for name, size in sizes.items():
                with (target / name).open("wb") as file:
                    while file.tell() < size:
                        reply = ask(self._agent, FetchFile(f"{source.name}/{name}", file.tell()))
                        part = reply.expect(FilePart).content
                        if not part:
                            raise StorageError(f"{source / name}: expected {size} bytes, got {file.tell()}")
                        file.write(part)
                        COUNTERS.add("bytes_loaded", len(part))
        return target
