"""Orphans: processes that outlive their parent. A *subreaper* among their ancestors becomes their parent.

Every agent is a subreaper, and so is the launcher: children of an agent's children become the agent's, those of a dead
agent the launcher's. A parent must reap all its children, also those that it did not start.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
from collections.abc import Collection, Iterator
from pathlib import Path

from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.proc import has_ended
from kintsugi.runtime.processes import Child, Processes

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
SHARED_MEMORY = Path("/dev/shm")
MAX_ATTEMPTS = 100
"""Attempts to read the threads of a process while threads start and end; takes milliseconds for an ended process."""


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """Make this process the parent of its orphaned descendants; the former setting is restored afterwards."""
    library = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    _control(library, _PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _control(library, _PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _control(library, _PR_SET_CHILD_SUBREAPER, before.value)


def become_subreaper() -> None:
    """Make this process, which was forked, the parent of its orphaned descendants: a fork does not inherit that."""
    _control(ctypes.CDLL(None, use_errno=True), _PR_SET_CHILD_SUBREAPER, 1)


def _control(library: ctypes.CDLL, option: int, argument: object) -> None:
    if library.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot become the parent of orphans: {os.strerror(number)}")


def children_of(pid: int) -> list[int]:
    """Return pids of the direct children of a process, including adopted orphans.

    A thread that ends meanwhile passes its children to another one, which may have been read before: then all are read
    again.
    """
    for _ in range(MAX_ATTEMPTS):
        children: set[int] = set()
        try:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                children.update(int(number) for number in (thread / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
        return sorted(children)
    raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended, or its threads change too often")


def reap_orphans(*, but: Collection[int]) -> None:
    """Reap zombies among this process's children except these, and kill their process groups."""
    for pid in children_of(os.getpid()):
        if pid in but or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            continue
        kill_group(pid)
        remove_counter_files(pid)
        os.waitpid(pid, 0)


def kill_group(pid: int) -> None:
    """Kill the process group of a process that has just ended.

    Only its parent may do so: the pid can not be reused until the parent reaps the zombie.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def remove_counter_files(pid: int) -> None:
    """Remove what torch and the CUDA driver leave in shared memory of a process that has ended.

    A process that shares GPU memory counts its readers in a file `torch_<pid>_…`. torch removes it when the last reader
    has released the memory, which at the end of the process is too late if the process was killed, or while a reader
    lives. Readers do without the file. The driver's own file is `cuda.shm.<user>.<pid, hexadecimal>.<number>`.
    """
    # A file of another user, or no descriptor left to look: whatever stays is small and harms nothing.
    with contextlib.suppress(OSError):
        if not has_ended(pid) and Path(f"/proc/{pid}").exists():
            return  # Another process with the same pid.
        for pattern in (f"torch_{pid}_*", f"cuda.shm.*.{pid:x}.*"):
            for path in SHARED_MEMORY.glob(pattern):
                path.unlink(missing_ok=True)


def hold_descendants(pid: int, *, processes: Processes) -> list[Child]:
    """Hold all descendants of a process by pidfd: for an agent that would not become the parent of orphans."""
    try:
        children = children_of(pid)
        return [
            descendant
            for child in children
            for descendant in (processes.adopt(child), *hold_descendants(child, processes=processes))
        ]
    except ProcessLookupError:
        return []


def kill_children(
    processes: Processes, *, but: Collection[int], timeout_s: float, clock: Clock = SYSTEM_CLOCK
) -> None:
    """Kill every child of this process except these, and every orphan that results, until there is none."""
    deadline = clock.monotonic() + timeout_s
    while others := [pid for pid in children_of(os.getpid()) if pid not in but]:
        with contextlib.ExitStack() as stack:
            held = []
            for pid in others:
                other = processes.adopt(pid)
                stack.callback(other.close)
                other.send_signal(signal.SIGKILL)  # At once: the next one may find no descriptor left.
                held.append(other)
            for other in held:
                other.wait_ended(whom=f"orphan {other.pid}", timeout_s=deadline - clock.monotonic())
                remove_counter_files(other.pid)
