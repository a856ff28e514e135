import threading
from pathlib import Path

import pytest
import torch

from kintsugi.config.schema import Config, ModelSection, NewModel
from kintsugi.errors import DeviceOutOfMemory, ModelError, UserError
from kintsugi.generation.cpu.runner import CpuRunner
from kintsugi.generation.engine import factory
from kintsugi.generation.engine.engine import Engine
from kintsugi.generation.engine.factory import _most_bytes, _num_pages, agreed_steps, build_engine, note_of
from kintsugi.generation.native.library import compiler
from kintsugi.generation.native.runner import NativeRunner
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.plan import plan_model
from kintsugi.model.tokenizer import character_tokenizer
from kintsugi.serving.options import make_options

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


def test_a_model_is_planned_beside_other_work_and_either_may_fail(tmp_path: Path) -> None:
    config = Config(name="test", model=ModelSection(new=NewModel(alphabet="ab")))
    threads: list[str] = []
    found = factory.plan_beside(config, lambda: threads.append(threading.current_thread().name))
    assert threads == [threading.current_thread().name]
    assert (found[0], found[1].vocab_size) == (plan_model(config)[0], plan_model(config)[1].vocab_size)
    missing = Config(name="test", model=ModelSection(path=str(tmp_path)))
    with pytest.raises(ModelError, match=r"config\.json"):
        factory.plan_beside(missing, lambda: None)

    def broken() -> None:
        raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        factory.plan_beside(config, broken)


def engine_of(
    kv_cache_gib: float | None, *, native: bool | None = False, dtype: torch.dtype = torch.float32
) -> Engine:
    return build_engine(
        CONFIG,
        character_tokenizer("ab"),
        slots=4,
        max_length=64,
        dtype=dtype,
        device=torch.device("cpu"),
        deterministic=True,
        kv_cache_gib=kv_cache_gib,
        native=native,
    )


def test_there_is_memory_for_all_slots_unless_told_otherwise() -> None:
    assert engine_of(None).stats()["pages_free"] == 4 * 4
    assert engine_of(5.5 * PAGE_BYTES / 2**30).stats()["pages_free"] == 5


@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
def test_memory_is_counted_as_compiled_steps_use_it() -> None:
    """Heads of 8 take the room of 16."""
    assert engine_of(5.5 * 2 * PAGE_BYTES / 2**30, native=True).stats()["pages_free"] == 5


@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
def test_steps_are_compiled_where_that_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    engine = engine_of(None, native=None)
    assert isinstance(engine.runner, NativeRunner) and note_of(engine) == ""


@pytest.mark.parametrize(
    ("reason", "dtype", "num_threads"),
    [
        ("c++ could not compile", torch.float32, 1),
        ("in float16", torch.float16, 1),
        ("one thread, not 2", torch.float32, 2),
    ],
)
def test_where_steps_can_not_be_compiled_others_are_used_and_it_is_said_why(
    monkeypatch: pytest.MonkeyPatch, reason: str, dtype: torch.dtype, num_threads: int
) -> None:
    monkeypatch.setattr(factory, "why_not", lambda _: "c++ could not compile native.cpp")
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    engine = engine_of(None, native=None, dtype=dtype)
    assert isinstance(engine.runner, CpuRunner)
    assert "steps are not compiled, and slower" in note_of(engine) and reason in note_of(engine)


@pytest.mark.parametrize("is_known", [True, False])
def test_what_is_trained_on_is_sampled_as_the_trainer_rounds(
    monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(factory, "why_not", lambda _: "")
    monkeypatch.setattr(factory, "rounds_like_the_trainer", lambda: is_known)
    assert not factory.why_not_trained_from(CONFIG, dtype=torch.float32)
    reason = factory.why_not_trained_from(CONFIG, dtype=torch.bfloat16)
    assert ("AVX512-BF16" in reason) is not is_known


def test_the_first_server_of_a_deterministic_run_decides_for_all(tmp_path: Path) -> None:
    assert agreed_steps(tmp_path, reason="", process="server-0")
    assert agreed_steps(tmp_path, reason="", process="server-1")
    with pytest.raises(UserError, match=r"expected server-2 to compile its steps.*found none"):
        agreed_steps(tmp_path, reason="expected a C++ compiler, found none", process="server-2")
    assert [path.name for path in tmp_path.iterdir()] == ["steps"]


def test_where_the_first_could_not_compile_nobody_does(tmp_path: Path) -> None:
    assert not agreed_steps(tmp_path, reason="expected a C++ compiler, found none", process="server-0")
    assert not agreed_steps(tmp_path, reason="", process="server-1")


def test_memory_for_less_than_one_request_is_refused() -> None:
    smallest = 4 * PAGE_BYTES / 2**30
    expected = rf"`kv_cache_gib` of at least {smallest:.3g}, .* got {0.9 * smallest:g}"
    with pytest.raises(UserError, match=expected):
        engine_of(0.9 * smallest)


@pytest.mark.parametrize("memory", [0.0, -1.0, float("inf"), float("nan")])
def test_a_server_is_not_planned_with_memory_that_is_none(memory: float) -> None:
    given = {"dtype": "auto", "device": "auto", "strategy": "least_loaded", "kv_cache_gib": memory}
    with pytest.raises(UserError, match="expected `--kv-cache-gib` to be positive"):
        make_options(Path("model"), CONFIG, max_length=None, given=given)


def test_a_planned_server_has_the_memory_that_was_asked_for() -> None:
    given = {"dtype": "auto", "device": "auto", "strategy": "least_loaded", "kv_cache_gib": 0.5}
    assert make_options(Path("model"), CONFIG, max_length=None, given=given).kv_cache_gib == 0.5


def test_the_cache_takes_what_the_runs_other_processes_leave_and_never_more_than_is_free() -> None:
    assert _most_bytes(100, None) == 50, "nothing is known of others: a share is left to them"
    assert _most_bytes(100, 30) == 30
    assert _most_bytes(100, 1000) == 80, "the rest is for the activations of the server itself"
    assert _most_bytes(-5, 30) == 0


def test_a_card_without_room_for_one_request_is_out_of_memory() -> None:
    with pytest.raises(DeviceOutOfMemory, match=r"expected 4 GiB of device memory .* got 3 GiB"):
        _num_pages(4, slots=8, page_bytes=2**30, kv_cache_gib=None, most_bytes=3 * 2**30)
    assert _num_pages(4, slots=8, page_bytes=2**30, kv_cache_gib=None, most_bytes=9 * 2**30) == 9
    assert _num_pages(4, slots=8, page_bytes=2**30, kv_cache_gib=None) == 32
