from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from kintsugi.config.schema import (
    ActorSection,
    AlgorithmSection,
    AsynchronySection,
    ClusterSection,
    Config,
    GenerationSection,
    LayoutSection,
    ReferenceSection,
    RewardModelSection,
)
from kintsugi.config.stages import stages
from kintsugi.model.architecture import ModelConfig, num_parameters, value_config
from kintsugi.model.memory import ProcessMemory, RunMemory, shares_weights
from kintsugi.model.plan import Companions
from kintsugi.types import Role

QWEN = ModelConfig(
    family="qwen2",
    vocab_size=151936,
    hidden_size=1536,
    intermediate_size=8960,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    max_positions=32768,
    attention_bias=True,
)
PARAMETERS = num_parameters(QWEN)
STATIC = ("state", "gradient", "compute weights", "reference")
GENERATION = GenerationSection(servers=1, slots=64, max_length=640)
H200 = 150_754_820_096


def memory(*, num_devices: int = 1, actor: dict[str, Any] | None = None, **sections: Any) -> RunMemory:
    section = ActorSection(**{"workers": 1, "dtype": "bfloat16", **(actor or {})})
    config = Config(name="a", actor=section, generation=sections.pop("generation", GENERATION), **sections)
    found = stages(config)
    companions = Companions(
        critic=value_config(QWEN) if any(stage.has_critic for stage in found) else None,
        moving_reference=any(stage.moves_reference for stage in found),
        reward_model=value_config(QWEN) if config.reward_model else None,
    )
    return RunMemory(config, QWEN, companions, num_devices)


def static(each: ProcessMemory) -> float:
    """Bytes per parameter that stay on the device."""
    return sum(each.device.get(name, 0) for name in STATIC) / PARAMETERS


def test_a_rank_has_18_bytes_per_parameter_a_reference_2_and_a_critic_18() -> None:
    assert static(memory().of_role(Role.MODEL)) == pytest.approx(18)
    assert static(memory(algorithm=AlgorithmSection(beta=0.1)).of_role(Role.MODEL)) == pytest.approx(20)
    moving = ReferenceSection(copy_every=1)
    follows = memory(algorithm=AlgorithmSection(beta=0.1), reference=moving)
    assert static(follows.of_role(Role.MODEL)) == pytest.approx(24)
    critic = num_parameters(value_config(QWEN), with_value_head=True) / PARAMETERS
    with_critic = memory(algorithm=AlgorithmSection(name="ppo", beta=0.0))
    assert static(with_critic.of_role(Role.MODEL)) == pytest.approx(18 + 18 * critic)


@pytest.mark.parametrize(("shards", "more"), [(1, 0), (2, 4), (3, 4), (4, 8), (8, 12)])
def test_shards_beyond_one_per_worker_cost_a_gradient_per_level_of_their_tree(shards: int, more: int) -> None:
    assert static(memory(actor={"logical_shards": shards}).of_role(Role.MODEL)) == pytest.approx(18 + more)


def test_recomputation_and_smaller_micro_batches_need_less_for_activations() -> None:
    whole, recomputed, small = (
        memory(actor=actor).of_role(Role.MODEL).device["activations"]
        for actor in ({}, {"recompute": True}, {"micro_batch_tokens": 1024})
    )
    assert whole > 10 * recomputed
    assert whole == 16 * small


def test_the_longest_sequence_bounds_the_smallest_micro_batch() -> None:
    generation = msgspec.structs.replace(GENERATION, max_length=32768)
    long, small = (
        memory(actor={"micro_batch_tokens": tokens}, generation=generation).of_role(Role.MODEL)
        for tokens in (32768, 1024)
    )
    assert long.device["activations"] == small.device["activations"]


def test_host_and_device_are_estimated_separately() -> None:
    rank, server = memory().of_role(Role.MODEL), memory().of_role(Role.SERVER)
    assert rank.host["snapshots"] == 24 * PARAMETERS
    assert "state" not in rank.host and "snapshots" not in rank.device
    assert server.device["weights"] == 4 * PARAMETERS
    assert server.host_bytes < 10**9
    assert memory().of_role(Role.ROLLOUT).device == {}


def test_without_accelerators_everything_is_the_hosts() -> None:
    rank = memory(num_devices=0).of_role(Role.MODEL)
    assert rank.device == {}
    assert {"state", "gradient", "activations", "snapshots"} <= rank.host.keys()


def test_weights_are_published_on_the_card_only_beside_a_server() -> None:
    beside, apart = memory(num_devices=1), memory(num_devices=2)
    assert beside.on_device(0) == ["model-0", "server-0"]
    assert (apart.on_device(0), apart.on_device(1)) == (["model-0"], ["server-0"])
    assert apart.of_process("model-0").host["published"] == 4 * PARAMETERS
    assert beside.of_process("model-0").device["published"] == 0, "it is what the rank computes with"
    ahead = AsynchronySection(max_staleness=1)
    assert memory(asynchrony=ahead).of_process("model-0").device["published"] == 4 * PARAMETERS


@pytest.mark.parametrize(
    ("actor", "cluster", "width"),
    [
        ({"dtype": "float32"}, ClusterSection(), 4),
        ({"workers": 2, "layout": LayoutSection(shards=2)}, ClusterSection(), 2),
        ({"logical_slices": 2}, ClusterSection(), 2),
        ({}, ClusterSection(share_device="offload"), 2),
    ],
)
def test_weights_that_can_not_stay_where_the_rank_computes_are_published_as_a_copy(
    actor: dict[str, Any], cluster: ClusterSection, width: int
) -> None:
    found = memory(actor=actor, cluster=cluster)
    assert not shares_weights(found.config)
    assert found.of_process("model-0").device["published"] == width * PARAMETERS


def test_a_server_leaves_the_ranks_of_its_card_their_peak_and_other_servers_their_share() -> None:
    one, apart = memory(), memory(num_devices=2)
    peak = one.of_process("model-0").device_bytes
    most = one.most_cache_bytes("server-0", total_bytes=H200)
    assert most + peak + one.server_bytes == H200
    assert apart.most_cache_bytes("server-0", total_bytes=H200) == H200 - apart.server_bytes
    assert one.most_cache_bytes("server-0", total_bytes=H200, foreign_bytes=10**9) == most - 10**9
    two = memory(generation=msgspec.structs.replace(GENERATION, servers=2))
    assert two.most_cache_bytes("server-1", total_bytes=H200) == (H200 - peak - 2 * two.server_bytes) // 2
    assert one.most_cache_bytes("server-0", total_bytes=peak) == 0


def test_an_offloaded_rank_leaves_its_card_to_the_cache() -> None:
    kept, moved = (
        memory(cluster=ClusterSection(share_device=policy)).most_cache_bytes("server-0", total_bytes=H200)
        for policy in ("keep", "offload")
    )
    assert moved - kept > 18 * PARAMETERS
    large = msgspec.structs.replace(GENERATION, kv_cache_gib=8)
    needed_kept, needed_moved = (
        memory(cluster=ClusterSection(share_device=policy), generation=large).needed_on_device(0)
        for policy in ("keep", "offload")
    )
    assert needed_moved < needed_kept


def test_models_beside_the_actor_take_memory_of_the_trainer() -> None:
    scored = memory(algorithm=AlgorithmSection(beta=0.1), reward_model=RewardModelSection("folder"))
    alone, with_both = memory().of_role(Role.MODEL), scored.of_role(Role.MODEL)
    assert with_both.device["reward model"] > 0
    assert with_both.device_bytes > alone.device_bytes


def test_servers_of_another_backend_need_nothing_here() -> None:
    generation = GenerationSection(servers=1, backend="vllm", urls=("http://a",))
    assert memory(generation=generation).computing() == ["model-0"]


def test_a_checkpoint_has_the_state_and_the_weights() -> None:
    assert memory().checkpoint_bytes == 14 * PARAMETERS
    assert memory(algorithm=AlgorithmSection(beta=0.1)).checkpoint_bytes == 16 * PARAMETERS


@pytest.mark.parametrize("workers", [4, 8])
def test_where_weights_are_gathered_by_layer_a_rank_holds_its_part_and_a_few_units(workers: int) -> None:
    layout = LayoutSection(shards=workers, gather="layer")
    found = memory(num_devices=workers + 1, actor={"workers": workers, "layout": layout})
    rank = found.of_role(Role.MODEL)
    assert static(rank) == pytest.approx(16 / workers, rel=1e-3)
    whole = memory(
        actor={"workers": workers, "layout": LayoutSection(shards=workers)}, num_devices=workers + 1
    )
    assert "compute weights" not in rank.device and "compute weights" in whole.of_role(Role.MODEL).device
    embedding = QWEN.vocab_size * QWEN.hidden_size
    assert rank.device["layers in use"] == pytest.approx((2 * 3 + 4 * 3) * embedding, rel=1e-3)


def staged(stage: int, *, model: ModelConfig, dtype: str = "bfloat16", **layout: int) -> Mapping[str, int]:
    """Device memory of a rank of two pipeline stages."""
    actor = ActorSection(workers=2, dtype=dtype, layout=LayoutSection(stages=2, **layout))  # type: ignore[arg-type]
    config = Config(name="a", actor=actor, algorithm=AlgorithmSection(beta=0.1), generation=GENERATION)
    return RunMemory(config, model, Companions(), 4).of_process(f"model-{stage}").device


def test_a_tied_embedding_is_state_of_the_last_stage_and_a_copy_in_the_first() -> None:
    tied = msgspec.structs.replace(QWEN, tie_embeddings=True)
    matrix = QWEN.vocab_size * QWEN.hidden_size
    first, last = (staged(stage, model=tied) for stage in range(2))
    apart_first, apart_last = (staged(stage, model=QWEN) for stage in range(2))
    assert (first["tied embedding"], last["tied embedding"]) == (2 * matrix, 2 * 2 * matrix)
    assert apart_first["state"] - first["state"] == 12 * matrix
    assert last["state"] == apart_last["state"]
    assert (first["reference"], last["reference"]) == (apart_first["reference"], apart_last["reference"])
    assert "tied embedding" not in apart_last
    whole = memory(algorithm=AlgorithmSection(beta=0.1)).of_role(Role.MODEL).device
    assert "tied embedding" not in whole, "one rank needs nothing more"


def test_initial_weights_that_are_kept_for_a_reference_count_where_they_exceed_what_comes_later() -> None:
    deep = msgspec.structs.replace(QWEN, num_layers=400, vocab_size=1024)
    layout = LayoutSection(shards=4, gather="layer")
    short = msgspec.structs.replace(GENERATION, max_length=64)
    kept = {}
    for beta in (0.0, 0.1):
        algorithm = AlgorithmSection(beta=beta, batch_size=4, group_size=2)
        given = memory(
            actor={"workers": 4, "layout": layout, "micro_batch_tokens": 64},
            generation=short,
            algorithm=algorithm,
            num_devices=4,
        )
        for model in (QWEN, deep):
            found = msgspec.structs.replace(given, model=model).of_process("model-0").device
            kept[beta, model.num_layers] = found.get("initial weights", 0)
    assert kept[0.0, 28] == kept[0.0, 400] == 0, "nothing begins with them"
    assert kept[0.1, 28] == 0, "embedding and activations take more later"
    assert 0 < kept[0.1, 400] < 2 * num_parameters(deep)
