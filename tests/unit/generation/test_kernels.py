"""The kernels of the CUDA runner, run by Triton's interpreter on small shapes; `tests/gpu` has the device itself."""

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

from benchmarks import gpu_checks
from kintsugi.generation.kernels.chunks import PrefillShape, packed_chunks, unpacked
from kintsugi.generation.kernels.network import PagedNetwork
from kintsugi.generation.kernels.products import split_tiling
from kintsugi.generation.kernels.state import ALIVE, POSITION
from kintsugi.generation.kernels.step import DecodeStep, Slots, StepKind
from kintsugi.generation.noise import stream_key
from kintsugi.generation.requests import Request
from kintsugi.generation.runner import Chunk, Row
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.attention import PackedLayout
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.types import Sampling

pytestmark = [
    pytest.mark.slow,
    # The interpreter computes with arrays where the device has numbers; infinities are meant.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),
]
CPU = torch.device("cpu")
PAGE_SIZE = 16
CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=300,
    hidden_size=48,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=24,
    max_positions=64,
    qk_norm=True,
    tie_embeddings=True,
)
HEADS = [(6, 2, 64), (4, 2, 24)]
DTYPES = [(torch.float32, 2e-6), (torch.float16, 1e-3)]
"""And not bfloat16, which the interpreter does not multiply."""


@pytest.fixture(autouse=True)
def _fresh_report() -> None:
    gpu_checks.report.update(checks={}, failures=[])


def with_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=64,
        hidden_size=96,
        intermediate_size=256,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=4096,
    )


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_attention_over_pages_is_that_of_torch_and_a_rows_bits_are_its_own(
    heads: tuple[int, int, int], dtype: torch.dtype, limit: float
) -> None:
    gpu_checks.check_attention(with_heads(*heads), dtype, limit=limit)
    assert gpu_checks.wrong_checks() == []


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_fused_layers_round_where_the_model_rounds(
    heads: tuple[int, int, int], dtype: torch.dtype, limit: float
) -> None:
    gpu_checks.check_layers(with_heads(*heads), dtype, limit=limit)
    assert gpu_checks.wrong_checks() == []


@pytest.mark.parametrize(("num_columns", "depth"), [(64, 256), (40, 300)])
def test_products_in_parts_are_those_of_torch(num_columns: int, depth: int) -> None:
    gpu_checks.check_products(torch.float16, num_columns=num_columns, depth=depth, limit=1e-3)
    assert gpu_checks.wrong_checks() == []


@pytest.mark.parametrize("vocab_size", [300, 5000])
def test_tokens_and_logprobs_are_those_of_the_cpus_sampler(vocab_size: int) -> None:
    gpu_checks.check_sampling(vocab_size, count=9)
    assert gpu_checks.wrong_checks() == []


@pytest.mark.parametrize("depth", [100, 128, 576, 1024, 3072, 8960])
@pytest.mark.parametrize("num_columns", [16, 576, 1024, 1536, 4096])
def test_splits_of_a_product_cover_its_depth_and_none_is_empty(num_columns: int, depth: int) -> None:
    tilings = {
        split_tiling(count, num_columns=num_columns, depth=depth, dtype=torch.bfloat16)
        for count in (1, 17, 64)
    }
    (tiling,) = tilings
    if tiling is None:
        assert num_columns > 2048
        return
    assert (tiling.num_splits - 1) * tiling.split_depth(depth) < depth
    assert tiling.num_splits * tiling.split_depth(depth) >= depth
    assert split_tiling(65, num_columns=num_columns, depth=depth, dtype=torch.bfloat16) is None
    assert split_tiling(1, num_columns=num_columns, depth=depth, dtype=torch.float32) is None


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.float16, 4e-3)])
@torch.no_grad()
def test_a_step_feeds_replays_samples_and_ends_rows_by_itself(dtype: torch.dtype, limit: float) -> None:
    model = Transformer(CONFIG, packed=True, dtype=dtype)
    initialize(model, seed=0)
    network = PagedNetwork(model, num_pages=9, page_size=PAGE_SIZE, max_rows=4, max_length=64)
    # Nothing may come of what others left in its pages.
    network.kv_pages.fill_(float("nan"))
    slots = Slots(
        3,
        max_length=64,
        page_size=PAGE_SIZE,
        scratch_page=8,
        vocab_size=CONFIG.vocab_size,
        device=CPU,
        upload=lambda array: torch.from_numpy(np.ascontiguousarray(array)),
    )
    step = DecodeStep(network, slots, max_rows=4, vocab_size=CONFIG.vocab_size)
    known = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 24).astype(np.int32)
    prompt, pages = known[:21], [5, 2, 7]
    shape = PrefillShape(num_rows=24, num_chunks=2, max_tokens=20, max_pages=4)
    chunk = Chunk(prompt[:20], 0, pages[:2])
    packed = packed_chunks([chunk], shape=shape, page_size=PAGE_SIZE, scratch_page=8)
    network.prefill(unpacked(torch.from_numpy(packed), shape=shape))
    key = stream_key("grpo:0:0:0", seed=0, sample=0, turn=0)
    request = Request((0, 0), prompt, key, Sampling(temperature=0.9, max_new_tokens=6))
    slots.start([Row(1, request, 20, known, ())])
    slots.set_pages({1: pages})
    step.rows[:2] = torch.tensor([1, 3])
    for _ in range(6):
        step.run(StepKind(2, 1))

    # Three known tokens were fed after the first; then three were sampled, which is all that the limit leaves.
    tokens = step.results[3:6, 0, 0].numpy()
    logprobs = step.results[3:6, 1, 0].view(torch.float32).numpy()
    assert (int(slots.state[1, ALIVE]), int(slots.state[1, POSITION])) == (0, 26)
    assert int(slots.state[3, POSITION]) == 0
    sequence = torch.from_numpy(np.concatenate([known, tokens])).long()
    layout = PackedLayout.from_lengths([len(sequence)])
    hidden = model.forward_packed(sequence, layout.positions, layout)
    expected, _ = model.token_logprobs(hidden[23:-1], sequence[24:], temperature=0.9)
    np.testing.assert_allclose(logprobs, expected.numpy(), atol=limit)
