from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kintsugi.cli import local_models
from kintsugi.config.recipe import Resolved, load
from kintsugi.config.schema import ModelSection
from kintsugi.errors import ModelError
from kintsugi.model.hub import is_hub_name, local_folder

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def cached(cache: Path) -> Path:
    """A model in the layout of the hub's cache."""
    model = cache / "models--HuggingFaceTB--SmolLM2-135M-Instruct"
    folder = model / "snapshots" / ("a" * 40)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("a" * 40)
    return folder


def test_a_name_is_found_in_the_local_cache_without_a_connection(tmp_path: Path) -> None:
    folder = cached(tmp_path)
    said: list[str] = []
    assert local_folder(NAME, field="model.path", cache_dir=tmp_path, say=said.append) == str(folder)
    assert said == []


def test_a_folder_that_exists_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("models/mine") and not is_hub_name("mine") and not is_hub_name("/a/b")
    Path("models/mine").mkdir(parents=True)
    assert not is_hub_name("models/mine") and not is_hub_name("models/misspelt")
    assert local_folder("models/mine", field="model.path") == "models/mine"


def test_without_a_connection_the_message_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said: list[str] = []
    with pytest.raises(
        ModelError, match=r"`model.path`: expected a model folder, or the name of a model"
    ) as caught:
        local_folder(NAME, field="model.path", cache_dir=tmp_path, say=said.append)
    assert f"`hf download {NAME}`" in str(caught.value) and "can not be reached" in str(caught.value)
    assert said == [f"model.path: {NAME} is not in the local cache of the Hugging Face hub; downloading it"]


def test_a_recipe_names_its_model_and_the_origin_keeps_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cached(tmp_path)
    monkeypatch.setattr(local_models, "local_folder", lambda path, **options: str(folder))
    loaded = load("grpo_arithmetic")
    config = msgspec.structs.replace(loaded.config, model=ModelSection(path=NAME))
    found = local_models.with_local_models(Resolved(config, {**loaded.origins, "model.path": "mine.yaml"}))
    assert found.config.model.path == str(folder)
    assert found.origins["model.path"] == f"mine.yaml: {NAME} of the hub"
