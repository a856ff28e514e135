"""Which model a configuration means, without loading its weights. No torch: `kintsugi check` and every worker ask."""

from __future__ import annotations

from pathlib import Path

from kintsugi.config import Config, NewModel
from kintsugi.errors import ModelError
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.folder import check_weights, load_config
from kintsugi.model.tokenizer import Tokenizer, character_tokenizer


def plan_model(config: Config) -> tuple[ModelConfig, Tokenizer]:
    """The model that the run will train and its tokenizer, without loading weights."""
    if config.model.path is not None:
        return _model_of_folder(Path(config.model.path))
    assert config.model.new is not None, "`kintsugi.validation` refuses a configuration with neither"
    tokenizer = character_tokenizer(config.model.new.alphabet)
    return new_model_config(config.model.new, tokenizer=tokenizer), tokenizer


def new_model_config(new: NewModel, *, tokenizer: Tokenizer) -> ModelConfig:
    """The sizes of a model built from scratch; heads share the hidden size evenly."""
    return ModelConfig(
        family=new.family,
        vocab_size=tokenizer.vocab_size,
        hidden_size=new.hidden_size,
        intermediate_size=new.intermediate_size,
        num_layers=new.num_layers,
        num_heads=new.num_heads,
        num_kv_heads=new.num_kv_heads,
        head_dim=new.hidden_size // new.num_heads,
        max_positions=new.max_positions,
        attention_bias=new.family == "qwen2",
        qk_norm=new.family == "qwen3",
        eos_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )


def _model_of_folder(folder: Path) -> tuple[ModelConfig, Tokenizer]:
    model = load_config(folder)
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size > model.vocab_size:
        raise ModelError(
            f"expected a tokenizer of at most `vocab_size`={model.vocab_size} tokens in {folder}, "
            f"got {tokenizer.vocab_size}"
        )
    check_weights(folder, config=model)
    return model, tokenizer
