"""Disk space of what a run records about itself: a budget per run, divided over its processes.

Spans, readings, events and printed logs are for people and for the diagnosis. Each process writes files of its own, and
puts a full one aside; the oldest is removed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

SPANS_SIZE = 4 << 30
READINGS_SIZE = 4 << 30
GROWN_READINGS_SIZE = 16 << 30
"""Limit of readings that are kept because the diagnosis looks back that far."""
EVENTS_SIZE = 1 << 30
LOGS_SIZE = 1 << 30
LARGEST_LOG = 64 << 20
SMALLEST_SIZE = 256 << 10
"""Smallest size of a file, in a run of however many processes."""
_BLOCK_SIZE = 1 << 20


class DiskBudget:
    """Sizes of files in a run of so many processes; before `divide`, of one."""

    def __init__(self) -> None:
        self._num_processes = 1

    def divide(self, num_processes: int) -> None:
        self._num_processes = max(1, num_processes)

    def file_size(self, total: int, *, num_files: int, largest: int) -> int:
        """Return the size of a file of which each process has `num_files`."""
        return max(SMALLEST_SIZE, min(largest, total // (num_files * self._num_processes)))


DISK_BUDGET = DiskBudget()
"""Budget of the run that this process belongs to."""


def bound_log(path: Path) -> None:
    """Put the end of a large log aside, as `model-0.1.log`, and empty it. Its process goes on writing to the same file;
    what it writes at that very moment is lost."""
    largest_size = DISK_BUDGET.file_size(LOGS_SIZE, num_files=2, largest=LARGEST_LOG)
    with suppress(OSError), path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= largest_size:
            return
        aside = path.with_suffix(f".1{path.suffix}")
        try:
            file.seek(size - largest_size)
            with aside.open("wb") as copy:
                while block := file.read(_BLOCK_SIZE):
                    copy.write(block)
        except OSError:  # The disk is full: this log must not fill it further.
            aside.unlink(missing_ok=True)
        file.truncate(0)
