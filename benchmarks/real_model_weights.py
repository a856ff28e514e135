"""Model folders of random weights in the shape of real models, with the tokenizer of another folder."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgspec
import torch

from benchmarks.generation_sides import MODELS
from kintsugi.model import huggingface
from kintsugi.model.architecture import ModelConfig, num_parameters, parameter_shapes
from kintsugi.model.folder import load_config
from kintsugi.model.tokenizer import Tokenizer

STANDARD_DEVIATION = 0.02
SHAPES = {
    **MODELS,
    # Qwen2.5-Coder-1.5B-Instruct as imported from its GGUF file, whose output matrix is not tied.
    "1.8b": msgspec.structs.replace(MODELS["1.5b"], tie_embeddings=False),
    # Llama-3.2-3B.
    "llama-3b": ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=3072,
        intermediate_size=8192,
        num_layers=28,
        num_heads=24,
        num_kv_heads=8,
        head_dim=128,
        max_positions=131072,
        rope_theta=500000.0,
        tie_embeddings=True,
    ),
    # Qwen3-4B.
    "4b": msgspec.structs.replace(
        MODELS["0.6b"], hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32
    ),
}


def write_random_model(shape: str, *, folder: Path, tokenizer: Path) -> int:
    """Write `folder`, whole or not at all, and return the number of parameters.

    The vocabulary is as large as the tokenizer needs; its end and padding tokens come from the `config.json` of
    the tokenizer's folder where it has one.
    """
    if shape not in SHAPES:
        raise SystemExit(f"--random-weights: expected one of {', '.join(SHAPES)}, got {shape}")
    config = _with_tokenizer(SHAPES[shape], tokenizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    state = {}
    stream = torch.Generator(device=device).manual_seed(0)
    for name, size in parameter_shapes(config).items():
        tensor = torch.empty(size, dtype=torch.bfloat16, device=device)
        if len(size) == 1 and name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif len(size) == 1:
            tensor.zero_()
        else:
            tensor.normal_(0.0, STANDARD_DEVIATION, generator=stream)
        state[name] = tensor
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        written = Path(scratch) / "model"
        huggingface.save(state, config=config, folder=written, tokenizer_folder=tokenizer)
        shutil.move(written, folder)
    return num_parameters(config)


def _with_tokenizer(config: ModelConfig, folder: Path) -> ModelConfig:
    known = Tokenizer.load(folder)
    given = load_config(folder) if (folder / "config.json").is_file() else None
    return msgspec.structs.replace(
        config,
        vocab_size=max(config.vocab_size, given.vocab_size if given else 0, known.vocab_size),
        eos_token_ids=given.eos_token_ids if given else config.eos_token_ids,
        pad_token_id=given.pad_token_id if given else config.pad_token_id,
    )
