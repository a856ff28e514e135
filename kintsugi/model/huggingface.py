"""Hugging Face model folders: read with every name and shape checked, written so that transformers loads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kintsugi.errors import ModelError
from kintsugi.model.architecture import ModelConfig, parameter_shapes
from kintsugi.model.tokenizer import TOKENIZER_FILES
from kintsugi.model.transformer import Transformer

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DEFAULT_MAX_SHARD_BYTES = 5_000_000_000

_VALUE_HEAD = ("value_head.weight", "value_head.bias")
_NAMES_SHOWN = 5


def load_config(folder: Path) -> ModelConfig:
    """The architecture that `folder/config.json` describes."""
    if not folder.is_dir():
        raise ModelError(
            f"expected a model folder at {folder}, found {'a file' if folder.exists() else 'nothing'}"
        )
    path = folder / CONFIG_FILE
    return ModelConfig.from_huggingface(_read_json(path), where=str(path))


def load(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    with_value_head: bool = False,
    device: torch.device | str = "cpu",
) -> Transformer:
    """The model in `folder`, in `dtype` or else as stored. A value head that is not stored starts at zero."""
    config = load_config(folder)
    with WeightFiles(folder) as files:
        wanted = parameter_shapes(config, with_value_head=with_value_head)
        missing_value_head = with_value_head and not files.shapes.keys() & set(_VALUE_HEAD)
        if missing_value_head:
            wanted = {name: shape for name, shape in wanted.items() if name not in _VALUE_HEAD}
        _check_parameters(files.shapes, wanted=wanted, config=config, where=str(folder))
        stored_dtype = files.tensor("model.embed_tokens.weight").dtype
        model = Transformer(
            config, with_value_head=with_value_head, dtype=dtype or stored_dtype, device=device
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if missing_value_head and name in _VALUE_HEAD:
                    parameter.zero_()
                else:
                    parameter.copy_(files.tensor(name))
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
    with_value_head = bool(model_state.keys() & set(_VALUE_HEAD))
    wanted = parameter_shapes(config, with_value_head=with_value_head)
    shapes = {name: tuple(tensor.shape) for name, tensor in model_state.items()}
    _check_parameters(shapes, wanted=wanted, config=config, where="the state to save")
    folder.mkdir(parents=True, exist_ok=True)
    dtype = model_state["model.embed_tokens.weight"].dtype
    config_path = folder / CONFIG_FILE
    _write_json(config_path, {**config.to_huggingface(), "torch_dtype": str(dtype).removeprefix("torch.")})
    written = [config_path]
    written += _write_weights(
        {name: model_state[name] for name in wanted}, folder=folder, max_bytes=max_shard_bytes
    )
    if tokenizer_folder is not None:
        written += copy_tokenizer(tokenizer_folder, folder=folder)
    return written


def copy_tokenizer(source: Path, *, folder: Path) -> list[Path]:
    """Copy the tokenizer files that `source` has."""
    names = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    return [Path(shutil.copyfile(source / name, folder / name)) for name in names]


class WeightFiles:
    """The safetensors files of a folder, opened together: shapes are known before any tensor is read."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        with ExitStack() as opened:
            for path, names in _shards(folder):
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
        absent = sorted(set(names or ()) - present)
        if absent:
            raise ModelError(f"{path} lacks {_some(absent)}, which {INDEX_FILE} places there")
        for name in sorted(present):
            self._files[name] = file
            self.shapes[name] = tuple(file.get_slice(name).get_shape())


def _shards(folder: Path) -> Iterator[tuple[Path, list[str] | None]]:
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


def _check_parameters(
    found: Mapping[str, tuple[int, ...]],
    *,
    wanted: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
    where: str,
) -> None:
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


def _write_weights(state: Mapping[str, Tensor], *, folder: Path, max_bytes: int) -> list[Path]:
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
        tensors = {name: _own_memory(state[name]) for name in names}
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
    written = [folder / file_name for file_name in file_names]
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(file_names, shards, strict=True) for name in names}
        total = sum(tensor.nbytes for tensor in state.values())
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
        written.append(folder / INDEX_FILE)
    return written


def _own_memory(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor that shares its storage with no other, as safetensors demands."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"expected the file {path.name} in {path.parent}, found none") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(contents, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(contents).__name__}")
    return contents


def _write_json(path: Path, contents: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def _some(names: list[str]) -> str:
    """A list that stays readable however long it is."""
    if not names:
        return "nothing"
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
