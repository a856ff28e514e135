"""Text to token ids and back, from a Hugging Face folder or built from an alphabet. No torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
import xxhash
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Regex, decoders, models, pre_tokenizers

from kintsugi.errors import DataError, ModelError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    CHAT_TEMPLATE_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""Files of a tokenizer in a model folder, which are copied so that other tools find all of them next to the weights."""

LONG_TEXT = 1 << 14
"""Number of characters that take milliseconds to encode."""
MOST_LOOP_STEPS = 1_000_000
"""Steps of all loops over `range` in one rendering of a chat template: a fraction of a second."""
LONGEST_REPETITION = 1 << 24
"""Length of a text or list that a chat template may make by `*`; a longer conversation is no request."""
LARGEST_EXPONENT = 64
_TEMPLATE_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors of a chat template, which is untrusted code, with messages that it does not expect."""
_SPECIAL_FIELDS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """A `tokenizers.Tokenizer` with its end and padding tokens and its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | None = None,
        where: str = TOKENIZER_CONFIG_FILE,
    ) -> None:
        """`special_tokens` maps `eos_token`, `pad_token`, … to their text; `where` is named in errors."""
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._where = where
        self.chat_template = chat_template
        self.eos_token_id = self._required_id("eos_token")
        self.pad_token_id = self._required_id("pad_token")
        self.bos_token_id = self._optional_id("bos_token")

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder; it must have an end token and a padding token."""
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise ModelError(f"expected the file {TOKENIZER_FILE} in {folder}, found none")
        backend = _read_backend(path)
        backend.no_padding()
        backend.no_truncation()
        config = _read_optional_json(folder / TOKENIZER_CONFIG_FILE)
        older = _read_optional_json(folder / "special_tokens_map.json")
        special_tokens = {}
        for field in _SPECIAL_FIELDS:
            text = _token_text(config.get(field)) or _token_text(older.get(field))
            if text is not None:
                special_tokens[field] = text
        return cls(
            backend,
            special_tokens=special_tokens,
            chat_template=_find_chat_template(folder, config=config),
            where=str(folder / TOKENIZER_CONFIG_FILE),
        )

    def save(self, folder: Path) -> list[Path]:
        """Write files from which transformers' AutoTokenizer makes a tokenizer with the same ids."""
        folder.mkdir(parents=True, exist_ok=True)
        files = self.files()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return [folder / name for name in files]

    def files(self) -> dict[str, bytes]:
        """Files that `save` writes, by name."""
        return {
            TOKENIZER_FILE: self._backend.to_str(pretty=True).encode(),
            TOKENIZER_CONFIG_FILE: self._config_file(),
        }

    @property
    def digest(self) -> str:
        """xxh3-128 of everything that decides which tokens a text or a conversation has."""
        return xxhash.xxh3_128_hexdigest(self._backend_digest + self._config_file())

    @cached_property
    def _backend_digest(self) -> bytes:
        """Computed once: writing out a vocabulary of 150 thousand tokens takes tenths of a second."""
        return xxhash.xxh3_128_digest(self._backend.to_str().encode())

    def _config_file(self) -> bytes:
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self._special_tokens,
            "clean_up_tokenization_spaces": False,
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()

    @property
    def vocab_size(self) -> int:
        """Upper bound of ids, added tokens included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def departure(self, folder: Path) -> str:
        """First id with another meaning in a folder's tokenizer; empty if there is none, or if the folder has no
        tokenizer.

        Names of added tokens may differ: chat models rename tokens that their base models reserve.
        """
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            return ""
        mine = self._backend.get_vocab(with_added_tokens=False)
        theirs = _read_backend(path).get_vocab(with_added_tokens=False)
        odd = sorted({(index, token) for token, index in mine.items() ^ theirs.items()})
        return f"{len(odd)} tokens differ, the first is {odd[0][1]!r} at {odd[0][0]}" if odd else ""

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Ids of exactly this text; `add_special` lets the tokenizer add its own tokens (BOS)."""
        try:
            if len(text) > LONG_TEXT:
                # Only batches are encoded without the interpreter's lock, which other threads of the process need.
                (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special)
            else:
                encoding = self._backend.encode(text, add_special_tokens=add_special)
            return list(encoding.ids)
        except Exception as error:  # the library raises plain Exception; only a character it lacks leads here
            unknown = sorted(
                {character for character in text if self._backend.token_to_id(character) is None}
            )
            where = text if len(text) <= LONG_TEXT else f"{text[:40]}…"
            why = "" if unknown else f": {error}"
            raise DataError(f"the tokenizer has no token for {unknown} in {where!r}{why}") from error

    def encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, as `encode` gives them; many texts are encoded by all cores."""
        if self._backend.padding is None:  # Padding would make all texts as long as the longest.
            with suppress(
                Exception
            ):  # The library raises plain Exception; `encode` below says which text it was.
                return [
                    list(found.ids)
                    for found in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
                ]
        return [self.encode(text) for text in texts]

    def encode_conversation(
        self, messages: Sequence[Mapping[str, Any]], *, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Ids of a prompt in the model's chat template, up to the start of its answer."""
        return self.encode(self.apply_chat_template(messages, variables=variables))

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a prompt that is plain text.

        It begins with BOS if the tokenizer itself would add it, and never ends with EOS, which some tokenizers add too.
        """
        plain = self.encode(text)
        begins = self.encode("", add_special=True)[:1]
        return [*begins, *plain] if begins == [self.bos_token_id] != plain[:1] else plain

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special))

    def text_of_completion(self, ids: Sequence[int], *, ended: bool) -> str:
        """Text of a completion for rewards. `ended`: its last token is the end token, which is left out.

        Every other special token stays visible: `4<pad>6` is not the answer 46.

        >>> character_tokenizer("46").text_of_completion([2, 0, 3, 1], ended=True)
        '4<pad>6'
        """
        return self.decode(ids[:-1] if ended else ids, skip_special=False)

    def piece(self, token_id: int) -> str | None:
        """Spelling of a token in the vocabulary; byte-level vocabularies spell its bytes."""
        text = self._backend.id_to_token(token_id)
        return None if text is None else str(text)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as one text, ready for `encode`; the template's own special tokens are in it.

        `variables` are further variables of the template: `tools`, `tool_choice`.
        """
        if self.chat_template is None:
            raise ModelError(
                f"{self._where}: field `chat_template` is missing, so conversations cannot be formatted; "
                "add one, or use plain text prompts"
            )
        try:
            return _compiled_template(self.chat_template).render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **(variables or {}),
                range=_BoundedRanges(),
            )
        except (jinja2.TemplateError, *_TEMPLATE_ERRORS) as error:
            raise ModelError(f"{self._where}: the chat template failed: {error}") from error

    def _required_id(self, field: str) -> int:
        token_id = self._optional_id(field)
        if token_id is None:
            raise ModelError(
                f"{self._where}: field `{field}` is missing; set it to one of the tokenizer's tokens"
                + (", for example one that text never contains" if field == "pad_token" else "")
            )
        return token_id

    def _optional_id(self, field: str) -> int | None:
        text = self._special_tokens.get(field)
        if text is None:
            return None
        token_id = self._backend.token_to_id(text)
        if token_id is None:
            raise ModelError(
                f"{self._where}: field `{field}` is {text!r}, which is not a token of {TOKENIZER_FILE}"
            )
        return int(token_id)


def character_tokenizer(alphabet: str) -> Tokenizer:
    """One token per character of `alphabet`, in its order, after `<pad>` (0) and `<eos>` (1).

    >>> character_tokenizer("0123456789+=").encode("1+2=")
    [3, 12, 4, 13]
    """
    if not alphabet or len(set(alphabet)) != len(alphabet):
        raise ModelError(f"expected an alphabet of distinct characters, got {alphabet!r}")
    special = ["<pad>", "<eos>"]
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unknown>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(special)
    return Tokenizer(backend, special_tokens={"pad_token": "<pad>", "eos_token": "<eos>"})


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception whatever is wrong with the file
        raise ModelError(f"{path} is not a readable tokenizer: {error}") from error


def _token_text(value: Any) -> str | None:
    """A special token is stored as its text, or as an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _find_chat_template(folder: Path, *, config: Mapping[str, Any]) -> str | None:
    path = folder / CHAT_TEMPLATE_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _read_optional_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(contents, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(contents).__name__}")
    return contents


@cache
def _compiled_template(text: str) -> jinja2.Template:
    """Compile a template, cached: compiling takes a hundred times as long as rendering."""
    return _template_environment().from_string(text)


def _template_environment() -> jinja2.Environment:
    """Environment that templates on the hub expect, sandboxed: a template is untrusted code."""
    environment = _BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which a template can not take the time or the memory of the process by an operator."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and abs(right) > LARGEST_EXPONENT:
            _raise_template_error(f"expected an exponent of at most {LARGEST_EXPONENT}, got {right}")
        if operator == "*":
            for text, count in ((left, right), (right, left)):
                if hasattr(text, "__len__") and len(text) * count > LONGEST_REPETITION:
                    _raise_template_error(
                        f"expected `*` to make at most {LONGEST_REPETITION:,} characters or items, "
                        f"got {len(text) * count:,}"
                    )
        return super().call_binop(context, operator, left, right)


class _BoundedRanges:
    """`range` of one rendering. A loop within a loop asks for its range in every step of the outer one."""

    def __init__(self) -> None:
        self._steps_left = MOST_LOOP_STEPS

    def __call__(self, *arguments: int) -> range:
        steps = range(*arguments)
        # Compared by its ends: `len` refuses a range of more than 2**63 steps.
        if steps and abs(steps[-1] - steps[0]) // abs(steps.step) >= self._steps_left:
            _raise_template_error(f"its loops take more than {MOST_LOOP_STEPS:,} steps")
        self._steps_left -= len(steps)
        return steps


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_template_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
