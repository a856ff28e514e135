"""Processes recognised by a mark in their environment, which everything that they start inherits."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kintsugi.runtime import wait

POLL_S = 0.0005
BEGIN_DEADLINE_S = 5.0
_END_CODE, _ENV_START, _ENV_END = 24, 47, 48
"""Of the fields of /proc/PID/stat that follow the name: where program and environment are in memory."""


def carries(pid: int, mark: str) -> bool:
    """Whether a living process carries a mark.

    While a program begins (`execve`), the kernel has taken the old environment away and does not show the new one yet:
    a process that is asked about in that moment would seem to be a stranger. It is asked again.
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
    """Every living process that carries a mark."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and carries(int(name), mark)]


def _has_none(folder: Path) -> bool:
    """Whether a process has an environment and it is empty. Threads of the kernel, and who ended, have no program:
    FileNotFoundError."""
    os.readlink(folder / "exe")
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    # The kernel says where the program is once everything else is in its place.
    return int(fields[_END_CODE]) > 0 and fields[_ENV_START] == fields[_ENV_END]
