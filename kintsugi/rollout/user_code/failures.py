"""Errors of the user's code: a one-line description, and the traceback in the log of the process; shared by rewards,
environments and agent programs."""

from __future__ import annotations

import inspect
import sys
import traceback

_LONGEST = 1000
"""Length limit of the message; the reason is stored and shown with every sample that it concerns."""


def shortened(error: BaseException) -> str:
    text = str(error)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def described(error: BaseException) -> str:
    """Describe an error by its type, its message, and the line that raised it."""
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    place = f" (line {frames[-1].lineno} of {frames[-1].filename})" if frames else ""
    return f"{type(error).__name__}: {shortened(error)}{place}"


class TracebackLog:
    """Writes the traceback of each kind of error once, to standard error, which is `logs/rollout-N.log` in a run."""

    def __init__(self, *, most: int = 20) -> None:
        self._most = most
        self._written: set[tuple[str, str, int]] = set()

    def write(self, error: BaseException) -> None:
        """Write the traceback, unless one of the same type and line was written, or too many were."""
        frames = traceback.extract_tb(error.__traceback__)
        if not frames:
            return
        kind = (type(error).__name__, frames[-1].filename, frames[-1].lineno or 0)
        if kind in self._written or len(self._written) >= self._most:
            return
        self._written.add(kind)
        try:
            sys.stderr.write("".join(traceback.format_exception(error)))
            sys.stderr.flush()
        except (OSError, ValueError):
            return  # The log can not be written; the error is reported all the same.


TRACEBACKS = TracebackLog()
