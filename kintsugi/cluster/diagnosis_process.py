"""The launcher's handle of the diagnosis process: starts `diagnosis/watcher.py` as a child and restarts it.

It is started once the master runs, restarted when it has ended or is stopped, and ends with its lifeline. The run does
not depend on it.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from pathlib import Path

from kintsugi.cluster.restart_policy import StoppedProcessDetector
from kintsugi.errors import DeadlineExceeded
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.proc import process_start_time
from kintsugi.runtime.processes import Child, Processes
from kintsugi.telemetry.verdict_files import WATCHER

MODULE = "kintsugi.diagnosis.watcher"
END_S = 3.0
"""Time for a last diagnosis of a run that has ended."""
SHORTEST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
"""Pause between two starts; a process that has run for longer is restarted without one."""


class DiagnosisProcess:
    """The diagnosis process with its lifeline, over all its incarnations."""

    def __init__(self, run_dir: Path, processes: Processes) -> None:
        self._run_dir, self._processes = run_dir, processes
        self._started_at = -math.inf
        self._pause_s = 0.0
        self._stopped = StoppedProcessDetector()
        self._child: Child | None = None
        self._lifeline = -1

    @property
    def pids(self) -> frozenset[int]:
        return frozenset() if self._child is None else frozenset({self._child.pid})

    def ensure_running(self, now: float) -> None:
        """Start the process if it does not run, with growing pauses if it ends repeatedly."""
        if self._child is not None and self._stopped.sample(self.pids, now=now):
            self._child.send_signal(signal.SIGKILL)
        if self._child is not None and self._child.ended():
            self._forget()
            if now - self._started_at > LONGEST_PAUSE_S:
                self._pause_s = 0.0
        if self._child is None and now - self._started_at >= self._pause_s:
            self._started_at = now
            self._pause_s = min(max(SHORTEST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
            self._start()

    def _start(self) -> None:
        """Start the process. The run continues without it if that fails, as on a full disk."""
        try:
            lifeline, write = os.pipe2(os.O_CLOEXEC)
        except OSError:
            return
        try:
            log = RunFolder(self._run_dir).log_file(WATCHER)
            log.parent.mkdir(exist_ok=True)
            with log.open("ab") as output:
                self._child = self._processes.spawn(
                    [sys.executable, "-P", "-m", MODULE, str(self._run_dir), str(lifeline)],
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

    @property
    def identity(self) -> tuple[int, int]:
        """Pid and start time; 0 if it does not run."""
        if self._child is None:
            return 0, 0
        return self._child.pid, process_start_time(self._child.pid) or 0

    def replace(self, pid: int, start_time: int) -> None:
        """End the process that a launcher, which has died, had started; `ensure_running` starts another one."""
        if self._child is not None:
            self._forget()
        if pid == 0:
            return
        with contextlib.suppress(ProcessLookupError):
            left = self._processes.adopt(pid)
            if process_start_time(pid) == start_time:
                left.send_signal(signal.SIGKILL)
            left.close()

    def close(self) -> None:
        """End the process after its last diagnosis."""
        if self._child is None:
            return
        os.close(self._lifeline)
        self._lifeline = -1
        try:
            self._child.wait_ended(whom=WATCHER, timeout_s=END_S)
        except DeadlineExceeded:
            self._child.send_signal(signal.SIGKILL)
            self._child.wait_ended(whom=WATCHER, timeout_s=END_S)
        self._forget()

    def _forget(self) -> None:
        assert self._child is not None
        self._child.status()
        self._child.close()
        self._child = None
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
