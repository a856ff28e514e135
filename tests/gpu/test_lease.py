"""A trainer and a server share one card: what leaves its memory comes back as it was, and runs end in the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kintsugi.device_lease.client import DeviceMemory
from kintsugi.device_lease.memory import MappedMemory, MovedMemory
from kintsugi.generation.engine.engine import Engine
from kintsugi.generation.engine.factory import build_engine, memory_of
from kintsugi.generation.engine.requests import GenerationRequest
from kintsugi.generation.engine.rng import stream_key
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.tokenizer import character_tokenizer
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.telemetry.events import Span, read_events
from kintsugi.training.state import TrainingState
from kintsugi.types import SamplingParams
from tests.gpu.test_runs import SHORT, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
GIB = 2**30
ALPHABET = "0123456789+="


def free_bytes() -> int:
    torch.cuda.synchronize(CUDA)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(CUDA)[0]


def test_mapped_memory_goes_and_comes_back_at_the_same_addresses() -> None:
    torch.zeros(1, device=CUDA)
    before = free_bytes()
    memory = MappedMemory(GIB, device=CUDA)
    address = memory.tensor.data_ptr()
    assert before - free_bytes() >= GIB
    memory.unmap()
    assert before - free_bytes() < GIB // 8
    memory.map()
    memory.tensor.fill_(7)
    assert memory.tensor.data_ptr() == address and int(memory.tensor[-1]) == 7
    memory.unmap()


def test_a_captured_graph_goes_on_with_memory_that_was_away() -> None:
    memory = MappedMemory(1 << 20, device=CUDA)
    numbers = memory.tensor.view(torch.float32)
    numbers.zero_()
    numbers.add_(1.0)
    torch.cuda.synchronize(CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers.add_(1.0)
    memory.unmap()
    memory.map()
    numbers.fill_(5.0)
    graph.replay()
    torch.cuda.synchronize(CUDA)
    assert float(numbers[0]) == 6.0
    memory.unmap()


def test_the_state_of_a_rank_leaves_the_card_and_comes_back_to_the_bit() -> None:
    config = ModelConfig(
        family="qwen3",
        vocab_size=4000,
        hidden_size=512,
        intermediate_size=1536,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        max_positions=128,
        qk_norm=True,
    )
    model = Transformer(config, device=CUDA)
    initialize(model, seed=1)
    state = TrainingState(model, compute_dtype=torch.bfloat16)
    before, here = state.digest(), free_bytes()
    memory = MovedMemory(CUDA, tensors=state.resident, settle=state.await_copy)
    memory.leave()
    size = sum(tensor.nbytes for tensor in (state._live, state.gradient))
    assert free_bytes() - here >= size * 0.9
    memory.enter()
    assert state.digest() == before
    first = next(state.model.parameters())
    assert first.is_cuda and bool(first.isfinite().all()), "views see the storage that came back"


def new_engine(policy: str) -> tuple[Engine, DeviceMemory | None]:
    tokenizer = character_tokenizer(ALPHABET)
    config = ModelConfig(
        family="qwen3",
        vocab_size=len(ALPHABET) + 8,
        hidden_size=128,
        intermediate_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_positions=512,
        qk_norm=True,
    )
    model = Transformer(config, packed=True, dtype=torch.bfloat16, device=CUDA)
    initialize(model, seed=1)
    engine = build_engine(
        config,
        tokenizer,
        slots=8,
        max_length=512,
        dtype=torch.bfloat16,
        device=CUDA,
        deterministic=True,
        kv_cache_gib=0.5,
    )
    memory = memory_of(engine, policy=policy, device=CUDA)  # type: ignore[arg-type]
    engine.load(1, {name: tensor.detach() for name, tensor in model.named_parameters()})
    return engine, memory


def tokens_of(engine: Engine, memory: DeviceMemory | None, *, away_every: int) -> dict[int, list[int]]:
    """Of four requests, with the pages taken off and brought back between steps."""
    engine.submit(
        GenerationRequest(
            (number, 0),
            prompt=np.arange(number + 3, dtype=np.int32),
            rng_key=stream_key(f"t{number}", seed=0, sample=0, turn=0),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=200, num_samples=1, seed=0),
        )
        for number in range(4)
    )
    found: dict[int, list[int]] = {}
    for step in range(10_000):
        if engine.idle:
            break
        for output in engine.step():
            found[output.request.id[0]] = output.tokens.ids.tolist()
        if memory is not None and step % away_every == 0:
            memory.leave()
            memory.enter()
    return found


def test_keys_and_values_that_were_away_give_the_same_tokens() -> None:
    stayed, no_memory = new_engine("no")
    expected = tokens_of(stayed, no_memory, away_every=1)
    moved, memory = new_engine("offload")
    assert memory is not None
    before = free_bytes()
    memory.leave()
    assert free_bytes() - before > GIB // 3
    memory.enter()
    assert len(expected) == 4 and tokens_of(moved, memory, away_every=3) == expected


@pytest.mark.cluster
def test_runs_that_share_the_card_end_in_the_same_bits(tmp_path: Path) -> None:
    usual = train(tmp_path / "no", *SHORT)
    for policy in ("keep", "offload"):
        shared = train(tmp_path / policy, *SHORT, f"cluster.share_device={policy}")
        assert shared["weights_sha256"] == usual["weights_sha256"], policy
        for process in ("model-0", "server-0"):
            events = [record.event for record in read_events(tmp_path / policy, process=process)]
            turns = [event for event in events if isinstance(event, Span) and event.name == "device_turn"]
            assert len(turns) >= 3, f"{process} took its turns, {policy}"
