from pathlib import Path

import pytest
import torch

from kintsugi.errors import UserError
from kintsugi.generation.building import build_engine
from kintsugi.generation.engine import Engine
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.tokenizer import character_tokenizer
from kintsugi.serving.plan import make_plan

CONFIG = ModelConfig(
    family="llama",
    vocab_size=8,
    hidden_size=32,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=128,
)
PAGE_BYTES = 16 * 2 * 2 * 2 * 8 * 4
"""Tokens, layers, key and value, heads, their size, bytes."""


def engine_of(kv_cache_gib: float | None) -> Engine:
    return build_engine(
        CONFIG,
        character_tokenizer("ab"),
        slots=4,
        max_length=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
        deterministic=True,
        kv_cache_gib=kv_cache_gib,
    )


def test_there_is_memory_for_all_slots_unless_told_otherwise() -> None:
    assert engine_of(None).stats()["pages_free"] == 4 * 4
    assert engine_of(5.5 * PAGE_BYTES / 2**30).stats()["pages_free"] == 5


def test_memory_for_less_than_one_request_is_refused() -> None:
    smallest = 4 * PAGE_BYTES / 2**30
    expected = rf"`kv_cache_gib` of at least {smallest:.3g}, .* got {0.9 * smallest:g}"
    with pytest.raises(UserError, match=expected):
        engine_of(0.9 * smallest)


@pytest.mark.parametrize("memory", [0.0, -1.0, float("inf"), float("nan")])
def test_a_server_is_not_planned_with_memory_that_is_none(memory: float) -> None:
    given = {"dtype": "auto", "device": "auto", "strategy": "least_loaded", "kv_cache_gib": memory}
    with pytest.raises(UserError, match="expected `--kv-cache-gib` to be positive"):
        make_plan(Path("model"), CONFIG, max_length=None, given=given)


def test_a_planned_server_has_the_memory_that_was_asked_for() -> None:
    given = {"dtype": "auto", "device": "auto", "strategy": "least_loaded", "kv_cache_gib": 0.5}
    assert make_plan(Path("model"), CONFIG, max_length=None, given=given).kv_cache_gib == 0.5
