"""A model in logical slices: equal bits for every number of tensor ranks, and the numbers of the whole model."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor

from kintsugi.errors import ModelError
from kintsugi.model.architecture import ModelConfig, parameter_shapes
from kintsugi.model.attention import PackedLayout
from kintsugi.model.sliced_transformer import SlicedTransformer
from kintsugi.model.tensor_group import OneRank, TensorGroup, ordered_sum
from kintsugi.model.tensor_slices import SliceName, cut, fill, slices_of
from kintsugi.model.transformer import Transformer

ROOT = Path(__file__).parents[3]
LENGTHS = (5, 1, 17, 9)
SLICES = 4
T = TypeVar("T")
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "mlp_bias": True, "attention_bias": True},
    "qwen2, tied": {"family": "qwen2", "attention_bias": True, "tie_embeddings": True},
    "qwen3": {"family": "qwen3", "qk_norm": True},
}


def make_config(**changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 43,  # Not divisible: slices of 10 and 11 tokens.
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 8,
        "max_positions": 64,
    }
    return ModelConfig(**{**sizes, **changes})


class ThreadExchange:
    """The all-gather of ranks that are threads."""

    def __init__(self, tensors: int) -> None:
        self.tensors = tensors
        self._slots: list[Tensor | None] = [None] * tensors
        self._barrier = threading.Barrier(tensors, timeout=60)

    def all_gather(self, tensor: Tensor, *, rank: int) -> Tensor:
        self._slots[rank] = tensor.clone()
        self._barrier.wait()
        found = torch.stack([each for each in self._slots if each is not None])
        self._barrier.wait()
        return found

    def abort(self) -> None:
        self._barrier.abort()


class ThreadGroup(NamedTuple):
    exchange: ThreadExchange
    rank: int
    num_slices: int

    @property
    def slices(self) -> range:
        return slices_of(self.rank, tensors=self.exchange.tensors, count=self.num_slices)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self.exchange.all_gather(tensor, rank=self.rank)


def on_ranks(tensors: int, num_slices: int, run: Callable[[TensorGroup], T]) -> list[T]:
    """Results of all tensor ranks."""
    if tensors == 1:
        return [run(OneRank(num_slices))]
    exchange = ThreadExchange(tensors)

    def guarded(rank: int) -> T:
        torch.set_num_threads(1)
        try:
            return run(ThreadGroup(exchange, rank, num_slices))
        except BaseException:
            exchange.abort()
            raise

    with ThreadPoolExecutor(tensors) as pool:
        return list(pool.map(guarded, range(tensors)))


class Results(NamedTuple):
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_weights(config: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.empty(shape).normal_(
            mean=1.0 if name.endswith("norm.weight") else 0.0, std=0.2, generator=generator
        )
        for name, shape in parameter_shapes(config, with_value_head=True).items()
    }


def train(model: Transformer) -> Results:
    """One pass through everything that learns: log-probabilities, entropies and values."""
    layout = PackedLayout.from_lengths(LENGTHS)
    generator = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(0, model.config.vocab_size, (2, layout.num_tokens), generator=generator)
    hidden = model.forward_packed(tokens, layout.positions, layout)
    logprobs, entropy = model.token_logprobs(hidden, targets, temperature=0.8, chunk_size=13)
    values = model.values(hidden)
    weights = torch.linspace(-1, 1, layout.num_tokens)
    loss = (logprobs * weights).sum() + 0.3 * (entropy * weights.flip(0)).sum() + (values * weights).sum()
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} learns nothing"
        gradients[name] = parameter.grad
    outputs = {"hidden": hidden, "logprobs": logprobs, "entropy": entropy, "values": values}
    return Results({name: each.detach() for name, each in outputs.items()}, gradients)


def train_sliced(
    config: ModelConfig, group: TensorGroup, *, dtype: torch.dtype, recompute: bool = False
) -> Results:
    model = SlicedTransformer(config, group=group, with_value_head=True, dtype=dtype)
    model.copy_weights(cut(make_weights(config), slices=group.slices, count=group.num_slices))
    model.recompute = recompute
    return train(model)


def train_whole(config: ModelConfig, *, dtype: torch.dtype) -> Results:
    model = Transformer(config, with_value_head=True, dtype=dtype)
    model.copy_weights(make_weights(config))
    return train(model)


def joined(slices: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    shapes = parameter_shapes(config, with_value_head=True)
    whole = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    fill(whole, slices)
    return whole


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_number_of_tensor_ranks_gives_the_same_bits(
    name: str, dtype: torch.dtype, recompute: bool
) -> None:
    config = make_config(**CONFIGS[name])
    alone = train_sliced(config, OneRank(SLICES), dtype=dtype)
    for tensors in (1, 2, 4):
        found = on_ranks(
            tensors, SLICES, lambda group: train_sliced(config, group, dtype=dtype, recompute=recompute)
        )
        assert {each for rank in found for each in rank.gradients} == alone.gradients.keys()
        for rank in found:
            for what, tensor in rank.outputs.items():
                assert tensor.equal(alone.outputs[what]), f"{what} of {tensors} ranks"
            for parameter, gradient in rank.gradients.items():
                assert gradient.equal(alone.gradients[parameter]), f"{parameter} of {tensors} ranks"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_slices_compute_what_the_whole_model_does(name: str, dtype: torch.dtype) -> None:
    config = make_config(**CONFIGS[name])
    exact = train_whole(config, dtype=torch.float32)
    whole, sliced = train_whole(config, dtype=dtype), train_sliced(config, OneRank(SLICES), dtype=dtype)
    gradients = joined(sliced.gradients, config)
    pairs = [(sliced.outputs[what], whole.outputs[what], exact.outputs[what]) for what in exact.outputs]
    pairs += [(gradients[each], whole.gradients[each], exact.gradients[each]) for each in exact.gradients]
    for ours, theirs, wanted in pairs:
        if dtype == torch.float32:
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
        else:  # As close to the exact numbers as the whole model, in the same type.
            error, accepted = ((each.float() - wanted).norm() for each in (ours, theirs))
            assert error <= 2 * accepted + 1e-3 * wanted.norm()


def test_the_order_of_a_sum_is_a_tree_that_ranks_do_not_change() -> None:
    parts = torch.tensor([1e8, 1.0, -1e8, 1.0])

    def total(group: TensorGroup) -> float:
        return ordered_sum([parts[index] for index in group.slices], group).item()

    expected = ((parts[0] + parts[1]) + (parts[2] + parts[3])).item()
    assert expected != (((parts[0] + parts[1]) + parts[2]) + parts[3]).item()
    for tensors in (1, 2, 4):
        assert on_ranks(tensors, SLICES, total) == [expected] * tensors


@pytest.mark.parametrize("tensors", [1, 2, 4])
def test_slices_of_all_ranks_tile_the_whole(tensors: int) -> None:
    config = make_config(**CONFIGS["llama"])
    weights = make_weights(config)
    whole = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights.items()}
    for rank in range(tensors):
        own = slices_of(rank, tensors=tensors, count=SLICES)
        fill(whole, cut(weights, slices=own, count=SLICES))
    assert all(whole[name].equal(tensor) for name, tensor in weights.items())


def test_a_slice_is_named_by_its_number_and_their_count() -> None:
    name = SliceName("lm_head.weight", 3, 8)
    assert str(name) == "lm_head.weight#3/8" and SliceName.parse(str(name)) == name
    assert SliceName.parse("lm_head.weight") == SliceName("lm_head.weight", 0, 1)


@pytest.mark.parametrize(
    ("count", "change", "expected"),
    [
        (3, {}, "a power of two, got 3"),
        (8, {}, "`num_kv_heads` divisible by the number of logical slices 8, got 4"),
        (4, {"intermediate_size": 66}, "`intermediate_size` divisible by .* 4, got 66"),
        (4, {"vocab_size": 3}, "a vocabulary of at least 4 tokens, got 3"),
    ],
)
def test_a_model_that_can_not_be_cut_is_refused(count: int, change: dict[str, int], expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        SlicedTransformer(make_config(**CONFIGS["llama"], **change), group=OneRank(count), device="meta")


@pytest.mark.slow
def test_a_model_is_created_without_importing_torchs_compiler() -> None:
    program = (
        "import sys; from tests.unit.model.test_sliced_transformer import *; "
        "SlicedTransformer(make_config(family='llama'), group=OneRank(SLICES)); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
