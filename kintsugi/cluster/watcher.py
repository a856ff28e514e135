"""The launcher's side of the watcher (`diagnosis/watcher.py`): a process that looks at the run, and that nobody needs.

It is started once the master is there, started again when it was killed, and ends by itself with its lifeline.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kintsugi.cluster.placement import log_path
from kintsugi.cluster.restarts import RestartLimit
from kintsugi.errors import DeadlineExceeded
from kintsugi.runtime import Child, Processes

MODULE = "kintsugi.diagnosis.watcher"
PROCESS = "watcher-0"
END_S = 3.0
"""For its last look at a run that has ended."""


class WatcherHandle:
    """Holds the watcher and its lifeline, over all its incarnations."""

    def __init__(self, run_dir: Path, processes: Processes) -> None:
        self._run_dir, self._processes = run_dir, processes
        self._limit = RestartLimit()
        self._child: Child | None = None
        self._lifeline = -1

    @property
    def pids(self) -> frozenset[int]:
        return frozenset() if self._child is None else frozenset({self._child.pid})

    def keep(self, now: float) -> None:
        """Start it if it does not run; one that ends again and again is left alone."""
        if self._child is not None and self._child.ended():
            self._let_go()
        if self._child is None and self._limit.allows(now):
            self._start()

    def _start(self) -> None:
        """The run goes on without one that can not be started: the disk may be full, or the host."""
        lifeline, write = os.pipe2(os.O_CLOEXEC)
        try:
            log = log_path(self._run_dir, PROCESS)
            log.parent.mkdir(exist_ok=True)
            with log.open("ab") as output:
                self._child = self._processes.spawn(
                    [sys.executable, "-m", MODULE, str(self._run_dir), str(lifeline)],
                    pass_fds=(lifeline,),
                    stdout=output,
                    stderr=output,
                    new_session=True,
                )
        except OSError:
            os.close(write)
            return
        finally:
            os.close(lifeline)
        self._lifeline = write

    def close(self) -> None:
        """Let it have its last look, for a moment."""
        if self._child is None:
            return
        os.close(self._lifeline)
        self._lifeline = -1
        try:
            self._child.wait_ended(whom=PROCESS, timeout_s=END_S)
        except DeadlineExceeded:
            self._child.send_signal(9)
            self._child.wait_ended(whom=PROCESS, timeout_s=END_S)
        self._let_go()

    def _let_go(self) -> None:
        assert self._child is not None
        self._child.status()
        self._child.close()
        self._child = None
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
