"""Checkpoints of ranks on hosts without the run folder: the agent beside the master takes and gives their files.

The bytes travel over the bulk channel. What reads or writes files runs in threads, as does the verification of a whole
checkpoint; the answers are sent from the agent's loop.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Protocol

from kintsugi.bulk.endpoint import BulkEndpoint
from kintsugi.bulk.files import FILE_PIECE_BYTES, DiskExport, fetch_piece
from kintsugi.checkpoint.store import UNFINISHED, keep_checkpoint, unfinished_folder
from kintsugi.errors import DataDamaged, IntegrityError, KintsugiError, RefusedError
from kintsugi.process.loop_calls import LoopCalls
from kintsugi.protocol.hosts import CheckpointKept, FilesListed, KeepCheckpoint, ListFiles, StoreFile
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.messages import Body
from kintsugi.runtime.digests import piece_digest
from kintsugi.runtime.disk import SYSTEM_DISK, File, storage_errors
from kintsugi.transport import Delivery
from kintsugi.types import Role, role_of

_FILE = re.compile(r"[\w-][\w.-]*")
_FOLDER = re.compile(rf"(step-|{re.escape(UNFINISHED)})\d+(\.\d+)?")


class Replies(Protocol):
    """The part of an endpoint that answers requests."""

    def reply(self, delivery: Delivery, body: Body) -> None: ...

    def fail(self, delivery: Delivery, error: BaseException) -> object: ...


class CheckpointReceiver:
    """Answers requests for files in `checkpoints/`, and for no other. It belongs to the agent's loop."""

    def __init__(self, replies: Replies, bulk: BulkEndpoint, calls: LoopCalls, *, folder: Path) -> None:
        self._replies, self._bulk, self._calls = replies, bulk, calls
        self._folder = folder
        self._offered: dict[str, FilesListed] = {}
        """Folder → its offer, for as long as the folder exists."""
        self._sizing = threading.Lock()
        """Held while a file gets its size: parts of it arrive at the same time."""
        self._verified: set[int] = set()
        """Steps whose files a thread verifies and renames: they must not change meanwhile."""

    def handle(self, delivery: Delivery) -> None:
        try:
            match delivery.body:
                case StoreFile() as part:
                    self._check_free(part.step)
                    path = self._place_of(part, sender=delivery.envelope.sender)
                    self._answer_from_thread(delivery, partial(self._store, part, path))
                case ListFiles(folder=name):
                    self._replies.reply(delivery, self._list(name))
                case KeepCheckpoint() as request:
                    self._check_free(request.step)
                    self._verified.add(request.step)
                    ended = partial(self._verified.discard, request.step)
                    self._answer_from_thread(delivery, partial(self._keep, request), ended=ended)
        except (KintsugiError, OSError) as error:
            self._replies.fail(delivery, error)

    def _answer_from_thread(
        self, delivery: Delivery, work: Callable[[], Body], *, ended: Callable[[], object] = lambda: None
    ) -> None:
        """Reply with the result of `work`, which a thread does; `ended` is called in the loop before the reply."""

        def run() -> None:
            answer: Callable[[], object]
            try:
                answer = partial(self._replies.reply, delivery, work())
            except Exception as error:  # noqa: BLE001 - the boundary of a thread: the failure is the reply.
                answer = partial(self._replies.fail, delivery, error)
            self._calls.run(ended)
            self._calls.run(answer)

        threading.Thread(target=run, name="checkpoint", daemon=True).start()

    def _check_free(self, step: int) -> None:
        if step in self._verified:
            raise RefusedError(f"the checkpoint of step {step} is being verified for an earlier request")

    # Checkpoints that arrive.

    def _place_of(self, part: StoreFile, *, sender: str) -> Path:
        if role_of(sender) is not Role.MODEL or part.offer.process != sender:
            raise RefusedError(f"{sender} can not store a file that {part.offer.process} offers")
        if _FILE.fullmatch(part.name) is None:
            raise RefusedError(f"expected the name of a file of a checkpoint, got {part.name!r}")
        last = part.offset + FILE_PIECE_BYTES * max(0, len(part.digests) - 1)
        if part.offset < 0 or last > part.size or (part.digests and last == part.size):
            raise RefusedError(
                f"{part.name} has {part.size} bytes, not {len(part.digests)} pieces from {part.offset} on"
            )
        return unfinished_folder(self._folder, step=part.step) / part.name

    def _store(self, part: StoreFile, path: Path) -> Ok:
        """Body of a thread: bring one part of a file to its place."""
        with storage_errors(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = SYSTEM_DISK.open(path, create=True)
        with closing(file):
            with storage_errors(str(path)), self._sizing:
                if file.size() != part.size:
                    file.truncate(part.size)
                    file.preallocate(max(1, part.size))
            buffer = memoryview(bytearray(min(FILE_PIECE_BYTES, part.size)))
            for number, digest in enumerate(part.digests):
                offset = part.offset + number * FILE_PIECE_BYTES
                piece = buffer[: min(FILE_PIECE_BYTES, part.size - offset)]
                self._store_piece(part, path, file, piece, offset=offset, digest=digest)
        return Ok()

    def _store_piece(
        self, part: StoreFile, path: Path, file: File, piece: memoryview, *, offset: int, digest: str
    ) -> None:
        with storage_errors(str(path)):
            if file.pread_into(piece, offset=offset) == len(piece) and piece_digest(piece) == digest:
                return
        fetch_piece(self._bulk.client, part.offer, index=part.index, offset=offset, target=piece)
        found = piece_digest(piece)
        if found != digest:
            raise IntegrityError(
                f"{part.name} of the checkpoint of step {part.step} from {part.offer.process}: expected xxh3 "
                f"{digest} at {offset}, got {found}",
                detail=DataDamaged(part.offer.process),
            )
        with storage_errors(str(path)):
            file.pwrite(piece, offset=offset)
            file.start_flush(offset=offset, size=len(piece))

    def _keep(self, request: KeepCheckpoint) -> CheckpointKept:
        """Body of a thread."""
        kept = keep_checkpoint(
            self._folder, step=request.step, keep=request.keep, best_steps=request.best_steps
        )
        return CheckpointKept(str(kept.path), kept.digest)

    # Checkpoints that are fetched.

    def _list(self, name: str) -> FilesListed:
        """Offer a checkpoint, or what has arrived of one: the rank that writes the rest needs the weights of all boxes.
        It stays offered, to any number of ranks, until its folder is removed."""
        if _FOLDER.fullmatch(name) is None:
            raise RefusedError(f"expected the name of a checkpoint, got {name!r}")
        for other in [each for each in self._offered if not (self._folder / each).exists()]:
            self._bulk.server.withdraw(self._offered.pop(other).offer.export)
        folder = self._folder / name
        with storage_errors(str(folder)):
            paths = sorted(folder.iterdir())
        export = DiskExport(paths)
        sizes = {path.name: size for path, size in zip(paths, export.sizes, strict=True)}
        known = self._offered.get(name)
        if known is not None and known.sizes == sizes:
            return known
        self._offered[name] = FilesListed(sizes, self._bulk.server.offer(f"checkpoint-{name}", export))
        return self._offered[name]
