"""How an error of the user's code reads in one line."""

from __future__ import annotations

import inspect

_LONGEST = 1000
"""Characters of what it says; the reason is kept and shown with every sample that it concerns."""


def shortened(error: BaseException) -> str:
    text = str(error)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def described(error: BaseException) -> str:
    """Its type, what it says, and where it was raised."""
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    place = f" (line {frames[-1].lineno} of {frames[-1].filename})" if frames else ""
    return f"{type(error).__name__}: {shortened(error)}{place}"
