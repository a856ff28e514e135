"""One-line description of an error of the user's code; shared by rewards, environments and agent programs."""

from __future__ import annotations

import inspect

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
