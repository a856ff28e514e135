import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kintsugi.errors import ModelError
from kintsugi.model import huggingface
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.attention import PackedLayout
from kintsugi.model.folder import INDEX_FILE, WEIGHTS_FILE
from kintsugi.model.tokenizer import character_tokenizer
from kintsugi.model.transformer import Transformer, initialize

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"attention_bias": True, "tie_embeddings": True},
    "qwen3": {"qk_norm": True},
}


def make_model(family: Any = "llama", *, with_value_head: bool = False, **changes: Any) -> Transformer:
    config = ModelConfig(
        family=family,
        vocab_size=24,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=64,
        eos_token_ids=(1,),
        pad_token_id=0,
        **{**FAMILIES[family], **changes},
    )
    model = Transformer(config, with_value_head=with_value_head)
    initialize(model, 3)
    return model


def state_of(model: Transformer) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def save(model: Transformer, folder: Path, **options: Any) -> list[Path]:
    return huggingface.save(state_of(model), config=model.config, folder=folder, **options)


def assert_equal_states(left: Transformer, right: Transformer) -> None:
    assert left.config == right.config
    expected = state_of(right)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state_of(left).items())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_shard_bytes", [10_000, 10**9])
def test_a_saved_folder_loads_in_transformers_and_gives_the_same_logits(
    family: str, max_shard_bytes: int, tmp_path: Path
) -> None:
    import transformers

    model = make_model(family)
    save(model, tmp_path, max_shard_bytes=max_shard_bytes)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = torch.arange(20)
    layout = PackedLayout.from_lengths([20])
    with torch.no_grad():
        ours = model.logits(model.forward_packed(tokens, layout.positions, layout))
        torch.testing.assert_close(ours, theirs(tokens[None]).logits[0], atol=1e-4, rtol=0)


def test_shards_and_index_come_back_as_the_same_model(tmp_path: Path) -> None:
    model = make_model(with_value_head=True)
    written = save(model, tmp_path, max_shard_bytes=10_000)
    assert len([path for path in written if path.suffix == ".safetensors"]) > 2
    assert sorted(written) == sorted(tmp_path.iterdir())
    assert_equal_states(huggingface.load(tmp_path, head="optional"), model)


def test_a_folder_that_transformers_saved_is_read(tmp_path: Path) -> None:
    import transformers

    model = make_model("qwen3")
    save(model, tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    assert_equal_states(huggingface.load(tmp_path / "theirs"), model)


def test_weights_are_kept_as_stored_unless_a_type_is_asked_for(tmp_path: Path) -> None:
    model = make_model()
    state = {name: tensor.bfloat16() for name, tensor in state_of(model).items()}
    huggingface.save(state, config=model.config, folder=tmp_path)
    assert huggingface.load(tmp_path).dtype == torch.bfloat16
    assert huggingface.load(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_tensors_that_are_slices_of_one_buffer_can_be_saved(tmp_path: Path) -> None:
    model = make_model()
    state = state_of(model)
    buffer = torch.cat([tensor.flatten() for tensor in state.values()])
    pieces = buffer.split([tensor.numel() for tensor in state.values()])
    slices = {name: piece.view_as(state[name]) for name, piece in zip(state, pieces, strict=True)}
    huggingface.save(slices, config=model.config, folder=tmp_path)
    assert_equal_states(huggingface.load(tmp_path), model)


def test_a_value_head_that_is_not_stored_starts_at_zero(tmp_path: Path) -> None:
    save(make_model(), tmp_path)
    model = huggingface.load(tmp_path, head="optional")
    assert model.value_head is not None
    assert not model.value_head.weight.any()
    assert not model.value_head.bias.any()


def test_an_output_matrix_stored_beside_tied_embeddings_is_ignored(tmp_path: Path) -> None:
    model = make_model("qwen2")
    save(model, tmp_path)
    rewrite(tmp_path, lambda state: {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()})
    assert_equal_states(huggingface.load(tmp_path), model)


def test_tokenizer_files_are_copied_beside_the_weights(tmp_path: Path) -> None:
    character_tokenizer("abc").save(tmp_path / "tokenizer")
    written = save(make_model(), tmp_path / "model", tokenizer_folder=tmp_path / "tokenizer")
    assert {path.name for path in written} >= {"tokenizer.json", "tokenizer_config.json"}
    assert all(path.is_file() for path in written)


def rewrite(folder: Path, change: Any) -> None:
    path = folder / WEIGHTS_FILE
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def test_missing_unexpected_and_misshapen_weights_are_all_named(tmp_path: Path) -> None:
    save(make_model(), tmp_path)

    def spoil(state: dict[str, Tensor]) -> dict[str, Tensor]:
        del state["model.layers.0.mlp.up_proj.weight"]
        return {**state, "model.extra": torch.zeros(1), "model.norm.weight": torch.zeros(31)}

    rewrite(tmp_path, spoil)
    with pytest.raises(ModelError) as caught:
        huggingface.load(tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "missing: model.layers.0.mlp.up_proj.weight" in message
    assert "unexpected: model.extra" in message
    assert "wrong shape: model.norm.weight (expected [32], got [31])" in message


def test_a_state_that_does_not_fit_the_config_is_not_saved(tmp_path: Path) -> None:
    model = make_model()
    state = state_of(model)
    del state["lm_head.weight"]
    with pytest.raises(ModelError, match=r"missing: lm_head\.weight"):
        huggingface.save(state, config=model.config, folder=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"expected a model folder at .*nowhere, found nothing"):
        huggingface.load(tmp_path / "nowhere")


def test_a_folder_with_weights_in_another_format_says_what_to_do(tmp_path: Path) -> None:
    save(make_model(), tmp_path)
    (tmp_path / WEIGHTS_FILE).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"model\.safetensors.*found.*pytorch_model\.bin.*converted"):
        huggingface.load(tmp_path)


def test_a_cut_weight_file_is_named(tmp_path: Path) -> None:
    save(make_model(), tmp_path)
    path = tmp_path / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a readable safetensors file"):
        huggingface.load(tmp_path)


def test_a_shard_that_the_index_names_but_is_gone_is_named(tmp_path: Path) -> None:
    save(make_model(), tmp_path, max_shard_bytes=10_000)
    gone = min(tmp_path.glob("model-00002-of-*.safetensors"))
    gone.unlink()
    with pytest.raises(ModelError, match=rf"names the file '{gone.name}', which is not in"):
        huggingface.load(tmp_path)


def test_an_index_cannot_point_outside_the_folder(tmp_path: Path) -> None:
    save(make_model(), tmp_path / "other")
    save(make_model(), tmp_path / "model")
    (tmp_path / "model" / INDEX_FILE).write_text(
        json.dumps({"weight_map": {"model.norm.weight": "../other/model.safetensors"}})
    )
    with pytest.raises(ModelError, match="which is not in"):
        huggingface.load(tmp_path / "model")
