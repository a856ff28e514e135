import pytest

from kintsugi.config.schema import AlgorithmSection, Config
from kintsugi.config.stages import Stage, stages
from kintsugi.errors import ConfigError
from kintsugi.graph.algorithms import grpo, sft
from kintsugi.graph.dfg import Graph
from kintsugi.graph.mfc import Call, Key, Per, estimate
from kintsugi.types import Role

A, B, C = Key("a", "int32", ("tokens",)), Key("b", "float32"), Key("c", "float32")


def stage(section: AlgorithmSection) -> Stage:
    return stages(Config(name="x", algorithm=section))[0]


def stage_of(section: AlgorithmSection) -> Stage:
    return stages(Config(name="a", algorithm=section))[-1]


def call(name: str, inputs: tuple[Key, ...], outputs: tuple[Key, ...]) -> Call:
    return Call(name, Role.MODEL, Per.BATCH, name, inputs, outputs)


def test_edges_come_from_keys_and_order_respects_them() -> None:
    graph = Graph([call("second", (B,), (C,)), call("first", (A,), (B,))], sources=(A,), wanted=("c",))
    assert graph.order == ["first", "second"]
    assert graph.children("first") == ["second"]


def test_calls_without_a_dependency_share_a_level() -> None:
    graph = Graph(
        [call("x", (A,), (B,)), call("y", (A,), (C,)), call("z", (B, C), (Key("d", "float32"),))],
        sources=(A,),
        wanted=("d",),
    )
    assert graph.levels() == [["x", "y"], ["z"]]


def test_a_circle_is_refused_with_its_calls() -> None:
    with pytest.raises(ConfigError, match=r"circle: (x → y → x|y → x → y)"):
        Graph([call("x", (C,), (B,)), call("y", (B,), (C,))], sources=(), wanted=("c",))


def test_a_missing_key_is_refused_with_call_key_and_a_suggestion() -> None:
    wrong = Key("rewards", "float32")
    with pytest.raises(
        ConfigError, match="call 'x' reads key 'rewards', which nothing gives; did you mean 'reward'"
    ):
        Graph([call("x", (wrong,), (B,))], sources=(Key("reward", "float32"),), wanted=("b",))


def test_a_wrong_shape_is_refused_with_both_sides() -> None:
    scalar = Key("a", "int32")
    with pytest.raises(ConfigError, match=r"'x' expects a: int32\[\], but the data gives a: int32\[tokens\]"):
        Graph([call("x", (scalar,), (B,))], sources=(A,), wanted=("b",))


def test_an_output_that_nobody_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match="call 'x' gives 'b', which no call reads"):
        Graph([call("x", (A,), (B,)), call("y", (A,), (C,))], sources=(A,), wanted=("c",))


def test_a_key_with_two_producers_is_refused() -> None:
    with pytest.raises(ConfigError, match="key 'b' of call 'y' is already given by x"):
        Graph([call("x", (A,), (B,)), call("y", (A,), (B,))], sources=(A,), wanted=("b",))


def test_two_calls_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two calls are named 'x'"):
        Graph([call("x", (A,), (B,)), call("x", (A,), (C,))], sources=(A,), wanted=("b",))


def test_a_wanted_key_that_no_call_gives_is_refused() -> None:
    with pytest.raises(ConfigError, match="wanted key 'd'"):
        Graph([call("x", (A,), (B,))], sources=(A,), wanted=("d",))


def test_grpo_asks_the_reference_only_when_its_weight_is_not_zero() -> None:
    assert "ref_inference" not in grpo(stage(AlgorithmSection(beta=0.0))).calls
    with_reference = grpo(stage(AlgorithmSection(beta=0.1)))
    assert "ref_inference" in with_reference.parents["actor_train"]
    assert with_reference.order.index("ref_inference") < with_reference.order.index("actor_train")


def test_a_graph_describes_every_call_on_a_line() -> None:
    assert len(sft(stage(AlgorithmSection(name="sft"))).describe().splitlines()) == 2


def test_the_estimate_counts_floating_point_work_per_parameter_and_token() -> None:
    train = grpo(stage(AlgorithmSection())).calls["actor_train"]
    cost = estimate(train, num_samples=4, tokens_per_sample=10, num_parameters=1000)
    assert cost.tokens == 40
    assert cost.flops == 6 * 1000 * 40
