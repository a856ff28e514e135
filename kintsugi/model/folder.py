"""A model folder on disk: its `config.json` and the headers of its weight files.

Imports no torch and reads no tensor, so that `kintsugi check` refuses a truncated or foreign file before any worker
starts.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Literal

import msgspec

from kintsugi.errors import ModelError
from kintsugi.model.architecture import ModelConfig, parameter_shapes

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

VALUE_HEAD = ("value_head.weight", "value_head.bias")
SCORE_HEAD = "score.weight"
"""Name of the head in transformers' models for sequence classification; it has no bias."""

Head = Literal["refused", "optional", "required"]
"""Whether a folder must not, may or must have a value head."""

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Stored types that can be trained from; anything else is quantised or not a weight."""
_MAX_HEADER_BYTES = 100_000_000
"""Limit of the format."""
_LENGTH_BYTES = 8
_NAMES_SHOWN = 5


class StoredTensor(msgspec.Struct, frozen=True):
    """One entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """[start, stop) after the header."""


def load_config(folder: Path) -> ModelConfig:
    """The architecture that `folder/config.json` describes."""
    if not folder.is_dir():
        raise ModelError(f"expected a model folder at {folder}, found {_found_instead(folder)}")
    path = folder / CONFIG_FILE
    return ModelConfig.from_huggingface(_read_json(path), where=str(path))


def importing_folder(destination: Path) -> Path:
    """Folder in which an import into `destination` writes; locked while it does."""
    return destination.parent / f".{destination.name}-importing"


def _found_instead(folder: Path) -> str:
    """Describe what is at a path where a model folder should be."""
    if folder.suffix.lower() == ".gguf" and folder.exists():
        return f"a GGUF file; convert it first: `kintsugi import {folder} FOLDER`"
    if folder.exists():
        return "a file"
    try:
        descriptor = os.open(importing_folder(folder), os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return "nothing"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "an import that has not ended yet"
    finally:
        os.close(descriptor)
    return f"an import that was interrupted; repeat it: `kintsugi import SOURCE {folder}`"


def check_weights(folder: Path, *, config: ModelConfig, head: Head = "refused") -> None:
    """Refuse weights that could not be loaded: a file that is missing, truncated or damaged, a tensor that does not
    fit."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, names in weight_files(folder):
        tensors = read_header(path)
        check_index(path, present=tensors.keys(), promised=names)
        shapes |= {name: tensor.shape for name, tensor in tensors.items()}
    stored_names(shapes, config=config, head=head, where=str(folder))


def stored_names(
    shapes: Mapping[str, tuple[int, ...]], *, config: ModelConfig, head: Head, where: str
) -> dict[str, str]:
    """Each parameter of the model by its name in a folder; ModelError if they do not fit.

    An optional head that is missing has no entry; neither has the bias of a head that was stored without one.
    """
    names = {name: name for name in parameter_shapes(config, with_value_head=head != "refused")}
    if head != "refused" and SCORE_HEAD in shapes:
        names[VALUE_HEAD[0]] = SCORE_HEAD
        del names[VALUE_HEAD[1]]
    elif head == "required" and not shapes.keys() & set(VALUE_HEAD):
        raise ModelError(
            f"{where}: expected a reward model's head ({VALUE_HEAD[0]} or {SCORE_HEAD}), found none; "
            "train one with `algorithm.name=reward_model`"
        )
    elif head == "optional" and not shapes.keys() & set(VALUE_HEAD):
        names = {name: name for name in parameter_shapes(config)}
    wanted = parameter_shapes(config, with_value_head=True)
    stored = {found: wanted[name] for name, found in names.items()}
    check_parameters(shapes, wanted=stored, config=config, where=where)
    return names


def weight_files(folder: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """Files that hold the weights, each with the names that the index assigns to it; None without an index."""
    index_path = folder / INDEX_FILE
    if not index_path.is_file():
        path = folder / WEIGHTS_FILE
        if not path.is_file():
            raise ModelError(
                f"expected {WEIGHTS_FILE} or {INDEX_FILE} in {folder}, found "
                f"{_some(sorted(entry.name for entry in folder.iterdir()))}; "
                "weights in other formats must be converted to safetensors first"
            )
        yield path, None
        return
    weight_map = _read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index_path}: expected field `weight_map` to be an object, got {weight_map!r}")
    names_by_file: dict[str, list[str]] = {}
    for name, file_name in weight_map.items():
        names_by_file.setdefault(str(file_name), []).append(name)
    for file_name, names in sorted(names_by_file.items()):
        path = folder / file_name
        if path.parent != folder or not path.is_file():
            raise ModelError(f"{index_path}: names the file {file_name!r}, which is not in {folder}")
        yield path, names


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of a safetensors file by name; every byte after the header belongs to exactly one of them."""
    try:
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = file.read(min(header_bytes, _MAX_HEADER_BYTES))
    except OSError as error:
        raise ModelError(f"{path} can not be read: {error.strerror}") from error
    if len(header) < max(1, header_bytes):
        raise ModelError(
            f"{path} is not a safetensors file, or cut: "
            f"expected a header of {header_bytes} bytes, found {len(header)}"
        )
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(raw, type=StoredTensor) for name, raw in entries.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} has no readable safetensors header: {error}") from error
    _check_layout(tensors, data_bytes=file_bytes - _LENGTH_BYTES - header_bytes, path=path)
    return tensors


def _check_layout(tensors: Mapping[str, StoredTensor], *, data_bytes: int, path: Path) -> None:
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda entry: entry[1].data_offsets):
        if tensor.dtype not in _ITEM_BYTES:
            raise ModelError(
                f"{path}: expected {name} stored as one of {', '.join(_ITEM_BYTES)}, got {tensor.dtype}"
            )
        start, stop = tensor.data_offsets
        size = math.prod(tensor.shape) * _ITEM_BYTES[tensor.dtype]
        if (start, stop) != (position, position + size):
            raise ModelError(
                f"{path} is damaged: expected {name} ({size} bytes) at {position}, its header says {start} to {stop}"
            )
        if stop > data_bytes:
            raise ModelError(
                f"{path} is cut: {name} needs {stop} bytes behind the header, there are {data_bytes}"
            )
        position = stop
    if position != data_bytes:
        raise ModelError(f"{path} is damaged: {data_bytes - position} bytes at its end belong to no tensor")


def check_index(path: Path, *, present: AbstractSet[str], promised: list[str] | None) -> None:
    """Refuse a file that lacks tensors that the index assigns to it."""
    absent = sorted(set(promised or ()) - present)
    if absent:
        raise ModelError(f"{path} lacks {_some(absent)}, which {INDEX_FILE} places there")


def check_parameters(
    found: Mapping[str, tuple[int, ...]],
    *,
    wanted: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
    where: str,
) -> None:
    """Refuse tensors that are not the model's, and name all differences."""
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted and not _is_redundant(name, config)]
    wrong = [
        f"{name} (expected {list(shape)}, got {list(found[name])})"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    problems = [
        f"{label}: {_some(names)}"
        for label, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", wrong))
        if names
    ]
    if problems:
        raise ModelError(f"{where}: weights do not fit {CONFIG_FILE}; " + "; ".join(problems))


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that older tools store although the architecture implies them."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_embeddings)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"expected the file {path.name} in {path.parent}, found none") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(contents, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(contents).__name__}")
    return contents


def _some(names: list[str]) -> str:
    """A list that stays readable at any length."""
    if not names:
        return "nothing"
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
