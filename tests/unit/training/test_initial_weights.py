"""Models beside the actor begin where their sections say."""

from __future__ import annotations

import weakref
from pathlib import Path

import msgspec
import pytest
import torch

from kintsugi.checkpoint.store import PART_MARK
from kintsugi.config.schema import (
    ActorSection,
    AlgorithmSection,
    Config,
    CriticSection,
    ModelSection,
    ReferenceSection,
    RewardModelSection,
)
from kintsugi.config.stages import stages
from kintsugi.model import huggingface
from kintsugi.model.plan import plan_architecture
from kintsugi.protocol.training import CallDone, CommitStep, Save, Saved, StartStage
from kintsugi.protocol.weights import Publish, Published
from kintsugi.training.batch import pack
from kintsugi.training.initial_weights import PassingParameters, load_model
from kintsugi.training.layout import LayoutSlot
from kintsugi.training.objectives import scores
from kintsugi.training.packing import sample_of
from kintsugi.training.state import TrainingState
from kintsugi.training.torch_framework import TorchFramework
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


def begun(config: Config) -> list[TrainingState]:
    """The ranks of a run as they start."""
    framework, states = TorchFramework(CPU), []
    for number in range(config.actor.workers):
        state = framework.open_state(config, process=f"model-{number}", segments=None)
        framework.fill_initial(state, config)
        states.append(state)
    return states


def laid_out(config: Config, **layout: object) -> Config:
    fields = {"workers": 4, "dtype": "bfloat16", "layout": layout}
    return msgspec.structs.replace(config, actor=msgspec.convert(fields, ActorSection))


def saved_model(tmp_path: Path) -> Config:
    """A configuration whose model is in a folder."""
    model = load_model(CONFIG, device=CPU)
    huggingface.save(
        dict(model.named_parameters()), config=plan_architecture(CONFIG), folder=tmp_path / "model"
    )
    section = ModelSection(path=str(tmp_path / "model"))
    return msgspec.structs.replace(CONFIG, model=section, warmup=None)


@pytest.mark.parametrize("is_stored", [True, False], ids=["from a folder", "from the seed"])
@pytest.mark.parametrize(
    "layout", [{}, {"shards": 4}, {"shards": 2}, {"shards": 4, "gather": "layer"}], ids=str
)
def test_the_parts_of_all_ranks_begin_as_the_model_does(
    layout: dict[str, object], is_stored: bool, tmp_path: Path
) -> None:
    stored = saved_model(tmp_path)
    config = laid_out(stored if is_stored else msgspec.structs.replace(CONFIG, warmup=None), **layout)
    whole = {
        name: parameter.detach() for name, parameter in load_model(CONFIG, device=CPU).named_parameters()
    }
    found = {name: torch.full((tensor.numel(),), torch.nan) for name, tensor in whole.items()}
    for state in begun(config):
        for name, part in state._box.by_name(state._live).items():
            kind, _, rest = name.partition("/")
            if kind != "weights":
                assert not part.any()
                continue
            parameter, _, first = rest.partition(PART_MARK)
            start = int(first or 0)
            found[parameter][start : start + part.numel()] = part.flatten()
        if not state.gathers_layers:
            weights = state.weights()
            assert all(torch.equal(weights[name], tensor.bfloat16()) for name, tensor in whole.items())
        assert not state.gradient.any()
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor.flatten()), name


def test_a_rank_that_gathers_by_layer_reads_its_own_part_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = laid_out(saved_model(tmp_path), shards=4, gather="layer")
    read: list[str] = []
    tensor_of = huggingface.WeightFiles.tensor

    def recorded(files: huggingface.WeightFiles, name: str) -> torch.Tensor:
        read.append(name)
        return tensor_of(files, name)

    monkeypatch.setattr(huggingface.WeightFiles, "tensor", recorded)
    begun(msgspec.structs.replace(config, actor=ActorSection(workers=1)))
    names = list(read)
    assert len(names) == len(set(names)) > 8
    read.clear()
    begun(config)
    assert set(read) == set(names)
    assert len(read) < 2 * len(names), "not each of four ranks has read everything"


def test_a_rank_keeps_the_initial_weights_for_a_reference_that_begins_with_them() -> None:
    plain, referring = (
        laid_out(
            msgspec.structs.replace(CONFIG, warmup=None, algorithm=AlgorithmSection(beta=beta)),
            shards=4,
            gather="layer",
        )
        for beta in (0.0, 0.1)
    )
    assert begun(plain)[1]._initial is None
    with_reference = begun(referring)[1]
    assert with_reference._initial is not None
    with_reference.start_stage(stages(referring)[0], step=0)
    expected = dict(load_model(CONFIG, device=CPU).named_parameters())
    for name, tensor in with_reference.reference_model.named_parameters():
        assert torch.equal(tensor, expected[name].bfloat16())
    assert with_reference._initial is None


def test_a_parameter_has_memory_only_while_it_is_filled() -> None:
    slots = [LayoutSlot(name, (4,), 4 * index) for index, name in enumerate("abc")]
    alive: list[weakref.ref[torch.Tensor]] = []
    taken: dict[str, list[float]] = {}

    def memory(slot: LayoutSlot) -> torch.Tensor:
        assert not any(reference() is not None for reference in alive), "the one before is gone"
        tensor = torch.empty(slot.shape)
        alive.append(weakref.ref(tensor))
        return tensor

    def take(slot: LayoutSlot, tensor: torch.Tensor) -> None:
        taken[slot.name] = tensor.tolist()

    parameters = PassingParameters(slots, memory=memory, take=take, others={"d": torch.zeros(4)})
    for index, name in enumerate(parameters):
        parameters[name].fill_(index)
    parameters.finish()
    assert taken == {name: [float(index)] * 4 for index, name in enumerate("abc")}
