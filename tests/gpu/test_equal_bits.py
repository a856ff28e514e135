"""On an accelerator too, neither neighbours nor the number of ranks change a bit, and a rollback is exact."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kintsugi.generation.engine.engine import Engine
from kintsugi.generation.engine.requests import GenerationOutput, GenerationRequest
from kintsugi.generation.engine.rng import stream_key
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.device import choose_device, identity, use_deterministic_kernels
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.training.model_calls import ModelCalls
from kintsugi.training.process_group import ProcessGroup, Route, _Rendezvous
from kintsugi.training.reduction import Contribution, sum_any_order
from kintsugi.transport import new_key_pair
from kintsugi.transport.store import StoreServer
from kintsugi.types import SamplingParams
from tests.unit.training.test_model_calls import alone
from tests.unit.training.world import (
    StoredTensors,
    every_length,
    in_world,
    new_pairs,
    new_stage,
    new_state,
    rewarded,
    run_call,
    train,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=500,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_positions=128,
    qk_norm=True,
)
CUDA = torch.device("cuda", 0)
NUM_REQUESTS = 24
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def deterministic() -> Iterator[None]:
    use_deterministic_kernels()
    yield
    torch.set_deterministic_debug_mode("default")


def requests() -> list[GenerationRequest]:
    """Prompts of different lengths, each with its own noise."""
    random = np.random.default_rng(0)
    return [
        GenerationRequest(
            (index, 0),
            prompt=random.integers(0, CONFIG.vocab_size, 3 + index % 17).astype(np.int32),
            rng_key=stream_key(f"grpo:0:{index}:0", seed=0, sample=0, turn=0),
            sampling=SamplingParams(max_new_tokens=20),
        )
        for index in range(NUM_REQUESTS)
    ]


def generate(wanted: list[GenerationRequest], *, dtype: torch.dtype) -> dict[int, GenerationOutput]:
    from kintsugi.generation.cuda.runner import CudaRunner

    model = Transformer(CONFIG, packed=True, dtype=dtype, device=CUDA)
    initialize(model, seed=1)
    runner = CudaRunner(model, num_slots=8, max_length=48, num_pages=16, deterministic=True)
    engine = Engine(runner, deterministic=True, steps_per_iteration=8, overlap=True)
    engine.submit(wanted)
    outputs = {}
    while not engine.idle:
        outputs.update({output.request.id[0]: output for output in engine.step()})
    return outputs


@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_slot_nor_neighbours_nor_being_put_back_change_a_bit_of_a_sample(dtype: torch.dtype) -> None:
    """Sixteen pages do for five or six of the eight slots."""
    together = generate(requests(), dtype=dtype)
    backwards = generate(requests()[::-1], dtype=dtype)
    assert len(together) == NUM_REQUESTS
    for index in (0, 7, 23):
        (by_itself,) = generate([requests()[index]], dtype=dtype).values()
        for output in (together[index], backwards[index]):
            np.testing.assert_array_equal(output.tokens.ids, by_itself.tokens.ids)
            np.testing.assert_array_equal(output.tokens.logprobs, by_itself.tokens.logprobs)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["grpo", "ppo", "dpo"])
def test_any_number_of_ranks_on_one_device_gives_equal_bits(name: str, world_size: int) -> None:
    stage = new_stage(name=name, beta=0.0 if name == "grpo" else 0.05)
    batches = {"grpo": every_length(), "ppo": rewarded(every_length()), "dpo": new_pairs(7)}
    batch = batches[name]
    (expected,) = train(batch, stage=stage, world_size=1, num_shards=4, device=CUDA)
    for outcome in train(batch, stage=stage, world_size=world_size, num_shards=4, device=CUDA):
        assert outcome.gradient.is_cuda
        assert torch.equal(outcome.gradient, expected.gradient)
        assert outcome.digests == expected.digests
        assert outcome.metrics == expected.metrics


@pytest.mark.usefixtures("deterministic")
def test_the_gradient_is_that_of_the_cpu_to_rounding() -> None:
    batch, stage = every_length(), new_stage()
    (expected,) = train(batch, stage=stage, world_size=1, num_shards=4, num_steps=1)
    (outcome,) = train(batch, stage=stage, world_size=1, num_shards=4, num_steps=1, device=CUDA)
    torch.testing.assert_close(outcome.gradient.cpu(), expected.gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rollback_returns_to_the_committed_bits_and_the_step_repeats_exactly(dtype: torch.dtype) -> None:
    batch, stage = every_length(), new_stage()
    state = new_state(stage, dtype=dtype, device=CUDA)
    calls = ModelCalls(state, deterministic=True)

    def step(number: int) -> str:
        call = batch.call(stage, step=number, rank=0, world_size=1, num_shards=4)
        run_call(batch, call, calls=calls, group=alone())
        return state.digest()

    first = step(1)
    state.commit(1)
    second = step(2)
    assert second != first
    state.rollback(1)
    assert state.digest() == first
    assert step(2) == second
    state.commit(2)
    restored = new_state(stage, dtype=dtype, device=CUDA)
    saved = {name: tensor.cpu() for name, tensor in state.tensors().items()}
    restored.restore(StoredTensors(saved), counters=state.committed_counters, stage=stage)
    assert restored.digest() == second


def test_ranks_that_share_a_device_exchange_through_host_memory() -> None:
    def rank_main(rank: int, group: ProcessGroup) -> tuple[Route, Contribution]:
        gradient = torch.full((1000,), float(rank + 1), device=CUDA)
        statistic = torch.full((2,), float(rank), dtype=torch.float64, device=CUDA)
        owned = Contribution(gradient, statistic, statistic)
        return group.route, sum_any_order(group, owned=owned, timeout_s=20.0)

    for route, total in in_world(2, rank_main, device=CUDA):
        assert route is Route.STAGED
        assert total.gradient.is_cuda and total.gradient.eq(3.0).all()
        assert (total.sums.tolist(), total.maxima.tolist()) == ([1.0, 1.0], [1.0, 1.0])


def test_a_rank_with_a_device_of_its_own_meets_the_others_through_nccl() -> None:
    """With one card this can only be a world of one, which otherwise needs no group: that NCCL starts, moves data and
    can be let go is all that it shows."""
    keys = new_key_pair()
    server = StoreServer(keys=keys)
    meeting = _Rendezvous(
        group_id=1,
        ranks=["model-0"],
        me="model-0",
        store_address=server.address,
        keys=keys,
        timeout_s=60.0,
        interruption=lambda: None,
    )
    backend, route, store = meeting.connect(CUDA)
    assert route is Route.NCCL
    group = ProcessGroup(
        group_id=1,
        ranks=["model-0", "nobody"],  # A group of one is never asked for a collective.
        rank=0,
        backend=backend,
        route=route,
        store=store,
        interruption=lambda: None,
    )
    tensor = torch.arange(6.0, device=CUDA)
    group.all_reduce(tensor, timeout_s=20.0)
    exchanged = group.all_to_all(tensor, sent=[6], received=[6], timeout_s=20.0)
    assert exchanged.tolist() == tensor.tolist() == [0, 1, 2, 3, 4, 5]
    del backend
    group.close()
    server.close()


def test_every_worker_finds_the_accelerator() -> None:
    assert choose_device("model-0").type == choose_device("server-0").type == "cuda"
    assert identity(choose_device("model-0")) == identity(CUDA) != "cpu"
