"""The fused parts of training, run by Triton's interpreter on small shapes; `tests/gpu` has the device itself."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("the interpreter would replace the device for every test", allow_module_level=True)
if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
    pytest.skip("Triton's interpreter needs numpy below 2.4", allow_module_level=True)
# Triton looks at this when it is imported.
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed: kernels are tested with it and on a device")

from kintsugi.model import layer_kernels, transformer
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.fused_layers import UNFUSED, FusedParts, joined
from kintsugi.model.transformer import Transformer, initialize
from tests.unit.model.layer_checks import (
    Heads,
    check_feed_forward,
    check_norm,
    check_rotation,
    model_result,
    relative_error,
)

pytestmark = [
    pytest.mark.slow,
    # The interpreter computes with arrays where the device has numbers; infinities are meant.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),
]
CPU = torch.device("cpu")
DTYPES = [(torch.float32, 2e-6), (torch.float16, 2e-3)]
HEADS = [
    Heads(4, 2, 16, has_norm=True, has_bias=False),
    Heads(3, 1, 24, has_norm=True, has_bias=True),
    Heads(6, 2, 16, has_norm=False, has_bias=True),
    Heads(2, 2, 24, has_norm=False, has_bias=False),
]
LENGTHS = (5, 1, 9)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few rows are enough for programs with several of them, the last one with fewer."""
    monkeypatch.setattr(layer_kernels, "MAX_PROGRAMS", 4)


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 16), (3, 48), (14, 96)])
def test_sum_and_norm_are_those_of_torch(num_rows: int, size: int, dtype: torch.dtype, limit: float) -> None:
    check_norm(num_rows, size, device=CPU, dtype=dtype, limit=limit)


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_projected_heads_are_normalised_and_rotated_as_by_torch(
    heads: Heads, dtype: torch.dtype, limit: float
) -> None:
    check_rotation(heads, num_tokens=14, hidden_size=40, device=CPU, dtype=dtype, limit=limit)


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
@pytest.mark.parametrize(("inner", "has_bias"), [(64, False), (1100, True)])
def test_the_feed_forward_part_is_that_of_torch(
    inner: int, has_bias: bool, dtype: torch.dtype, limit: float
) -> None:
    check_feed_forward(7, 24, inner, has_bias=has_bias, device=CPU, dtype=dtype, limit=limit)


def small_model(*, qk_norm: bool) -> Transformer:
    config = ModelConfig(
        family="qwen3" if qk_norm else "qwen2",
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=64,
        qk_norm=qk_norm,
        attention_bias=not qk_norm,
        tie_embeddings=qk_norm,
    )
    model = Transformer(config)
    initialize(model, 3)
    return model


@pytest.mark.parametrize("qk_norm", [True, False])
def test_a_fused_model_has_the_logprobs_and_gradients_of_the_unfused_one(
    qk_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(qk_norm=qk_norm)
    monkeypatch.setattr(transformer, "has_kernels", lambda _: True)
    model.fused = UNFUSED
    expected = model_result(model, LENGTHS)
    assert len(expected) == 1 + len(list(model.parameters()))
    for parts in (FusedParts(), *(UNFUSED._replace(**{part: True}) for part in FusedParts._fields)):
        model.fused = parts
        found = model_result(model, LENGTHS)
        errors = {name: relative_error(found[name], expected[name]) for name in expected}
        assert max(errors.values()) < 1e-5, f"{parts}: {errors}"


@pytest.mark.parametrize("qk_norm", [True, False])
def test_a_fused_model_with_recomputation_has_equal_bits(
    qk_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(qk_norm=qk_norm)
    monkeypatch.setattr(transformer, "has_kernels", lambda _: True)
    expected = model_result(model, LENGTHS)
    model.recompute = True
    found = model_result(model, LENGTHS)
    assert all(found[name].equal(each) for name, each in expected.items())


def test_neighbours_in_memory_are_joined_without_a_copy() -> None:
    flat = torch.arange(30.0)
    first, second = flat[4:10].view(2, 3), flat[10:22].view(4, 3)
    both = joined((first, second))
    assert both.data_ptr() == first.data_ptr() and both.equal(flat[4:22].view(6, 3))
    for others in ((second, first), (first, flat[11:23].view(4, 3)), (first, second.clone())):
        copied = joined(others)
        assert copied.equal(torch.cat(others)) and copied.data_ptr() != first.data_ptr()
