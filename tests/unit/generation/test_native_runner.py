"""The compiled runner by itself; `test_exactness.py` has it in the engine."""

import threading
from typing import Any

import numpy as np
import pytest
import torch

from kintsugi.errors import ModelError
from kintsugi.generation.engine.factory import rounds_like_the_trainer
from kintsugi.generation.engine.rng import uniforms
from kintsugi.generation.engine.runner import DecodedTokens, PrefillChunk
from kintsugi.generation.engine.sampler import sample
from kintsugi.generation.native.library import compiler
from kintsugi.generation.native.runner import NativeRunner
from kintsugi.model.transformer import Transformer, initialize
from tests.unit.generation.driven_runner import Driven, logprobs_by_the_trainer, request_of
from tests.unit.generation.test_cpu_runner import CONFIGS, PROMPT, is_same, make_model

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
rounded_alike = pytest.mark.skipif(
    not rounds_like_the_trainer(),
    reason="in bfloat16 the order of the trainer's sums is that of CPUs with AVX512-BF16 and without AMX",
)


def weights_of(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def driven_of(
    model: Transformer, *, num_slots: int = 4, max_length: int = 64, num_pages: int = 16
) -> Driven[NativeRunner]:
    runner = NativeRunner(
        Transformer(model.config, packed=True, dtype=model.dtype),
        num_slots=num_slots,
        max_length=max_length,
        num_pages=num_pages,
    )
    runner.load(weights_of(model))
    return Driven(runner)


def decode_alone(model: Transformer, *, num_steps: int = 8, slot: int = 0, **sampling: Any) -> DecodedTokens:
    driven = driven_of(model)
    driven.start(slot, request_of(PROMPT, max_new_tokens=num_steps, **sampling))
    return driven.decode([slot], num_steps)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=rounded_alike)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_are_the_trainers(name: str, dtype: torch.dtype) -> None:
    """In bfloat16 too: it rounds where the trainer rounds."""
    model = make_model(name, dtype=dtype)
    decoded = decode_alone(model, num_steps=28)
    expected = logprobs_by_the_trainer(model, [*PROMPT, *decoded.tokens[:, 0].tolist()])
    np.testing.assert_allclose(decoded.logprobs[:, 0], expected[len(PROMPT) - 1 :], atol=1e-5, rtol=0)


@rounded_alike
def test_products_of_many_inputs_are_rounded_like_the_trainers() -> None:
    model = make_model(dtype=torch.bfloat16, intermediate_size=1024, num_layers=4)
    decoded = decode_alone(model, num_steps=28)
    expected = logprobs_by_the_trainer(model, [*PROMPT, *decoded.tokens[:, 0].tolist()])
    np.testing.assert_allclose(decoded.logprobs[:, 0], expected[len(PROMPT) - 1 :], atol=1e-5, rtol=0)


@rounded_alike
@pytest.mark.parametrize("num_prompt", [150, 230, 500, 740])
def test_many_keys_are_added_up_like_the_trainers(num_prompt: int) -> None:
    """In one run, in several, where the trainer has keys behind its last run, and in a second span."""
    model = make_model(dtype=torch.bfloat16, max_positions=1024, num_layers=4)
    prompt = np.random.default_rng(0).integers(0, 40, num_prompt).tolist()
    driven = driven_of(model, num_slots=1, max_length=768, num_pages=48)
    driven.start(0, request_of(prompt, max_new_tokens=28))
    decoded = driven.decode([0], 28)
    expected = logprobs_by_the_trainer(model, [*prompt, *decoded.tokens[:, 0].tolist()])
    np.testing.assert_allclose(decoded.logprobs[:, 0], expected[num_prompt - 1 :], atol=1e-5, rtol=0)


@rounded_alike
@pytest.mark.parametrize("hidden_size", [48, 328, 1088])
def test_norms_of_any_width_are_rounded_like_the_trainers(hidden_size: int) -> None:
    """In bfloat16, where one more rounding of a sum of squares is seen."""
    model = make_model(dtype=torch.bfloat16, hidden_size=hidden_size, num_layers=4)
    decoded = decode_alone(model, num_steps=28)
    expected = logprobs_by_the_trainer(model, [*PROMPT, *decoded.tokens[:, 0].tolist()])
    np.testing.assert_allclose(decoded.logprobs[:, 0], expected[len(PROMPT) - 1 :], atol=1e-5, rtol=0)


def test_widths_that_fill_no_vector_are_computed_right() -> None:
    model = make_model(
        hidden_size=40, intermediate_size=50, head_dim=10, num_heads=6, num_kv_heads=2, vocab_size=37
    )
    decoded = decode_alone(model)
    expected = logprobs_by_the_trainer(model, [*PROMPT, *decoded.tokens[:, 0].tolist()])
    np.testing.assert_allclose(decoded.logprobs[:, 0], expected[len(PROMPT) - 1 :], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_depend_neither_on_neighbours_nor_on_slot_or_pages(dtype: torch.dtype) -> None:
    model = make_model(dtype=dtype)
    alone = decode_alone(model)
    driven = driven_of(model, num_slots=11, num_pages=44)
    pages = np.random.default_rng(0).permutation(44).reshape(11, 4).tolist()
    for slot in range(11):
        prompt = PROMPT if slot == 7 else PROMPT[: slot + 1]
        processed: dict[str, Any] = {"top_k": 5, "top_logprobs": 2} if slot % 3 == 0 else {}
        driven.start(
            slot, request_of(prompt, number=0 if slot == 7 else slot, **processed), pages=pages[slot]
        )
    assert is_same(alone, driven.decode(range(11), 8), other_column=7)


def test_a_prefilled_token_has_the_bits_of_a_decoded_one() -> None:
    model = make_model()
    decoded = decode_alone(model)
    produced = decoded.tokens[:5, 0].tolist()
    driven = driven_of(model)
    driven.start(2, request_of([*PROMPT, *produced], max_new_tokens=3))
    resumed = driven.decode([2], 3)
    assert resumed.logprobs.tolist() == decoded.logprobs[5:].tolist()


def test_chunks_of_one_prompt_may_stand_in_one_call() -> None:
    model = make_model()
    driven = driven_of(model)
    prompt = np.asarray((PROMPT * 3)[:50], np.int32)
    driven.runner.prefill(
        [PrefillChunk(prompt[:32], 0, [3, 1]), PrefillChunk(prompt[32:49], 32, [3, 1, 2, 0])]
    )
    driven.start_prefilled(0, request_of(prompt.tolist()), pages=[3, 1, 2, 0])
    separate = driven_of(model)
    separate.start(0, request_of(prompt.tolist()))
    assert is_same(driven.decode([0], 8), separate.decode([0], 8))


def test_known_tokens_of_a_chunk_are_not_written() -> None:
    model = make_model()
    driven = driven_of(model)
    driven.prefill(np.asarray(PROMPT[:12], np.int32), pages=[4], num_known=7)
    config, page = model.config, driven.runner._pages[:, 4]
    values = page.view(config.num_layers, config.num_kv_heads, 2, -1)[:, :, 1].unflatten(-1, (16, -1))
    assert not values[:, :, :7].any()
    assert values[:, :, 7:12].any(dim=-1).all()


def test_numbers_that_are_not_finite_do_not_reach_the_next_request() -> None:
    model = make_model()
    weights = weights_of(model)
    name = "model.layers.0.mlp.down_proj.weight"
    driven = driven_of(model)
    driven.runner.load({**weights, name: weights[name] * float("nan")})
    driven.start(0, request_of((PROMPT * 2)[:38]), pages=[0, 1, 2])
    assert not np.isfinite(driven.decode([0], 3).logprobs).any()
    driven.runner.stop([0])
    driven.runner.load(weights)
    driven.start(0, request_of(PROMPT), pages=[2, 1, 0])
    assert is_same(driven.decode([0], 8), decode_alone(model))


def test_new_weights_are_taken_over_and_nothing_of_them_is_a_view() -> None:
    model, other = make_model(), make_model()
    initialize(other, 1)
    expected = decode_alone(other)
    driven = driven_of(model)
    given = {name: tensor.clone() for name, tensor in weights_of(other).items()}
    driven.runner.load(driven.runner.stage(given))
    for tensor in given.values():
        tensor.fill_(float("nan"))
    driven.start(0, request_of(PROMPT))
    assert is_same(driven.decode([0], 8), expected)


def test_weights_may_be_staged_while_rows_decode() -> None:
    model, other = make_model(), make_model()
    initialize(other, 1)
    driven = driven_of(model)
    driven.start(0, request_of(PROMPT, max_new_tokens=40))
    is_done = threading.Event()
    num_staged = 0

    def stage() -> None:
        nonlocal num_staged
        while not is_done.is_set():
            driven.runner.stage(weights_of(other))
            num_staged += 1

    thread = threading.Thread(target=stage)
    thread.start()
    try:
        decoded = driven.decode([0], 40)
    finally:
        is_done.set()
        thread.join()
    assert num_staged > 0
    assert is_same(decoded, decode_alone(model, num_steps=40))


def test_weights_of_another_model_are_refused() -> None:
    with pytest.raises(ModelError, match="shape"):
        driven_of(make_model()).runner.load(weights_of(make_model(hidden_size=32)))


@pytest.mark.parametrize("vocab_size", [5, 128, 300, 5000])
def test_tokens_are_drawn_like_the_samplers(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(64, vocab_size, generator=generator) * 3
    keys = torch.randint(-(2**62), 2**62, (64,), generator=generator)
    temperatures = torch.tensor([1.0, 0.5, 0.0, 2.0]).repeat(16)
    runner = driven_of(make_model(vocab_size=vocab_size), num_slots=64, num_pages=4).runner
    rows = runner._rows
    rows.rng_keys[:], rows.temperatures[:], rows.positions[:] = keys.numpy(), temperatures.numpy(), 6
    tokens, logprobs, _ = runner._draw(logits.clone(), np.arange(64))
    counters = torch.full((64,), 7)
    expected = sample(logits, temperatures=temperatures, uniforms=uniforms(keys, counters=counters))
    assert tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(logprobs, expected.logprobs.numpy(), atol=1e-5, rtol=0)


def test_what_is_left_out_is_never_drawn() -> None:
    model = make_model()
    decoded = decode_alone(model, num_steps=20, top_k=1, logit_bias=((3, -1e9),), repetition_penalty=1.5)
    assert 3 not in decoded.tokens
    greedy = decode_alone(
        model, num_steps=20, temperature=0.0, logit_bias=((3, -1e9),), repetition_penalty=1.5
    )
    assert decoded.tokens.tolist() == greedy.tokens.tolist()


def test_a_step_before_the_first_weights_is_our_mistake() -> None:
    model = make_model()
    runner = NativeRunner(
        Transformer(model.config, packed=True, dtype=model.dtype), num_slots=1, max_length=32, num_pages=2
    )
    with pytest.raises(AssertionError, match="before the first weights"):
        Driven(runner).start(0, request_of(PROMPT))
