"""When a tracker is opened, and in which thread it is called."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf

from kintsugi.errors import DeadlineExceeded, StorageError
from kintsugi.runtime.clock import Clock
from kintsugi.runtime.waits import WaitTable, join, wait
from kintsugi.telemetry.trackers.tracker import Tracker, TrackerTable

MOST_CALLS = 1024
"""Longest queue for a tracker in the background; later calls are dropped."""
REOPEN_S = 60.0
"""Pause after a failure to open a tracker in the background: W&B itself waits for its server for longer."""
FINISH_S = 30.0
"""Time for the last calls of a tracker in the background."""
IDLE_S = 3600.0


class OpenedLate:
    """A tracker that is opened by the first call, and by the next one if that failed."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]) -> None:
        self._name, self._open = name, open_tracker
        self._tracker: Tracker | None = None

    def _opened(self) -> Tracker:
        if self._tracker is None:
            try:
                self._tracker = self._open()
            except StorageError:
                raise
            except Exception as error:
                # Whatever a library raises while it is set up, such as a version that does not fit: no run ends of it.
                raise StorageError(f"{self._name}: {error}") from error
        return self._tracker

    def write(self, step: int, values: Mapping[str, float], *, time: float) -> None:
        self._opened().write(step, values, time=time)

    def write_table(self, name: str, step: int, table: TrackerTable, *, time: float) -> None:
        self._opened().write_table(name, step, table, time=time)

    def truncate_after(self, step: int, *, time: float) -> None:
        self._opened().truncate_after(step, time=time)

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()


class InBackground:
    """Calls a tracker in a thread of its own, in order: one that does not answer, as over a network, delays nothing.

    The thread consumes a bounded queue of calls, opens the tracker for the first one, and ends at `close`. After a
    failure to open it, calls are dropped for `REOPEN_S`. An error is raised by the next call, or by `close`.
    """

    def __init__(self, name: str, open_tracker: Callable[[], Tracker], *, clock: Clock) -> None:
        self._name, self._open, self._clock = name, open_tracker, clock
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(maxsize=MOST_CALLS)
        self._thread: threading.Thread | None = None
        self._error = ""

    def write(self, step: int, values: Mapping[str, float], *, time: float) -> None:
        self._put(lambda tracker: tracker.write(step, values, time=time))

    def write_table(self, name: str, step: int, table: TrackerTable, *, time: float) -> None:
        self._put(lambda tracker: tracker.write_table(name, step, table, time=time))

    def truncate_after(self, step: int, *, time: float) -> None:
        self._put(lambda tracker: tracker.truncate_after(step, time=time))

    def _put(self, call: Callable[[Tracker], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise StorageError(f"{self._name}: {MOST_CALLS} calls wait for it") from None
        self._raise_error()

    def _raise_error(self) -> None:
        error, self._error = self._error, ""
        if error:
            raise StorageError(f"{self._name}: {error}")

    def _run(self) -> None:
        tracker: Tracker | None = None
        reopen_at = -inf
        while (call := self._next()) is not None:
            try:
                if tracker is None and self._clock.monotonic() >= reopen_at:
                    reopen_at = self._clock.monotonic() + REOPEN_S
                    tracker = self._open()
                if tracker is not None:
                    call(tracker)
            except Exception as error:  # noqa: BLE001 - the thread's outermost boundary: raised by the next call.
                self._error = str(error) or type(error).__name__
        try:
            if tracker is not None:
                tracker.close()
        except Exception as error:  # noqa: BLE001 - as above: raised by `close`.
            self._error = str(error) or type(error).__name__

    def _next(self) -> Callable[[Tracker], None] | None:
        """Wait for a call; None at `close`. The waits of this thread say nothing about the progress of the process, so
        they are not declared."""

        def attempt(remaining_s: float) -> tuple[Callable[[Tracker], None] | None] | None:
            try:
                return (self._calls.get(timeout=remaining_s),)
            except queue.Empty:
                return None

        while True:
            with suppress(DeadlineExceeded):
                return wait(attempt, whom="itself", what="a call", timeout_s=IDLE_S, waits=WaitTable())[0]

    def close(self) -> None:
        """Make the calls that wait, for a bounded time."""
        if self._thread is None:
            return
        with suppress(queue.Full, DeadlineExceeded):
            self._calls.put_nowait(None)
            join(self._thread, whom=self._name, timeout_s=FINISH_S)
        self._raise_error()
