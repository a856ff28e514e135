"""Text that is safe to print: model-written and foreign text must not control the terminal of the reader.

Escape sequences can set the title and the clipboard, ask the terminal to type something, and hide lines; bidirectional
controls reorder what is read. `printable` shows them as escapes. Everything that a command echoes goes through it.
"""

from __future__ import annotations

import re

_CONTROL = "\x00-\x08\x0b-\x1f\x7f-\x9f"
"""C0 without tab and newline, DEL, C1."""
_DIRECTION = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_LINES = "\u2028\u2029"
_SURROGATES = "\ud800-\udfff"
_HOSTILE = re.compile(f"[{_CONTROL}{_DIRECTION}{_LINES}{_SURROGATES}]")


def printable(text: str) -> str:
    r"""Return text with control characters as escapes; tabs and newlines stay.

    >>> printable("\x1b]52;c;cm0gLXJm\x07 \u202e[/b]")
    '\\x1b]52;c;cm0gLXJm\\x07 \\u202e[/b]'
    """
    return _HOSTILE.sub(_escaped, text)


def printable_line(text: str) -> str:
    r"""Return text on one line: `printable_line("a\nb") == "a\\nb"`."""
    return printable(text).replace("\n", "\\n")


def printable_json(text: str) -> str:
    r"""Return JSON with control characters as its own escapes, so that it decodes to the same values."""
    return _HOSTILE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
