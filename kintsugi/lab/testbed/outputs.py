"""Outputs that the command of a run is given in an experiment: a terminal, or one that fails while the run goes on."""

from __future__ import annotations

import os
import pty
import termios
import threading
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

READ_BYTES = 1 << 16
LINES_READ = 3
"""Lines after which the reader of a pipe goes away."""
TERMINAL_SIZE = (24, 80)


class Output(StrEnum):
    """Where a command writes to: `Output.PIPE` is `kintsugi train … | head -3`."""

    TERMINAL = "terminal"
    PIPE = "pipe"
    FULL_DISK = "full-disk"
    CLOSED = "closed"


class CommandOutput:
    """Standard output of one command, given to it as `descriptor`. What can be read of it is appended to `log`."""

    def __init__(self, output: Output, *, log: Path) -> None:
        self._output = output
        self._reader: threading.Thread | None = None
        if output is Output.TERMINAL:
            source, self.descriptor = pty.openpty()
            termios.tcsetwinsize(self.descriptor, TERMINAL_SIZE)
            self._reader = threading.Thread(target=_copy, args=(source, log), daemon=True)
        elif output is Output.PIPE:
            source, self.descriptor = os.pipe()
            self._reader = threading.Thread(target=_copy, args=(source, log, LINES_READ), daemon=True)
        else:
            self.descriptor = os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command line that gives `argv` this output."""
        closing = ["/bin/sh", "-c", 'exec "$@" >&- 2>&-', "sh"] if self._output is Output.CLOSED else []
        return [*closing, *argv]

    def started(self) -> None:
        """Begin to read. To be called once the command has its copy of `descriptor`, which is closed here."""
        os.close(self.descriptor)
        if self._reader is not None:
            self._reader.start()


def _copy(source: int, log: Path, num_lines: int | None = None) -> None:
    """Copy to a file until the end of the output, or until so many lines were read."""
    read = 0
    with log.open("ab") as file, suppress(OSError):  # The end of a terminal is an error.
        while num_lines is None or read < num_lines:
            data = os.read(source, READ_BYTES)
            if not data:
                break
            file.write(data)
            file.flush()
            read += data.count(b"\n")
    os.close(source)
