"""A Hugging Face folder with a tiny model whose output projection is its embedding."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kintsugi.config.schema import NewModel
from kintsugi.model import huggingface
from kintsugi.model.plan import new_model_config
from kintsugi.model.tokenizer import character_tokenizer
from kintsugi.model.transformer import Transformer, initialize

NEW = NewModel(family="qwen3", num_kv_heads=2, num_layers=3, max_positions=32)


def write_tied_model(folder: Path) -> None:
    tokenizer = character_tokenizer(NEW.alphabet)
    config = msgspec.structs.replace(new_model_config(NEW, tokenizer=tokenizer), tie_embeddings=True)
    model = Transformer(config)
    initialize(model, seed=1)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    huggingface.save(weights, config=config, folder=folder)
    for name, content in tokenizer.files().items():
        (folder / name).write_bytes(content)
