"""Output of the commands: control characters and markup in texts of a run stay text, and output that cannot be written
does not end a run.

Standard output may be a full disk, a pipe whose reader has ended, a terminal that was closed, or not open at all.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, TextIO

import typer

from kintsugi.runtime.printable import printable, printable_json

if TYPE_CHECKING:
    from rich.console import Console


def console(file: TextIO | None = None) -> Console:
    """Console for tables and live views. Colours and redrawing are for terminals only, also where FORCE_COLOR is set,
    as by notebooks and CI; NO_COLOR and TERM=dumb are obeyed."""
    from rich.console import Console

    target = file if file is not None else sys.stdout
    is_terminal = target is not None and target.isatty() and os.environ.get("TERM") != "dumb"
    return Console(file=target, force_terminal=is_terminal, legacy_windows=False)


def say(text: str, *, err: bool = False, nl: bool = True, wrap: bool = True) -> None:
    """Print text. On a terminal, lines that are longer than it is wide are broken between words."""
    stream = sys.stderr if err else sys.stdout
    text = printable(text)
    if wrap and stream is not None and stream.isatty():
        text = wrapped(text, width=shutil.get_terminal_size().columns)
    typer.echo(text, err=err, nl=nl)


def text_width(*, most: int) -> int:
    """Return the width of the terminal, at most `most`; `most` where the output is none."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return min(most, shutil.get_terminal_size().columns) if is_terminal else most


def wrapped(text: str, *, width: int) -> str:
    """Break long lines between words; what follows is indented further than the line. Longer words stay whole.

    >>> print(wrapped("  cause  a rank was lost", width=16))
      cause  a rank
          was lost
    """
    lines = []
    for line in text.split("\n"):
        if len(line) > width:
            lead = line[: len(line) - len(line.lstrip())]
            line = textwrap.fill(
                line,
                width,
                subsequent_indent=f"{lead}    ",
                replace_whitespace=False,
                break_long_words=False,
                break_on_hyphens=False,
            )
        lines.append(line)
    return "\n".join(lines)


def counted(count: int, noun: str) -> str:
    """`1 step`, `2 steps`, `no steps`."""
    return f"{f'{count:,}' if count else 'no'} {noun}{'' if count == 1 else 's'}"


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
    """Write a message to standard error, if that is possible. A terminal gets it broken between words."""
    output, text = SteadyOutput(sys.stderr), printable(message)
    if output.isatty():
        text = wrapped(text, width=shutil.get_terminal_size().columns)
    output.write(f"{text}\n")


def open_standard_streams() -> None:
    """Open /dev/null in place of a standard stream that is closed: another file would get its number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is this one.
            os.open(os.devnull, os.O_RDWR)
