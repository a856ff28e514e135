"""Models that a configuration describes, without loading their weights. Imports no torch: `kintsugi check` and every
worker use it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.config.schema import Config, NewModel
from kintsugi.config.stages import stages
from kintsugi.errors import ModelError
from kintsugi.model.architecture import ModelConfig, value_config
from kintsugi.model.folder import Head, check_weights, load_config
from kintsugi.model.tensor_slices import check_slices
from kintsugi.model.tokenizer import TOKENIZER_FILES, Tokenizer, character_tokenizer


class Companions(msgspec.Struct, frozen=True):
    """Models of the run besides the actor, where a stage needs them."""

    value_head: bool = False
    """Whether the actor has a value head: it is to become a reward model."""
    critic: ModelConfig | None = None
    reference: ModelConfig | None = None
    """None if it has the actor's architecture."""
    moving_reference: bool = False
    reward_model: ModelConfig | None = None


ACTOR_ALONE = Companions()


def plan_model(config: Config) -> tuple[ModelConfig, Tokenizer]:
    """The model that the run will train and its tokenizer, without loading weights."""
    if config.model.path is not None:
        return _model_of_folder(Path(config.model.path), head=actor_head(config))
    assert config.model.new is not None, "`kintsugi.config.validation` refuses a configuration with neither"
    tokenizer = character_tokenizer(config.model.new.alphabet)
    return new_model_config(config.model.new, tokenizer=tokenizer), tokenizer


def plan_architecture(config: Config) -> ModelConfig:
    """The model that the run will train, without its tokenizer, which takes seconds to load where it is large."""
    if config.model.path is None:
        return plan_model(config)[0]
    folder = Path(config.model.path)
    model = load_config(folder)
    check_weights(folder, config=model, head=actor_head(config))
    return model


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


def actor_head(config: Config) -> Head:
    """Whether `model.path` may have a value head: a reward model may continue from one that has a head already."""
    return "optional" if _trains_reward_model(config) else "refused"


def plan_companions(config: Config) -> Companions:
    """The other models that the ranks will hold, with every folder checked; ModelError names the setting that does not
    fit."""
    actor = plan_architecture(config)

    def companion(field: str, path: str, *, head: Head = "refused") -> ModelConfig:
        try:
            return _companion(Path(path), actor=actor, tokenizer=plan_model(config)[1], head=head)
        except ModelError as error:
            raise ModelError(f"`{field}`: {error}") from error

    critic = reference = reward_model = None
    for stage in stages(config):
        if stage.has_critic:
            critic = value_config(actor)
            if stage.critic.path is not None:
                critic = companion("critic.path", stage.critic.path, head="optional")
        if stage.has_reference and stage.reference.path is not None:
            reference = companion("reference.path", stage.reference.path)
            if stage.moves_reference and not _compute_alike(reference, actor):
                raise ModelError(
                    f"`reference.path`: expected the actor's own architecture, because the reference is to follow it; "
                    f"got another one in {stage.reference.path}"
                )
        if stage.reward_model is not None:
            reward_model = companion("reward_model.path", stage.reward_model.path, head="required")
    for model in (actor, critic, reference, reward_model):
        if model is not None:
            _check_slices(model, config.actor.logical_slices)
    return Companions(
        value_head=_trains_reward_model(config),
        critic=critic,
        reference=reference,
        moving_reference=any(stage.moves_reference for stage in stages(config)),
        reward_model=reward_model,
    )


def _check_slices(model: ModelConfig, count: int) -> None:
    try:
        check_slices(model, count)
    except ModelError as error:
        raise ModelError(f"`actor.logical_slices`={count}: {error}") from error


def _trains_reward_model(config: Config) -> bool:
    return any(stage.algorithm.name == "reward_model" for stage in stages(config))


def _companion(folder: Path, *, actor: ModelConfig, tokenizer: Tokenizer, head: Head) -> ModelConfig:
    """The architecture in a folder, which must use the actor's vocabulary."""
    found = load_config(folder)
    if found.vocab_size != actor.vocab_size:
        raise ModelError(
            f"expected a vocabulary of {actor.vocab_size} tokens, as the actor has, "
            f"got {found.vocab_size} in {folder}"
        )
    departure = tokenizer.departure(folder)
    if departure:
        raise ModelError(f"expected the actor's vocabulary, got another one in {folder}: {departure}")
    found = found if head == "refused" else value_config(found)
    check_weights(folder, config=found, head=head)
    return found


def _compute_alike(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether two models with the same weights compute the same function; special tokens may differ."""
    aside: dict[str, Any] = {
        "eos_token_ids": (),
        "bos_token_id": None,
        "pad_token_id": None,
        "max_positions": 1,
    }
    return msgspec.structs.replace(one, **aside) == msgspec.structs.replace(other, **aside)


def _model_of_folder(folder: Path, *, head: Head) -> tuple[ModelConfig, Tokenizer]:
    model = load_config(folder)
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > model.vocab_size:
        raise ModelError(
            f"expected a tokenizer of at most `vocab_size`={model.vocab_size} tokens in {folder}, "
            f"got {tokenizer.vocab_size}"
        )
    check_weights(folder, config=model, head=head)
    return model, tokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder; loaded once per process as long as its files do not change."""
    files = [folder / name for name in TOKENIZER_FILES]
    stats = tuple(
        (path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in files if path.is_file()
    )
    return _load_tokenizer(folder, stats)


@lru_cache(maxsize=2)
def _load_tokenizer(folder: Path, stats: tuple[tuple[str, int, int], ...]) -> Tokenizer:
    """`stats`: name, time of change and size of its files, which tell another version of the folder."""
    return Tokenizer.load(folder)
