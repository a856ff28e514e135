"""Weights as folders that a server of another make reads: one per version, of which the newest stays."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kintsugi.disk import storage_errors
from kintsugi.model.architecture import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor


_EMBEDDINGS = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


class WeightFolders:
    """The server must see `folder` under the same path."""

    def __init__(self, folder: Path, *, architecture: ModelConfig) -> None:
        self._folder = folder.absolute()
        self._architecture = msgspec.structs.replace(architecture, tie_embeddings=False)

    def complete(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """With the output's matrix, where it is that of the embeddings: on a CPU, vLLM has a copy of its own for the
        output, which stays as it was if it is not named."""
        if _HEAD in tensors or _EMBEDDINGS not in tensors:
            return tensors
        return {**tensors, _HEAD: tensors[_EMBEDDINGS].detach().clone()}

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> Path:
        """A Hugging Face folder; ModelError if these are not the model's parameters. Not synced: after a crash it is
        written again."""
        from kintsugi.model import huggingface

        folder = self._folder / f"version-{version}"
        contents = huggingface.files(tensors, config=self._architecture)
        with storage_errors(f"could not write weights for another server into {folder}"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for name, data in contents:
                (folder / name).write_bytes(data)
        return folder

    def keep_only(self, folder: Path) -> None:
        """The server has read the others, or never will."""
        for other in self._folder.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
