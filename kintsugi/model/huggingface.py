"""Hugging Face model folders: read with every name and shape checked, written so that transformers loads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kintsugi.errors import ModelError
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.folder import Head, check_index, load_config, stored_names, weight_files
from kintsugi.model.folder_files import DEFAULT_MAX_SHARD_BYTES, folder_files
from kintsugi.model.tensor_file import content_pieces
from kintsugi.model.tensor_slices import SliceName, view
from kintsugi.model.transformer import Transformer


def load(
    folder: Path,
    *,
    config: ModelConfig | None = None,
    dtype: torch.dtype | None = None,
    head: Head = "refused",
    device: torch.device | str = "cpu",
) -> Transformer:
    """Load the model in `folder`, in `dtype` or else as stored; `config` overrides the one of the folder.

    An optional value head that is missing starts at zero.
    """
    config = load_config(folder) if config is None else config
    if dtype is None:
        with WeightFiles(folder) as files:
            stored_names(files.shapes, config=config, head=head, where=str(folder))
            dtype = files.tensor("model.embed_tokens.weight").dtype
    model = Transformer(config, with_value_head=head != "refused", dtype=dtype, device=device)
    load_into(dict(model.named_parameters()), folder, config=config, head=head)
    return model


@torch.no_grad()
def load_into(
    parameters: Mapping[str, Tensor], folder: Path, *, config: ModelConfig, head: Head = "refused"
) -> None:
    """Fill the parameters of a model, or slices of them, by name, from a folder, one tensor at a time. An optional
    value head that is missing becomes zero."""
    with WeightFiles(folder) as files:
        names = stored_names(files.shapes, config=config, head=head, where=str(folder))
        for name, parameter in parameters.items():
            where = SliceName.parse(name)
            if where.name in names:  # Converted on the device: fewer bytes travel, and the CPU is slower.
                parameter.copy_(view(files.tensor(names[where.name]), where).to(parameter.device))
            else:
                parameter.zero_()


class StoredWeights(Mapping[str, Tensor]):
    """Weights of a model in a folder, by the names of its parameters, in float32. Each is read when it is asked for; an
    optional value head may be missing."""

    def __init__(self, folder: Path, *, config: ModelConfig | None = None, head: Head = "refused") -> None:
        """`config` overrides the one of the folder."""
        self._files = WeightFiles(folder)
        config = load_config(folder) if config is None else config
        self._names = stored_names(self._files.shapes, config=config, head=head, where=str(folder))

    def __getitem__(self, name: str) -> Tensor:
        return self._files.tensor(self._names[name]).float()

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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
    contents = folder_files(
        model_state, config=config, tokenizer_folder=tokenizer_folder, max_shard_bytes=max_shard_bytes
    )
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, content in contents:
        with (folder / name).open("wb") as file:
            file.writelines(content_pieces(content))
        written.append(folder / name)
    return written


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
        """Open one file; `names` are those that the index assigns to it, None without an index."""
        try:
            file = opened.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a readable safetensors file: {error}") from error
        present = set(file.keys())
        check_index(path, present=present, promised=names)
        for name in sorted(present):
            self._files[name] = file
            self.shapes[name] = tuple(file.get_slice(name).get_shape())
