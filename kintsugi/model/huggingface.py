"""Hugging Face model folders: read with every name and shape checked, written so that transformers loads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor

from kintsugi.errors import ModelError
from kintsugi.model.architecture import ModelConfig, parameter_shapes
from kintsugi.model.folder import (
    CONFIG_FILE,
    INDEX_FILE,
    VALUE_HEAD,
    WEIGHTS_FILE,
    Head,
    check_index,
    check_parameters,
    load_config,
    stored_names,
    weight_files,
)
from kintsugi.model.tokenizer import TOKENIZER_FILES
from kintsugi.model.transformer import Transformer

DEFAULT_MAX_SHARD_BYTES = 5_000_000_000


def load(
    folder: Path,
    *,
    config: ModelConfig | None = None,
    dtype: torch.dtype | None = None,
    head: Head = "refused",
    device: torch.device | str = "cpu",
) -> Transformer:
    """The model in `folder`, in `dtype` or else as stored; `config` where it is not to be read as the folder says.

    A value head that may be missing, and is, starts at zero.
    """
    config = load_config(folder) if config is None else config
    with WeightFiles(folder) as files:
        names = stored_names(files.shapes, config=config, head=head, where=str(folder))
        stored_dtype = files.tensor("model.embed_tokens.weight").dtype
        model = Transformer(
            config, with_value_head=head != "refused", dtype=dtype or stored_dtype, device=device
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in names:
                    parameter.copy_(files.tensor(names[name]))
                else:
                    parameter.zero_()
    return model


def save(
    model_state: Mapping[str, Tensor],
    *,
    config: ModelConfig,
    folder: Path,
    tokenizer_folder: Path | None = None,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
) -> list[Path]:
    """Write config, weights and tokenizer files into `folder` and return their paths.

    The caller makes it durable and atomic: nothing here is synced or renamed.
    """
    contents = files(
        model_state, config=config, tokenizer_folder=tokenizer_folder, max_shard_bytes=max_shard_bytes
    )
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, data in contents:
        (folder / name).write_bytes(data)
        written.append(folder / name)
    return written


def files(
    model_state: Mapping[str, Tensor],
    *,
    config: ModelConfig,
    tokenizer_folder: Path | None = None,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
) -> Iterator[tuple[str, bytes]]:
    """Name and contents of every file of a Hugging Face folder, one at a time; whoever takes them writes them."""
    with_value_head = bool(model_state.keys() & set(VALUE_HEAD))
    wanted = parameter_shapes(config, with_value_head=with_value_head)
    shapes = {name: tuple(tensor.shape) for name, tensor in model_state.items()}
    check_parameters(shapes, wanted=wanted, config=config, where="the state to save")
    dtype = str(model_state["model.embed_tokens.weight"].dtype).removeprefix("torch.")
    return chain(
        [(CONFIG_FILE, _json({**config.to_huggingface(), "torch_dtype": dtype}))],
        _weight_files({name: model_state[name] for name in wanted}, max_bytes=max_shard_bytes),
        _tokenizer_files(tokenizer_folder) if tokenizer_folder is not None else (),
    )


def _tokenizer_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Those that `folder` has."""
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            yield name, (folder / name).read_bytes()


class WeightFiles:
    """The safetensors files of a folder, opened together: shapes are known before any tensor is read."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        with ExitStack() as opened:
            for path, names in weight_files(folder):
                self._open(path, names=names, opened=opened)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def _open(self, path: Path, *, names: list[str] | None, opened: ExitStack) -> None:
        """Open one file; `names` are what the index promises of it, None when there is no index."""
        try:
            file = opened.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a readable safetensors file: {error}") from error
        present = set(file.keys())
        check_index(path, present=present, promised=names)
        for name in sorted(present):
            self._files[name] = file
            self.shapes[name] = tuple(file.get_slice(name).get_shape())


def _weight_files(state: Mapping[str, Tensor], *, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    """One file, or shards filled in order with an index; tensors are brought to the CPU one shard at a time."""
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name, tensor in state.items():
        if shards[-1] and shard_bytes + tensor.nbytes > max_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += tensor.nbytes
    if len(shards) == 1:
        file_names = [WEIGHTS_FILE]
    else:
        file_names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file_name, names in zip(file_names, shards, strict=True):
        yield (
            file_name,
            serialize({name: _own_memory(state[name]) for name in names}, metadata={"format": "pt"}),
        )
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(file_names, shards, strict=True) for name in names}
        total = sum(tensor.nbytes for tensor in state.values())
        yield INDEX_FILE, _json({"metadata": {"total_size": total}, "weight_map": weight_map})


def _own_memory(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor that shares its storage with no other, as safetensors demands."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _json(contents: Mapping[str, Any]) -> bytes:
    return (json.dumps(contents, indent=2) + "\n").encode()
