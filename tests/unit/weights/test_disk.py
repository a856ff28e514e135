"""A model folder as a version of the weights."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from kintsugi.config.schema import NewModel
from kintsugi.errors import IntegrityError, ModelError, StorageFull
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.huggingface import save
from kintsugi.model.plan import new_model_config
from kintsugi.model.tokenizer import character_tokenizer
from kintsugi.model.transformer import Transformer
from kintsugi.types import FolderSource
from kintsugi.weights.fetch import Fetched, Fetcher
from kintsugi.weights.transports.disk import folder_manifest, write_folder

CONFIG = new_model_config(
    NewModel(hidden_size=16, num_heads=2, num_kv_heads=2), tokenizer=character_tokenizer("ab")
)


def written(
    folder: Path, *, dtype: torch.dtype = torch.float32, max_shard_bytes: int = 1 << 30
) -> dict[str, torch.Tensor]:
    state = {name: torch.randn(each.shape).to(dtype) for name, each in Transformer(CONFIG).named_parameters()}
    save(state, config=CONFIG, folder=folder, max_shard_bytes=max_shard_bytes)
    return state


def fetched(folder: Path, *, config: ModelConfig = CONFIG) -> Fetched:
    manifest = folder_manifest(folder, config=config, version=3)
    return fetcher().fetch(manifest, [FolderSource(str(folder))])


def fetcher() -> Fetcher:
    return Fetcher(process="server-0", host="here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 4096])
def test_what_is_read_is_what_was_written(tmp_path: Path, dtype: torch.dtype, max_shard_bytes: int) -> None:
    state = written(tmp_path, dtype=dtype, max_shard_bytes=max_shard_bytes)
    found = fetched(tmp_path).tensors()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_folder_that_changed_since_is_not_taken(tmp_path: Path) -> None:
    written(tmp_path)
    manifest = folder_manifest(tmp_path, config=CONFIG, version=0)
    written(tmp_path)
    with pytest.raises(IntegrityError, match="expected xxh3"):
        fetcher().fetch(manifest, [FolderSource(str(tmp_path))])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(IntegrityError, match="has changed"):
        fetcher().fetch(manifest, [FolderSource(str(tmp_path))])


def test_weights_of_another_shape_are_the_users_mistake(tmp_path: Path) -> None:
    written(tmp_path)
    other = new_model_config(
        NewModel(hidden_size=32, num_heads=2, num_kv_heads=2), tokenizer=character_tokenizer("ab")
    )
    with pytest.raises(ModelError, match="wrong shape"):
        folder_manifest(tmp_path, config=other, version=0)


def test_a_full_disk_is_named_and_keeps_no_half_version(tmp_path: Path) -> None:
    written(tmp_path / "source")
    manifest = folder_manifest(tmp_path / "source", config=CONFIG, version=3)
    buffer = memoryview(bytearray(manifest.size))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (manifest.size // 2, hard))
    try:
        with pytest.raises(StorageFull, match=r"could not write .*version-3 on disk"):
            write_folder(manifest, buffer, tmp_path / "weights" / "version-3")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "weights").iterdir()) == []
