"""Files of a Hugging Face folder that does not exist yet, from the weights of a model in either framework."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from kintsugi.model.architecture import ModelConfig, parameter_shapes
from kintsugi.model.arrays import Array
from kintsugi.model.folder import CONFIG_FILE, INDEX_FILE, VALUE_HEAD, WEIGHTS_FILE, check_parameters
from kintsugi.model.tensor_file import FileContent, TensorFile
from kintsugi.model.tokenizer import TOKENIZER_FILES

DEFAULT_MAX_SHARD_BYTES = 5_000_000_000


def folder_files(
    model_state: Mapping[str, Array],
    *,
    config: ModelConfig,
    tokenizer_folder: Path | None = None,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    dtype: Any = None,
) -> Iterator[tuple[str, FileContent]]:
    """Name and contents of every file of a Hugging Face folder, one at a time; the caller writes them.

    With `dtype` the weights are converted as they are written, in pieces.
    """
    with_value_head = bool(model_state.keys() & set(VALUE_HEAD))
    wanted = parameter_shapes(config, with_value_head=with_value_head)
    shapes = {name: tuple(tensor.shape) for name, tensor in model_state.items()}
    check_parameters(shapes, wanted=wanted, config=config, where="the state to save")
    dtype = dtype or model_state["model.embed_tokens.weight"].dtype
    stored = str(dtype).removeprefix("torch.")
    return chain(
        [(CONFIG_FILE, _json({**config.to_huggingface(), "torch_dtype": stored}))],
        _weight_files({name: model_state[name] for name in wanted}, max_bytes=max_shard_bytes, dtype=dtype),
        _tokenizer_files(tokenizer_folder) if tokenizer_folder is not None else (),
    )


def _tokenizer_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Tokenizer files that `folder` has."""
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            yield name, (folder / name).read_bytes()


def _weight_files(
    state: Mapping[str, Array], *, max_bytes: int, dtype: Any
) -> Iterator[tuple[str, FileContent]]:
    """One file, or shards filled in order with an index."""
    sizes = {name: math.prod(tensor.shape) * dtype.itemsize for name, tensor in state.items()}
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name, size in sizes.items():
        if shards[-1] and shard_bytes + size > max_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += size
    if len(shards) == 1:
        file_names = [WEIGHTS_FILE]
    else:
        file_names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file_name, names in zip(file_names, shards, strict=True):
        tensors = {name: state[name] for name in names}
        yield file_name, TensorFile(tensors, dtype=dtype, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(file_names, shards, strict=True) for name in names}
        yield INDEX_FILE, _json({"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})


def _json(contents: Mapping[str, Any]) -> bytes:
    return (json.dumps(contents, indent=2) + "\n").encode()
