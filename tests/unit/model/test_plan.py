"""What the models beside the actor must be, told from their folders alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from kintsugi.config.schema import (
    AlgorithmSection,
    Config,
    CriticSection,
    ModelSection,
    NewModel,
    ReferenceSection,
    RewardModelSection,
)
from kintsugi.errors import ModelError
from kintsugi.model import huggingface
from kintsugi.model.plan import Companions, plan_companions, plan_model
from kintsugi.model.transformer import Transformer, initialize

SMALL = NewModel(hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=2, num_layers=1)


def config_of(algorithm: str = "ppo", **sections: Any) -> Config:
    return Config(
        name="test",
        model=ModelSection(new=SMALL),
        algorithm=AlgorithmSection(name=algorithm, beta=0.1),  # type: ignore[arg-type]
        **sections,
    )


def folder_of(new: NewModel, folder: Path, *, head: bool = False) -> str:
    """A model of this shape as a Hugging Face folder."""
    planned, tokenizer = plan_model(Config(name="test", model=ModelSection(new=new)))
    model = Transformer(planned, with_value_head=head)
    initialize(model, seed=5)
    huggingface.save(dict(model.named_parameters()), config=planned, folder=folder)
    tokenizer.save(folder)
    return str(folder)


def test_what_no_stage_needs_is_not_planned() -> None:
    assert plan_companions(config_of("sft")) == Companions()


def test_a_critic_is_the_actor_without_its_output_projection() -> None:
    critic = plan_companions(config_of()).critic
    assert critic is not None and critic.tie_embeddings and critic.hidden_size == 16


def test_companions_may_have_architectures_of_their_own(tmp_path: Path) -> None:
    wide = folder_of(msgspec.structs.replace(SMALL, hidden_size=32), tmp_path)
    planned = plan_companions(
        config_of(critic=CriticSection(path=wide), reference=ReferenceSection(path=wide))
    )
    assert planned.critic is not None and planned.critic.hidden_size == 32
    assert planned.reference is not None and planned.reference.hidden_size == 32


@pytest.mark.parametrize(
    ("field", "sections"),
    [
        ("critic.path", {"critic": CriticSection}),
        ("reference.path", {"reference": ReferenceSection}),
        ("reward_model.path", {"reward_model": RewardModelSection}),
    ],
)
def test_another_vocabulary_is_refused_by_field_and_size(
    field: str, sections: dict[str, Any], tmp_path: Path
) -> None:
    other = folder_of(msgspec.structs.replace(SMALL, alphabet="0123456789"), tmp_path, head=True)
    built = {name: section(path=other) for name, section in sections.items()}
    with pytest.raises(ModelError, match=f"`{field}`: expected a vocabulary of 14 tokens, .* got 12"):
        plan_companions(config_of(**built))


@pytest.mark.parametrize("section", [CriticSection, ReferenceSection, RewardModelSection])
def test_a_vocabulary_of_the_same_size_with_other_meanings_is_refused(section: Any, tmp_path: Path) -> None:
    other = folder_of(msgspec.structs.replace(SMALL, alphabet="9876543210+="), tmp_path, head=True)
    field = {CriticSection: "critic", ReferenceSection: "reference", RewardModelSection: "reward_model"}[
        section
    ]
    with pytest.raises(ModelError, match=rf"`{field}\.path`: expected the actor's vocabulary, .* '0' at 2"):
        plan_companions(config_of(**{field: section(path=other)}))


def test_a_folder_without_tokenizer_is_taken_at_its_word(tmp_path: Path) -> None:
    folder = folder_of(SMALL, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert plan_companions(config_of(reference=ReferenceSection(path=folder))).reference is not None


def test_a_reward_model_without_head_is_refused(tmp_path: Path) -> None:
    plain = folder_of(SMALL, tmp_path)
    with pytest.raises(
        ModelError, match=r"`reward_model\.path`.*expected a reward model's head.* found none"
    ):
        plan_companions(config_of(reward_model=RewardModelSection(path=plain)))


def test_a_reward_model_of_transformers_is_accepted_and_loaded(tmp_path: Path) -> None:
    """Its head is named otherwise and has no bias, and it has no output projection."""
    folder = folder_of(SMALL, tmp_path, head=True)
    tensors = load_file(tmp_path / "model.safetensors")
    head = torch.arange(16.0).view(1, 16)
    for name in ("value_head.weight", "value_head.bias", "lm_head.weight"):
        del tensors[name]
    save_file({**tensors, "score.weight": head}, tmp_path / "model.safetensors")
    planned = plan_companions(config_of(reward_model=RewardModelSection(path=folder)))
    model = huggingface.load(tmp_path, config=planned.reward_model, head="required")
    assert model.value_head is not None
    assert torch.equal(model.value_head.weight, head) and not bool(model.value_head.bias.any())


def test_a_reference_that_follows_the_actor_needs_its_architecture(tmp_path: Path) -> None:
    wide = folder_of(msgspec.structs.replace(SMALL, hidden_size=32), tmp_path)
    with pytest.raises(ModelError, match="expected the actor's own architecture"):
        plan_companions(config_of(reference=ReferenceSection(path=wide, copy_every=2)))


def test_a_reference_that_follows_the_actor_computes_as_it_does(tmp_path: Path) -> None:
    """The same shapes are not enough: its weights become the actor's, its configuration stays."""
    folder = folder_of(SMALL, tmp_path)
    follows = config_of(reference=ReferenceSection(path=folder, copy_every=2))
    assert plan_companions(follows).moving_reference
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 5e5}))
    with pytest.raises(ModelError, match="expected the actor's own architecture"):
        plan_companions(follows)


def test_a_folder_that_is_not_there_is_refused_by_field(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"`critic\.path`: expected a model folder"):
        plan_companions(config_of(critic=CriticSection(path=str(tmp_path / "nothing"))))
