import ctypes
import errno
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kintsugi.errors import ModelError, StorageFull
from kintsugi.model import gguf_weights, huggingface
from kintsugi.model.architecture import ModelConfig, num_parameters, parameter_shapes
from kintsugi.model.attention import PackedLayout
from kintsugi.model.folder import load_config, read_header
from kintsugi.model.gguf_file import read_gguf
from kintsugi.model.gguf_tokenizer import read_tokenizer
from kintsugi.model.import_gguf import _block_size, gguf_config, import_model
from kintsugi.model.tokenizer import Tokenizer, character_tokenizer
from kintsugi.model.transformer import Transformer, initialize
from tests.unit.generation.driven_runner import Driven, request_of, runner_of
from tests.unit.model.written_gguf import new_state, write_gguf

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
GENERATED = PROMPTS[:2]
"""What more prompts are continued with is compared where the engine is tested."""
NEW_TOKENS = 8


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
    config = TINY["qwen2"]
    write_gguf(tmp_path / "model.gguf", config=config, state=new_state(config), quantised="Q5_0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(
        ModelError, match=r"of the GGML type 6 needs gguf; install it with `pip install 'kints"
    ):
        import_model(tmp_path / "model.gguf", tmp_path / "imported")


TINY = {
    "llama": ModelConfig(
        family="llama",
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=128,
        rope_theta=5e5,
        rms_norm_eps=1e-5,
    ),
    "qwen2": ModelConfig(
        family="qwen2",
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=128,
        rope_theta=1e6,
        tie_embeddings=True,
        attention_bias=True,
    ),
    "qwen3": ModelConfig(
        family="qwen3",
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_positions=128,
        qk_norm=True,
    ),
}


@pytest.fixture(scope="module")
def damaged_header(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A place to write damaged files to, and the content of a whole one."""
    path = tmp_path_factory.mktemp("damaged") / "model.gguf"
    write_gguf(path, config=TINY["qwen2"], state=new_state(TINY["qwen2"]))
    return path, path.read_bytes()


@pytest.mark.parametrize("family", TINY)
def test_a_gguf_file_becomes_the_model_that_was_written_into_it(family: str, tmp_path: Path) -> None:
    config = TINY[family]
    state = new_state(config)
    write_gguf(tmp_path / "model.gguf", config=config, state=state)
    written = import_model(tmp_path / "model.gguf", tmp_path / "imported")
    assert sorted(path.name for path in written) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    model = huggingface.load(tmp_path / "imported")
    eps = pytest.approx(config.rms_norm_eps)
    assert {**model.config.to_huggingface(), "rms_norm_eps": eps} == {
        **config.to_huggingface(),
        "rms_norm_eps": eps,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    assert model.config.rms_norm_eps == eps
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, state[name].to(torch.bfloat16)), name


def test_large_weights_become_several_files_with_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_weights, "MAX_SHARD_BYTES", 60_000)
    config = TINY["qwen3"]
    state = new_state(config)
    write_gguf(tmp_path / "model.gguf", config=config, state=state)
    written = import_model(tmp_path / "model.gguf", tmp_path / "imported")
    assert sum(path.suffix == ".safetensors" for path in written) > 1
    for name, parameter in huggingface.load(tmp_path / "imported").named_parameters():
        assert torch.equal(parameter, state[name].to(torch.bfloat16)), name


def test_quantised_blocks_are_dequantised_as_the_gguf_library_does(tmp_path: Path) -> None:
    config = TINY["qwen2"]
    state = new_state(config)
    expected = write_gguf(tmp_path / "model.gguf", config=config, state=state, quantised="Q8_0")
    import_model(tmp_path / "model.gguf", tmp_path / "imported")
    for name, parameter in huggingface.load(tmp_path / "imported").named_parameters():
        assert torch.equal(parameter, expected[name].to(torch.bfloat16)), name


KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
WIDE = msgspec.structs.replace(
    TINY["qwen2"], hidden_size=256, intermediate_size=512, head_dim=64, tie_embeddings=False
)


def blocks_of_every_kind(config: ModelConfig) -> dict[str, tuple[np.ndarray[Any, Any], str]]:
    """Random blocks for every matrix of a model, one kind after the other."""
    stream = np.random.default_rng(1)
    found = {}
    kinds = cycle(KINDS)
    for name, shape in parameter_shapes(config).items():
        if len(shape) == 1:
            continue
        kind = next(kinds)
        quantised = gguf.GGMLQuantizationType[kind]
        elements, size = gguf.GGML_QUANT_SIZES[quantised]
        if elements < 256:
            blocks = gguf.quantize(stream.standard_normal(shape).astype(np.float32), quantised)
        else:
            blocks = stream.integers(0, 64, (shape[0], shape[1] // elements * size), dtype=np.uint8)
        found[name] = blocks, kind
    assert len({kind for _, kind in found.values()}) == len(KINDS)
    return found


def in_halves(values: torch.Tensor, *, num_heads: int) -> torch.Tensor:
    by_pair = values.view(num_heads, -1, 2, values.shape[-1])
    return by_pair.transpose(1, 2).reshape(values.shape)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("piece", [1 << 19, 1_000])
def test_weights_of_every_kind_are_byte_by_byte_those_of_the_gguf_library_rounded_by_torch(
    family: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_weights, "PIECE_ELEMENTS", piece)
    config = msgspec.structs.replace(WIDE, family=family, attention_bias=family == "qwen2")
    expected = write_gguf(
        tmp_path / "model.gguf", config=config, state=new_state(config), given=blocks_of_every_kind(config)
    )
    import_model(tmp_path / "model.gguf", tmp_path / "imported")
    path = tmp_path / "imported" / "model.safetensors"
    content = path.read_bytes()
    data = content[8 + int.from_bytes(content[:8], "little") :]
    for name, stored in read_header(path).items():
        values = expected[name]
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = in_halves(
                values, num_heads=config.num_heads if "q_proj" in name else config.num_kv_heads
            )
        rounded = values.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
        assert data[slice(*stored.data_offsets)] == rounded, name


def test_a_value_that_is_not_finite_is_refused_with_the_name_of_its_tensor(tmp_path: Path) -> None:
    state = new_state(TINY["qwen2"])
    state["model.layers.1.mlp.up_proj.weight"][3, 5] = math.nan
    write_gguf(tmp_path / "model.gguf", config=TINY["qwen2"], state=state)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(
        ModelError, match=r"is damaged: blk\.1\.ffn_up\.weight has values that are not finite"
    ):
        import_model(tmp_path / "model.gguf", tmp_path / "imported")
    assert sorted(tmp_path.iterdir()) == before


def test_a_disk_without_room_is_noticed_before_anything_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "model.gguf", config=TINY["qwen2"], state=new_state(TINY["qwen2"]))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    before = sorted(tmp_path.iterdir())
    for source in (tmp_path / "model.gguf", folder):
        with pytest.raises(StorageFull, match=rf"expected .* of free space in {tmp_path} for the weights"):
            import_model(source, tmp_path / "imported")
    assert sorted(tmp_path.iterdir()) == before


def test_a_disk_that_becomes_full_is_named_and_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: memoryview, position: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_gguf(tmp_path / "model.gguf", config=TINY["qwen2"], state=new_state(TINY["qwen2"]))
    monkeypatch.setattr(os, "pwrite", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(StorageFull, match=r"could not import .*model\.gguf into .*imported: .*No space left"):
        import_model(tmp_path / "model.gguf", tmp_path / "imported")
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_system_that_can_not_reserve_space_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unable:
        def fallocate(self, *words: object) -> int:
            ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *words, **options: Unable())
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    gguf_weights._reserve(descriptor, size=12_345)
    os.close(descriptor)
    assert (tmp_path / "file").stat().st_size == 12_345


def test_a_family_that_is_not_supported_is_named_with_those_that_are(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", config=TINY["qwen2"], state={}, architecture="gemma3")
    with pytest.raises(
        ModelError, match=r"expected a model of a supported family \(llama, qwen2, qwen3\), got 'gemma3'"
    ):
        import_model(tmp_path / "model.gguf", tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


def test_a_part_of_a_split_model_is_named_as_such(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", config=TINY["qwen2"], state={}, split_count=3)
    with pytest.raises(ModelError, match=r"one of 3 parts of a model.*llama-gguf-split --merge"):
        import_model(tmp_path / "model.gguf", tmp_path / "imported")


def test_a_gguf_file_given_as_a_model_folder_is_named_with_the_command_that_converts_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        ModelError, match=r"found a GGUF file; convert it first: `kintsugi import .*model\.gguf"
    ):
        load_config(tmp_path / "model.gguf")


def test_a_tensor_that_the_family_does_not_have_is_named(tmp_path: Path) -> None:
    config = TINY["qwen2"]
    state = {**new_state(config), "model.layers.0.mlp.experts.weight": torch.zeros(4, 64)}
    write_gguf(tmp_path / "model.gguf", config=config, state=state)
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.experts\.weight is unknown"):
        import_model(tmp_path / "model.gguf", tmp_path / "imported")


@pytest.mark.parametrize("kept", [0, 3, 50, 2_000, -1])
def test_a_gguf_file_that_is_cut_is_named_and_leaves_nothing_behind(kept: int, tmp_path: Path) -> None:
    config = TINY["qwen2"]
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, config=config, state=new_state(config))
    (tmp_path / "model.gguf").write_bytes(whole.read_bytes()[:kept])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ModelError, match=r"model\.gguf is (cut|not a GGUF file)"):
        import_model(tmp_path / "model.gguf", tmp_path / "imported")
    assert sorted(tmp_path.iterdir()) == before


def test_a_damaged_gguf_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"model\.gguf: expected GGUF version 2 or 3, got 0"):
        import_model(tmp_path / "model.gguf", tmp_path / "imported")


@settings(max_examples=200, deadline=None)
@given(place=st.integers(4, 3_000), damage=st.binary(min_size=1, max_size=8))
def test_no_damage_to_the_header_raises_anything_but_a_model_error(
    damaged_header: tuple[Path, bytes], place: int, damage: bytes
) -> None:
    path, content = damaged_header
    path.write_bytes(content[:place] + damage + content[place + len(damage) :])
    with suppress(ModelError):
        file = read_gguf(path, block_size=_block_size)
        gguf_config(file)
        read_tokenizer(file.metadata, where=path)


def test_an_interrupted_import_leaves_nothing_behind(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", config=TINY["llama"], state=new_state(TINY["llama"]))
    before = sorted(tmp_path.iterdir())
    calls = []

    def interrupt(done: int, total: int) -> None:
        calls.append(done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_model(tmp_path / "model.gguf", tmp_path / "imported", progress=interrupt)
    assert calls, "the interruption came while weights were written"
    assert sorted(tmp_path.iterdir()) == before


def test_what_a_killed_import_left_is_removed_by_the_next(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", config=TINY["llama"], state=new_state(TINY["llama"]))
    program = (
        "import os, sys; from pathlib import Path; from kintsugi.model.import_gguf import import_model\n"
        "import_model(Path(sys.argv[1]), Path(sys.argv[2]), progress=lambda done, total: os.kill(os.getpid(), 9))"
    )
    arguments = [str(tmp_path / "model.gguf"), str(tmp_path / "imported")]
    killed = subprocess.run([sys.executable, "-c", program, *arguments], check=False)
    assert killed.returncode == -9
    assert not (tmp_path / "imported").exists()
    assert (tmp_path / ".imported-importing").exists()
    with pytest.raises(
        ModelError, match=r"at .*imported, found an import that was interrupted; repeat it: `kintsugi import"
    ):
        load_config(tmp_path / "imported")
    import_model(tmp_path / "model.gguf", tmp_path / "imported")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["imported", "model.gguf"]


def test_two_imports_into_one_folder_exclude_each_other(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", config=TINY["llama"], state=new_state(TINY["llama"]))
    refused = []

    def import_again(done: int, total: int) -> None:
        with pytest.raises(ModelError, match=r"another import into .*imported is running") as error:
            import_model(tmp_path / "model.gguf", tmp_path / "imported")
        refused.append(error)
        with pytest.raises(ModelError, match=r"at .*imported, found an import that has not ended yet"):
            load_config(tmp_path / "imported")

    import_model(tmp_path / "model.gguf", tmp_path / "imported", progress=import_again)
    assert refused


def test_progress_ends_with_all_bytes_of_the_weights(tmp_path: Path) -> None:
    config = TINY["qwen3"]
    write_gguf(tmp_path / "model.gguf", config=config, state=new_state(config))
    calls: list[tuple[int, int]] = []
    import_model(
        tmp_path / "model.gguf",
        tmp_path / "imported",
        progress=lambda done, total: calls.append((done, total)),
    )
    total = 2 * num_parameters(config)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1] == (total, total)


def test_files_beside_a_gguf_file_have_no_part_in_its_import(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", config=TINY["qwen2"], state=new_state(TINY["qwen2"]))
    foreign = {"eos_token": "Ġhello", "auto_map": {"AutoTokenizer": ["code.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(foreign))
    (tmp_path / "config.json").write_text("{}")
    import_model(tmp_path / "model.gguf", tmp_path / "imported")
    assert Tokenizer.load(tmp_path / "imported").eos_token_id == 1
    assert "auto_map" not in (tmp_path / "imported" / "tokenizer_config.json").read_text()


def test_an_unknown_way_to_split_words_is_refused(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "model.gguf", config=TINY["qwen2"], state=new_state(TINY["qwen2"]), pre="unheard-of"
    )
    with pytest.raises(
        ModelError, match=r"expected `tokenizer\.ggml\.pre` to be one of .*qwen2.*'unheard-of'"
    ):
        import_model(tmp_path / "model.gguf", tmp_path / "imported")


def greedy(model: Transformer, prompt: list[int]) -> list[int]:
    """As generation computes them: a prefill, then one token at a time."""
    driven = Driven(runner_of(model, max_length=len(prompt) + NEW_TOKENS, deterministic=False))
    driven.start(0, request_of(prompt, temperature=0.0, max_new_tokens=NEW_TOKENS))
    tokens: list[int] = driven.decode([0], NEW_TOKENS).tokens[:, 0].tolist()
    return tokens


@pytest.mark.slow
def test_real_weights_from_gguf_give_the_greedy_tokens_and_logits_of_transformers(
    smollm2: Path, tmp_path: Path
) -> None:
    import transformers

    model = huggingface.load(smollm2, dtype=torch.float32)
    tokenizer = Tokenizer.load(smollm2)
    resaved = tmp_path / "resaved"
    huggingface.save(
        dict(model.named_parameters()), config=model.config, folder=resaved, tokenizer_folder=smollm2
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
