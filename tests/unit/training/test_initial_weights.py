"""Models beside the actor begin where their sections say."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from kintsugi.config.schema import (
    AlgorithmSection,
    Config,
    CriticSection,
    ReferenceSection,
    RewardModelSection,
)
from kintsugi.model import huggingface
from kintsugi.protocol.training import CallDone, CommitStep, Save, Saved, StartStage
from kintsugi.protocol.weights import Publish, Published
from kintsugi.training.batch import pack
from kintsugi.training.initial_weights import load_model
from kintsugi.training.objectives import scores
from kintsugi.training.packing import sample_of
from tests.unit.training.fakes import BATCH, CONFIG, Rank, rebuild
from tests.unit.training.world import CPU, new_pairs

PAIRS = new_pairs(4)
RM_CONFIG = msgspec.structs.replace(
    CONFIG, algorithm=AlgorithmSection(name="reward_model", steps=5), warmup=None
)


def with_algorithm(name: str, **changes: object) -> Config:
    section = msgspec.convert({"name": name, "steps": 5, "beta": 0.1}, AlgorithmSection)
    return msgspec.structs.replace(CONFIG, algorithm=section, **changes)


def saved_actor(rank: Rank, folder: Path) -> str:
    saved = rank.ask(Save(2, rank.stage.name, str(folder)))
    assert isinstance(saved, Saved)
    return saved.path


def test_critic_and_reference_begin_with_the_actor_where_nothing_else_is_said() -> None:
    rank = Rank(config=with_algorithm("ppo")).start()
    actor, critic = rank.state.weights(), dict(rank.state.critic.named_parameters())
    assert not bool(critic["value_head.weight"].any())
    for name, tensor in rank.state.reference_model.named_parameters():
        assert torch.equal(tensor, actor[name])
    assert all(torch.equal(actor[name], tensor) for name, tensor in critic.items() if name in actor)


def test_critic_and_reference_begin_in_their_folders(tmp_path: Path) -> None:
    other = Rank(seed=1).start()
    folder = saved_actor(other, tmp_path)
    config = with_algorithm("ppo", critic=CriticSection(path=folder), reference=ReferenceSection(path=folder))
    rank = Rank(config=config).start()
    theirs = other.state.weights()
    for model in (rank.state.critic, rank.state.reference_model):
        for name, tensor in model.named_parameters():
            assert name.startswith("value_head") or torch.equal(tensor, theirs[name]), name
    rank.train(3)


def trained_reward_model(folder: Path) -> tuple[Rank, str]:
    """A rank after one step on pairs, and its checkpoint."""
    rank = Rank(config=RM_CONFIG, batch=PAIRS)
    rank.ask(rebuild(1), StartStage("reward_model", 0))
    (call,) = rank.calls(1)
    assert isinstance(rank.ask(call), CallDone)
    rank.ask(CommitStep(1))
    saved = rank.ask(Save(1, "reward_model", str(folder)))
    assert isinstance(saved, Saved), saved
    return rank, saved.path


def test_an_exported_reward_model_is_served_with_the_same_scores(tmp_path: Path) -> None:
    trained, folder = trained_reward_model(tmp_path)
    config = with_algorithm("ppo", reward_model=RewardModelSection(path=folder))
    rank = Rank(config=config).start()
    call = next(call for call in rank.calls(3) if call.interface == "reward_inference")
    done = rank.ask(msgspec.structs.replace(call, after=()))
    assert isinstance(done, CallDone), done
    for item in BATCH.items:
        batch = pack([sample_of(item, BATCH.trajectories[item.key])], device=CPU)
        with torch.no_grad():
            expected = scores(trained.state.model, batch).item()
        assert done.outputs["score"][item.key] == pytest.approx(expected, abs=1e-6)


def test_a_reward_model_is_published_without_its_head_and_trained_further_with_it(tmp_path: Path) -> None:
    trained, folder = trained_reward_model(tmp_path)
    published = trained.ask(Publish(1, 1))
    assert isinstance(published, Published)
    assert not any(piece.name.startswith("value_head") for piece in published.manifest.pieces)
    assert torch.equal(
        huggingface.load(Path(folder), head="required").get_parameter("value_head.weight"),
        trained.state.weights()["value_head.weight"],
    )
    model = msgspec.structs.replace(RM_CONFIG.model, path=folder, new=None)
    again = load_model(msgspec.structs.replace(RM_CONFIG, model=model), device=CPU)
    for name, tensor in again.named_parameters():
        assert torch.equal(tensor, trained.state.weights()[name])
