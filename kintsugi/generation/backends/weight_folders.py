"""Weights as Hugging Face folders that an external server reads: one per version, of which the newest stays."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kintsugi.model.architecture import ModelConfig
from kintsugi.runtime.disk import storage_errors

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
        """Add the output matrix where it is tied to the embeddings: on a CPU, vLLM has a separate copy for the output,
        which is not updated unless it is named."""
        if _HEAD in tensors or _EMBEDDINGS not in tensors:
            return tensors
        return {**tensors, _HEAD: tensors[_EMBEDDINGS].detach().clone()}

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> Path:
        """Write a Hugging Face folder; ModelError if these are not the model's parameters. Not synced: after a crash it
        is written again."""
        from kintsugi.model import huggingface

        folder = self._folder / f"version-{version}"
        with storage_errors(f"could not write weights for another server into {folder}"):
            shutil.rmtree(folder, ignore_errors=True)
            huggingface.save(tensors, config=self._architecture, folder=folder)
        return folder

    def keep_only(self, folder: Path) -> None:
        """Remove the folders of other versions."""
        for other in self._folder.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
