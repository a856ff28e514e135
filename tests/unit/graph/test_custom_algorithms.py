"""Graphs and advantages of custom algorithms, from the master's side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kintsugi.config import custom_algorithm
from kintsugi.config.custom_algorithm import CustomAlgorithm
from kintsugi.config.schema import AlgorithmSection, Config
from kintsugi.config.stages import Stage, stages
from kintsugi.errors import ConfigError, UserError
from kintsugi.graph import algorithms
from kintsugi.graph.advantages import CUSTOM_ADVANTAGES, group_advantages, master_call
from kintsugi.graph.algorithms import build_graph
from kintsugi.graph.dfg import Graph
from kintsugi.types import ShardItem

Customize = Callable[..., Stage]


@pytest.fixture
def customize(monkeypatch: pytest.MonkeyPatch) -> Customize:
    """A stage whose custom algorithm is not imported from a file but given."""

    def customized(custom: CustomAlgorithm, *, beta: float = 0.0) -> Stage:
        monkeypatch.setattr(custom_algorithm, "load_custom_algorithm", lambda path: custom)
        section = AlgorithmSection(name=custom.base, custom="mine.py:it", beta=beta)  # type: ignore[arg-type]
        return stages(Config(name="x", algorithm=section))[0]

    return customized


def best_first(rewards: Sequence[float], *, scale_by_std: bool) -> list[float]:
    return [reward - max(rewards) for reward in rewards]


def items(*rewards: float, masked: int = 0) -> list[ShardItem]:
    return [
        ShardItem(f"t/{index}", "rollout-0", "", 5, 3, {"reward": reward, "mask": float(index >= masked)})
        for index, reward in enumerate(rewards)
    ]


def test_own_advantages_take_the_place_of_the_baseline_in_the_graph_of_the_base(customize: Customize) -> None:
    graph = build_graph(customize(CustomAlgorithm(base="grpo", group_advantages=best_first)))
    assert graph.order == ["actor_generate", "reward", "advantage", "actor_train"]
    assert graph.calls["advantage"].interface == CUSTOM_ADVANTAGES


def test_without_advantages_of_its_own_the_graph_is_that_of_the_base(customize: Customize) -> None:
    graph = build_graph(customize(CustomAlgorithm(base="ppo", token_loss=lambda tokens, settings: tokens)))  # type: ignore[arg-type, return-value]
    base = build_graph(stages(Config(name="x", algorithm=AlgorithmSection(name="ppo")))[0])
    assert graph.calls == base.calls


def test_the_master_calls_own_advantages_group_by_group(customize: Customize) -> None:
    stage = customize(CustomAlgorithm(base="grpo", group_advantages=best_first))
    assert master_call(stage, CUSTOM_ADVANTAGES, items(0.0, 1.0, 0.5)) == {
        "advantage": {"t/0": -1.0, "t/1": 0.0, "t/2": -0.5}
    }


def test_a_group_with_one_valid_sample_has_no_advantage(customize: Customize) -> None:
    stage = customize(CustomAlgorithm(base="grpo", group_advantages=lambda rewards, *, scale_by_std: [7.0]))
    assert master_call(stage, CUSTOM_ADVANTAGES, items(0.0, 1.0, masked=1)) == {
        "advantage": {"t/0": 0.0, "t/1": 0.0}
    }


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda rewards, *, scale_by_std: [1.0], r"got \[1.0\]"),
        (lambda rewards, *, scale_by_std: [float("nan")] * len(rewards), r"got \[nan, nan\]"),
        (lambda rewards: [0.0, 0.0], "got TypeError: .*scale_by_std"),
        (lambda rewards, *, scale_by_std: None, "got TypeError"),
    ],
)
def test_what_is_not_one_finite_number_per_reward_is_named(
    customize: Customize, function: Callable[..., Sequence[float]], found: str
) -> None:
    stage = customize(CustomAlgorithm(base="grpo", group_advantages=function))
    expected = (
        rf"`algorithm.custom`: expected 2 finite numbers from `group_advantages` of mine.py:it .*{found}"
    )
    with pytest.raises(UserError, match=expected):
        master_call(stage, CUSTOM_ADVANTAGES, items(0.0, 1.0))


def graph_with(*, advantage: str = "leave_one_out", train: str = "policy_train") -> Callable[[Stage], Graph]:
    return lambda stage: algorithms.graph(
        algorithms.generate(),
        algorithms.reward(),
        algorithms.group_advantage(stage, advantage),
        algorithms.train(train, algorithms.LOGPROBS, algorithms.ADVANTAGE),
    )


def test_a_graph_of_its_own_is_built_from_the_parts_of_the_package(customize: Customize) -> None:
    graph = build_graph(customize(CustomAlgorithm(base="grpo", graph=graph_with()), beta=0.1))
    assert graph.order == ["actor_generate", "reward", "advantage", "actor_train"], "without the reference"


def without_training(stage: Stage) -> Graph:
    calls = (algorithms.generate(), algorithms.reward(), algorithms.group_advantage(stage, "leave_one_out"))
    return Graph(calls, sources=(algorithms.PROMPT, algorithms.COLUMNS), wanted=("advantage",))


def without_reward(stage: Stage) -> Graph:
    calls = (algorithms.generate(), algorithms.group_advantage(stage, "leave_one_out"))
    return algorithms.graph(*calls, algorithms.policy_train(stage, algorithms.ADVANTAGE))


def with_demonstrations(stage: Stage) -> Graph:
    return algorithms.graph(algorithms.demonstrate(), algorithms.train("sft_train"))


@pytest.mark.parametrize(
    ("custom", "expected"),
    [
        (CustomAlgorithm(base="grpo", graph=lambda stage: 3), "expected a Graph from `graph`, got int"),  # type: ignore[arg-type, return-value]
        (CustomAlgorithm(base="grpo", graph=lambda: 3), "expected a Graph from `graph`, got TypeError: "),  # type: ignore[arg-type, misc]
        (
            CustomAlgorithm(base="grpo", graph=without_reward),
            "graph: call 'advantage' reads key 'reward'",
        ),
        (
            CustomAlgorithm(base="grpo", graph=graph_with(advantage="leave_two_out")),
            "expected call 'advantage' to name an interface of group_advantages, leave_one_out, got 'leave_two_out'",
        ),
        (
            CustomAlgorithm(base="grpo", graph=graph_with(train="policy_trian")),
            "expected call 'actor_train' to name an interface of .*policy_train.*, got 'policy_trian'",
        ),
        (
            CustomAlgorithm(base="grpo", graph=graph_with(train="critic_train")),
            "expected call 'actor_train' .*, got 'critic_train'",
        ),
        (
            CustomAlgorithm(base="grpo", graph=graph_with(), group_advantages=group_advantages),
            "a call with the interface 'custom_advantages', because `group_advantages` is given, got none",
        ),
        (CustomAlgorithm(base="grpo", graph=without_training), "expected a call that trains the actor"),
        (
            CustomAlgorithm(base="grpo", graph=with_demonstrations),
            "expected the calls actor_generate, reward of grpo, unchanged, per group, got 'demonstrate'",
        ),
    ],
)
def test_a_graph_that_no_process_could_carry_out_is_refused(
    customize: Customize, custom: CustomAlgorithm, expected: str
) -> None:
    with pytest.raises(ConfigError, match=rf"`algorithm.custom` \(mine.py:it\): .*{expected}"):
        build_graph(customize(custom))
