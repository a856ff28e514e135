"""Stack dumps: the interpreter writes the stacks of all threads to a process's log, when it crashes or on request.

Every process enables them before it is reported as started. The dump is written by a C signal handler that needs
neither the interpreter's lock nor memory, so a process that hangs inside a library leaves its stacks as well. Forked
children inherit the handler; executed ones do not.
"""

from __future__ import annotations

import faulthandler
import signal

from kintsugi.runtime.proc import catches_signal, process_stat
from kintsugi.runtime.processes import Child

STACK_SIGNAL = signal.SIGUSR1
STANDARD_ERROR = 2


def enable_stack_dumps(descriptor: int = STANDARD_ERROR) -> None:
    """Dump stacks to this descriptor on `STACK_SIGNAL`, and on signals that end the process, such as SIGSEGV."""
    faulthandler.enable(file=descriptor, all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True, chain=False)


def can_dump_stacks(child: Child) -> bool:
    """Whether `STACK_SIGNAL` makes this process dump its stacks.

    The default action of the signal ends a process, so one without the handler must not get it. A stopped process
    (state T) would not handle it before it continues.
    """
    stat = process_stat(child.pid)
    return stat is not None and stat.state in "RSD" and catches_signal(child.pid, STACK_SIGNAL)
