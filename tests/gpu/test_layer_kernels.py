"""The fused parts of training on the device: values and gradients, equal bits, and less memory with recomputation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kintsugi.model.architecture import ModelConfig
from kintsugi.model.attention import PackedLayout, _shares_keys, packed_attention
from kintsugi.model.device import use_deterministic_kernels
from kintsugi.model.fused_layers import UNFUSED, FusedParts, has_kernels
from kintsugi.model.transformer import Transformer, initialize
from tests.unit.model.layer_checks import (
    Drawn,
    Heads,
    check_feed_forward,
    check_norm,
    check_rotation,
    model_result,
    relative_error,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
DTYPES = [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
LENGTHS = (5, 1, 700, 33, 128, 1025)
HEADS = [
    Heads(12, 2, 128, has_norm=False, has_bias=True),
    Heads(16, 8, 128, has_norm=True, has_bias=False),
    Heads(9, 3, 64, has_norm=False, has_bias=False),
    Heads(5, 1, 80, has_norm=True, has_bias=True),
]


@pytest.fixture
def deterministic() -> Iterator[None]:
    use_deterministic_kernels()
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "size"), [(1, 128), (1023, 576), (5000, 1024), (3000, 1536), (2100, 2560), (70, 8192)]
)
def test_sum_and_norm_are_those_of_float64(
    num_rows: int, size: int, dtype: torch.dtype, limit: float
) -> None:
    check_norm(num_rows, size, device=CUDA, dtype=dtype, limit=limit)


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_projected_and_rotated_heads_are_those_of_float64(
    heads: Heads, dtype: torch.dtype, limit: float
) -> None:
    check_rotation(heads, num_tokens=2500, hidden_size=256, device=CUDA, dtype=dtype, limit=limit)


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
@pytest.mark.parametrize(("inner", "has_bias"), [(8960, False), (1000, True)])
def test_the_feed_forward_part_is_that_of_float64(
    inner: int, has_bias: bool, dtype: torch.dtype, limit: float
) -> None:
    check_feed_forward(900, 512, inner, has_bias=has_bias, device=CUDA, dtype=dtype, limit=limit)


def attended(*, heads: tuple[int, int], head_dim: int, repeat_keys: bool) -> list[Tensor]:
    """Attention, and the gradients of queries, keys and values."""
    layout = PackedLayout.from_lengths(LENGTHS, device=CUDA)
    draw = Drawn(CUDA, torch.bfloat16)
    inputs = [draw(layout.num_tokens, count, head_dim) for count in (heads[0], heads[1], heads[1])]
    output = packed_attention(
        inputs[0], key=inputs[1], value=inputs[2], layout=layout, repeat_keys=repeat_keys
    )
    upstream = draw(*output.shape).detach()
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream)]


@pytest.mark.parametrize(("heads", "head_dim"), [((12, 2), 128), ((16, 8), 128), ((9, 3), 64)])
@pytest.mark.usefixtures("deterministic")
def test_attention_with_shared_keys_is_that_with_repeated_keys_and_has_equal_bits(
    heads: tuple[int, int], head_dim: int
) -> None:
    assert _shares_keys(CUDA, torch.bfloat16, head_dim), "this torch repeats keys: attention is slower"
    shared, again = (attended(heads=heads, head_dim=head_dim, repeat_keys=False) for _ in range(2))
    repeated = attended(heads=heads, head_dim=head_dim, repeat_keys=True)
    assert all(one.equal(other) for one, other in zip(shared, again, strict=True))
    errors = [relative_error(*pair) for pair in zip(shared, repeated, strict=True)]
    assert max(errors) < 1e-2, errors


def new_model(*, qk_norm: bool, dtype: torch.dtype = torch.bfloat16) -> Transformer:
    config = ModelConfig(
        family="qwen3" if qk_norm else "qwen2",
        vocab_size=3000,
        hidden_size=512,
        intermediate_size=1536,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        max_positions=2048,
        qk_norm=qk_norm,
        attention_bias=not qk_norm,
        tie_embeddings=qk_norm,
    )
    model = Transformer(config, dtype=dtype, device=CUDA)
    initialize(model, 0)
    return model


@pytest.mark.parametrize("qk_norm", [True, False])
def test_gradients_of_a_fused_model_are_no_less_exact_than_those_of_torchs_operations(qk_norm: bool) -> None:
    model = new_model(qk_norm=qk_norm)
    exact = new_model(qk_norm=qk_norm, dtype=torch.float32)
    exact.load_state_dict(model.state_dict())
    assert has_kernels(model.output_weight) and not has_kernels(exact.output_weight)
    expected = model_result(exact, LENGTHS)
    results = {}
    for name, parts in {"fused": FusedParts(), "unfused": UNFUSED}.items():
        model.fused = parts
        found = model_result(model, LENGTHS)
        results[name] = {each: relative_error(found[each], expected[each]) for each in expected}
    too_far = {
        name: (error, results["unfused"][name])
        for name, error in results["fused"].items()
        if error > 1.5 * results["unfused"][name] + 1e-3
    }
    assert not too_far, f"relative errors, fused and unfused: {too_far}"


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.usefixtures("deterministic")
def test_a_model_gives_equal_bits_each_time_and_with_recomputation(qk_norm: bool) -> None:
    model = new_model(qk_norm=qk_norm)
    first, second = (model_result(model, LENGTHS) for _ in range(2))
    model.recompute = True
    third = model_result(model, LENGTHS)
    assert len(first) == 1 + len(list(model.parameters()))
    for name, each in first.items():
        assert each.isfinite().all(), name
        assert each.equal(second[name]), f"{name} differs the second time"
        assert each.equal(third[name]), f"{name} differs with recomputation"


def test_recomputation_takes_a_fraction_of_the_memory() -> None:
    model = new_model(qk_norm=True)
    peaks = []
    for recompute in (False, True):
        model.recompute = recompute
        model.zero_grad(set_to_none=True)
        layout = PackedLayout.from_lengths([1024] * 16, device=CUDA)
        tokens = torch.zeros(layout.num_tokens, dtype=torch.int64, device=CUDA)
        before = torch.cuda.memory_allocated(CUDA)
        hidden = model.forward_packed(tokens, layout.positions, layout)
        peaks.append(torch.cuda.memory_allocated(CUDA) - before)
        hidden.float().sum().backward()
        del hidden
    assert peaks[1] < peaks[0] / 4, peaks


def test_a_layout_is_the_same_on_the_device() -> None:
    ours, expected = PackedLayout.from_lengths(LENGTHS, device=CUDA), PackedLayout.from_lengths(LENGTHS)
    for name in ("cumulative_lengths", "positions", "sequence_index", "padded_index"):
        found, wanted = getattr(ours, name), getattr(expected, name)
        assert found.is_cuda and found.dtype == wanted.dtype and found.cpu().equal(wanted), name
