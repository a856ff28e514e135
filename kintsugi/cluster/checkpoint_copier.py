"""The launcher's handle of the copies of checkpoints (`checkpoint.copy_to`): a process for each round of copying.

A round begins when the run folder has other checkpoints than after the last one that succeeded. One that fails is told,
and repeated with growing pauses; the run does not depend on it. The process ends with this one.
"""

from __future__ import annotations

import math
import signal
import sys
from pathlib import Path

from kintsugi.errors import DeadlineExceeded
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.processes import Child, Processes

MODULE = "kintsugi.checkpoint.copies"
NAME = "copies"
LOOK_S = 2.0
"""Interval at which the checkpoints of the run folder are looked at."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""Pause after a round that failed; it doubles."""
END_S = 3.0
LAST_LINE_BYTES = 2000


class CheckpointCopier:
    """Rounds of copying, one after the other."""

    def __init__(self, run_dir: Path, *, target: str, processes: Processes) -> None:
        self._run_dir, self._target, self._processes = run_dir, target, processes
        self._child: Child | None = None
        self._copying: frozenset[str] = frozenset()
        self._copied: frozenset[str] = frozenset()
        """Checkpoints of the run folder at the begin of the last round that succeeded."""
        self._pause_s = 0.0
        self._next_at = -math.inf
        self.num_failures = 0

    @property
    def pids(self) -> frozenset[int]:
        return frozenset() if self._child is None else frozenset({self._child.pid})

    @property
    def is_done(self) -> bool:
        """Whether everything that is in the run folder was copied."""
        return self._child is None and self._names() == self._copied

    def turn(self, now: float) -> str:
        """Begin or end a round, if one is due; return why a round failed, or nothing."""
        if self._child is not None:
            return self._end_of_round(now) if self._child.ended() else ""
        if now >= self._next_at:
            self._next_at = now + LOOK_S
            names = self._names()
            if names and names != self._copied:
                self._start(names)
        return ""

    def hurry(self) -> None:
        """Begin the next round at once."""
        self._next_at = -math.inf

    def _names(self) -> frozenset[str]:
        return frozenset(path.name for path in RunFolder(self._run_dir).checkpoints_folder.glob("step-*"))

    def _start(self, names: frozenset[str]) -> None:
        """Raises OSError, as on a full disk; the next turn tries it again."""
        log = RunFolder(self._run_dir).log_file(NAME)
        with log.open("ab") as output:
            self._child = self._processes.spawn(
                [sys.executable, "-P", "-m", MODULE, str(self._run_dir), self._target],
                stdout=output,
                stderr=output,
                new_session=True,
            )
        self._copying = names

    def _end_of_round(self, now: float) -> str:
        assert self._child is not None
        status = self._child.status()
        self._child.close()
        self._child = None
        if status == 0:
            self._copied, self._pause_s = self._copying, 0.0
            return ""
        self.num_failures += 1
        self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
        self._next_at = now + self._pause_s
        return self._last_line() or f"it ended with status {status}"

    def _last_line(self) -> str:
        try:
            text = RunFolder(self._run_dir).log_file(NAME).read_bytes()[-LAST_LINE_BYTES:]
        except OSError:
            return ""
        lines = text.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def forget(self) -> None:
        """Leave the round that a launcher had begun which has died: the process ends with it."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def close(self) -> None:
        """End a round that runs."""
        if self._child is None:
            return
        self._child.send_signal(signal.SIGKILL)
        try:
            self._child.wait_ended(whom=NAME, timeout_s=END_S)
        except DeadlineExceeded:
            return
        finally:
            self.forget()
