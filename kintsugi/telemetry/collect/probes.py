"""Probes of what can hang (a disk, a name server), each in a thread of its own, so that reading their values never
blocks."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kintsugi.errors import DeadlineExceeded
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.waits import WaitTable, join, wait

PAUSE_S = 1.0
PROBE_SIZE = 4096
CLOSE_S = 0.2


class Probe:
    """Makes an attempt once a second and times it: `<name>_s`, and `<name>_pending_s` while it has not returned.

    Its thread produces values, waits for its next turn and for the attempt, and ends at `close`; an attempt that never
    returns is abandoned with its thread.
    """

    def __init__(
        self,
        name: str,
        attempt: Callable[[], dict[str, float]],
        *,
        note: Callable[[str], None] = lambda text: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`attempt` returns further values; its errors are counted as `<name>_errors`. An OSError is an expected
        result; `note` receives the first other error."""
        self._name, self._attempt, self._note, self._clock = name, attempt, note, clock
        self._since: float | None = None
        self._values: dict[str, float] = {}
        self._num_errors = 0
        self._has_noted = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name} probe", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def values(self) -> dict[str, float]:
        values, since = self._values, self._since
        if since is not None and self._clock.monotonic() - since > PAUSE_S:
            values = values | {f"{self._name}_pending_s": self._clock.monotonic() - since}
        return values | ({f"{self._name}_errors": float(self._num_errors)} if self._num_errors else {})

    def _run(self) -> None:
        waits = WaitTable()
        while not self._closing.is_set():
            self._try()
            with suppress(DeadlineExceeded):
                wait(
                    lambda remaining_s: self._closing.wait(remaining_s) or None,
                    whom="itself",
                    what=f"the next {self._name} probe",
                    timeout_s=PAUSE_S,
                    waits=waits,
                )

    def _try(self) -> None:
        since = self._since = self._clock.monotonic()
        try:
            values = self._attempt()
        except OSError:
            self._fail()
        except Exception as error:  # noqa: BLE001 - the thread's outermost boundary: it continues to try.
            self._fail()
            if not self._has_noted:
                self._note(f"{self._name} probe: {error!r}")
            self._has_noted = True
        else:
            self._values = {f"{self._name}_s": self._clock.monotonic() - since, **values}
        self._since = None

    def _fail(self) -> None:
        """Count an error and drop the duration of the last success, which says nothing about now."""
        self._num_errors += 1
        took = f"{self._name}_s"
        self._values = {name: value for name, value in self._values.items() if name != took}

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            with suppress(DeadlineExceeded):
                join(self._thread, whom=f"{self._name} probe", what="its end", timeout_s=CLOSE_S)


class DiskProbe:
    """Writes and syncs a few bytes on the disk of the run folder; also returns its free space.

    The same bytes at the same place each time: no new space is needed, and only data has to reach the disk.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def __call__(self) -> dict[str, float]:
        if self._descriptor < 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        begun = SYSTEM_CLOCK.monotonic()
        os.pwrite(self._descriptor, bytes(PROBE_SIZE), 0)
        os.fdatasync(self._descriptor)
        durable_s = SYSTEM_CLOCK.monotonic() - begun
        space = os.fstatvfs(self._descriptor)
        return {
            "fsync_s": durable_s,
            "disk_total_bytes": float(space.f_blocks * space.f_frsize),
            "disk_free_bytes": float(space.f_bavail * space.f_frsize),
        }

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._path.unlink(missing_ok=True)


class NameProbe:
    """Resolves a host name as a connecting process would."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> dict[str, float]:
        socket.getaddrinfo(self.name, None, type=socket.SOCK_STREAM)
        return {}


def is_name(host: str) -> bool:
    """Return whether a host is given by a name that has to be resolved."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return False
    return bool(host) and host != "*"
