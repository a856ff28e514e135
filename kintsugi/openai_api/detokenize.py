"""Incremental detokenization: never half a character, never the beginning of a stop string.

The pieces that `Detokenizer` returns, joined, equal the decoding of all tokens together, up to the first stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""Replacement of bytes that are not, or not yet, a character."""
WINDOW = 32
"""Tokens that are decoded together, so that a token's text does not depend on its chunk; longer ones are cut."""
LONGEST_CHARACTER = 4
"""Most tokens of a character; each is at least one of its bytes."""


class Detokenizer:
    """The text of one completion.

    >>> writer = Detokenizer(lambda ids: "".join(map(chr, ids)), stops=("cd",))
    >>> [writer.push([ord(letter)]) for letter in "abcx"], writer.push([ord("c"), ord("d")]), writer.stopped
    (['a', 'b', '', 'cx'], '', True)
    """

    def __init__(self, decode: Decode, *, stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._start = 0
        """Start of the window, at the start of a character."""
        self._read = 0
        """End of the tokens that are in `_window` completely."""
        self._window = ""
        self._held = ""
        """Decoded text that may be the beginning of a stop string."""
        self._given: list[str] = []
        self.length = 0
        """Number of characters that were returned."""
        self.stopped = False
        """Whether a stop string was found: no text follows."""

    @property
    def decoded(self) -> int:
        """Number of characters so far, including those held back."""
        return self.length + len(self._held)

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens; return the text that is certain by now, possibly empty."""
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
        """Hold back the rest of a character. A character never takes a whole window, and bytes that are not text would
        make the window grow with every token: then only the last few tokens are held back."""
        if len(self._ids) - self._read <= WINDOW:
            return ""
        fresh = window[len(self._window) :].removesuffix(BROKEN)
        self._start = self._read = len(self._ids) - LONGEST_CHARACTER
        self._window = self._decode(self._ids[self._start :]).removesuffix(BROKEN)
        return self._give(fresh, is_last=False)

    def end(self) -> str:
        """Return the rest, as no more tokens come: a broken character, or the beginning of a stop string."""
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
    """Number of trailing characters that may be the beginning of one of the marks.

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
    """Bytes of a token that decodes to `text` and is spelled `piece` in its vocabulary; None if unknown.

    A token that is part of a character decodes to nothing readable; byte-level vocabularies spell its bytes.

    >>> token_bytes("a", piece="a"), token_bytes(BROKEN, piece="Ã")
    ([97], [195])
    """
    if BROKEN not in text:
        return list(text.encode())
    spelled = [_BYTE_OF_LETTER.get(letter) for letter in piece or ""]
    known = [byte for byte in spelled if byte is not None]
    return known if known and len(known) == len(spelled) else None


def _byte_letters() -> dict[str, int]:
    """Spelling of each byte in byte-level vocabularies: printable ones as themselves, the others from 256 on."""
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
