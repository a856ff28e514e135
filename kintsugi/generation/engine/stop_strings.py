"""Detection of stop strings in sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

TextOf = Callable[[Sequence[int]], str]
"""Decodes tokens. An incomplete character becomes U+FFFD, with some tokenizers also adjacent ones that are spelled in
bytes."""

_MISSING = "\ufffd"
_SLACK = 8
"""Characters at the beginning of a decoded window that may differ from the whole text: the rest of a character that
began before the window, or a leading space that a tokenizer drops."""


def first_stop(tokens: NDArray[np.int32], *, start: int, stop: Sequence[str], text_of: TextOf) -> int | None:
    """First position, from `start` on, of a token that completes one of the strings `stop`; None if none does.

    `tokens` are a whole completion in which nothing stopped before `start`. Only its end is decoded: the new tokens and
    as many before as a string completed by them can reach. A string, once complete, stays complete whatever follows,
    except while a character after it is incomplete.
    """
    if start >= len(tokens):
        return None
    num_characters = num_back = max(map(len, stop)) + _SLACK
    begin = max(0, start - num_back)
    while begin > 0 and not _reads(text_of(tokens[begin:start].tolist()), num_characters):
        # Special tokens have no text, and several tokens may make one character.
        num_back *= 2
        begin = max(0, start - num_back)
    window = tokens[begin:].tolist()
    text = text_of(window)
    if _MISSING not in text and not _contains(text, stop):
        return None
    for length in range(start - begin + 1, len(window)):
        if _contains(text_of(window[:length]), stop):
            return begin + length - 1
    return len(tokens) - 1 if _contains(text, stop) else None


def _reads(text: str, num_characters: int) -> bool:
    """Whether a text does not begin inside a character, and is long enough."""
    return not text.startswith(_MISSING) and len(text) - text.count(_MISSING) >= num_characters


def _contains(text: str, stop: Sequence[str]) -> bool:
    return any(each in text for each in stop)
