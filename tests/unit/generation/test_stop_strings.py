from collections.abc import Sequence

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders

from kintsugi.generation.engine.stop_strings import TextOf, first_stop
from tests.unit.generation.fake_runner import PIECES, text_of

_EMPTY = PIECES.index(b"")
_EURO = [PIECES.index(piece) for piece in (b"\xe2", b"\x82", b"\xac")]
_S = PIECES.index(b"stop")


_FALLBACK = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
_SPELLED = ["a", "b", "ab", *(f"<0x{byte:02X}>" for byte in "€é\n".encode())]


def _text_by_fallback(tokens: Sequence[int]) -> str:
    """Characters may be spelled in bytes; a run of these that is incomplete at an end is not read."""
    return str(_FALLBACK.decode([_SPELLED[token] for token in tokens]))


def _in_pieces(
    tokens: Sequence[int], *, stop: Sequence[str], sizes: Sequence[int], text_of: TextOf = text_of
) -> int | None:
    """As an engine asks, visit after visit."""
    start = 0
    for size in [*sizes, len(tokens)]:
        end = min(start + size, len(tokens))
        place = first_stop(np.array(tokens[:end], np.int32), start=start, stop=stop, text_of=text_of)
        if place is not None:
            return place
        start = end
    return None


def _by_definition(tokens: Sequence[int], *, stop: Sequence[str], text_of: TextOf = text_of) -> int | None:
    for place in range(len(tokens)):
        if any(text in text_of(tokens[: place + 1]) for text in stop):
            return place
    return None


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=120),
    st.lists(st.text("abcst op€éxy", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.integers(1, 9), max_size=40),
)
@example([0, *[_EMPTY] * 60, 1], ["ab"], [1] * 62)
@example([0, *[_EMPTY] * 60, 1], ["ab"], [61])
@example([*_EURO * 12, 0], ["€€€€a"], [1] * 40)
@example([*[_EURO[0], _EURO[1]] * 30, _S], ["stop"], [1] * 61)
def test_a_stop_text_is_found_where_the_whole_text_first_contains_it(
    tokens: list[int], stop: list[str], sizes: list[int]
) -> None:
    assert _in_pieces(tokens, stop=stop, sizes=sizes) == _by_definition(tokens, stop=stop)


@given(
    st.lists(st.sampled_from([[0], [1], [2], [3, 4, 5], [6, 7], [8]]), max_size=50),
    st.lists(st.text("ab€é\n", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.integers(1, 9), max_size=60),
)
@example([[3, 4, 5]] * 5 + [[8]], ["\n"], [1] * 16)
@example([[8], [3, 4, 5]], ["\n"], [2, 2])
@example([[3, 4, 5]] * 30, ["€" * 30], [1] * 90)
def test_characters_that_are_spelled_in_bytes_are_read_however_they_are_cut(
    characters: list[list[int]], stop: list[str], sizes: list[int]
) -> None:
    tokens = [token for character in characters for token in character]
    found = _in_pieces(tokens, stop=stop, sizes=sizes, text_of=_text_by_fallback)
    assert found == _by_definition(tokens, stop=stop, text_of=_text_by_fallback)


def test_only_the_end_is_decoded() -> None:
    decoded: list[int] = []

    def count(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return text_of(tokens)

    tokens = np.zeros(5000, np.int32)
    assert first_stop(tokens, start=4992, stop=["stop"], text_of=count) is None
    assert sum(decoded) < 60
