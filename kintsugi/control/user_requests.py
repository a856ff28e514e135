"""Requests of users to a running run: one file each in `<run>/requests`, until it is answered.

A request appears atomically, and is removed only when its answer is durable in the journal. So it survives a master
that dies in between: the next one finds it, and the journal shows whether it was answered.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from uuid import uuid4

import msgspec

from kintsugi.control.protocol import ScaleRequested, Suspected
from kintsugi.errors import StorageError, UntrustedFile
from kintsugi.recovery.liveness import SuspicionKind
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.disk import write_atomically
from kintsugi.runtime.owned_files import read_owned
from kintsugi.telemetry.verdict_files import HostNotice, read_notices, take_verdicts

_SUFFIX = ".json"


class _Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of a file; the name of the file is the name of the request."""

    servers: int


class UserRequests:
    """Folder of the requests of a run, for the commands that write them and for the master."""

    def __init__(self, run_dir: Path) -> None:
        self._run = RunFolder(run_dir)
        self._folder = self._run.requests_folder

    def submit(self, *, servers: int) -> str:
        """Request this many generation servers; return the name of the request. Names sort in the order of the
        requests."""
        name = f"{time.time_ns():020d}-{uuid4().hex[:8]}"
        try:
            self._folder.mkdir(exist_ok=True)
            write_atomically(self._path(name), msgspec.json.encode(_Order(servers)), durable=True)
        except OSError as error:
            raise StorageError(f"could not write a request to {self._folder}: {error.strerror}") from error
        return name

    def waiting(self) -> list[ScaleRequested]:
        """Return the unanswered requests, the oldest first. A folder that cannot be read now is read again later."""
        try:
            names = sorted(name for name in os.listdir(self._folder) if name.endswith(_SUFFIX))
            return [request for name in names if (request := self._read(name.removesuffix(_SUFFIX)))]
        except OSError:
            return []

    def _read(self, name: str) -> ScaleRequested | None:
        try:
            order = msgspec.json.decode(read_owned(self._path(name)), type=_Order)
        except msgspec.MsgspecError:
            self._path(name).rename(self._path(name).with_suffix(".unreadable"))
            return None
        except UntrustedFile:
            self._path(name).rename(self._path(name).with_suffix(".refused"))
            return None
        return ScaleRequested(name, order.servers)

    def verdicts(self) -> list[Suspected]:
        """Return the verdicts of the diagnosis process, and remove them: it repeats what still holds."""
        return [
            Suspected(
                each.process,
                each.incarnation,
                each.summary,
                SuspicionKind.DIAGNOSED,
                time=each.onset,
                verdict=each,
            )
            for each in take_verdicts(self._run.path)
        ]

    def host_notices(self) -> list[tuple[Path, HostNotice]]:
        """Return the notices of the host manager that were not acted on, with their files."""
        return read_notices(self._run.path)

    def remove(self, request: str) -> None:
        """Remove a request that was answered or is not waited for any more. If that fails, the journal still has the
        answer."""
        with contextlib.suppress(OSError):
            self._path(request).unlink()

    def is_waiting(self, request: str) -> bool:
        return self._path(request).exists()

    def _path(self, name: str) -> Path:
        return self._run.request_file(name)
