"""Processes recognised by a mark in their environment, which all their child processes inherit."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kintsugi.runtime.proc import stat_fields
from kintsugi.runtime.waits import wait

POLL_S = 0.0005
BEGIN_DEADLINE_S = 5.0
_END_CODE, _ENV_START, _ENV_END = 24, 47, 48
"""Indices in /proc/PID/stat, counted after the name: addresses of the program and of the environment."""


def carries(pid: int, mark: str) -> bool:
    """Whether a running process carries a mark.

    During `execve` the kernel has removed the old environment and does not show the new one yet: such a process would
    seem to carry no mark. The file is read again in that case.
    """
    folder = Path("/proc", str(pid))

    def attempt(remaining_s: float) -> bytes | None:
        try:
            found = (folder / "environ").read_bytes()
            if found or _has_none(folder):
                return found
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return b""
        time.sleep(min(remaining_s, POLL_S))
        return None

    return mark.encode() in wait(
        attempt, whom=str(pid), what="its program to begin", timeout_s=BEGIN_DEADLINE_S
    )


def carriers(mark: str) -> list[int]:
    """Return all running processes that carry a mark."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and carries(int(name), mark)]


def _has_none(folder: Path) -> bool:
    """Whether a process has an empty environment. Kernel threads and ended processes have no program:
    FileNotFoundError."""
    os.readlink(folder / "exe")
    fields = stat_fields((folder / "stat").read_text())
    # The kernel sets the address of the program after everything else.
    return int(fields[_END_CODE]) > 0 and fields[_ENV_START] == fields[_ENV_END]
