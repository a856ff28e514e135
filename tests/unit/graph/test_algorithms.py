"""Each algorithm's model calls, as its paper has them."""

import pytest

from kintsugi.config.schema import (
    AlgorithmName,
    AlgorithmSection,
    AsynchronySection,
    Config,
    RewardModelSection,
)
from kintsugi.config.stages import Stage, stages
from kintsugi.graph.algorithms import ALGORITHMS, build_graph
from kintsugi.graph.dfg import Graph
from kintsugi.graph.mfc import Per
from kintsugi.types import Role

PAIRS_AND_ROWS: tuple[AlgorithmName, ...] = ("sft", "reward_model", "dpo")
OF_GROUPS: tuple[AlgorithmName, ...] = ("grpo", "dr_grpo", "dapo", "gspo", "rloo")
OF_TOKENS: tuple[AlgorithmName, ...] = ("ppo", "reinforce_pp")


def stage_of(section: AlgorithmSection, *, with_reward_model: bool = False) -> Stage:
    reward_model = RewardModelSection(path="somewhere") if with_reward_model else None
    return stages(Config(name="x", algorithm=section, reward_model=reward_model))[0]


def graph_of(name: AlgorithmName, *, beta: float = 0.0, with_reward_model: bool = False) -> Graph:
    return build_graph(stage_of(AlgorithmSection(name=name, beta=beta), with_reward_model=with_reward_model))


def reads(graph: Graph, call: str) -> set[str]:
    return {key.name for key in graph.calls[call].inputs}


def gives(graph: Graph, call: str) -> set[str]:
    return {key.name for key in graph.calls[call].outputs}


def test_every_named_algorithm_has_its_graph() -> None:
    assert set(ALGORITHMS) == {*PAIRS_AND_ROWS, *OF_GROUPS, *OF_TOKENS, "rollout"}


@pytest.mark.parametrize("name", PAIRS_AND_ROWS)
def test_demonstrations_are_tokenised_and_trained_on(name: AlgorithmName) -> None:
    graph = graph_of(name, beta=0.1)
    assert graph.order[0] == "demonstrate"
    assert graph.order[-1] == "actor_train"
    assert "actor_generate" not in graph.calls and "reward" not in graph.calls


def test_dpo_compares_with_the_reference() -> None:
    assert graph_of("dpo", beta=0.1).order == ["demonstrate", "ref_inference", "actor_train"]


@pytest.mark.parametrize("name", OF_GROUPS)
def test_algorithms_of_groups_need_no_model_for_the_advantage(name: AlgorithmName) -> None:
    graph = graph_of(name)
    assert graph.order == ["actor_generate", "reward", "advantage", "actor_train"]
    assert graph.calls["advantage"].role is Role.MASTER
    baseline = "leave_one_out" if name == "rloo" else "group_advantages"
    assert graph.calls["advantage"].interface == baseline


def test_actor_and_critic_train_at_the_same_time() -> None:
    graph = graph_of("ppo", beta=0.1)
    assert graph.levels()[-1] == ["actor_train", "critic_train"]
    assert {"reward", "ref_inference", "critic_inference"} <= set(graph.levels()[1])
    assert graph.wanted == ("update", "critic_update")


def test_ppo_without_its_critic_is_reinforce_pp() -> None:
    with_critic, without = graph_of("ppo", beta=0.1), graph_of("reinforce_pp", beta=0.1)
    assert set(with_critic.calls) - set(without.calls) == {"critic_inference", "critic_train"}
    assert with_critic.calls["token_advantage"].interface == "gae"
    assert without.calls["token_advantage"].interface == "reward_to_go"


@pytest.mark.parametrize("name", [*OF_GROUPS, *OF_TOKENS])
def test_the_reference_is_asked_only_where_its_divergence_weighs_something(name: AlgorithmName) -> None:
    assert "ref_inference" not in graph_of(name).calls
    with_reference = graph_of(name, beta=0.1)
    assert with_reference.calls["ref_inference"].interface == "reference_inference"
    assert "reference_logprobs" in reads(with_reference, "actor_train")


@pytest.mark.parametrize(("name", "of_sample"), [("rloo", True), ("grpo", False), ("ppo", False)])
def test_a_divergence_taken_off_a_whole_samples_reward_is_summed_over_it(
    name: AlgorithmName, of_sample: bool
) -> None:
    graph = graph_of(name, beta=0.1)
    assert ("reference_kl" in gives(graph, "ref_inference")) is of_sample
    if "advantage" in graph.calls:
        assert ("reference_kl" in reads(graph, "advantage")) is of_sample


def test_a_divergence_in_the_reward_reaches_every_tokens_advantage() -> None:
    assert "reference_logprobs" in reads(graph_of("ppo", beta=0.1), "token_advantage")
    in_loss = build_graph(stage_of(AlgorithmSection(name="ppo", beta=0.1, kl_in="loss")))
    assert "reference_logprobs" not in reads(in_loss, "token_advantage")


@pytest.mark.parametrize("name", [*OF_GROUPS, *OF_TOKENS])
def test_a_reward_models_score_reaches_the_advantage(name: AlgorithmName) -> None:
    graph = graph_of(name, with_reward_model=True)
    assert gives(graph, "reward_inference") == {"score"}
    consumer = "advantage" if name in OF_GROUPS else "token_advantage"
    assert "score" in reads(graph, consumer)


@pytest.mark.parametrize("name", [*OF_GROUPS, *OF_TOKENS])
def test_the_proximal_policy_is_asked_once_before_several_updates(name: AlgorithmName) -> None:
    graph = build_graph(stage_of(AlgorithmSection(name=name, proximal="recompute", updates_per_step=2)))
    assert graph.calls["prox_inference"].interface == "proximal_inference"
    assert "proximal_logprobs" in reads(graph, "actor_train")
    assert graph.parents["prox_inference"] == {"actor_generate"}


@pytest.mark.parametrize("name", [*OF_GROUPS, *OF_TOKENS])
@pytest.mark.parametrize("proximal", ["sampler", "approximate"])
def test_other_proximal_policies_cost_no_pass(name: AlgorithmName, proximal: str) -> None:
    section = AlgorithmSection(name=name, proximal=proximal, updates_per_step=2)  # type: ignore[arg-type]
    assert "prox_inference" not in build_graph(stage_of(section)).calls


@pytest.mark.parametrize("name", [*OF_GROUPS, *OF_TOKENS])
def test_a_single_update_starts_from_the_proximal_policy_and_needs_no_pass_for_it(
    name: AlgorithmName,
) -> None:
    (stage,) = stages(
        Config(name="x", algorithm=AlgorithmSection(name=name), asynchrony=AsynchronySection(max_staleness=1))
    )
    assert stage.algorithm.proximal == "recompute"
    assert "prox_inference" not in build_graph(stage).calls


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_whatever_runs_on_models_covers_the_batch(name: AlgorithmName) -> None:
    graph = graph_of(name, beta=0.1)
    assert {call.per for call in graph.calls.values() if call.role is Role.MODEL} == {Per.BATCH}
    assert {call.per for call in graph.calls.values() if call.role is Role.ROLLOUT} == {Per.GROUP}
