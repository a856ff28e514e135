"""Floating point rounding mode of the threads of another process, read and changed through ptrace.

A process that rounds towards zero computes slightly different results than its peers, silently, as a damaged core does.
Setting the mode back to nearest restores it completely.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import time
from collections.abc import Iterator

from kintsugi.runtime.waits import wait

NEAREST = 0
TOWARDS_ZERO = 3
"""Values of the rounding control field of MXCSR, bits 13 and 14."""
_SHIFT = 13
_MXCSR = 24
"""Offset of MXCSR in the floating point registers of x86-64 (`user_fpregs_struct`)."""
_FPREGS_BYTES = 512
_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_GET_FPREGS, _SET_FPREGS = 14, 15
_WALL = 0x40000000
STOP_TIMEOUT_S = 2.0


def missing() -> str | None:
    """Return why this machine does not support it; None when it does."""
    return None if platform.machine() == "x86_64" else f"only on x86_64, this is {platform.machine()}"


def set_rounding(pid: int, mode: int) -> int:
    """Set the rounding mode of every thread of a process; return the number of threads changed. ProcessLookupError when
    the process has ended."""
    changed = 0
    for entry in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):
            changed += _set_rounding_of_thread(int(entry), mode)
    return changed


def rounding(pid: int) -> set[int]:
    """Return the rounding modes of the threads of a process."""
    return {(_mxcsr_of(int(thread)) >> _SHIFT) & 3 for thread in os.listdir(f"/proc/{pid}/task")}


def _mxcsr_of(thread: int) -> int:
    registers = ctypes.create_string_buffer(_FPREGS_BYTES)
    with _held(thread):
        _ptrace(_GET_FPREGS, thread, registers)
    return int.from_bytes(registers.raw[_MXCSR : _MXCSR + 4], "little")


def _set_rounding_of_thread(thread: int, mode: int) -> int:
    registers = ctypes.create_string_buffer(_FPREGS_BYTES)
    with _held(thread):
        _ptrace(_GET_FPREGS, thread, registers)
        before = int.from_bytes(registers.raw[_MXCSR : _MXCSR + 4], "little")
        after = before & ~(3 << _SHIFT) | mode << _SHIFT
        ctypes.memmove(ctypes.addressof(registers) + _MXCSR, after.to_bytes(4, "little"), 4)
        _ptrace(_SET_FPREGS, thread, registers)
    return int(after != before)


@contextlib.contextmanager
def _held(thread: int) -> Iterator[None]:
    """Stop a thread for a moment; a thread that was stopped before stays stopped."""
    _ptrace(_SEIZE, thread, None)
    try:
        _ptrace(_INTERRUPT, thread, None)

        def attempt(remaining_s: float) -> bool | None:
            pid, _ = os.waitpid(thread, _WALL | os.WNOHANG)
            if pid == thread:
                return True
            time.sleep(min(remaining_s, 0.0005))
            return None

        wait(attempt, whom=f"thread {thread}", what="to stand still", timeout_s=STOP_TIMEOUT_S)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            _ptrace(_DETACH, thread, None)


def _ptrace(request: int, thread: int, data: ctypes.Array[ctypes.c_char] | None) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    library.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    library.ptrace.restype = ctypes.c_long
    address = ctypes.addressof(data) if data is not None else None
    if library.ptrace(request, thread, None, address) == -1:
        number = ctypes.get_errno()
        if number == errno.ESRCH:
            raise ProcessLookupError(number, f"there is no thread {thread}")
        raise OSError(number, os.strerror(number))
