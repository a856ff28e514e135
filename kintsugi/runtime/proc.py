"""Processes as the kernel describes them in /proc, and the one process attribute that is set by prctl.

A process number can be reused. Number and start time together name one process for as long as the host is up.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

import msgspec

_PR_SET_PDEATHSIG = 1
"""PR_SET_PDEATHSIG of linux/prctl.h."""
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
ENDED_STATES = "ZX"
"""States of a process that has ended: zombie and dead."""
_PF_EXITING = 0x4
"""PF_EXITING of linux/sched.h: the thread is exiting and runs no more code of its program."""


class ProcessStat(msgspec.Struct, frozen=True):
    """State of a process in the kernel: `ProcessStat("S", 883127, 1.25)`."""

    state: str
    """R, S, D, T (stopped), t (traced), Z (zombie)."""
    start_time: int
    """Clock ticks after boot."""
    cpu_s: float
    """CPU time of all its threads so far."""


def stat_fields(stat: str) -> list[str]:
    """Split the content of a `stat` file into its fields from the state on.

    The command name before them stands in the last pair of parentheses and may contain any character.

    >>> stat_fields("4711 (a) b) S 1 4711")
    ['S', '1', '4711']
    """
    return stat[stat.rindex(")") + 2 :].split()


def process_stat(pid: int) -> ProcessStat | None:
    """Read a process's state; None when there is no process with this number. Other errors of the kernel, such as too
    many open files, raise OSError."""
    try:
        fields = stat_fields(Path(f"/proc/{pid}/stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None
    return ProcessStat(fields[0], int(fields[19]), (int(fields[11]) + int(fields[12])) * TICK_S)


def is_exiting(pid: int) -> bool:
    """Return whether the kernel is ending a process already: one with tens of gigabytes is a zombie, or frees its
    memory, for seconds before its end is reported."""
    try:
        return _exiting_fields(f"/proc/{pid}/stat") is not None
    except OSError:
        return True


def process_start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks after boot; None when there is no such process, or only a zombie."""
    stat = process_stat(pid)
    return None if stat is None or stat.state in ENDED_STATES else stat.start_time


def has_ended(pid: int) -> bool:
    """Whether every thread of a process is a zombie or dead; False when there is no such process.

    A zombie that a debugger traces is one of these: none of its threads will run again, but its pidfd is not readable.
    """
    try:
        if _state(f"/proc/{pid}/stat") not in ENDED_STATES:
            return False
        threads = os.listdir(f"/proc/{pid}/task")
        return all(_state(f"/proc/{pid}/task/{thread}/stat") in ENDED_STATES for thread in threads)
    except (FileNotFoundError, ProcessLookupError):
        return False


def _state(path: str) -> str:
    with open(path, "rb", buffering=0) as file:
        return chr(file.read(512).rpartition(b")")[2][1])


def ending_status(pid: int) -> int | None:
    """Exit code, or minus the signal, of a process of which no thread will run again, before it is a zombie.

    The kernel frees the memory of a process first, tens of GB of it for seconds, and reports the end afterwards. None
    while any thread runs, when there is no such process, and where the kernel does not tell the code: it shows 0 then,
    which is also that of a regular end.
    """
    try:
        fields = _exiting_fields(f"/proc/{pid}/stat")
        if fields is None:
            return None
        threads = os.listdir(f"/proc/{pid}/task")
        if any(_exiting_fields(f"/proc/{pid}/task/{thread}/stat") is None for thread in threads):
            return None
    except (FileNotFoundError, ProcessLookupError):
        return None
    return status_of(int(fields[49])) or None


def status_of(wait_status: int) -> int:
    """Exit code, or minus the signal: `status_of(9) == -9`, `status_of(3 << 8) == 3`."""
    number = wait_status & 0x7F
    return -number if number else wait_status >> 8


def _exiting_fields(path: str) -> list[str] | None:
    """Fields of the `stat` file of a thread that is exiting or has ended; None for any other."""
    with open(path, "rb", buffering=0) as file:
        fields = stat_fields(file.read(1024).decode(errors="replace"))
    return fields if fields[0] in ENDED_STATES or int(fields[6]) & _PF_EXITING else None


def context_switches(pid: int) -> int:
    """Context switches of the main thread of a process so far; 0 when there is no such process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches:" in line)


def catches_signal(pid: int, number: signal.Signals) -> bool:
    """Whether a process has installed a handler for this signal; False when there is no such process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1]
    return bool(int(caught, 16) >> (number - 1) & 1)


def has_capability(number: int) -> bool:
    """Whether this process has a capability, by its number in linux/capability.h."""
    status = Path("/proc/self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:")).split()[1]
    return bool(int(effective, 16) >> number & 1)


def boot_id() -> str:
    """Identity of this boot of this host, without which a start time means nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def die_with_parent() -> None:
    """Let the kernel send SIGKILL to this process when its parent ends.

    A parent that has ended before this call is not noticed: the caller compares `os.getppid()` afterwards.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
