"""Options of `kintsugi serve` for its servers: one file in the gateway's folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from kintsugi.config.schema import Strategy
from kintsugi.errors import ModelError, UserError
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.folder import check_weights, load_config
from kintsugi.model.tokenizer import Tokenizer

OPTIONS_FILE = "serve.json"
LONGEST_BY_DEFAULT = 4096

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
_CHOICES = {"dtype": get_args(Dtype), "device": get_args(Device), "strategy": get_args(Strategy)}


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`ServerOptions(model="models/SmolLM2", slots=64, max_length=2048)`."""

    model: str
    """A Hugging Face folder."""
    slots: int = 64
    """Number of sequences that one server decodes concurrently."""
    max_length: int
    """Longest prompt + completion, in tokens."""
    kv_cache_gib: float | None = None
    """Memory of one server's KV cache; by default for all slots at full length, as far as there is memory."""
    dtype: Dtype = "auto"
    """Type of the computation; `auto`: as stored, on a CPU float32."""
    device: Device = "auto"
    """`auto`: an accelerator if there is one."""
    deterministic: bool = False
    """The same request gives the same tokens to the bit, independent of other requests and of the server."""
    strategy: Strategy = "least_loaded"


def make_options(
    model: Path, config: ModelConfig, *, max_length: int | None, given: Mapping[str, Any]
) -> ServerOptions:
    """Build the options from the command line; UserError for an invalid value."""
    for name, choices in _CHOICES.items():
        if given[name] not in choices:
            raise UserError(f"expected `--{name}` to be one of {', '.join(choices)}, got {given[name]!r}")
    if (memory := given.get("kv_cache_gib")) is not None and not 0 < memory < math.inf:
        raise UserError(f"expected `--kv-cache-gib` to be positive, got {memory:g}")
    values = {"model": str(model.resolve()), "max_length": _longest(config, max_length), **given}
    return msgspec.convert(values, type=ServerOptions)


def write_options(options: ServerOptions, folder: Path) -> None:
    (folder / OPTIONS_FILE).write_bytes(msgspec.json.encode(options))


def read_options(folder: Path) -> ServerOptions:
    return msgspec.json.decode((folder / OPTIONS_FILE).read_bytes(), type=ServerOptions)


def described(model: Path) -> tuple[ModelConfig, Tokenizer]:
    """Architecture and tokenizer of the model in a folder; its weights are checked by their headers."""
    config = load_config(model)
    tokenizer = Tokenizer.load(model)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"expected a tokenizer of at most `vocab_size`={config.vocab_size} tokens in {model}, "
            f"got {tokenizer.vocab_size}"
        )
    check_weights(model, config=config)
    return config, tokenizer


def _longest(config: ModelConfig, asked: int | None) -> int:
    """Longest prompt + completion."""
    if asked is None:
        return min(config.max_positions, LONGEST_BY_DEFAULT)
    if not 2 <= asked <= config.max_positions:
        raise UserError(
            f"expected `--max-length` from 2 to {config.max_positions}, the model's positions, got {asked}"
        )
    return asked
