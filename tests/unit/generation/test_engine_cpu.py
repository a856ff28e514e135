"""The engine with a real model on the CPU: in deterministic mode a sample has the same bits whatever happens to it."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kintsugi.errors import ModelError
from kintsugi.generation.cpu.runner import PAGE_SIZE, CpuRunner
from kintsugi.generation.engine.engine import Engine
from kintsugi.generation.engine.requests import GenerationOutput, GenerationRequest, RequestId
from kintsugi.generation.engine.rng import stream_key
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.attention import PackedLayout
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.types import FinishReason, SamplingParams

_CONFIG = ModelConfig(
    family="llama",
    vocab_size=14,
    hidden_size=96,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=24,
    max_positions=64,
)
_END = 13
_MAX_LENGTH = 64


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = Transformer(_CONFIG, packed=True)
    initialize(model, 0)
    return model


def _weights(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _engine(
    model: Transformer,
    *,
    slots: int = 8,
    num_pages: int | None = None,
    end_token_ids: Sequence[int] = (),
    deterministic: bool = True,
    steps_per_iteration: int = 1,
    overlap: bool = False,
) -> Engine:
    """With a model of its own, which starts as a copy of `model`."""
    own = Transformer(_CONFIG, packed=True)
    runner = CpuRunner(
        own,
        num_slots=slots,
        max_length=_MAX_LENGTH,
        num_pages=num_pages or slots * _MAX_LENGTH // PAGE_SIZE,
        deterministic=deterministic,
    )
    engine = Engine(
        runner,
        end_token_ids=end_token_ids,
        deterministic=deterministic,
        steps_per_iteration=steps_per_iteration,
        overlap=overlap,
    )
    engine.load(0, _weights(model))
    return engine


def _request(
    sample: int, *, job: int = 0, prompt: Sequence[int] | None = None, **sampling: Any
) -> GenerationRequest:
    """A request whose prompt and lengths depend on `sample`, so that neighbours are out of step."""
    own = (np.arange(3 + sample % 23, dtype=np.int32) * 5 + sample) % 12
    return GenerationRequest(
        (job, sample),
        prompt=own if prompt is None else np.array(prompt, np.int32),
        rng_key=stream_key(f"ticket {job}", seed=0, sample=sample, turn=0),
        sampling=SamplingParams(**{"max_new_tokens": 6 + sample % 7, **sampling}),
    )


def _drain(engine: Engine) -> dict[RequestId, GenerationOutput]:
    outputs: dict[RequestId, GenerationOutput] = {}
    while not engine.idle:
        outputs |= {output.request.id: output for output in engine.step()}
    return outputs


def _generate(engine: Engine, requests: Iterable[GenerationRequest]) -> dict[RequestId, GenerationOutput]:
    engine.submit(requests)
    return _drain(engine)


def _bits(output: GenerationOutput) -> tuple[bytes, bytes, FinishReason | None]:
    return output.tokens.ids.tobytes(), output.tokens.logprobs.tobytes(), output.finish


def test_a_sample_has_the_same_bits_alone_among_others_in_any_slot_and_on_another_engine(
    model: Transformer,
) -> None:
    wanted = _request(20)
    (alone,) = _generate(_engine(model, slots=64), [wanted]).values()
    others = [_request(sample, job=1) for sample in range(63)]
    among = _engine(model, slots=64)
    for place in (0, 17, 63):
        together = _generate(among, [*others[:place], wanted, *others[place:]])
        assert len(together) == 64
        assert _bits(together[wanted.id]) == _bits(alone)


def test_a_sample_has_the_same_bits_when_its_prompt_was_computed_by_another(model: Transformer) -> None:
    prompt = [(place * 5) % 12 for place in range(40)]
    alone = {
        key: _bits(output)
        for sample in range(4)
        for key, output in _generate(_engine(model), [_request(sample, prompt=prompt)]).items()
    }
    engine = _engine(model)
    _generate(engine, [_request(0, job=1, prompt=prompt[:33])])
    shared = _generate(engine, [_request(sample, prompt=prompt) for sample in range(4)])
    assert {key: _bits(output) for key, output in shared.items()} == alone
    assert engine.stats()["prefix_hit_tokens"] >= 32 + 3 * 39


def test_samples_have_the_same_bits_when_pages_run_out(model: Transformer) -> None:
    requests = [_request(sample, max_new_tokens=30) for sample in range(12)]
    undisturbed = _generate(_engine(model), requests)
    tight = _engine(model, num_pages=7)
    disturbed = _generate(tight, requests)
    assert tight.stats()["preemptions"] > 0
    for key, output in undisturbed.items():
        assert _bits(disturbed[key]) == _bits(output)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_length_of_a_visit_and_looking_late_do_not_change_a_bit(
    model: Transformer, overlap: bool
) -> None:
    requests = [_request(sample, max_new_tokens=20) for sample in range(20)]
    expected = _generate(_engine(model, end_token_ids=[_END]), requests)
    visits = _engine(model, end_token_ids=[_END], steps_per_iteration=5, overlap=overlap)
    for key, output in _generate(visits, requests).items():
        assert _bits(output) == _bits(expected[key])


@pytest.mark.parametrize("num_visits", [0, 1, 3, 7])
def test_a_sample_has_the_same_bits_after_being_interrupted_and_resumed_elsewhere(
    model: Transformer, num_visits: int
) -> None:
    wanted = _request(20, max_new_tokens=12)
    (undisturbed,) = _generate(_engine(model), [wanted]).values()
    first, second = _engine(model), _engine(model)
    first.submit([wanted, _request(1, max_new_tokens=20)])
    for _ in range(num_visits):
        first.step()
    interrupted = first.interrupt(wanted.id)
    assert interrupted is not None and interrupted.finish is None
    assert len(interrupted.tokens.ids) == num_visits
    resumed = _generate(second, [_request(2), _request(3), interrupted.resume()])[wanted.id]
    assert _bits(resumed) == _bits(undisturbed)
    assert _drain(first).keys() == {(0, 1)}


def test_without_equal_bits_disturbed_samples_differ_by_rounding_only(model: Transformer) -> None:
    requests = [_request(sample, max_new_tokens=30) for sample in range(12)]
    expected = _generate(_engine(model), requests)
    fast = _engine(model, num_pages=7, deterministic=False)
    disturbed = _generate(fast, requests)
    assert fast.stats()["preemptions"] > 0
    for key, output in expected.items():
        np.testing.assert_array_equal(output.tokens.ids, disturbed[key].tokens.ids)
        np.testing.assert_allclose(output.tokens.logprobs, disturbed[key].tokens.logprobs, atol=1e-5)


def test_the_number_of_slots_changes_rounding_only(model: Transformer) -> None:
    """Not the bits on every processor: matrix libraries may choose their kernel by the number of rows."""
    requests = [_request(sample) for sample in range(40)]
    few = _generate(_engine(model, slots=4), requests)
    many = _generate(_engine(model, slots=128), requests)
    for key, output in few.items():
        np.testing.assert_array_equal(output.tokens.ids, many[key].tokens.ids)
        np.testing.assert_allclose(output.tokens.logprobs, many[key].tokens.logprobs, atol=1e-5)


@pytest.mark.parametrize("deterministic", [True, False])
def test_log_probabilities_are_those_of_a_packed_forward_pass(
    model: Transformer, deterministic: bool
) -> None:
    engine = _engine(model, deterministic=deterministic)
    for output in _generate(engine, [_request(sample) for sample in range(12)]).values():
        prompt = output.request.prompt
        sequence = torch.from_numpy(np.concatenate([prompt, output.tokens.ids])).long()
        layout = PackedLayout.from_lengths([len(sequence) - 1])
        hidden = model.forward_packed(sequence[:-1], layout.positions, layout)
        logprobs, _ = model.token_logprobs(hidden, sequence[1:])
        sampled = torch.from_numpy(output.tokens.logprobs)
        torch.testing.assert_close(logprobs[len(prompt) - 1 :].detach(), sampled, atol=1e-5, rtol=0)


def test_an_end_token_is_kept_when_sampled_and_never_appended(model: Transformer) -> None:
    requests = [_request(sample, max_new_tokens=12) for sample in range(60)]
    outputs = _generate(_engine(model, end_token_ids=[_END]), requests).values()
    ended = [output for output in outputs if output.finish is FinishReason.EOS]
    truncated = [output for output in outputs if output.finish is FinishReason.LENGTH]
    assert len(ended) + len(truncated) == 60 and ended and truncated
    for output in ended:
        assert output.tokens.ids[-1] == _END and _END not in output.tokens.ids[:-1]
    for output in truncated:
        assert len(output.tokens.ids) == 12 and _END not in output.tokens.ids[:-1]


def test_new_keys_and_values_are_computed_when_new_weights_ask_for_it(model: Transformer) -> None:
    """What follows is then what the new weights give to these tokens; with the old keys and values it is not."""
    other = Transformer(_CONFIG, packed=True)
    initialize(other, 1)
    request = _request(20, max_new_tokens=12)
    outputs = {}
    for running in ("keep", "recompute"):
        engine = _engine(model)
        engine.submit([request])
        for _ in range(5):
            engine.step()
        engine.load(1, _weights(other), running=running)
        (outputs[running],) = _drain(engine).values()
        assert outputs[running].tokens.versions.tolist() == [0] * 5 + [1] * 7
    interrupted = GenerationOutput(request, outputs["recompute"].tokens.between(0, 5), None)
    (resumed,) = _generate(_engine(other), [interrupted.resume()]).values()
    assert _bits(resumed) == _bits(outputs["recompute"])
    assert not np.array_equal(outputs["keep"].tokens.logprobs, outputs["recompute"].tokens.logprobs)


def test_weights_of_another_model_are_refused_before_any_is_copied(model: Transformer) -> None:
    engine = _engine(model)
    weights = _weights(model)
    (expected,) = _generate(engine, [_request(0)]).values()
    with pytest.raises(ModelError, match="exactly the model's parameters"):
        engine.load(1, dict(list(weights.items())[:-1]))
    zeros = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    with pytest.raises(ModelError, match="of shape"):
        engine.load(1, zeros | {"model.norm.weight": torch.zeros(3)})
    assert engine.version == 0
    (again,) = _generate(engine, [_request(0)]).values()
    assert _bits(again) == _bits(expected)


@pytest.mark.parametrize("deterministic", [True, False])
def test_what_bent_the_last_request_of_a_row_does_not_bend_the_next_one(
    model: Transformer, deterministic: bool
) -> None:
    """Nor what bends its neighbour, for whom the biases of all rows are added."""
    requested = [_request(2, max_new_tokens=12), _request(3, top_k=4)]
    expected = _generate(_engine(model, deterministic=deterministic), requested)
    engine = _engine(model, deterministic=deterministic)
    _generate(engine, [_request(sample, logit_bias=((1, 50.0),)) for sample in range(8)])
    again = _generate(engine, requested)
    assert {key: output.tokens.ids.tolist() for key, output in again.items()} == {
        key: output.tokens.ids.tolist() for key, output in expected.items()
    }


def test_a_prompt_that_overflowed_and_never_decoded_leaves_nothing_in_its_pages(model: Transformer) -> None:
    good = _weights(model)
    engine = _engine(model)
    engine.load(1, {name: torch.full_like(tensor, float("nan")) for name, tensor in good.items()})
    engine.submit(_request(sample, prompt=[sample, *[1] * 40], max_new_tokens=4) for sample in range(5))
    broken = engine.step()
    assert len(broken) == 1 and not broken[0].finite and engine.stats()["running"] == 4
    engine.load(2, good)
    outputs = _drain(engine) | _generate(engine, [_request(sample, job=1) for sample in range(8)])
    assert len(outputs) == 12 and all(output.finite for output in outputs.values())


@pytest.mark.parametrize("deterministic", [True, False])
def test_an_overflowed_sample_is_marked_and_leaves_nothing_in_its_place(
    model: Transformer, deterministic: bool
) -> None:
    engine = _engine(model, slots=4, deterministic=deterministic)
    good = _weights(model)
    expected = _generate(engine, [_request(sample) for sample in range(4)])
    engine.load(1, good | {"model.layers.0.mlp.up_proj.weight": torch.full((256, 96), float("inf"))})
    broken = _generate(engine, [_request(sample, max_new_tokens=20) for sample in range(4)])
    assert len(broken) == 4 and not any(output.finite for output in broken.values())
    engine.load(2, good)
    again = _generate(engine, [_request(sample) for sample in range(4)])
    assert {key: _bits(output) for key, output in again.items()} == {
        key: _bits(output) for key, output in expected.items()
    }
