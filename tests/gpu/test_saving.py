"""A state of gigabytes on the accelerator is saved beside training: the process is heard, and the bits return."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kintsugi.checkpoint.snapshot import Snapshots
from kintsugi.checkpoint.store import load_checkpoint
from kintsugi.protocol.training import Save, Saved
from kintsugi.training.saving import CheckpointSaver
from kintsugi.training.snapshots import CopyCounters, HeldState, StateSnapshots
from tests.unit.training.fakes import FakeShell
from tests.unit.training.test_saving import GAP_S, Heartbeats, anonymous_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_BYTES = 3 << 30
PART = 50_000_000


def parts(flat: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"part{index}": part for index, part in enumerate(flat.split(PART))}


def test_a_state_of_three_gigabytes_is_saved_beside_training_and_restored_with_the_same_digest(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    live = torch.rand(NUM_BYTES // 4, device="cuda")
    copies = StateSnapshots(live, snapshots=Snapshots("model-0", size=live.nbytes, segments=None))

    def train(step: int) -> str:
        copies.settle()
        live.mul_(1.0 + 1e-3)
        digest = copies.prepare(CopyCounters(step))
        copies.commit()
        return digest

    digest = train(1)
    train(2)  # Both slots are in memory.
    copies.settle()
    digest = train(3)
    replies: list[object] = []
    saver = CheckpointSaver(
        model_files=lambda held, others: iter(()),
        keep=1,
        reply=lambda delivery, body: replies.append(body),
        fail=lambda delivery, error: replies.append(error),
    )
    view, await_copy, hold = copies.hold_committed(3)
    held = HeldState(CopyCounters(3), parts(view), {}, torch.bfloat16, await_copy, hold)
    before, most, busy = anonymous_bytes(), 0, torch.rand(4096, 4096, device="cuda")
    with Heartbeats() as heartbeats:
        delivery = FakeShell("model-0").delivery_of(Save(3, "", ""))
        saver.begin(delivery, request=Save(3, "", str(tmp_path)), held=held)
        train(4)
        while not replies:
            busy = torch.tanh(busy @ busy)
            torch.cuda.synchronize()
            most = max(most, anonymous_bytes())
            time.sleep(0.005)
    (saved,) = replies
    assert isinstance(saved, Saved), saved
    assert max(heartbeats.gaps) < GAP_S
    assert most - before < 400 << 20
    record_property("timing", saved.timing)
    record_property("longest_gap_s", max(heartbeats.gaps))
    live.zero_()
    stored, _ = load_checkpoint(Path(saved.path))
    with Heartbeats() as heartbeats:
        found, _ = copies.fill(CopyCounters(3), lambda view: stored.read(parts(view)))
    assert found == digest == copies.digest(CopyCounters(3))
    assert max(heartbeats.gaps) < GAP_S
