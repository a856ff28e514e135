from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kintsugi.errors import ModelError
from kintsugi.model.architecture import (
    LinearRope,
    Llama3Rope,
    ModelConfig,
    YarnRope,
    num_parameters,
    parameter_shapes,
)
from kintsugi.model.attention import PackedLayout, packed_attention
from kintsugi.model.transformer import DecoderLayer, Transformer, initialize
from tests.unit.model.layer_checks import model_result

LLAMA3 = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32)
YARN = YarnRope(factor=4.0, original_max_positions=32)

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama-one-kv-head-tied": {"family": "llama", "num_kv_heads": 1, "tie_embeddings": True},
    "llama-full-heads-biases": {
        "family": "llama",
        "num_kv_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama-linear-rope": {"family": "llama", "rope_scaling": LinearRope(factor=2.0)},
    "llama-llama3-rope": {"family": "llama", "rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "llama-yarn-rope": {"family": "llama", "rope_scaling": YARN},
    "qwen2": {"family": "qwen2", "attention_bias": True},
    "qwen2-tied-yarn": {
        "family": "qwen2",
        "attention_bias": True,
        "tie_embeddings": True,
        "rope_scaling": YARN,
    },
    "qwen3": {"family": "qwen3", "qk_norm": True, "head_dim": 24},
    "qwen3-tied-biases": {"family": "qwen3", "qk_norm": True, "tie_embeddings": True, "attention_bias": True},
}
LENGTHS = (5, 1, 17, 9)


def make_config(**changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_positions": 128,
    }
    return ModelConfig(**{**sizes, **changes})


def make_model(config: ModelConfig, *, with_value_head: bool = False) -> Transformer:
    """Random everywhere, also where initialisation gives ones and zeros, so that nothing cancels by accident."""
    model = Transformer(config, with_value_head=with_value_head)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.normal_(mean=centre, std=0.2, generator=generator)
    return model


def random_tokens(config: ModelConfig, count: int, *, seed: int = 3) -> Tensor:
    return torch.randint(0, config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_packed_sequences_are_those_of_transformers(name: str) -> None:
    import transformers

    config = make_config(**CONFIGS[name])
    model = make_model(config)
    fields = config.to_huggingface()
    theirs_config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    theirs = transformers.AutoModelForCausalLM.from_config(theirs_config, attn_implementation="eager").eval()
    missing, unexpected = theirs.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_embeddings else set())
    theirs.tie_weights()
    layout = PackedLayout.from_lengths(LENGTHS)
    tokens = random_tokens(config, layout.num_tokens)
    with torch.no_grad():
        ours = model.logits(model.forward_packed(tokens, layout.positions, layout))
        expected = torch.cat([theirs(sequence[None]).logits[0] for sequence in tokens.split(list(LENGTHS))])
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama-full-heads-biases", "qwen2", "qwen3"])
def test_a_packed_model_has_the_same_parameters_and_a_layers_projections_in_one_piece(name: str) -> None:
    config = make_config(**CONFIGS[name])
    plain, packed = Transformer(config), Transformer(config, packed=True)
    initialize(plain, 3)
    packed.copy_weights({name: parameter.detach() for name, parameter in plain.named_parameters()})
    assert {name: parameter.shape for name, parameter in packed.named_parameters()} == parameter_shapes(
        config
    )
    layer = packed.model.layers[1]
    assert isinstance(layer, DecoderLayer)
    attention, feed_forward = layer.self_attn, layer.mlp
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert attention.qkv_weight.equal(torch.cat([part.weight for part in parts]))
    assert feed_forward.gate_up_weight.equal(
        torch.cat([feed_forward.gate_proj.weight, feed_forward.up_proj.weight])
    )
    if config.attention_bias:
        assert attention.qkv_bias is not None
        assert attention.qkv_bias.equal(torch.cat([part.bias for part in parts]))
    layout = PackedLayout.from_lengths(LENGTHS)
    tokens = random_tokens(config, layout.num_tokens)
    hidden = [model.forward_packed(tokens, layout.positions, layout) for model in (plain, packed)]
    assert hidden[0].equal(hidden[1])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "a difference in .'model.norm.weight'"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.ones(31)}),
            r"`model.norm.weight` of shape \(32,\), got \(31,\)",
        ),
    ],
)
def test_weights_that_do_not_fit_change_nothing(
    change: Callable[[dict[str, Tensor]], object], expected: str
) -> None:
    model, other = make_model(make_config(**CONFIGS["llama"])), make_model(make_config(**CONFIGS["llama"]))
    weights = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    change(weights)
    with pytest.raises(ModelError, match=expected):
        model.copy_weights(weights)
    assert all(a.equal(b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_packed_bits_do_not_depend_on_the_neighbours_when_the_padded_length_is_fixed() -> None:
    config = make_config(**CONFIGS["llama"])
    model = make_model(config)
    tokens = random_tokens(config, sum(LENGTHS))

    def hidden_of(lengths: tuple[int, ...], packed: Tensor) -> Tensor:
        layout = PackedLayout.from_lengths(lengths, padded_length=24)
        return model.forward_packed(packed, layout.positions, layout).detach()

    together = hidden_of(LENGTHS, tokens)
    assert torch.equal(hidden_of((5,), tokens[:5]), together[:5])
    assert torch.equal(hidden_of((17, 9), tokens[6:]), together[6:])


def test_attention_in_bfloat16_is_the_same_bits_at_every_padding() -> None:
    """So a sampler can round like it, without knowing what a sequence will be packed with."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(700, 9, 64, generator=generator).bfloat16() for _ in range(3))

    def attended(length: int, padded_length: int) -> Tensor:
        layout = PackedLayout.from_lengths([length], padded_length=padded_length)
        return packed_attention(query[:length], key=key[:length], value=value[:length], layout=layout)

    expected = attended(700, 1024)
    for length, padded_length in ((180, 192), (200, 208), (300, 304), (300, 368), (500, 512)):
        assert torch.equal(attended(length, padded_length), expected[:length])
    for padded_length in (704, 720, 880, 1008):
        assert torch.equal(attended(700, padded_length), expected)


def test_gradients_of_packed_sequences_are_the_sum_of_each_alone() -> None:
    config = make_config(**CONFIGS["qwen3-tied-biases"])
    model = make_model(config)
    tokens = random_tokens(config, sum(LENGTHS))

    def gradients(pieces: list[tuple[tuple[int, ...], Tensor]]) -> list[Tensor]:
        model.zero_grad()
        for lengths, packed in pieces:
            layout = PackedLayout.from_lengths(lengths)
            hidden = model.forward_packed(packed, layout.positions, layout)
            logprobs, _ = model.token_logprobs(hidden, packed)
            logprobs.sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    together = gradients([(LENGTHS, tokens)])
    alone = gradients(
        [((length,), piece) for length, piece in zip(LENGTHS, tokens.split(list(LENGTHS)), strict=True)]
    )
    assert len(together) == len(list(model.parameters()))
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_exactly_those_the_architecture_promises(name: str) -> None:
    config = make_config(**CONFIGS[name])
    model = Transformer(config, with_value_head=True)
    promised = parameter_shapes(config, with_value_head=True)
    assert {key: tuple(value.shape) for key, value in model.named_parameters()} == promised
    assert list(dict(model.named_parameters())) == list(promised)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters(
        config, with_value_head=True
    )


def test_the_value_head_estimates_one_number_per_token_and_starts_at_zero() -> None:
    config = make_config(**CONFIGS["llama"])
    model = Transformer(config, with_value_head=True)
    initialize(model, 0)
    layout = PackedLayout.from_lengths(LENGTHS)
    hidden = model.forward_packed(random_tokens(config, layout.num_tokens), layout.positions, layout)
    values = model.values(hidden)
    assert torch.equal(values, torch.zeros(layout.num_tokens))
    values.sum().backward()
    assert model.value_head is not None
    torch.testing.assert_close(model.value_head.weight.grad, hidden.sum(dim=0, keepdim=True))


def test_values_of_a_low_precision_model_are_not_rounded_to_it() -> None:
    model = Transformer(make_config(**CONFIGS["llama"]), with_value_head=True, dtype=torch.bfloat16)
    assert model.value_head is not None
    with torch.no_grad():
        model.value_head.weight.fill_(1.0)
        model.value_head.bias.fill_(64.0)
    hidden = torch.zeros(2, model.config.hidden_size, dtype=torch.bfloat16)
    hidden[1, 0] = 2.0**-8
    assert model.values(hidden).tolist() == [64.0, 64.0 + 2.0**-8]


def test_initialisation_depends_on_the_seed_alone() -> None:
    config = make_config(**CONFIGS["qwen2"])
    first, second, other = (Transformer(config) for _ in range(3))
    initialize(first, 5)
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    initialize(second, 5)
    initialize(other, 6)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.output_weight, other.output_weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-full-heads-biases", "qwen2", "qwen3-tied-biases"])
def test_recomputation_of_activations_does_not_change_a_bit(name: str, dtype: torch.dtype) -> None:
    model = make_model(make_config(**CONFIGS[name])).to(dtype)
    expected = model_result(model, LENGTHS)
    model.recompute = True
    found = model_result(model, LENGTHS)
    assert found.keys() == expected.keys() and len(found) == 1 + len(list(model.parameters()))
    assert all(found[name].equal(each) for name, each in expected.items())


def test_recomputation_keeps_only_the_input_of_each_layer() -> None:
    model = make_model(make_config(family="llama", num_layers=6))
    layout = PackedLayout.from_lengths(LENGTHS)
    tokens = random_tokens(model.config, layout.num_tokens)

    def kept_bytes(*, recompute: bool) -> int:
        model.recompute, kept = recompute, []

        def keep(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.forward_packed(tokens, layout.positions, layout)
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in kept}.values())

    layer_input = layout.num_tokens * model.config.hidden_size * 4
    assert kept_bytes(recompute=True) < (6 + 4) * layer_input < kept_bytes(recompute=False) / 4


def test_hooks_see_each_gradient_once_and_layer_by_layer_when_activations_are_recomputed() -> None:
    model = make_model(make_config(family="llama"))
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    model.recompute = True
    model_result(model, LENGTHS)
    assert sorted(seen) == sorted(name for name, _ in model.named_parameters())
    layers = [name.split(".")[2] for name in seen if ".layers." in name]
    assert layers == sorted(layers, reverse=True)


def test_frozen_parameters_get_no_gradient_and_the_others_the_same_when_activations_are_recomputed() -> None:
    model = make_model(make_config(family="llama"))
    expected = model_result(model, LENGTHS)
    frozen = {"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    model.recompute = True
    found = model_result(model, LENGTHS)
    assert found.keys() == expected.keys() - frozen
    assert all(each.equal(expected[name]) for name, each in found.items())


def test_without_gradient_nothing_is_kept_for_recomputation() -> None:
    model = make_model(make_config(family="llama"))
    model.recompute = True
    layout = PackedLayout.from_lengths(LENGTHS)
    with torch.no_grad():
        hidden = model.forward_packed(
            random_tokens(model.config, layout.num_tokens), layout.positions, layout
        )
    assert not hidden.requires_grad
