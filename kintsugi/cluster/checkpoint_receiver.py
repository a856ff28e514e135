"""Checkpoints of ranks on hosts without the run folder: the agent beside the master takes and gives their files.

Parts are written and read in the agent's loop, a few MiB at a time. Verification reads a whole checkpoint from the
device, so it runs in a thread; its answer is sent from the loop.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kintsugi.checkpoint.store import arriving_folder, keep_checkpoint
from kintsugi.errors import KintsugiError, RefusedError
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
from kintsugi.protocol.membership import Ok
from kintsugi.runtime.disk import storage_errors
from kintsugi.transport import Delivery, Endpoint

_FILE = re.compile(r"[\w-][\w.-]*")
_FOLDER = re.compile(r"step-\d+(\.\d+)?")


class CheckpointReceiver:
    """Answers requests for files in `checkpoints/`, and for no other."""

    def __init__(self, endpoint: Endpoint, folder: Path) -> None:
        self._endpoint, self._folder = endpoint, folder
        self._verified: set[int] = set()
        """Steps whose files a thread verifies and renames: they must not change meanwhile."""
        self._answers: list[Callable[[], object]] = []
        """Answers of threads, to be sent from the loop."""

    def handle(self, delivery: Delivery) -> None:
        self.send_answers()
        try:
            match delivery.body:
                case StoreFile() as part:
                    self._check_free(part.step)
                    self._store(part)
                    self._endpoint.reply(delivery, Ok())
                case ListFiles(folder=name):
                    self._endpoint.reply(delivery, FilesListed(self._sizes(name)))
                case FetchFile(name=name, offset=offset):
                    part_bytes, size = self._read(name, offset)
                    self._endpoint.reply(delivery, FilePart(size, part_bytes))
                case KeepCheckpoint() as request:
                    self._check_free(request.step)
                    self._verified.add(request.step)
                    target = partial(self._keep, delivery, request)
                    threading.Thread(target=target, name="checkpoint", daemon=True).start()
        except (KintsugiError, OSError) as error:
            self._endpoint.fail(delivery, error)

    def send_answers(self) -> None:
        """Send the answers of threads that have ended. Called several times a second."""
        while self._answers:
            self._answers.pop(0)()

    def _check_free(self, step: int) -> None:
        if step in self._verified:
            raise RefusedError(f"the checkpoint of step {step} is being verified for an earlier request")

    def _store(self, part: StoreFile) -> None:
        if _FILE.fullmatch(part.name) is None:
            raise RefusedError(f"expected the name of a file of a checkpoint, got {part.name!r}")
        folder = arriving_folder(self._folder, step=part.step)
        path = folder / part.name
        with storage_errors(str(path)):
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("r+b" if part.offset else "wb") as file:
                file.seek(part.offset)
                file.write(part.content)

    def _keep(self, delivery: Delivery, request: KeepCheckpoint) -> None:
        """Body of the thread; its outcome is the answer."""
        answer: Callable[[], object]
        try:
            kept = keep_checkpoint(
                self._folder, step=request.step, keep=request.keep, best_steps=request.best_steps
            )
            body = CheckpointKept(str(kept.path), kept.digest)
            answer = partial(self._endpoint.reply, delivery, body)
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: the failure is the reply, with its cause.
            answer = partial(self._endpoint.fail, delivery, error)
        self._answers.append(partial(self._end, request.step, answer))
        self._endpoint.wake()

    def _end(self, step: int, answer: Callable[[], object]) -> None:
        self._verified.discard(step)
        answer()

    def _checkpoint(self, name: str) -> Path:
        if _FOLDER.fullmatch(name) is None:
            raise RefusedError(f"expected the name of a checkpoint, got {name!r}")
        return self._folder / name

    def _sizes(self, name: str) -> dict[str, int]:
        folder = self._checkpoint(name)
        with storage_errors(str(folder)):
            return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}

    def _read(self, name: str, offset: int) -> tuple[bytes, int]:
        folder, _, file_name = name.partition("/")
        path = self._checkpoint(folder) / file_name
        if _FILE.fullmatch(file_name) is None:
            raise RefusedError(f"expected a file of a checkpoint, got {name!r}")
        with storage_errors(str(path)), path.open("rb") as file:
            file.seek(offset)
            return file.read(PART_BYTES), path.stat().st_size
