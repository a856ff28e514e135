"""The outermost boundary of every process: events for its begin and end, uncaught errors, and its exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable

from kintsugi.errors import UserError, fault_of
from kintsugi.process.exit_codes import EXIT_ERROR, EXIT_USER_ERROR
from kintsugi.process.membership import ShuttingDown
from kintsugi.process.shell import Shell
from kintsugi.process.thread_errors import recorded_thread_errors
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.shortages import EXIT_UNFIT, shortage_code
from kintsugi.telemetry.disk_budget import DISK_BUDGET
from kintsugi.telemetry.events import EventLog, FaultSeen, Note, ProcessBegan, ProcessEnded
from kintsugi.telemetry.spans import SpanLog
from kintsugi.types import Role


def run_worker(
    bootstrap: Bootstrap, body: Callable[[Shell], None], *, capabilities: dict[str, str] | None = None
) -> int:
    """Run the main part of a worker with a shell; `ShuttingDown` is a clean end."""
    shell = Shell(bootstrap, capabilities=capabilities or {})
    try:
        shell.join_run()
        body(shell)
    except ShuttingDown as reason:
        shell.events.emit(Note(f"shutting down: {reason}"))
    finally:
        shell.close()
    return 0


def _exit_code(error: BaseException) -> int:
    if isinstance(error, UserError):
        return EXIT_USER_ERROR
    code = shortage_code(error)
    return EXIT_ERROR if code in (None, EXIT_UNFIT) else code


def run_process(bootstrap: Bootstrap, main: Callable[[Bootstrap], int]) -> int:
    """Run a process's program, record its begin, its end and uncaught errors, and return its exit code.

    The code is 0 after a clean end, 2 for a mistake of the user (one sentence on stderr), one of its own if the host
    gave it no memory, descriptor or thread, 1 for any other error (with its traceback).
    """
    DISK_BUDGET.divide(bootstrap.num_processes)
    log = EventLog(RunFolder(bootstrap.run_dir).events_file(bootstrap.process), process=bootstrap.process)
    log.emit(ProcessBegan(bootstrap.role.value, bootstrap.incarnation, os.getpid()))
    spans = SpanLog(bootstrap.run_dir, bootstrap.process)
    reason = ""
    is_replaceable = bootstrap.role not in (Role.MASTER, Role.AGENT)
    try:
        with recorded_thread_errors(log, process=bootstrap.process, is_replaceable=is_replaceable):
            code = main(bootstrap)
    except BaseException as error:  # noqa: BLE001 - the outermost boundary: recorded with its cause, then reported.
        fault = fault_of(error, process=bootstrap.process, time=SYSTEM_CLOCK.wall())
        log.emit(FaultSeen(fault))
        reason = f"{fault.kind}: {fault.message}"
        code = _exit_code(error)
        with contextlib.suppress(OSError):  # The log may not be writable.
            if code == EXIT_USER_ERROR:
                sys.stderr.write(f"{error}\n")
            else:
                traceback.print_exc()
    spans.close()
    log.emit(ProcessEnded(code, reason))
    log.close()
    return code
