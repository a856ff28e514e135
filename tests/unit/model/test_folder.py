import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from kintsugi.errors import ModelError
from kintsugi.model.architecture import ModelConfig, parameter_shapes
from kintsugi.model.folder import INDEX_FILE, WEIGHTS_FILE, check_weights, load_config, read_header

CONFIG = ModelConfig(
    family="llama",
    vocab_size=8,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=32,
)
TIED = ModelConfig(
    **{name: getattr(CONFIG, name) for name in CONFIG.__struct_fields__} | {"tie_embeddings": True}
)
Tensors = dict[str, NDArray[Any]]


def tensors_of(config: ModelConfig) -> Tensors:
    return {name: np.zeros(shape, np.float32) for name, shape in parameter_shapes(config).items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(tensors_of(CONFIG), tmp_path / WEIGHTS_FILE, metadata={"format": "pt"})
    return tmp_path / WEIGHTS_FILE


def refusal(folder: Path, config: ModelConfig = CONFIG) -> str:
    with pytest.raises(ModelError) as caught:
        check_weights(folder, config=config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The same data behind another header."""
    contents = path.read_bytes()
    length = int.from_bytes(contents[:8], "little")
    header = json.loads(contents[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + contents[8 + length :])


def test_a_whole_file_is_taken_with_every_name_and_shape(path: Path) -> None:
    check_weights(path.parent, config=CONFIG)
    assert {name: tensor.shape for name, tensor in read_header(path).items()} == parameter_shapes(CONFIG)


def test_tied_embeddings_need_no_output_matrix_and_ignore_one(tmp_path: Path) -> None:
    for tensors in (tensors_of(TIED), tensors_of(CONFIG)):
        save_file(tensors, tmp_path / WEIGHTS_FILE)
        check_weights(tmp_path, config=TIED)
    save_file(tensors_of(TIED), tmp_path / WEIGHTS_FILE)
    assert "missing: lm_head.weight" in refusal(tmp_path)


def test_a_file_cut_anywhere_is_refused_by_name(path: Path) -> None:
    whole = path.read_bytes()
    for length in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert str(path) in refusal(path.parent)
    assert "is cut: model.norm.weight needs" in refusal(path.parent)


def test_bytes_behind_the_last_tensor_are_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")
    assert "4 bytes at its end belong to no tensor" in refusal(path.parent)


@pytest.mark.parametrize(
    "contents", [b"<html>not a model</html>", (5).to_bytes(8, "little") + b"[1,2]", b"\xff" * 64]
)
def test_a_file_that_is_something_else_is_refused(path: Path, contents: bytes) -> None:
    path.write_bytes(contents)
    assert str(path) in refusal(path.parent) and "safetensors" in refusal(path.parent)


def test_offsets_that_overlap_or_do_not_fit_the_shape_are_refused_by_tensor(path: Path) -> None:
    whole, name = path.read_bytes(), "model.norm.weight"
    for changed in ({"data_offsets": [0, 64]}, {"shape": [15]}, {"shape": [16, 2]}):
        path.write_bytes(whole)
        with_header(path, lambda header, changed=changed: header[name].update(changed))  # type: ignore[misc]
        assert str(path) in refusal(path.parent) and "is damaged: expected " in refusal(path.parent)


def test_a_header_without_the_fields_of_a_tensor_is_refused(path: Path) -> None:
    with_header(path, lambda header: header["model.norm.weight"].pop("shape"))
    assert "no readable safetensors header" in refusal(path.parent)


def test_quantised_weights_are_refused_by_tensor_and_type(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG) | {"model.norm.weight": np.zeros(16, np.int8)}
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    message = refusal(tmp_path)
    assert "model.norm.weight" in message and "got I8" in message and "BF16" in message


def test_missing_unexpected_and_misshapen_tensors_are_all_named(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    del tensors["model.norm.weight"]
    tensors |= {"extra": np.zeros(1, np.float32), "lm_head.weight": np.zeros((8, 15), np.float32)}
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    message = refusal(tmp_path)
    assert "missing: model.norm.weight" in message and "unexpected: extra" in message
    assert "lm_head.weight (expected [8, 16], got [8, 15])" in message


class TestShards:
    """Weights in two files and an index."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        tensors = tensors_of(CONFIG)
        parts = {"a.safetensors": sorted(tensors)[:5], "b.safetensors": sorted(tensors)[5:]}
        for file_name, names in parts.items():
            save_file({name: tensors[name] for name in names}, tmp_path / file_name)
        weight_map = {name: file_name for file_name, names in parts.items() for name in names}
        (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
        return tmp_path

    def test_all_files_together_make_the_model(self, folder: Path) -> None:
        check_weights(folder, config=CONFIG)

    def test_a_missing_file_is_named(self, folder: Path) -> None:
        (folder / "b.safetensors").unlink()
        assert "names the file 'b.safetensors'" in refusal(folder)

    def test_a_file_that_lacks_what_the_index_promises_is_named(self, folder: Path) -> None:
        (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
        message = refusal(folder)
        assert "b.safetensors lacks" in message and INDEX_FILE in message

    @pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": []}'])
    def test_a_damaged_index_is_named(self, folder: Path, text: str) -> None:
        (folder / INDEX_FILE).write_text(text)
        assert INDEX_FILE in refusal(folder)


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"expected the file config\.json in"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"), [("{", "not valid JSON"), ("[]", "expected a JSON object, got list")]
)
def test_a_damaged_config_is_named(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=rf"config\.json.*{expected}"):
        load_config(tmp_path)
