"""Text out of tokens as they come: never half a character, never the beginning of a stop text.

The pieces that `Writer` gives, joined, are what decoding all tokens at once gives, up to the first stop text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What a decoder makes of bytes that are not, or not yet, a character."""
WINDOW = 32
"""Tokens that are decoded together, so that a token's text does not depend on whether it stands alone; more are cut."""
LONGEST_CHARACTER = 4
"""In tokens, of which each is at least one of its bytes."""


class Writer:
    """The text of one completion.

    >>> writer = Writer(lambda ids: "".join(map(chr, ids)), stops=("cd",))
    >>> [writer.push([ord(letter)]) for letter in "abcx"], writer.push([ord("c"), ord("d")]), writer.stopped
    (['a', 'b', '', 'cx'], '', True)
    """

    def __init__(self, decode: Decode, *, stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._start = 0
        """Where the window begins: a place where a character begins too."""
        self._read = 0
        """Tokens up to here are in `_window` whole."""
        self._window = ""
        self._held = ""
        """Decoded, but it may be the beginning of a stop text."""
        self._given: list[str] = []
        self.length = 0
        """Characters that were given."""
        self.stopped = False
        """A stop text has come: there is nothing more."""

    @property
    def decoded(self) -> int:
        """Characters so far, with those that are held back."""
        return self.length + len(self._held)

    def push(self, ids: Sequence[int]) -> str:
        """Take more tokens; gives the text that is certain by now, possibly none."""
        if self.stopped:
            return ""
        self._ids += ids
        window = self._decode(self._ids[self._start :])
        if window.endswith(BROKEN) or len(window) <= len(self._window):
            return self._wait(window)
        fresh = window[len(self._window) :]
        start, self._read, self._window = self._read, len(self._ids), window
        if self._read - self._start > WINDOW:
            self._start = start
            self._window = self._decode(self._ids[start:])
        return self._give(fresh, is_last=False)

    def _wait(self, window: str) -> str:
        """For the rest of a character; but no character takes a whole window, and what is no text would make the window
        grow with every token. Then only the last few may still become a character."""
        if len(self._ids) - self._read <= WINDOW:
            return ""
        fresh = window[len(self._window) :].removesuffix(BROKEN)
        self._start = self._read = len(self._ids) - LONGEST_CHARACTER
        self._window = self._decode(self._ids[self._start :]).removesuffix(BROKEN)
        return self._give(fresh, is_last=False)

    def end(self) -> str:
        """The rest, now that no more tokens come: a broken character, what might have become a stop text."""
        if self.stopped:
            return ""
        whole = self._decode(self._ids)
        so_far = "".join(self._given) + self._held
        return self._give(whole.removeprefix(so_far) if whole.startswith(so_far) else "", is_last=True)

    def _give(self, fresh: str, *, is_last: bool) -> str:
        held = self._held + fresh
        found = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if found:
            self.stopped = True
            certain = min(found)
        else:
            certain = len(held) if is_last else len(held) - begun(held, self._stops)
        self._held = "" if self.stopped else held[certain:]
        text = held[:certain]
        self._given.append(text)
        self.length += len(text)
        return text


def begun(text: str, marks: Sequence[str]) -> int:
    """How many of the last characters may be the beginning of one of the marks.

    >>> begun("a <to", ["<tool_call>"])
    3
    """
    longest = max(map(len, marks), default=1) - 1
    return next(
        (
            size
            for size in range(min(longest, len(text)), 0, -1)
            if any(mark.startswith(text[-size:]) for mark in marks)
        ),
        0,
    )


def token_bytes(text: str, *, piece: str | None) -> list[int] | None:
    """The bytes of a token that decodes to `text` and is called `piece` in its vocabulary; None if nobody can say.

    A token that is a part of a character decodes to nothing readable; byte-level vocabularies spell its bytes.

    >>> token_bytes("a", piece="a"), token_bytes(BROKEN, piece="Ã")
    ([97], [195])
    """
    if BROKEN not in text:
        return list(text.encode())
    spelled = [_BYTE_OF_LETTER.get(letter) for letter in piece or ""]
    known = [byte for byte in spelled if byte is not None]
    return known if known and len(known) == len(spelled) else None


def _byte_letters() -> dict[str, int]:
    """How byte-level vocabularies write each byte: printable ones as themselves, the others from 256 on."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }


_BYTE_OF_LETTER = _byte_letters()
