"""The kernels of the CUDA runner, run by Triton's interpreter on small shapes; `tests/gpu` has the device itself."""

from __future__ import annotations

import os
from typing import Any

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
from kintsugi.generation.cuda.decode_step import DecodeStep, Slots, StepKind
from kintsugi.generation.cuda.matmul import MAX_SPLIT_ROWS, split_tiling
from kintsugi.generation.cuda.network import PagedNetwork
from kintsugi.generation.cuda.prefill_inputs import PrefillShape, packed_chunks, unpacked
from kintsugi.generation.cuda.sampling import SamplingSummary, draw, summarize
from kintsugi.generation.cuda.slot_state import ALIVE, POSITION, RNG_KEY, packed_rows
from kintsugi.generation.engine.requests import GenerationRequest
from kintsugi.generation.engine.rng import stream_key, uniforms
from kintsugi.generation.engine.runner import DecodeRow, PrefillChunk
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.attention import PackedLayout
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.types import SamplingParams

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
HEADS = [(6, 2, 64), (4, 2, 24), (40, 1, 16)]
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


def test_what_a_blocks_mass_is_rounded_by_is_not_the_probability_of_its_last_token() -> None:
    num_rows, vocab_size, key = 64, 4096, 13629332
    (uniform,) = uniforms(torch.tensor([key]), counters=torch.tensor([1])).tolist()
    assert 1 - 3e-8 < uniform < 1 - 2e-8
    state = torch.from_numpy(packed_rows(gpu_checks.rows_of([SamplingParams()] * num_rows)))
    state[:, RNG_KEY] = key
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 2
    logits[:, -1] = -60.0
    slots = torch.arange(num_rows, dtype=torch.int32)
    summary = SamplingSummary.empty(num_rows, vocab_size=vocab_size, device=CPU)
    summarize(logits, slots=slots, state=state, is_scaled=False, summary=summary)
    tokens = torch.zeros(1, num_rows, dtype=torch.int32)
    draw(
        logits,
        summary,
        processed=None,
        slots=slots,
        state=state,
        known=torch.zeros(num_rows, 8, dtype=torch.int32),
        cursors=torch.zeros(num_rows, dtype=torch.int32),
        result_tokens=tokens,
        result_logprobs=torch.zeros(1, num_rows),
    )
    assert (tokens > vocab_size - 300).all() and not (tokens == vocab_size - 1).any()


@pytest.mark.parametrize("depth", [100, 128, 576, 1024, 3072, 8960])
@pytest.mark.parametrize("num_columns", [16, 576, 1024, 1536, 4096])
def test_splits_of_a_product_cover_its_depth_and_none_is_empty(num_columns: int, depth: int) -> None:
    tilings = {
        split_tiling(count, num_columns=num_columns, depth=depth, dtype=torch.bfloat16)
        for count in (1, 17, MAX_SPLIT_ROWS)
    }
    (tiling,) = tilings
    if tiling is None:
        assert num_columns > 2048
        return
    assert (tiling.num_splits - 1) * tiling.split_depth(depth) < depth
    assert tiling.num_splits * tiling.split_depth(depth) >= depth
    too_many = MAX_SPLIT_ROWS + 1
    assert split_tiling(too_many, num_columns=num_columns, depth=depth, dtype=torch.bfloat16) is None
    assert split_tiling(1, num_columns=num_columns, depth=depth, dtype=torch.float32) is None


def new_slots(num_slots: int) -> Slots:
    return Slots(
        num_slots,
        max_length=64,
        page_size=PAGE_SIZE,
        scratch_page=8,
        vocab_size=CONFIG.vocab_size,
        device=CPU,
        upload=lambda array: torch.from_numpy(np.ascontiguousarray(array)),
    )


def test_what_edits_a_slots_logits_is_that_of_its_last_request() -> None:
    slots, prompt = new_slots(3), np.array([5, 9, 5], np.int32)

    def start(slot: int, **sampling: Any) -> None:
        request = GenerationRequest((slot, 0), prompt, 0, SamplingParams(max_new_tokens=4, **sampling))
        slots.start([DecodeRow(slot, request, 2, prompt, ())])

    start(0, repetition_penalty=2.0)
    start(1, logit_bias=((299, -3.0), (0, 4.0)))
    start(2, repetition_penalty=2.0, logit_bias=((7, 1.0),))
    start(2, top_k=3)
    assert slots.edits is not None
    seen, biases = (each.nonzero().tolist() for each in slots.edits)
    assert (seen, biases) == ([[0, 5], [0, 9]], [[1, 0], [1, 299]])
    assert slots.edits.biases[1, [0, 299]].tolist() == [4.0, -3.0]
    for slot in range(2):
        start(slot)
    assert not any(each.any() for each in slots.edits)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.float16, 4e-3)])
@torch.no_grad()
def test_a_step_feeds_replays_samples_and_ends_rows_by_itself(dtype: torch.dtype, limit: float) -> None:
    model = Transformer(CONFIG, packed=True, dtype=dtype)
    initialize(model, seed=0)
    network = PagedNetwork(model, num_pages=9, page_size=PAGE_SIZE, max_rows=4, max_length=64)
    # Nothing may come of what others left in its pages.
    network.kv_pages.fill_(float("nan"))
    slots = new_slots(3)
    step = DecodeStep(network, slots, max_rows=4, vocab_size=CONFIG.vocab_size)
    known = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 24).astype(np.int32)
    prompt, pages = known[:21], [5, 2, 7]
    shape = PrefillShape(num_rows=24, num_chunks=2, max_tokens=20, max_pages=4)
    chunk = PrefillChunk(prompt[:20], 0, pages[:2])
    packed = packed_chunks([chunk], shape=shape, page_size=PAGE_SIZE, scratch_page=8)
    network.prefill(unpacked(torch.from_numpy(packed), shape=shape))
    key = stream_key("grpo:0:0:0", seed=0, sample=0, turn=0)
    request = GenerationRequest((0, 0), prompt, key, SamplingParams(temperature=0.9, max_new_tokens=6))
    slots.start([DecodeRow(1, request, 20, known, ())])
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


@pytest.mark.parametrize("learns", [(True, False), (False, True), (True, True)])
def test_logprobs_and_their_gradient_are_those_of_torchs_operations(learns: tuple[bool, bool]) -> None:
    from kintsugi.model import logprob_kernels, logprobs

    logits = 4 * torch.randn(7, 5000)
    targets = torch.randint(0, 5000, (7,))
    found = []
    for module in (logprob_kernels.summarize, logprobs._summarize):
        sums = torch.empty(3, 7)
        module(
            logits.clone(),
            targets=targets,
            temperature=0.7,
            logprobs=sums[0],
            entropy=sums[1],
            normalizer=sums[2],
        )
        found.append(sums)
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)
    upstream = [torch.randn(7) if wanted else None for wanted in learns]
    gradients = [
        gradient(
            logits.clone(),
            targets=targets,
            temperature=0.7,
            normalizer=found[1][2],
            entropy=found[1][1],
            logprob_gradient=upstream[0],
            entropy_gradient=upstream[1],
            dtype=torch.float32,
        )
        for gradient in (logprob_kernels.gradient_of_logits, logprobs._gradient_of_logits)
    ]
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-5)
