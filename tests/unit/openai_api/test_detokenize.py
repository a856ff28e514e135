"""Text that is given piece by piece."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from kintsugi.openai_api.detokenize import BROKEN, Detokenizer, token_bytes


@cache
def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token per byte, spelled as byte-level vocabularies do."""
    from kintsugi.openai_api.detokenize import _BYTE_OF_LETTER

    backend = tokenizers.Tokenizer(models.WordLevel(vocab=dict(_BYTE_OF_LETTER), unk_token="<unknown>"))
    backend.decoder = decoders.ByteLevel()
    return backend


def decode(ids: object) -> str:
    return str(byte_tokenizer().decode(list(ids)))  # type: ignore[call-overload]


def pieces_of(
    content: bytes, cuts: list[int], *, stops: tuple[str, ...] = ()
) -> tuple[list[str], Detokenizer]:
    writer = Detokenizer(decode, stops=stops)
    places = sorted({0, len(content), *(cut % (len(content) + 1) for cut in cuts)})
    given = [writer.push(list(content[start:end])) for start, end in pairwise(places)]
    return [*given, writer.end()], writer


@given(st.text(max_size=80), st.lists(st.integers(0, 400), max_size=40))
@settings(max_examples=150, deadline=None)
def test_pieces_join_to_the_text_and_none_has_half_a_character(text: str, cuts: list[int]) -> None:
    pieces, _ = pieces_of(text.encode(), cuts)
    assert "".join(pieces) == text
    assert BROKEN in text or not any(BROKEN in piece for piece in pieces)


@given(st.binary(max_size=120), st.lists(st.integers(0, 120), max_size=120))
@settings(max_examples=150, deadline=None)
def test_bytes_that_are_no_text_join_to_what_decoding_at_once_gives(content: bytes, cuts: list[int]) -> None:
    pieces, _ = pieces_of(content, cuts)
    assert "".join(pieces) == decode(content)


@given(
    st.text("abc", max_size=60),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 60), max_size=30),
)
@settings(max_examples=200, deadline=None)
def test_nothing_of_the_first_stop_text_is_given_however_the_tokens_come(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    # As an engine does, which ends with the token that completes a stop text.
    made = text[: ends[0]] if ends else text
    starts = [place for stop in stops if (place := made.find(stop)) >= 0]
    pieces, writer = pieces_of(made.encode(), cuts, stops=tuple(stops))
    assert "".join(pieces) == (made[: min(starts)] if starts else made)
    assert writer.stopped == bool(starts)


def test_what_might_have_become_a_stop_text_is_given_at_the_end() -> None:
    writer = Detokenizer(decode, stops=("END",))
    assert [writer.push(list(b"xE")), writer.push(list(b"N")), writer.end()] == ["x", "", "EN"]


@pytest.mark.parametrize(
    "content", [b"word " * 400, b"\xff" * 2000, b"\xf0\x9f" * 1000, b"\x80" * 999 + "é".encode() * 500]
)
def test_what_is_long_is_decoded_in_windows_even_if_it_is_no_text(content: bytes) -> None:
    longest = 0

    def watched(ids: object) -> str:
        nonlocal longest
        longest = max(longest, len(list(ids)))  # type: ignore[call-overload]
        return decode(ids)

    writer = Detokenizer(watched)
    text = "".join(writer.push([byte]) for byte in content)
    assert longest < 100
    assert text + writer.end() == decode(content)


@pytest.mark.parametrize(
    ("text", "piece", "spelled"),
    [("é", "Ã©", [195, 169]), (BROKEN, "Ã", [195]), (BROKEN, None, None), ("", "<eos>", [])],
)
def test_a_token_that_is_part_of_a_character_has_its_bytes(
    text: str, piece: str | None, spelled: list[int] | None
) -> None:
    assert token_bytes(text, piece=piece) == spelled
