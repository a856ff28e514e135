import subprocess
import sys
from typing import Any

import pytest

from kintsugi.errors import ModelError
from kintsugi.model.architecture import (
    LinearRope,
    Llama3Rope,
    ModelConfig,
    RopeScaling,
    YarnRope,
    num_parameters,
    parameter_shapes,
)

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_importing_the_architecture_and_the_tokenizer_pulls_in_no_torch() -> None:
    program = (
        "import sys, kintsugi.model.architecture, kintsugi.model.tokenizer; "
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_an_unsupported_family_is_refused_by_file_field_and_value() -> None:
    with pytest.raises(ModelError, match=r"m/config\.json.*`model_type`.*llama, qwen2, qwen3.*'mixtral'"):
        ModelConfig.from_huggingface({**LLAMA, "model_type": "mixtral"}, where="m/config.json")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hidden_size": None}, "`hidden_size`"),
        ({"vocab_size": "many"}, "`vocab_size`.*'many'"),
        ({"vocab_size": 0}, "`vocab_size` to be positive, got 0"),
        ({"num_key_value_heads": 3}, "`num_heads` divisible by `num_kv_heads` 3, got 4"),
        ({"head_dim": 5}, "`head_dim` to be even"),
        ({"hidden_act": "gelu"}, "`hidden_act` to be 'silu', got 'gelu'"),
        ({"use_sliding_window": True}, "`use_sliding_window`"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"bits": 4}}, "`quantization_config`"),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor`"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "linear, llama3, yarn, got 'longrope'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "linear, llama3, yarn, got 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "`rope_scaling` of type 'linear'.*factor"),
        ({"rope_scaling": "linear"}, "`rope_scaling` to be an object"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "`mscale`"),
        ({"tie_word_embeddings": "yes"}, "tie_embeddings"),
    ],
)
def test_what_would_be_computed_differently_is_refused_by_name(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        ModelConfig.from_huggingface({**LLAMA, **change})


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        LinearRope(factor=2.0),
        Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64),
        YarnRope(factor=4.0, original_max_positions=64, attention_factor=1.2),
    ],
)
def test_a_config_survives_the_way_to_huggingface_and_back(family: Any, scaling: RopeScaling | None) -> None:
    config = ModelConfig(
        family=family,
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=128,
        rope_theta=5000.0,
        rope_scaling=scaling,
        attention_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tie_embeddings=True,
        eos_token_ids=(1, 2),
        pad_token_id=0,
    )
    assert ModelConfig.from_huggingface(config.to_huggingface()) == config


def test_transformers_5_spelling_of_rope_is_read() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0}
    config = ModelConfig.from_huggingface({**LLAMA, "rope_parameters": rope})
    assert (config.rope_theta, config.rope_scaling) == (700.0, LinearRope(factor=2.0))


def test_a_tied_model_has_no_output_matrix_and_a_value_head_adds_its_own() -> None:
    config = ModelConfig.from_huggingface({**LLAMA, "tie_word_embeddings": True})
    assert "lm_head.weight" not in parameter_shapes(config)
    assert num_parameters(config, with_value_head=True) == num_parameters(config) + config.hidden_size + 1
