from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kintsugi.errors import DataError, ModelError, UserError
from kintsugi.generation.engine import NO_TOKENS, Engine, Output, Request
from kintsugi.generation.noise import stream_key
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.attention import PackedLayout
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.types import Finish

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


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = Transformer(_CONFIG)
    initialize(model, 0)
    return model


def _engine(model: Transformer, *, slots: int = 8, end_token_ids: Sequence[int] = ()) -> Engine:
    return Engine(model, slots=slots, max_length=32, end_token_ids=end_token_ids)


def _request(sample: int, *, job: int = 0, **changes: Any) -> Request:
    """A request whose prompt and lengths depend on `sample`, so that neighbours are out of step."""
    fields: dict[str, Any] = {
        "prompt": (np.arange(3 + sample % 5, dtype=np.int32) * 5 + sample) % 12,
        "noise_key": stream_key(f"ticket {job}", seed=0, sample=sample, turn=0),
        "temperature": 1.0,
        "max_new_tokens": 6 + sample % 7,
    }
    return Request((job, sample), **{**fields, **changes})


def _drain(engine: Engine) -> dict[object, Output]:
    outputs: dict[object, Output] = {}
    while not engine.idle:
        outputs |= {output.request.id: output for output in engine.step()}
    return outputs


def _generate(engine: Engine, requests: Iterable[Request]) -> dict[object, Output]:
    engine.submit(requests)
    return _drain(engine)


def _bits(output: Output) -> tuple[bytes, bytes, Finish | None]:
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


def test_the_number_of_slots_changes_rounding_only(model: Transformer) -> None:
    """Not the bits on every processor: matrix libraries may choose their kernel by the number of rows."""
    requests = [_request(sample) for sample in range(40)]
    few = _generate(_engine(model, slots=4), requests)
    many = _generate(_engine(model, slots=128), requests)
    for key, output in few.items():
        np.testing.assert_array_equal(output.tokens.ids, many[key].tokens.ids)
        np.testing.assert_allclose(output.tokens.logprobs, many[key].tokens.logprobs, atol=1e-5)


@pytest.mark.parametrize("num_steps", [0, 1, 5, 7, 10])
def test_a_sample_has_the_same_bits_after_being_interrupted_and_resumed(
    model: Transformer, num_steps: int
) -> None:
    wanted = _request(20, prompt=np.arange(6, dtype=np.int32))
    (undisturbed,) = _generate(_engine(model), [wanted]).values()
    first, second = _engine(model), _engine(model)
    first.submit([_request(1, max_new_tokens=20), wanted])
    for _ in range(num_steps):
        first.step()
    interrupted = first.interrupt(wanted.id)
    assert interrupted is not None and interrupted.finish is None
    assert len(interrupted.tokens.ids) == max(0, num_steps - 5)
    resumed = _generate(second, [_request(2), _request(3), interrupted.resume()])[wanted.id]
    assert _bits(resumed) == _bits(undisturbed)
    assert _drain(first).keys() == {(0, 1)}


def test_log_probabilities_are_those_of_a_packed_forward_pass(model: Transformer) -> None:
    for output in _generate(_engine(model), [_request(sample) for sample in range(12)]).values():
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
    ended = [output for output in outputs if output.finish is Finish.EOS]
    truncated = [output for output in outputs if output.finish is Finish.LENGTH]
    assert len(ended) + len(truncated) == 60 and ended and truncated
    for output in ended:
        assert output.tokens.ids[-1] == _END and _END not in output.tokens.ids[:-1]
    for output in truncated:
        assert len(output.tokens.ids) == 12 and _END not in output.tokens.ids[:-1]


def test_a_stop_token_of_the_request_ends_it_and_no_other(model: Transformer) -> None:
    (free,) = _generate(_engine(model), [_request(5)]).values()
    stop = int(free.tokens.ids[2])
    first = free.tokens.ids.tolist().index(stop)
    stopping = _request(5, job=1, stop_token_ids=(stop,), noise_key=_request(5).noise_key)
    outputs = _generate(_engine(model), [stopping, _request(5)])
    assert outputs[stopping.id].tokens.ids.tolist() == free.tokens.ids[: first + 1].tolist()
    assert outputs[stopping.id].finish is Finish.EOS
    assert _bits(outputs[0, 5]) == _bits(free)


def test_every_token_carries_the_version_of_the_weights_that_made_it(model: Transformer) -> None:
    engine = _engine(model)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine.load(7, weights)
    engine.submit([_request(0, prompt=np.arange(4, dtype=np.int32), max_new_tokens=5)])
    for _ in range(6):
        engine.step()
    engine.load(8, weights)
    (output,) = _drain(engine).values()
    assert output.tokens.versions.tolist() == [7, 7, 7, 8, 8]


def test_new_weights_are_copied_into_the_same_memory() -> None:
    model = Transformer(_CONFIG)
    initialize(model, 0)
    other = Transformer(_CONFIG)
    initialize(other, 1)
    engine = _engine(model)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    engine.load(1, dict(other.named_parameters()))
    (loaded,) = _generate(engine, [_request(0)]).values()
    (expected,) = _generate(_engine(other), [_request(0)]).values()
    assert _bits(loaded) == _bits(expected)
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]


def test_weights_of_another_model_are_refused_before_any_is_copied() -> None:
    model = Transformer(_CONFIG)
    initialize(model, 0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine = _engine(model)
    with pytest.raises(ModelError, match="exactly the model's parameters"):
        engine.load(1, dict(list(before.items())[:-1]))
    zeros = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    with pytest.raises(ModelError, match="of shape"):
        engine.load(1, zeros | {"model.norm.weight": torch.zeros(3)})
    assert all(parameter.equal(before[name]) for name, parameter in model.named_parameters())
    assert engine.version == -1


def test_greedy_tokens_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    reference = transformers.LlamaForCausalLM(config).eval()
    model = Transformer(ModelConfig.from_huggingface(config.to_dict()))
    engine = _engine(model)
    engine.load(0, dict(reference.named_parameters()))
    prompts = [(np.arange(2 + row, dtype=np.int32) * 7 + row) % 50 for row in range(12)]
    outputs = _generate(
        engine,
        [
            _request(row, prompt=prompt, temperature=0.0, max_new_tokens=12)
            for row, prompt in enumerate(prompts)
        ],
    )
    for row, prompt in enumerate(prompts):
        ids = torch.from_numpy(prompt).long()[None]
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
        )
        assert outputs[0, row].tokens.ids.tolist() == expected[0, len(prompt) :].tolist()


def test_an_overflowed_sample_is_marked_and_leaves_nothing_in_its_slot() -> None:
    model = Transformer(_CONFIG)
    initialize(model, 0)
    engine = _engine(model, slots=4)
    good = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    expected = _generate(engine, [_request(sample) for sample in range(4)])
    engine.load(1, good | {"model.layers.0.mlp.up_proj.weight": torch.full((256, 96), float("inf"))})
    broken = _generate(engine, [_request(sample, max_new_tokens=20) for sample in range(4)])
    assert not any(output.finite for output in broken.values())
    engine.load(2, good)
    again = _generate(engine, [_request(sample) for sample in range(4)])
    assert {key: _bits(output) for key, output in again.items()} == {
        key: _bits(output) for key, output in expected.items()
    }


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompt": np.empty(0, np.int32)}, DataError, "at least one token"),
        ({"prompt": np.full(30, 1, np.int32)}, DataError, "generation.max_length"),
        ({"prompt": np.array([14], np.int32)}, DataError, "vocabulary of 14"),
        ({"max_new_tokens": 0}, UserError, "max_new_tokens"),
        ({"temperature": -1.0}, UserError, "temperature"),
        ({"temperature": float("nan")}, UserError, "temperature"),
        ({"stop_token_ids": (1,) * 17}, UserError, "at most 16 end and stop tokens"),
        ({"stop_token_ids": (14,)}, UserError, "vocabulary of 14"),
    ],
)
def test_an_impossible_request_is_refused_and_its_batch_with_it(
    model: Transformer, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    engine = _engine(model)
    with pytest.raises(error, match=message):
        engine.submit([_request(0), _request(1, **changes)])
    assert engine.idle


def test_an_interrupted_request_that_waits_has_produced_nothing(model: Transformer) -> None:
    engine = _engine(model, slots=4)
    engine.submit([_request(sample) for sample in range(6)])
    engine.step()
    waiting = engine.interrupt((0, 5))
    assert waiting is not None and waiting.tokens is NO_TOKENS
    assert engine.interrupt((0, 5)) is None
    assert len(_drain(engine)) == 5
