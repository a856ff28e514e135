"""Output of the commands: control characters and markup in texts of a run stay text, and output that cannot be written
does not end a run.

Standard output may be a full disk, a pipe whose reader has ended, a terminal that was closed, or not open at all.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TextIO

import typer

from kintsugi.runtime.printable import printable, printable_json


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text."""
    typer.echo(printable(text), err=err, nl=nl)


def say_json(encoded: bytes) -> None:
    """Print JSON; it decodes to what was encoded."""
    typer.echo(printable_json(encoded.decode()))


class SteadyOutput(io.TextIOBase):
    """A text file in front of another one. Errors of the other one are dropped; the next write tries again.

    Characters that its encoding does not have are replaced.
    """

    def __init__(self, target: TextIO | None) -> None:
        self._target = target

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._target, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if self._target is not None:
            writable = text.encode(self.encoding, errors="replace").decode(self.encoding)
            with contextlib.suppress(OSError):
                self._target.write(writable)
        return len(text)

    def flush(self) -> None:
        if self._target is not None:
            with contextlib.suppress(OSError):
                self._target.flush()

    def isatty(self) -> bool:
        return self._target is not None and self._target.isatty()

    def fileno(self) -> int:
        if self._target is None:
            raise io.UnsupportedOperation("standard output is closed")
        return self._target.fileno()

    def settle(self) -> None:
        """Discard text that still cannot be written: the interpreter would fail to write it at its exit."""
        if self._target is None:
            return
        try:
            self._target.flush()
        except OSError:
            with contextlib.suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._target.fileno())
                os.close(nowhere)


def print_message(message: str) -> None:
    """Write a line to standard error, if that is possible."""
    SteadyOutput(sys.stderr).write(f"{printable(message)}\n")


def open_standard_streams() -> None:
    """Open /dev/null in place of a standard stream that is closed: another file would get its number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is this one.
            os.open(os.devnull, os.O_RDWR)
