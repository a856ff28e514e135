"""A rank on a GPU holds at most 19 bytes per parameter besides activations, also where it publishes its weights for
servers there; large blocks give equal bits."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from kintsugi.cluster.device_memory import read_devices
from kintsugi.config.schema import ActorSection, Config, GenerationSection
from kintsugi.model.architecture import ModelConfig, num_parameters
from kintsugi.model.device import identity, use_deterministic_kernels
from kintsugi.model.memory import RunMemory
from kintsugi.model.plan import ACTOR_ALONE
from kintsugi.model.transformer import Transformer
from kintsugi.runtime.peak_memory import PEAK_ALLOCATED, PEAK_RESERVED, PEAK_UPDATE, PeakMemory
from kintsugi.training import state as state_module
from kintsugi.training.batch import cut
from kintsugi.training.model_calls import ModelCalls
from kintsugi.training.packing import sample_of
from kintsugi.training.process_group import ProcessGroup
from kintsugi.training.state import TrainingState
from kintsugi.types import Role
from kintsugi.weights.manifest import build_manifest
from kintsugi.weights.transports.device import DeviceSlots
from tests.unit.training.test_model_calls import alone
from tests.unit.training.world import Batch, in_world, new_batch, new_stage, new_state, run_call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda", 0)
LARGE = ModelConfig(
    family="qwen3",
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=32,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    max_positions=1024,
    qk_norm=True,
)
"""0.47 billion parameters."""
SMALL = ModelConfig(
    family="qwen3",
    vocab_size=500,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_positions=1024,
    qk_norm=True,
)
BLOCK_TOKENS = 16384
SEQUENCE = 512
MOST_STATIC = 19
"""Bytes per parameter: 12 of state, 4 of gradient, 2 of compute weights, and what is temporary."""


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    use_deterministic_kernels()
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.set_deterministic_debug_mode("default")
    gc.collect()
    torch.cuda.empty_cache()


def actor(**values: object) -> ActorSection:
    return ActorSection(workers=1, dtype="bfloat16", micro_batch_tokens=BLOCK_TOKENS, **values)  # type: ignore[arg-type]


def large_state() -> TrainingState:
    model = Transformer(LARGE, device=CUDA)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    return TrainingState(model, compute_dtype=torch.bfloat16, shares_weights=True)


def test_a_rank_of_half_a_billion_parameters_peaks_at_19_bytes_each_and_its_activations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peaks = PeakMemory()
    monkeypatch.setattr(state_module, "PEAKS", peaks)
    stage, parameters = new_stage(actor=actor()), num_parameters(LARGE)
    torch.cuda.init()  # Before it, there are no statistics to reset.
    before = torch.cuda.memory_allocated(CUDA)
    torch.cuda.reset_peak_memory_stats(CUDA)
    state = large_state()
    state.start_stage(stage, step=0)
    assert torch.cuda.memory_allocated(CUDA) - before <= 18.05 * parameters
    assert torch.cuda.max_memory_allocated(CUDA) - before <= MOST_STATIC * parameters, "while it was built"
    batch, calls = new_batch([(SEQUENCE, SEQUENCE // 2)] * 48), ModelCalls(state, deterministic=True)
    for step in (1, 2):
        call = batch.call(stage, step=step, rank=0, world_size=1, num_shards=1)
        run_call(batch, call, calls=calls, group=alone())
        state.commit(step)
    gauges = peaks.gauges()
    config = Config(name="a", actor=stage.actor, generation=GenerationSection(servers=0, max_length=SEQUENCE))
    estimate = RunMemory(config, LARGE, ACTOR_ALONE, 1).of_role(Role.MODEL).device
    in_passes = sum(estimate[name] for name in ("activations", "logits"))
    print(  # noqa: T201 - figures for the record.
        f"update {(gauges[PEAK_UPDATE] - before) / parameters:.2f} B/parameter, step "
        f"{(gauges[PEAK_ALLOCATED] - before) / parameters:.2f}, reserved {gauges[PEAK_RESERVED] / parameters:.2f}, "
        f"activations at most {in_passes / 1e9:.2f} GB estimated, "
        f"{(gauges[PEAK_ALLOCATED] - before - 18 * parameters) / 1e9:.2f} GB found"
    )
    assert gauges[PEAK_UPDATE] - before <= MOST_STATIC * parameters
    assert gauges[PEAK_ALLOCATED] - before <= MOST_STATIC * parameters + in_passes
    assert sum(estimate.values()) >= gauges[PEAK_ALLOCATED] - before, "the estimate is an upper bound"
    before_publishing = torch.cuda.memory_allocated(CUDA)
    assert state.weights() and state.tensors()
    assert torch.cuda.memory_allocated(CUDA) <= before_publishing, "weights and state are handed out as views"
    torch.cuda.reset_peak_memory_stats(CUDA)
    slots = DeviceSlots(CUDA, host="host-0", versions_kept=1, shared=state.shared_weights)
    held, source = slots.hold(state.weights(), version=2)
    assert source.offsets and build_manifest(held, version=2, step=2, mesh={}).pieces
    published = torch.cuda.max_memory_allocated(CUDA) - before_publishing
    assert published <= 0.05 * parameters, "a version for servers on the card is not a copy"


def long_batch() -> Batch:
    """About 38,000 tokens in sequences of 260 to 540."""
    return new_batch([(260 + (index * 97) % 280, 200) for index in range(96)])


def test_a_shard_has_even_blocks_of_at_most_the_given_tokens() -> None:
    batch = long_batch()
    call = batch.call(new_stage(), step=1, rank=0, world_size=1, num_shards=1)
    samples = [sample_of(item, batch.trajectories[item.key]) for item in call.shards[0].items]
    blocks = cut(samples, deterministic=True, max_tokens=BLOCK_TOKENS, device=CUDA)
    tokens = [block.tokens.numel() for block in blocks]
    assert len(tokens) == -(-sum(tokens) // BLOCK_TOKENS) > 1
    assert max(tokens) <= BLOCK_TOKENS and max(tokens) - min(tokens) <= 540


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_blocks_give_equal_bits_twice_and_for_one_and_two_ranks(dtype: torch.dtype) -> None:
    batch, stage = long_batch(), new_stage(actor=actor())

    def digests(world_size: int) -> list[list[str]]:
        def rank_main(rank: int, group: ProcessGroup) -> list[str]:
            state = new_state(stage, config=SMALL, dtype=dtype, device=CUDA)
            calls, found = ModelCalls(state, deterministic=True), []
            for step in (1, 2):
                call = batch.call(stage, step=step, rank=rank, world_size=world_size, num_shards=2)
                run_call(batch, call, calls=calls, group=group)
                found.append(state.digest())
                state.commit(step)
            return found

        return in_world(world_size, rank_main, device=CUDA)

    (expected,) = digests(1)
    assert expected[0] != expected[1]
    assert digests(1) == [expected]
    assert digests(2) == [expected, expected]


def test_the_driver_and_torch_agree_on_the_devices() -> None:
    devices = read_devices()
    assert len(devices) == torch.cuda.device_count()
    assert devices[0].identity == identity(CUDA)
    free, total = torch.cuda.mem_get_info(CUDA)
    assert devices[0].total_bytes == pytest.approx(total, rel=0.03)
    assert devices[0].free_bytes == pytest.approx(free, abs=0.03 * total)
