from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kintsugi.errors import ModelError
from kintsugi.generation.cpu.runner import CpuRunner
from kintsugi.generation.engine.runner import DecodedTokens, PrefillChunk
from kintsugi.model.architecture import LinearRope, Llama3Rope, ModelConfig, YarnRope
from kintsugi.model.transformer import Transformer, initialize
from tests.unit.generation.driven_runner import Driven, logprobs_by_the_trainer, request_of, runner_of

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama-biases": {"family": "llama", "num_kv_heads": 4, "attention_bias": True, "mlp_bias": True},
    "llama-linear": {"family": "llama", "rope_scaling": LinearRope(factor=2.0), "num_kv_heads": 1},
    "llama-llama3": {
        "family": "llama",
        "rope_scaling": Llama3Rope(8.0, 1.0, 4.0, 32),
        "tie_embeddings": True,
    },
    "qwen2": {"family": "qwen2", "attention_bias": True, "rope_scaling": YarnRope(4.0, 32)},
    "qwen3": {"family": "qwen3", "qk_norm": True, "head_dim": 24, "tie_embeddings": True},
}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def make_model(name: str = "llama", *, dtype: torch.dtype = torch.float32, **changes: Any) -> Transformer:
    sizes: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_positions": 128,
    }
    model = Transformer(ModelConfig(**{**sizes, **CONFIGS[name], **changes}), dtype=dtype)
    initialize(model, 0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                values = torch.linspace(-0.5, 0.5, len(parameter))
                parameter.copy_(values + parameter_name.endswith("norm.weight"))
            else:
                parameter.mul_(2.0)
    return model


def is_same(decoded: DecodedTokens, other: DecodedTokens, *, column: int = 0, other_column: int = 0) -> bool:
    return (decoded.tokens[:, column] == other.tokens[:, other_column]).all() and bool(
        (decoded.logprobs[:, column] == other.logprobs[:, other_column]).all()
    )


def decode_alone(model: Transformer, *, num_steps: int = 8, **options: Any) -> DecodedTokens:
    driven = Driven(runner_of(model, **options))
    driven.start(0, request_of(PROMPT, max_new_tokens=num_steps))
    return driven.decode([0], num_steps)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_are_the_trainers(name: str, deterministic: bool) -> None:
    model = make_model(name)
    decoded = decode_alone(model, deterministic=deterministic)
    expected = logprobs_by_the_trainer(model, [*PROMPT, *decoded.tokens[:, 0].tolist()])
    np.testing.assert_allclose(decoded.logprobs[:, 0], expected[len(PROMPT) - 1 :], atol=1e-5, rtol=0)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_logprobs_in_bfloat16_are_the_trainers_too(name: str, deterministic: bool) -> None:
    """Over as many keys everything is rounded alike; a single entry that is not would grow from layer to layer."""
    model = make_model(name, dtype=torch.bfloat16, num_layers=8)
    decoded = decode_alone(model, num_steps=28, max_length=64, deterministic=deterministic)
    sequence = [*PROMPT, *decoded.tokens[:, 0].tolist()]
    expected = logprobs_by_the_trainer(model, sequence, padded_length=64)
    np.testing.assert_allclose(decoded.logprobs[:, 0], expected[len(PROMPT) - 1 :], atol=1e-5, rtol=0)


def among_others(model: Transformer, *, slot: int, num_slots: int, seed: int) -> DecodedTokens:
    """With other prompts before, beside and after it, in pages in disorder."""
    generator = np.random.default_rng(seed)
    driven = Driven(runner_of(model, num_slots=num_slots))
    tables = generator.permutation(num_slots * 3).reshape(num_slots, 3).tolist()
    for other in generator.permutation(num_slots):
        prompt = generator.integers(0, 40, generator.integers(1, 30)).tolist()
        driven.start(int(other), request_of(prompt, number=int(other)), pages=tables[other])
        driven.decode([int(other)], int(generator.integers(1, 4)))
    driven.runner.stop([slot])
    driven.start(slot, request_of(PROMPT), pages=tables[slot])
    slots = generator.permutation(num_slots).tolist()
    decoded = driven.decode(slots, 8)
    column = slots.index(slot)
    return DecodedTokens(
        decoded.tokens[:, [column]], decoded.logprobs[:, [column]], decoded.top_tokens, decoded.top_logprobs
    )


@pytest.mark.parametrize(
    ("name", "num_slots", "dtype"),
    [
        ("llama", 5, torch.float32),
        ("llama", 64, torch.float32),
        ("qwen2", 7, torch.float32),
        ("qwen3", 64, torch.float32),
        ("llama", 64, torch.bfloat16),
    ],
)
def test_bits_depend_neither_on_neighbours_nor_on_slot_pages_or_history(
    name: str, num_slots: int, dtype: torch.dtype
) -> None:
    model = make_model(name, dtype=dtype)
    alone = decode_alone(model, num_slots=num_slots)
    for slot, seed in ((0, 1), (num_slots // 2, 2), (num_slots - 1, 3)):
        assert is_same(alone, among_others(model, slot=slot, num_slots=num_slots, seed=seed))


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_a_few_slots_are_padded_to_rows_with_equal_bits(num_slots: int) -> None:
    model = make_model()
    alone = decode_alone(model, num_slots=num_slots)
    assert is_same(alone, among_others(model, slot=num_slots - 1, num_slots=num_slots, seed=1))


@pytest.mark.parametrize("deterministic", [True, False])
def test_steps_together_are_steps_one_by_one(deterministic: bool) -> None:
    model = make_model()
    together = decode_alone(model, deterministic=deterministic)
    driven = Driven(runner_of(model, deterministic=deterministic))
    driven.start(0, request_of(PROMPT))
    singly = [driven.decode([0], 1) for _ in range(8)]
    assert np.concatenate([each.tokens for each in singly]).tolist() == together.tokens.tolist()
    np.testing.assert_allclose(
        np.concatenate([each.logprobs for each in singly]), together.logprobs, atol=1e-6, rtol=0
    )


def test_known_tokens_are_replayed_to_the_same_bits() -> None:
    model = make_model()
    first = decode_alone(model)
    driven = Driven(runner_of(model))
    produced = first.tokens[:5, 0].tolist()
    driven.start(2, request_of(PROMPT, produced=produced))
    replayed = driven.decode([2], 8)
    assert replayed.tokens[5:].tolist() == first.tokens[5:].tolist()
    assert replayed.logprobs.tolist() == first.logprobs.tolist()


def test_a_prompt_in_several_chunks_shares_pages_and_copies_its_last() -> None:
    model = make_model()
    driven = Driven(runner_of(model, num_slots=4, max_length=48, num_pages=12))
    prompt = (PROMPT * 2)[:38]
    request = request_of(prompt)
    driven.start(0, request, pages=[7, 2, 5])
    driven.runner.copy_pages([(5, 9)])
    driven.start_prefilled(1, request, pages=[7, 2, 9])
    decoded = driven.decode([1, 0], 8)
    assert is_same(decoded, decoded, column=0, other_column=1)
    expected = logprobs_by_the_trainer(model, [*prompt, *decoded.tokens[:, 0].tolist()])
    np.testing.assert_allclose(decoded.logprobs[:, 0], expected[37:], atol=1e-5, rtol=0)


def test_chunks_of_one_prompt_may_stand_in_one_call() -> None:
    model = make_model()
    driven = Driven(runner_of(model, max_length=64))
    prompt = np.asarray((PROMPT * 2)[:34], np.int32)
    size = driven.runner.shape.chunk_size
    assert size == 16
    driven.runner.prefill(
        [
            PrefillChunk(prompt[:16], 0, [3]),
            PrefillChunk(prompt[16:32], 16, [3, 1]),
            PrefillChunk(prompt[32:33], 32, [3, 1, 2]),
        ]
    )
    driven.start_prefilled(0, request_of(prompt.tolist()), pages=[3, 1, 2, 4])
    together = driven.decode([0], 8)
    separate = Driven(runner_of(model, max_length=64))
    separate.start(0, request_of(prompt.tolist()))
    assert is_same(together, separate.decode([0], 8))


def test_known_tokens_of_a_chunk_are_not_written() -> None:
    driven = Driven(runner_of(make_model()))
    tokens = np.asarray(PROMPT[:12], np.int32)
    driven.prefill(tokens, pages=[4], num_known=7)
    page = pages_of(driven.runner)[4]
    assert not page[:7].any()
    assert page[7:12].any(dim=-1).all()


def pages_of(runner: CpuRunner) -> torch.Tensor:
    return runner._pages.unflatten(0, (-1, runner.shape.page_size))


@pytest.mark.parametrize("ends_itself", [True, False])
def test_what_a_row_decoded_is_in_its_pages_when_it_stops_as_if_prefilled(ends_itself: bool) -> None:
    model = make_model()
    driven = Driven(runner_of(model, deterministic=False))
    max_new_tokens = 8 if ends_itself else 20
    driven.start(1, request_of(PROMPT, max_new_tokens=max_new_tokens), pages=[6, 1, 3])
    decoded = driven.decode([1], 8)
    driven.runner.stop([1])
    written = pages_of(driven.runner)[[6, 1]].flatten(0, 1)[: len(PROMPT) + 7].clone()
    prefilled = Driven(runner_of(model))
    sequence = np.asarray([*PROMPT, *decoded.tokens[:7, 0].tolist()], np.int32)
    prefilled.prefill(sequence, pages=[0, 2])
    expected = pages_of(prefilled.runner)[[0, 2]].flatten(0, 1)[: len(sequence)]
    torch.testing.assert_close(written, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_row_that_ends_feeds_nothing_more(deterministic: bool) -> None:
    model = make_model()
    tokens = decode_alone(model).tokens[:, 0].tolist()
    driven = Driven(runner_of(model, deterministic=deterministic))
    driven.start(0, request_of(PROMPT), end_token_ids=(tokens[2],))
    first_end = tokens.index(tokens[2])
    driven.decode([0], first_end + 1)
    held = driven.runner._regions.of_row(0).clone()
    assert held[..., len(PROMPT) + first_end - 1, :].any()
    driven.decode([0], 3)
    assert driven.runner._regions.of_row(0).equal(held)


def test_a_row_that_is_not_asked_for_waits_where_it_is() -> None:
    model = make_model()
    alone = decode_alone(model)
    driven = Driven(runner_of(model))
    driven.start(0, request_of(PROMPT))
    driven.start(3, request_of(PROMPT[:4], number=1))
    first = driven.decode([0, 3], 2)
    driven.decode([3], 3)
    rest = driven.decode([0], 6)
    assert np.concatenate([first.tokens[:, 0], rest.tokens[:, 0]]).tolist() == alone.tokens[:, 0].tolist()
    assert (
        np.concatenate([first.logprobs[:, 0], rest.logprobs[:, 0]]).tolist() == alone.logprobs[:, 0].tolist()
    )


def test_rows_that_are_left_are_moved_together() -> None:
    """In fast mode a step takes few rows when few are in use, wherever their slots are."""
    model = make_model()
    driven = Driven(runner_of(model, num_slots=16, max_length=64, deterministic=False))
    sampling: dict[str, Any] = {"max_new_tokens": 40, "repetition_penalty": 1.3}
    prompts = {slot: PROMPT[: slot + 1] for slot in range(16)}
    for slot, prompt in prompts.items():
        driven.start(slot, request_of(prompt, number=slot, **sampling))
    found: dict[int, list[NDArray[np.float32]]] = {9: [], 15: []}
    sampled: dict[int, list[int]] = {9: [], 15: []}
    slots = list(range(16))
    for _ in range(4):
        decoded = driven.decode(slots, 7)
        for slot in (9, 15):
            found[slot].extend(decoded.logprobs[:, slots.index(slot)])
            sampled[slot].extend(decoded.tokens[:, slots.index(slot)].tolist())
        gone = [slot for slot in slots if slot not in (9, 15)][:7]
        driven.runner.stop(gone)
        slots = [slot for slot in slots if slot not in gone]
    assert slots == [9, 15]
    for slot in slots:
        expected = logprobs_by_the_trainer(model, [*prompts[slot], *sampled[slot]])
        np.testing.assert_allclose(found[slot], expected[slot:], atol=1e-5, rtol=0)


def test_new_weights_are_copied_to_where_the_old_ones_are() -> None:
    model, other = make_model(), make_model()
    initialize(other, 1)
    runner = runner_of(model)
    addresses = [parameter.data_ptr() for parameter in runner._model.parameters()]
    driven = Driven(runner)
    driven.start(0, request_of(PROMPT))
    driven.decode([0], 2)
    runner.load({name: parameter.detach() for name, parameter in other.named_parameters()})
    assert [parameter.data_ptr() for parameter in runner._model.parameters()] == addresses
    driven.runner.stop([0])
    driven.start(0, request_of(PROMPT))
    assert is_same(driven.decode([0], 8), decode_alone(other))


@pytest.mark.parametrize("deterministic", [True, False])
def test_numbers_that_are_not_finite_do_not_reach_the_next_request(deterministic: bool) -> None:
    model = make_model()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    broken = {**weights, "model.norm.weight": torch.full_like(weights["model.norm.weight"], float("nan"))}
    broken["model.layers.0.mlp.down_proj.weight"] = weights["model.layers.0.mlp.down_proj.weight"] * float(
        "nan"
    )
    driven = Driven(runner_of(model, deterministic=deterministic))
    driven.runner.load(broken)
    driven.start(0, request_of((PROMPT * 2)[:38]), pages=[0, 1, 2])
    assert not np.isfinite(driven.decode([0], 3).logprobs).any()
    driven.runner.stop([0])
    driven.runner.load(weights)
    driven.start(0, request_of(PROMPT), pages=[2, 1, 0])
    decoded = driven.decode([0], 8)
    expected = logprobs_by_the_trainer(model, [*PROMPT, *decoded.tokens[:, 0].tolist()])
    np.testing.assert_allclose(decoded.logprobs[:, 0], expected[len(PROMPT) - 1 :], atol=1e-5, rtol=0)


def test_a_repetition_penalty_sees_what_has_been_fed_so_far() -> None:
    """So a replayed request draws what it drew the first time."""
    model = make_model()
    sampling: dict[str, Any] = {
        "repetition_penalty": 5.0,
        "top_k": 12,
        "logit_bias": ((7, 2.0),),
        "top_logprobs": 3,
    }
    first = Driven(runner_of(model))
    first.start(0, request_of(PROMPT, **sampling))
    decoded = first.decode([0], 8)
    replay = Driven(runner_of(model))
    replay.start(1, request_of(PROMPT, produced=decoded.tokens[:4, 0].tolist(), **sampling))
    replayed = replay.decode([1], 8)
    assert replayed.tokens[4:, 0].tolist() == decoded.tokens[4:, 0].tolist()
    assert replayed.top_tokens.tolist() == decoded.top_tokens.tolist()
    assert decoded.top_tokens.shape == (8, 1, 3)
    plain = decode_alone(model)
    assert plain.top_tokens.shape == (8, 1, 0)
    assert plain.tokens.tolist() != decoded.tokens.tolist()


def test_a_length_beyond_the_models_positions_is_refused() -> None:
    model = Transformer(make_model().config, packed=True)
    with pytest.raises(ModelError, match="`max_positions` 128, got 129"):
        CpuRunner(model, num_slots=4, max_length=129, num_pages=40, deterministic=True)
