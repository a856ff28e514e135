"""Shortages: ends of a process that the host did not give what it needs. They have exit codes of their own, because a
process without memory, descriptors or space can record nothing else."""

from __future__ import annotations

import errno
import resource

from kintsugi.errors import UserError
from kintsugi.runtime.processes import describe_status

EXIT_UNFIT = 71
"""An error of the host that another process in its place may not meet."""
EXIT_NO_MEMORY = 72
EXIT_NO_DESCRIPTORS = 73
EXIT_FILE_LIMIT = 74
"""The process met its own limit of the size of a file (RLIMIT_FSIZE)."""
EXIT_NO_THREADS = 75
EXIT_ADDRESS_TAKEN = 76
"""Another process has the name or port of its socket: another user can take the name of an agent that was killed."""

SHORTAGES = {
    EXIT_UNFIT: "it met an error of the host",
    EXIT_NO_MEMORY: "it got no memory",
    EXIT_NO_DESCRIPTORS: "no descriptor was left to it",
    EXIT_FILE_LIMIT: "it met its own limit of the size of a file, ulimit -f",
    EXIT_NO_THREADS: "it could start no thread: the limit of processes of its user or control group is reached",
    EXIT_ADDRESS_TAKEN: "another process has the name or port of its socket",
}
"""Exit codes of a process that was not given what it needs, and the reason: another one is started in its place."""
_NO_THREAD = "can't start new thread"
"""Text of the interpreter's error, which has no class of its own."""
_BY_NUMBER = {
    errno.EMFILE: EXIT_NO_DESCRIPTORS,
    errno.ENFILE: EXIT_NO_DESCRIPTORS,
    errno.ENOMEM: EXIT_NO_MEMORY,
    errno.EADDRINUSE: EXIT_ADDRESS_TAKEN,
}


def shortage_code(error: BaseException) -> int | None:
    """Return the exit code for an error of the host, itself or as the cause of another one; None for other errors."""
    link: BaseException | None = None if isinstance(error, UserError) else error
    while link is not None:
        if isinstance(link, MemoryError):
            return EXIT_NO_MEMORY
        if isinstance(link, RuntimeError) and str(link).startswith(_NO_THREAD):
            return EXIT_NO_THREADS
        number = getattr(link, "errno", None)
        # Libraries have errors of their own with the numbers of the kernel.
        if number in _BY_NUMBER:
            return _BY_NUMBER[number]
        if number == errno.EFBIG and _has_file_limit():
            return EXIT_FILE_LIMIT
        if isinstance(link, OSError):
            return EXIT_UNFIT
        link = link.__cause__
    return None


def start_shortage(error: OSError) -> str:
    """Return what the host lacks to start a process; empty if that is not the reason."""
    if error.errno == errno.EAGAIN:
        return "the limit of processes of its user or control group is reached"
    return SHORTAGES[_BY_NUMBER[error.errno]] if error.errno in _BY_NUMBER else ""


def _has_file_limit() -> bool:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return soft != resource.RLIM_INFINITY


def describe_exit(status: int | None) -> str:
    """Describe an exit status: `describe_exit(72) == "exited with code 72 (it got no memory)"`."""
    reason = SHORTAGES.get(status) if status is not None else None
    return describe_status(status) + (f" ({reason})" if reason else "")
