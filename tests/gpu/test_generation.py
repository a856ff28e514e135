"""The CUDA runner: its kernels, its steps, and what its bits depend on."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kintsugi.errors import ModelError
from kintsugi.generation.engine.requests import GenerationRequest
from kintsugi.generation.engine.rng import stream_key
from kintsugi.generation.engine.runner import DecodedTokens, DecodeRow, PrefillChunk
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.attention import PackedLayout
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.types import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CudaRunner = pytest.importorskip("kintsugi.generation.cuda.runner", reason="needs Triton").CudaRunner

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=4000,
    hidden_size=256,
    intermediate_size=768,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    max_positions=2048,
    qk_norm=True,
)
CUDA = torch.device("cuda", 0)
MAX_LENGTH = 2048
NUM_SLOTS = 64
DTYPES = [torch.float32, torch.bfloat16]


def new_model(dtype: torch.dtype = torch.bfloat16, *, config: ModelConfig = CONFIG) -> Transformer:
    model = Transformer(config, packed=True, dtype=dtype, device=CUDA)
    initialize(model, seed=1)
    return model


class Driver:
    """An engine of the simplest kind: every request gets its own pages, in an order of its own."""

    def __init__(
        self,
        model: Transformer,
        *,
        deterministic: bool,
        seed: int = 0,
        uses_graphs: bool = True,
        num_slots: int = NUM_SLOTS,
        num_pages: int = NUM_SLOTS * MAX_LENGTH // 16,
    ) -> None:
        self.runner = CudaRunner(
            model,
            num_slots=num_slots,
            max_length=MAX_LENGTH,
            num_pages=num_pages,
            deterministic=deterministic,
            uses_graphs=uses_graphs,
        )
        self.free_pages = np.random.default_rng(seed).permutation(num_pages).tolist()

    def start(
        self,
        slot: int,
        request: GenerationRequest,
        *,
        produced: Sequence[int] = (),
        ends: tuple[int, ...] = (),
    ) -> None:
        pages = [self.free_pages.pop() for _ in range(-(-request.max_length // 16))]
        known = np.concatenate([request.prompt, np.array(produced, np.int32)])
        prefilled = len(request.prompt) - 1
        size = self.runner.shape.chunk_size
        chunks = [
            PrefillChunk(
                known[start : min(start + size, prefilled)],
                start,
                pages[: -(-min(start + size, prefilled) // 16)],
            )
            for start in range(0, prefilled, size)
        ]
        for first in range(0, len(chunks), self.runner.shape.max_chunks):
            self.runner.prefill(chunks[first : first + self.runner.shape.max_chunks])
        self.runner.start([DecodeRow(slot, request, prefilled, known, ends)])
        self.runner.set_pages({slot: pages})

    def decode(
        self, slots: Sequence[int], *, visits: Sequence[int]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """[steps, slots]; a visit is launched before the one before is read."""
        pending = [self.runner.decode(slots, num_steps=num_steps) for num_steps in visits]
        results: list[DecodedTokens] = [each.result() for each in pending]
        return np.concatenate([each.tokens for each in results]), np.concatenate(
            [each.logprobs for each in results]
        )


def request(
    index: int, *, length: int, num_tokens: int = 24, vocab_size: int = 4000, **sampling: object
) -> GenerationRequest:
    prompt = np.random.default_rng(index).integers(0, vocab_size, length).astype(np.int32)
    key = stream_key(f"grpo:0:{index}:0", seed=0, sample=0, turn=0)
    return GenerationRequest((index, 0), prompt, key, SamplingParams(max_new_tokens=num_tokens, **sampling))  # type: ignore[arg-type]


@torch.no_grad()
def trainer_logprobs(model: Transformer, sequence: NDArray[np.int32], *, start: int) -> NDArray[np.float32]:
    tokens = torch.from_numpy(sequence).long().to(CUDA)
    layout = PackedLayout.from_lengths([len(tokens)], device=CUDA)
    hidden = model.forward_packed(tokens, layout.positions, layout)
    logprobs, _ = model.token_logprobs(hidden[start - 1 : -1], tokens[start:])
    return logprobs.cpu().numpy()


def test_every_kernel_computes_what_torch_computes() -> None:
    from benchmarks import gpu_checks

    gpu_checks.check_everything()
    assert gpu_checks.wrong_checks() == []
    assert len(gpu_checks.report["checks"]) > 40


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("dtype", "mean"), [(torch.float32, 3e-6), (torch.bfloat16, 5e-3)])
def test_sampled_logprobs_are_the_trainers(dtype: torch.dtype, mean: float, deterministic: bool) -> None:
    """Over contexts of one split of the attention, and of two."""
    model = new_model(dtype)
    driver = Driver(model, deterministic=deterministic)
    lengths = [1, 2, 17, 100, 257, 900, 1000, 1400]
    requests = [request(i, length=length, num_tokens=40) for i, length in enumerate(lengths)]
    for slot, each in enumerate(requests):
        driver.start(slot, each)
    tokens, logprobs = driver.decode(range(len(lengths)), visits=(8, 8, 24))
    differences = []
    for column, each in enumerate(requests):
        sequence = np.concatenate([each.prompt, tokens[:, column]])
        expected = trainer_logprobs(model, sequence, start=len(each.prompt))
        differences.append(np.abs(expected - logprobs[:, column]))
    assert np.mean(differences) < mean, [float(each.mean()) for each in differences]
    assert np.max(differences) < 100 * mean


@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_neighbours_nor_slot_nor_pages_nor_a_replay_change_a_bit(dtype: torch.dtype) -> None:
    model = new_model(dtype)
    wanted = request(7, length=1100, num_tokens=30)
    alone = Driver(model, deterministic=True)
    alone.start(3, wanted)
    tokens, logprobs = alone.decode([3], visits=(10, 10, 10))

    crowded = Driver(model, deterministic=True, seed=1)
    for slot in range(NUM_SLOTS):
        crowded.start(
            slot, wanted if slot == 60 else request(100 + slot, length=1 + 11 * slot, num_tokens=30)
        )
    among, among_logprobs = crowded.decode(range(NUM_SLOTS), visits=(7, 13, 10))
    np.testing.assert_array_equal(among[:, 60], tokens[:, 0])
    np.testing.assert_array_equal(among_logprobs[:, 60], logprobs[:, 0])

    crowded.runner.stop([60])
    crowded.start(60, wanted, produced=tokens[:12, 0].tolist())
    again, again_logprobs = crowded.decode([60, 2], visits=(12, 18))
    np.testing.assert_array_equal(again[12:, 0], tokens[12:, 0])
    np.testing.assert_array_equal(again_logprobs[12:, 0], logprobs[12:, 0])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_runner_that_was_warmed_up_before_its_weights_came_computes_the_same_bits(
    deterministic: bool,
) -> None:
    wanted = request(7, length=80, num_tokens=30)
    cold = Driver(new_model(), deterministic=deterministic)
    cold.start(3, wanted)
    expected, expected_logprobs = cold.decode([3], visits=(10, 20))

    model = Transformer(CONFIG, packed=True, dtype=torch.bfloat16, device=CUDA)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))  # As memory may be that nothing was loaded into.
    warm = Driver(model, deterministic=deterministic)
    warm.runner.warm_up()
    warm.runner.load({name: each.detach() for name, each in new_model().named_parameters()})
    warm.start(3, wanted)
    tokens, logprobs = warm.decode([3], visits=(10, 20))
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(logprobs, expected_logprobs)


@pytest.mark.parametrize("num_slots", [1, 3, 5, 130])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_of_a_step_of_any_size_has_the_same_bits(dtype: torch.dtype, num_slots: int) -> None:
    driver = Driver(new_model(dtype), deterministic=True, num_slots=num_slots)
    for slot in range(num_slots):
        driver.start(slot, request(7, length=40))
    tokens, logprobs = driver.decode(range(num_slots), visits=(8,))
    np.testing.assert_array_equal(tokens, np.broadcast_to(tokens[:, :1], tokens.shape))
    np.testing.assert_array_equal(logprobs, np.broadcast_to(logprobs[:, :1], logprobs.shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompts_place_among_others_of_its_prefill_does_not_change_a_bit(dtype: torch.dtype) -> None:
    runner = Driver(new_model(dtype), deterministic=True).runner
    prompt = request(7, length=80).prompt
    other = PrefillChunk(request(8, length=37).prompt, 0, [20, 21, 22])
    for before, pages in ([], [0, 1, 2, 3, 4]), ([other], [9, 8, 7, 6, 5]):
        runner.prefill(
            [*before, PrefillChunk(prompt[:64], 0, pages[:4]), PrefillChunk(prompt[64:], 64, pages)]
        )
    torch.cuda.synchronize()
    first, second = runner._network.kv_pages[:, :, :5], runner._network.kv_pages[:, :, 5:10].flip(2)
    assert first.any() and torch.equal(first, second)


def test_pages_may_lie_behind_two_billion_numbers() -> None:
    num_pages = 2**31 // (16 * CONFIG.kv_size) + 256
    driver = Driver(new_model(), deterministic=True, num_pages=num_pages)
    for slot, first in enumerate((0, num_pages - 128)):
        driver.free_pages = list(range(first, first + 128))
        driver.start(slot, request(7, length=1100))
    tokens, logprobs = driver.decode([0, 1], visits=(8,))
    np.testing.assert_array_equal(tokens[:, 0], tokens[:, 1])
    np.testing.assert_array_equal(logprobs[:, 0], logprobs[:, 1])
    driver.runner.copy_pages([(num_pages - 30, 300), (100, num_pages - 200)])
    torch.cuda.synchronize()
    pages = driver.runner._network.kv_pages
    assert pages[:, :, 100].any() and pages[:, :, num_pages - 30].any()
    assert torch.equal(pages[:, :, 300], pages[:, :, num_pages - 30])
    assert torch.equal(pages[:, :, num_pages - 200], pages[:, :, 100])


def test_a_replayed_graph_gives_the_bits_of_its_launches() -> None:
    model = new_model()
    results = []
    for uses_graphs in (True, False):
        driver = Driver(model, deterministic=False, uses_graphs=uses_graphs)
        for slot in range(5):
            driver.start(slot, request(slot, length=30 + 100 * slot))
        results.append(driver.decode(range(5), visits=(4, 4)))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_many_short_prompts_are_prefilled_as_each_of_them_alone() -> None:
    """In calls that have room for few chunks, and for many; compared by what follows."""
    model = new_model(torch.float32)
    prompts = [np.arange(5 + i, dtype=np.int32) for i in range(20)]
    followed = []
    for size in (1, 7, 20):
        runner = Driver(model, deterministic=False).runner
        pages = [[2 * slot, 2 * slot + 1] for slot in range(20)]
        chunks = [PrefillChunk(each[:-1], 0, own) for each, own in zip(prompts, pages, strict=True)]
        for first in range(0, 20, size):
            runner.prefill(chunks[first : first + size])
        requests = [
            GenerationRequest((i, 0), each, i, SamplingParams(temperature=0.0))
            for i, each in enumerate(prompts)
        ]
        runner.start(
            [DecodeRow(i, each, len(each.prompt) - 1, each.prompt, ()) for i, each in enumerate(requests)]
        )
        runner.set_pages(dict(enumerate(pages)))
        followed.append(runner.decode(range(20), num_steps=4).result())
    for each in followed[1:]:
        np.testing.assert_allclose(each.logprobs, followed[0].logprobs, atol=1e-4)


def test_garbage_that_holds_graphs_does_not_spoil_a_capture() -> None:
    model = new_model()
    for _ in range(2):
        driver = Driver(model, deterministic=True)
        driver.start(0, request(0, length=9, num_tokens=8))
        threshold = gc.get_threshold()
        gc.set_threshold(1, 1, 1)
        try:
            driver.decode([0], visits=(8,))
        finally:
            gc.set_threshold(*threshold)
        driver.runner.itself = driver.runner  # So that only the collector ends it.


def test_rows_end_by_themselves_and_write_no_further() -> None:
    driver = Driver(new_model(), deterministic=True)
    driver.start(0, request(0, length=9, num_tokens=20))
    tokens, _ = driver.decode([0], visits=(19,))
    end = int(tokens[6, 0])
    first = int(np.flatnonzero(tokens[:, 0] == end)[0])
    driver.start(1, request(0, length=9, num_tokens=20), ends=(3999, end))
    driver.start(2, request(0, length=9, num_tokens=4))
    driver.decode([1, 2], visits=(10,))
    torch.cuda.synchronize()
    assert driver.runner._slots.state[1, 1:3].tolist() == [9 + first, 0]
    assert driver.runner._slots.state[2, 1:3].tolist() == [12, 0]


def test_drawn_tokens_have_the_frequencies_of_the_distribution() -> None:
    """Chi-square over 64 × 300 draws after the same prompt, four standard deviations above what is expected."""
    model = new_model(torch.float32)
    driver = Driver(model, deterministic=False)
    num_rounds, temperature = 300, 0.3
    prompt = np.arange(5, dtype=np.int32)
    counts = np.zeros(CONFIG.vocab_size)
    for seed in range(num_rounds):
        keys = [stream_key("x", seed=seed, sample=slot, turn=0) for slot in range(NUM_SLOTS)]
        sampling = SamplingParams(temperature=temperature)
        requests = [GenerationRequest((slot, 0), prompt, key, sampling) for slot, key in enumerate(keys)]
        if seed == 0:
            for slot, each in enumerate(requests):
                driver.start(slot, each)
        driver.runner.start([DecodeRow(slot, each, 4, prompt, ()) for slot, each in enumerate(requests)])
        tokens, _ = driver.decode(range(NUM_SLOTS), visits=(1,))
        counts += np.bincount(tokens[0], minlength=CONFIG.vocab_size)
    layout = PackedLayout.from_lengths([5], device=CUDA)
    with torch.no_grad():
        hidden = model.forward_packed(torch.arange(5, device=CUDA), layout.positions, layout)
        probabilities = (model.logits(hidden[-1:])[0] / temperature).softmax(-1).double().cpu().numpy()
    expected = probabilities * num_rounds * NUM_SLOTS
    order = np.argsort(expected)
    groups = (np.cumsum(expected[order]) / 40).astype(int)
    observed, wanted = np.bincount(groups, counts[order]), np.bincount(groups, expected[order])
    observed, wanted = observed[wanted > 20], wanted[wanted > 20]
    assert len(wanted) > 50
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    assert statistic < len(wanted) + 4 * np.sqrt(2 * len(wanted)), (statistic, len(wanted))


def test_cuts_edits_and_top_logprobs_apply_to_the_rows_that_ask_for_them() -> None:
    driver = Driver(new_model(), deterministic=True)
    driver.start(0, request(0, length=9))
    plain, plain_logprobs = driver.decode([0], visits=(8,))
    driver.start(0, request(0, length=9))
    driver.start(1, request(0, length=9, top_k=1))
    driver.start(2, request(0, length=9, temperature=0.0, logit_bias=((17, 1000.0),)))
    driver.start(3, request(0, length=9, top_logprobs=5, temperature=0.0))
    driver.start(4, request(0, length=9, temperature=0.0, repetition_penalty=1e6))
    pending = driver.runner.decode(range(5), num_steps=8).result()
    np.testing.assert_array_equal(pending.tokens[:, 0], plain[:, 0])
    np.testing.assert_array_equal(pending.logprobs[:, 0], plain_logprobs[:, 0])
    assert (pending.tokens[:, 2] == 17).all()
    np.testing.assert_array_equal(pending.tokens[:, 1], pending.tokens[:, 3])
    np.testing.assert_array_equal(pending.top_tokens[:, 3, 0], pending.tokens[:, 3])
    np.testing.assert_allclose(pending.top_logprobs[:, 3, 0], pending.logprobs[:, 3], atol=1e-5)
    assert (np.diff(pending.top_logprobs[:, 3]) <= 0).all()
    assert len(set(pending.tokens[:, 4].tolist())) == 8
    driver.runner.stop([1, 2, 3, 4])
    driver.start(2, request(0, length=9))
    driver.start(4, request(0, length=9, top_k=1))
    after = driver.runner.decode([2, 4], num_steps=8).result()
    np.testing.assert_array_equal(after.tokens[:, 0], plain[:, 0])
    np.testing.assert_array_equal(after.tokens[:, 1], pending.tokens[:, 3])


def test_new_weights_take_effect_between_two_visits_and_in_place() -> None:
    model, other = new_model(), Transformer(CONFIG, packed=True, dtype=torch.bfloat16, device=CUDA)
    initialize(other, seed=2)
    driver = Driver(model, deterministic=True)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    driver.start(0, request(0, length=40))
    first = driver.runner.decode([0], num_steps=8)
    driver.runner.load({name: each.detach().cpu() for name, each in other.named_parameters()})
    second = driver.runner.decode([0], num_steps=8)
    old, new = first.result(), second.result()
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    fresh = Driver(new_model(), deterministic=True)
    fresh.start(0, request(0, length=40))
    tokens, _ = fresh.decode([0], visits=(16,))
    np.testing.assert_array_equal(old.tokens[:, 0], tokens[:8, 0])
    assert (new.tokens[:, 0] != tokens[8:, 0]).any()


def test_weights_that_are_not_all_there_change_nothing() -> None:
    model = new_model()
    runner = Driver(model, deterministic=False).runner
    before = [parameter.detach().clone() for parameter in model.parameters()]
    weights = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    del weights["model.norm.weight"]
    for tensors in weights, {name: each.cpu() for name, each in weights.items()}:
        with pytest.raises(ModelError, match="a difference in"):
            runner.load(tensors)
    torch.cuda.synchronize()
    assert all(map(torch.equal, before, model.parameters()))


def test_a_swap_of_staged_weights_takes_milliseconds() -> None:
    config = ModelConfig(
        family="llama", vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_layers=8, num_heads=16,
        num_kv_heads=4, head_dim=128, max_positions=2048,
    )  # fmt: skip
    model = new_model(config=config)
    driver = Driver(model, deterministic=False)
    driver.start(0, request(0, length=20, vocab_size=32000))
    driver.decode([0], visits=(2,))
    staged = driver.runner.stage({name: each.detach().cpu() for name, each in model.named_parameters()})
    start = time.perf_counter()
    driver.runner.load(staged)
    torch.cuda.synchronize()
    assert time.perf_counter() - start < 0.02


def test_copied_pages_hold_what_was_copied() -> None:
    runner = Driver(new_model(), deterministic=False).runner
    pages = runner._network.kv_pages
    torch.cuda.synchronize()
    pages.normal_()
    torch.cuda.synchronize()
    before = pages[:, :, [3, 9]].clone()
    runner.copy_pages([(3, 5), (9, 7)])
    torch.cuda.synchronize()
    assert torch.equal(pages[:, :, [5, 7]], before)
    assert torch.equal(pages[:, :, [3, 9]], before)
