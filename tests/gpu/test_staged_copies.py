"""A state of a gigabyte is copied between a device and memory that is not pinned, in order with the device's work."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from kintsugi.checkpoint.snapshot import Snapshots
from kintsugi.training.snapshots import CopyCounters, StateSnapshots
from kintsugi.training.staged_copies import DeviceLane, StagedCopies
from tests.unit.training.fakes import FakeSegments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUMEL = 1 << 28


def staged_copies() -> StagedCopies:
    return StagedCopies(lambda: DeviceLane(torch.device("cuda", 0)))


def event() -> torch.cuda.Event:
    return torch.cuda.current_stream().record_event()


def test_a_state_is_copied_to_the_host_and_back_after_what_was_enqueued_before(
    record_property: Callable[[str, object], None],
) -> None:
    live, copies = torch.zeros(NUMEL, device="cuda"), staged_copies()
    host, back = torch.empty(NUMEL), torch.empty(NUMEL, device="cuda")
    for name in ("first", "later"):  # The first one allocates the pages and the buffers.
        busy = torch.rand(8192, 8192, device="cuda")
        for _ in range(10):
            busy = torch.tanh(busy @ busy)
        live.uniform_()
        start = time.perf_counter()
        copies.copy(live, into=host, after=event())
        to_host_s = time.perf_counter() - start
        back.zero_()
        start = time.perf_counter()
        copies.copy(host, into=back, after=event())
        record_property(f"{name}_gb_per_s_to_host", live.nbytes / to_host_s / 1e9)
        record_property(f"{name}_gb_per_s_to_device", live.nbytes / (time.perf_counter() - start) / 1e9)
        assert torch.equal(back, live) and torch.equal(host, live.cpu())


def test_a_successor_loads_the_snapshot_in_advance_beside_other_work_and_adopts_it() -> None:
    segments = FakeSegments()
    live = torch.rand(NUMEL, device="cuda")
    copies = StateSnapshots(live, snapshots=Snapshots("model-0", size=live.nbytes, segments=segments))
    digest = copies.prepare(CopyCounters(1))
    copies.commit()
    copies.settle()
    found = torch.zeros_like(live)
    successor = StateSnapshots(found, snapshots=Snapshots("model-0", size=live.nbytes, segments=segments))
    successor.begin_load()
    busy = torch.rand(4096, 4096, device="cuda")
    for _ in range(20):
        busy = torch.tanh(busy @ busy)
    assert successor.adopt(1, digest=digest) == CopyCounters(1)
    assert torch.equal(found, live) and successor.digest(CopyCounters(1)) == digest
    segments.close()
