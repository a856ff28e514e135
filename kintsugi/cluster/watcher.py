"""The launcher's side of the watcher (`diagnosis/watcher.py`): a process that looks at the run, and that nobody needs.

It is started once the master is there, started again when it has ended or stands still, and ends by itself with its
lifeline.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path

from kintsugi.cluster.placement import log_path
from kintsugi.cluster.restarts import StoppedWatch
from kintsugi.errors import DeadlineExceeded
from kintsugi.observe.verdicts import WATCHER
from kintsugi.runtime import Child, Processes

MODULE = "kintsugi.diagnosis.watcher"
END_S = 3.0
"""For its last look at a run that has ended."""
SHORTEST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
"""Between two starts; one that has lived for longer is started again at once."""


class WatcherHandle:
    """Holds the watcher and its lifeline, over all its incarnations."""

    def __init__(self, run_dir: Path, processes: Processes) -> None:
        self._run_dir, self._processes = run_dir, processes
        self._started_at = -math.inf
        self._pause_s = 0.0
        self._stopped = StoppedWatch()
        self._child: Child | None = None
        self._lifeline = -1

    @property
    def pids(self) -> frozenset[int]:
        return frozenset() if self._child is None else frozenset({self._child.pid})

    def keep(self, now: float) -> None:
        """Start it if it does not run; one that ends again and again is started ever more seldom."""
        if self._child is not None and self._stopped.sample(self.pids, now=now):
            self._child.send_signal(signal.SIGKILL)
        if self._child is not None and self._child.ended():
            self._let_go()
            if now - self._started_at > LONGEST_PAUSE_S:
                self._pause_s = 0.0
        if self._child is None and now - self._started_at >= self._pause_s:
            self._started_at = now
            self._pause_s = min(max(SHORTEST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
            self._start()

    def _start(self) -> None:
        """The run goes on without one that can not be started: the disk may be full, or the host."""
        try:
            lifeline, write = os.pipe2(os.O_CLOEXEC)
        except OSError:
            return
        try:
            log = log_path(self._run_dir, WATCHER)
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
            self._child.wait_ended(whom=WATCHER, timeout_s=END_S)
        except DeadlineExceeded:
            self._child.send_signal(signal.SIGKILL)
            self._child.wait_ended(whom=WATCHER, timeout_s=END_S)
        self._let_go()

    def _let_go(self) -> None:
        assert self._child is not None
        self._child.status()
        self._child.close()
        self._child = None
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
