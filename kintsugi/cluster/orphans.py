"""Orphans: processes that live on when their parent has died. A *subreaper* among their ancestors becomes their parent.

Every agent is one, and so is the launcher: an agent's children are its own, those of a dead agent are the launcher's.
A parent must take the remains of its children away, also of those that it did not start.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
from collections.abc import Collection, Iterator
from pathlib import Path

from kintsugi.runtime import SYSTEM_CLOCK, Child, Clock, Processes

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
LOOKS = 100
"""At the threads of a process that come and go; a process that is gone fails as often in a few milliseconds."""


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """Be the parent of orphaned descendants, and afterwards whatever this process was before."""
    library = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    _control(library, _PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _control(library, _PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _control(library, _PR_SET_CHILD_SUBREAPER, before.value)


def _control(library: ctypes.CDLL, option: int, argument: object) -> None:
    if library.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot become the parent of orphans: {os.strerror(number)}")


def children_of(pid: int) -> list[int]:
    """Numbers of the direct children of a process, adopted orphans among them.

    A thread that ends meanwhile leaves its children to another, which may have been looked at before: then look again.
    """
    for _ in range(LOOKS):
        children: set[int] = set()
        try:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                children.update(int(number) for number in (thread / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
        return sorted(children)
    raise ProcessLookupError(errno.ESRCH, f"process {pid} is gone, or its threads do not stand still")


def reap_orphans(*, but: Collection[int]) -> None:
    """Take away the remains of children of ours that nobody holds, and what they have left in their groups."""
    for pid in children_of(os.getpid()):
        if pid in but or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            continue
        kill_group(pid)
        os.waitpid(pid, 0)


def kill_group(pid: int) -> None:
    """Kill what a process that has just ended left in the group it led.

    For its parent alone: the number is still taken by its remains, until the parent takes them away.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def hold_descendants(pid: int, *, processes: Processes) -> list[Child]:
    """Everybody who descends from a process, held by pidfd: for who is not told when they become orphans."""
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
    """Kill every child of this process except these, and every orphan that this leaves, until none is there."""
    deadline = clock.monotonic() + timeout_s
    while strangers := [pid for pid in children_of(os.getpid()) if pid not in but]:
        for pid in strangers:
            stranger = processes.adopt(pid)
            stranger.send_signal(signal.SIGKILL)
            stranger.wait_ended(whom=f"orphan {pid}", timeout_s=deadline - clock.monotonic())
            stranger.close()
