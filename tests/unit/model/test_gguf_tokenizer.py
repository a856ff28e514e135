"""Tokenizers that GGUF files describe."""

from pathlib import Path

import pytest

from kintsugi.errors import ModelError
from kintsugi.model.gguf_tokenizer import _byte_spelling, read_tokenizer

WHERE = Path("model.gguf")
PIECES = [
    "▁",
    "h",
    "e",
    "l",
    "o",
    "w",
    "r",
    "d",
    "he",
    "ll",
    "hell",
    "hello",
    "▁hello",
    "▁w",
    "or",
    "▁wor",
    "ld",
]


def byte_level(pre: str, *, merges: list[str]) -> dict[str, object]:
    tokens = ["<|end|>", *_byte_spelling().values(), *(merge.replace(" ", "") for merge in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
    }


def sentence_piece() -> dict[str, object]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(number) for number in range(len(PIECES))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }


@pytest.mark.parametrize(("pre", "num_tokens"), [("qwen2", 5), ("smollm", 5), ("llama-bpe", 4), ("gpt-2", 2)])
def test_digits_are_split_as_the_family_splits_them(pre: str, num_tokens: int) -> None:
    tokenizer = read_tokenizer(byte_level(pre, merges=["1 2", "3 4", "34 5"]), where=WHERE)
    assert len(tokenizer.encode("12345")) == num_tokens
    assert tokenizer.decode(tokenizer.encode("12345")) == "12345"


@pytest.mark.parametrize("pre", ["qwen2", "smollm", "llama-bpe", "gpt-2"])
def test_any_text_comes_back_from_a_byte_level_tokenizer(pre: str) -> None:
    tokenizer = read_tokenizer(byte_level(pre, merges=["h e"]), where=WHERE)
    text = "the  héron\n\n\tsaid: “12 + 3.5 = 15.5”, 中文"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|end|>") == [0]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0


def test_a_sentence_piece_tokenizer_merges_by_score_and_falls_back_to_bytes() -> None:
    metadata = sentence_piece()
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokenizer = read_tokenizer(metadata, where=WHERE)
    assert [tokens[index] for index in tokenizer.encode("hello world")] == ["▁hello", "▁wor", "ld"]
    assert [tokens[index] for index in tokenizer.encode("é")] == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
    assert tokenizer.encode("hello", add_special=True)[0] == 1


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"`tokenizer\.ggml\.model` to be one of 'gpt2', 'llama', got 'bert'"
    ):
        read_tokenizer({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"]}, where=WHERE)


def test_a_merge_of_one_token_is_named_as_damage() -> None:
    with pytest.raises(
        ModelError, match="its tokenizer is damaged: expected a merge of two tokens, got 'he'"
    ):
        read_tokenizer(byte_level("qwen2", merges=["he"]), where=WHERE)
