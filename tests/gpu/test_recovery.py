"""A rank on the accelerator: snapshots in host memory, and what a failing device is called."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kintsugi.errors import DeviceOutOfMemory
from kintsugi.model.device_errors import as_world_error
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.training.digests import ON_DEVICE_BYTES, SLICE_BYTES, digest
from kintsugi.training.state import TrainingState
from tests.unit.training.fakes import FakeSegments
from tests.unit.training.world import TINY, new_stage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
STAGE = new_stage(beta=0.1)


@pytest.fixture
def segments() -> Iterator[FakeSegments]:
    held = FakeSegments()
    yield held
    held.close()


def new_rank(segments: FakeSegments, *, seed: int = 3) -> TrainingState:
    model = Transformer(TINY, device=CUDA)
    initialize(model, seed=seed)
    return TrainingState(model, compute_dtype=torch.bfloat16, process="model-0", segments=segments)


def advance(state: TrainingState, step: int) -> str:
    gradient = torch.randn(state.gradient.shape, generator=torch.Generator().manual_seed(step)).to(CUDA)
    state.begin_update()
    state.update(gradient)
    state.end_update(step)
    digest = state.prepared_digest
    state.commit(step)
    return digest


def test_a_replacement_goes_on_from_its_predecessors_snapshot_with_equal_bits(
    segments: FakeSegments,
) -> None:
    rank = new_rank(segments)
    rank.start_stage(STAGE, step=0)
    digests = [advance(rank, step) for step in (1, 2)]
    assert rank.digest() == digests[-1]
    newcomer = new_rank(segments, seed=99)
    newcomer.restore_snapshot(2, process="model-0", stages={STAGE.name: STAGE}, digest=digests[-1])
    assert newcomer.digest() == digests[-1]
    expected = {name: tensor.clone() for name, tensor in rank.reference_model.named_parameters()}
    for name, parameter in newcomer.reference_model.named_parameters():
        assert torch.equal(parameter, expected[name])
    assert advance(newcomer, 3) == advance(new_rank_at(2, digests[-1], segments), 3)


def new_rank_at(step: int, digest: str, segments: FakeSegments) -> TrainingState:
    """A twin that never died: the same steps again, in memory of its own."""
    twin = new_rank(FakeSegments())
    twin.start_stage(STAGE, step=0)
    found = [advance(twin, each) for each in range(1, step + 1)]
    assert found[-1] == digest
    return twin


def test_a_half_updated_rank_returns_to_the_committed_bits(segments: FakeSegments) -> None:
    rank = new_rank(segments)
    rank.start_stage(STAGE, step=0)
    digest = advance(rank, 1)
    rank.begin_update()
    rank.update(torch.ones_like(rank.gradient))
    assert rank.half_updated and rank.digest() != digest
    rank.rollback(1)
    assert (rank.digest(), rank.half_updated) == (digest, False)


@pytest.mark.parametrize("odd_bytes", [0, 4, SLICE_BYTES - 4])
def test_a_digest_is_the_same_on_the_card_and_in_host_memory(odd_bytes: int) -> None:
    words = (ON_DEVICE_BYTES + 3 * SLICE_BYTES + odd_bytes) // 4
    content = torch.randn(words, generator=torch.Generator().manual_seed(odd_bytes))
    on_device = content.to(CUDA)
    before = digest(b"step 1", content)
    assert digest(b"step 1", on_device) == before
    on_device[words // 2] += 1.0
    assert digest(b"step 1", on_device) != before


def test_memory_that_ran_out_is_named_and_comes_back() -> None:
    torch.cuda.empty_cache()
    free_before, total = torch.cuda.mem_get_info()
    fault: Exception | None = None
    try:
        held = []
        while True:
            held.append(torch.empty(total // 8, dtype=torch.uint8, device=CUDA))
    except torch.OutOfMemoryError as error:
        fault = as_world_error(error)
        held.clear()
    torch.cuda.empty_cache()
    assert isinstance(fault, DeviceOutOfMemory)
    assert abs(torch.cuda.mem_get_info()[0] - free_before) < 50 << 20


ILLEGAL_ACCESS = """
import torch
from kintsugi.model.device_errors import as_world_error
try:
    torch.zeros(4, device="cuda")[torch.tensor([1 << 30], device="cuda")].sum().item()
except Exception as error:
    fault = as_world_error(error)
    print(type(fault).__name__, fault)
"""


def test_an_illegal_access_is_the_devices_error() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", ILLEGAL_ACCESS],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert finished.stdout.startswith("DeviceError CUDA error"), finished.stderr
