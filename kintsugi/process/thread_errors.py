"""Uncaught exceptions of threads: recorded, counted, and fatal where the program itself is wrong.

Python prints the exception of a thread and continues without the thread. A process that lost a thread this way looks
healthy from outside, so the exception becomes an event like any other fault.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from kintsugi.errors import fault_of
from kintsugi.process.exit_codes import EXIT_ERROR
from kintsugi.process.membership import ShuttingDown
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.counters import COUNTERS
from kintsugi.telemetry.events import EventLog, FaultSeen, ProcessEnded

NUM_THREAD_ERRORS = "process.thread_errors"


@contextmanager
def recorded_thread_errors(
    log: EventLog, *, process: str, is_replaceable: bool, end: Callable[[int], object] = os._exit
) -> Iterator[None]:
    """Record every uncaught exception of a thread as `FaultSeen`, count it, and print its trace.

    A failed assertion is a mistake of this program, after which its state can not be trusted: it ends the process as it
    would in the main thread, where `is_replaceable` says that another process can take its place.
    """
    before = threading.excepthook

    def record(error: threading.ExceptHookArgs) -> None:
        if error.exc_type is SystemExit or issubclass(error.exc_type, ShuttingDown):
            return
        COUNTERS.add(NUM_THREAD_ERRORS)
        name = error.thread.name if error.thread is not None else "unknown"
        exception = error.exc_value if error.exc_value is not None else error.exc_type()
        fault = fault_of(exception, process=process, time=SYSTEM_CLOCK.wall())
        fault = msgspec.structs.replace(fault, message=f"thread {name}: {fault.message}")
        log.emit(FaultSeen(fault))
        before(error)
        if is_replaceable and isinstance(exception, AssertionError):
            log.emit(ProcessEnded(EXIT_ERROR, f"{fault.kind}: {fault.message}"))
            sys.stderr.flush()
            end(EXIT_ERROR)

    threading.excepthook = record
    try:
        yield
    finally:
        threading.excepthook = before
