"""The tokenizer that a GGUF file describes in its metadata, as tokenizer files of a Hugging Face folder. No torch.

Two kinds exist among the supported families: byte-level BPE (`gpt2`), whose way to split text into words is named by
`tokenizer.ggml.pre`, and SentencePiece BPE (`llama`), whose merges follow from the scores of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from kintsugi.errors import ModelError
from kintsugi.model.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens that are never split."""
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = {
    "llama-bpe": _LLAMA3_WORDS,
    "llama3": _LLAMA3_WORDS,
    "llama-v3": _LLAMA3_WORDS,
    "smaug-bpe": _LLAMA3_WORDS,
    "qwen2": _QWEN2_WORDS,
    "deepseek-r1-qwen": _QWEN2_WORDS,
}
"""`tokenizer.ggml.pre` → pattern of a word."""
_GPT2_SPLITS = ("default", "gpt-2", "smollm")
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_METASPACE = "\u2581"


def read_tokenizer(metadata: dict[str, Any], *, where: Path) -> Tokenizer:
    """Build the tokenizer of a file with this metadata; ModelError if its kind is not known."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelError(f"{where}: expected the tokenizer's tokens in `tokenizer.ggml.tokens`, found none")
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens=tokens, where=where)
    elif kind == "llama":
        backend = _sentence_piece(metadata, tokens=tokens, where=where)
    else:
        raise ModelError(
            f"{where}: expected `tokenizer.ggml.model` to be one of 'gpt2', 'llama', got {kind!r}; "
            "import the model's Hugging Face folder instead"
        )
    _add_special_tokens(backend, metadata, tokens=tokens)
    special = {}
    for name, key in _SPECIAL.items():
        index = metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(index, int) and 0 <= index < len(tokens):
            special[name] = tokens[index]
    if "eos_token" in special:
        special.setdefault("pad_token", special["eos_token"])
    if metadata.get("tokenizer.ggml.add_bos_token") and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_template=template if isinstance(template, str) else None,
        where=str(where),
    )


def _byte_level(metadata: dict[str, Any], *, tokens: Sequence[str], where: Path) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _WORDS and pre not in _GPT2_SPLITS:
        known = ", ".join((*_GPT2_SPLITS, *_WORDS))
        raise ModelError(
            f"{where}: expected `tokenizer.ggml.pre` to be one of {known}, got {pre!r}; other words would "
            "become other tokens; import the model's Hugging Face folder instead"
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelError(
            f"{where}: expected the merges of the tokenizer in `tokenizer.ggml.merges`, found none"
        )
    spelling = _byte_spelling()
    alphabet = set(spelling.values())
    vocabulary = {
        token if alphabet.issuperset(token) else "".join(spelling[byte] for byte in token.encode()): index
        for index, token in enumerate(tokens)
    }
    pairs = _pairs(merges, where=where)
    is_llama3 = _WORDS.get(pre) == _LLAMA3_WORDS
    backend = _tokenizer(
        vocabulary,
        pairs,
        where=where,
        ignore_merges=is_llama3,
        continuing_subword_prefix="",
        end_of_word_suffix="",
    )
    if pre in _WORDS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_WORDS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif pre == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if _WORDS.get(pre) == _QWEN2_WORDS:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(metadata: dict[str, Any], *, tokens: Sequence[str], where: Path) -> tokenizers.Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = metadata.get("tokenizer.ggml.merges")
    if isinstance(merges, list):
        pairs = _pairs(merges, where=where)
    else:
        scores = metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, list) or len(scores) != len(tokens):
            raise ModelError(f"{where}: expected a score of each token in `tokenizer.ggml.scores`")
        pairs = _merges_of_scores(vocabulary, scores)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise ModelError(f"{where}: its tokenizer is damaged: the unknown token is {unknown!r}")
    backend = _tokenizer(
        vocabulary, pairs, where=where, byte_fallback=True, fuse_unk=True, unk_token=tokens[unknown]
    )
    with_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_METASPACE, prepend_scheme="first" if with_space else "never", split=False
    )
    steps = [decoders.Replace(_METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if with_space else steps)
    return backend


def _tokenizer(
    vocabulary: dict[str, int], pairs: Sequence[tuple[str, str]], *, where: Path, **options: Any
) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, **options))
    except Exception as error:  # the library raises plain Exception whatever is wrong
        raise ModelError(f"{where}: its tokenizer is damaged: {error}") from error


def _pairs(merges: Sequence[object], *, where: Path) -> list[tuple[str, str]]:
    """Merges as the two tokens that become one, which are written with a space between."""
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if not (left and right):
            raise ModelError(
                f"{where}: its tokenizer is damaged: expected a merge of two tokens, got {merge!r}"
            )
        pairs.append((left, right))
    return pairs


def _merges_of_scores(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs of tokens that make another one, the best score first."""
    found = []
    for token, index in vocabulary.items():
        pairs = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        ]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(scores[index], len(left), len(right), left, right) for left, right in pairs]
    found.sort(key=lambda each: each[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _add_special_tokens(
    backend: tokenizers.Tokenizer, metadata: dict[str, Any], *, tokens: Sequence[str]
) -> None:
    """Tokens that stay whole: control tokens are special, tokens that the model's authors added are not."""
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    known = backend.get_vocab(with_added_tokens=False)
    for kind, add in (
        (_CONTROL, backend.add_special_tokens),
        (_USER_DEFINED, backend.add_tokens),
    ):
        add(
            [
                AddedToken(token, normalized=False, special=kind == _CONTROL)
                for token, found in zip(tokens, kinds, strict=False)
                # One that is spelled otherwise in the vocabulary would get a new index.
                if found == kind and token in known
            ]
        )


def _byte_spelling() -> dict[int, str]:
    """Printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelling = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(0x100) if byte not in spelling)
    return spelling | {byte: chr(0x100 + number) for number, byte in enumerate(list(others))}
