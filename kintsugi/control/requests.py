"""What people ask of a run while it goes on: `<run>/requests` has one file per request, until it is answered.

A request appears whole, and is taken away only when the answer to it is durable in the journal. So it outlives a master
that dies in between; the next one finds it, and the journal says whether it was answered.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from uuid import uuid4

import msgspec

from kintsugi.control.protocol import ScaleRequested, Suspected
from kintsugi.errors import StorageError
from kintsugi.observe.verdicts import take_verdicts
from kintsugi.recovery.detection import SuspicionKind

_SUFFIX = ".json"


class _Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of a file; the name of the file is that of the request."""

    servers: int


class Requests:
    """The folder of a run's requests, for those who ask and for the master."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "requests"

    def leave(self, *, servers: int) -> str:
        """Ask for this many generation servers; gives the request's name. Names sort in the order of asking."""
        name = f"{time.time_ns():020d}-{uuid4().hex[:8]}"
        path = self._path(name)
        try:
            self._folder.mkdir(exist_ok=True)
            with path.with_suffix(".new").open("wb") as file:
                file.write(msgspec.json.encode(_Order(servers)))
                file.flush()
                os.fsync(file.fileno())
            path.with_suffix(".new").rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.with_suffix(".new").unlink()
            raise StorageError(f"could not leave a request in {self._folder}: {error.strerror}") from error
        return name

    def waiting(self) -> list[ScaleRequested]:
        """What is not answered, the oldest first. A folder that can not be read now is read at the next look."""
        try:
            names = sorted(name for name in os.listdir(self._folder) if name.endswith(_SUFFIX))
            return [request for name in names if (request := self._read(name.removesuffix(_SUFFIX)))]
        except OSError:
            return []

    def _read(self, name: str) -> ScaleRequested | None:
        try:
            order = msgspec.json.decode(self._path(name).read_bytes(), type=_Order)
        except msgspec.MsgspecError:
            self._path(name).rename(self._path(name).with_suffix(".unreadable"))
            return None
        return ScaleRequested(name, order.servers)

    def verdicts(self) -> list[Suspected]:
        """What the watcher has handed over, taken away with the reading: it says again what still holds."""
        return [
            Suspected(
                each.process,
                each.incarnation,
                each.summary,
                SuspicionKind.DIAGNOSED,
                time=each.onset,
                verdict=each,
            )
            for each in take_verdicts(self._folder.parent)
        ]

    def take_away(self, request: str) -> None:
        """It is answered, or nobody waits for the answer any more. Where that fails, the journal still knows."""
        with contextlib.suppress(OSError):
            self._path(request).unlink()

    def is_waiting(self, request: str) -> bool:
        return self._path(request).exists()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"
