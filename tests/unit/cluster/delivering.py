"""The agent beside the master with the run folder, and ranks of other hosts that bring checkpoints and fetch them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kintsugi.bulk import files
from kintsugi.bulk.exports import SLICE_BYTES
from kintsugi.checkpoint.store import Checkpoint, save_checkpoint
from kintsugi.cluster import checkpoint_receiver
from kintsugi.cluster.checkpoint_receiver import CheckpointReceiver
from kintsugi.errors import Fault, StorageFull, WorldError
from kintsugi.protocol.hosts import StoreFile
from kintsugi.protocol.messages import Body
from kintsugi.training import checkpoint_delivery
from kintsugi.training.checkpoint_delivery import Ask, CheckpointDelivery
from kintsugi.transport import Reply
from tests.unit.bulk.loop import Loop
from tests.unit.bulk.peers import Processes, processes

PIECE_BYTES = 2 * SLICE_BYTES
PAUSE_S = 0.01
"""Pause between two attempts."""
ELEMENTS = 5 * PIECE_BYTES // 4 + 3
"""Float32 elements: six pieces in two parts, the last one of some bytes."""


class Run:
    """Agent beside the master with the run folder, and ranks of another host."""

    def __init__(self, made: Processes, root: Path) -> None:
        self.made, self.root = made, root
        self.run_folder = root / "run"
        self.loop = Loop()
        self.requests: list[Body] = []
        self.ranks: dict[str, CheckpointDelivery] = {}
        loop: Any = self.loop
        self.receiver = CheckpointReceiver(loop, made.add("agent-0"), loop, folder=self.run_folder)

    def ask(self, sender: str, body: Body) -> Reply:
        """Answer a request of any thread."""
        self.requests.append(body)
        delivery = self.loop.delivery(sender, body)
        self.receiver.handle(delivery)
        try:
            return Reply(self.loop.until_answered(delivery.envelope.sequence))
        except StorageFull as error:
            raise WorldError("full", cause=Fault("id", "StorageFull", "agent-0", "full", 0.0)) from error

    def rank(self, name: str) -> CheckpointDelivery:
        if name in self.ranks:
            return self.ranks[name]
        bulk = self.made.endpoints.get(name) or self.made.add(name)

        def call(process: str, body: Body, *, deadline_s: float) -> Reply:
            return self.ask(name, body)

        folder = self.root / "host-1" / name
        made = CheckpointDelivery(call, bulk, process=name, agent="agent-0", folder=folder, pause_s=PAUSE_S)
        return self.ranks.setdefault(name, made)

    def deliver(self, rank: str, path: Path, *, step: int = 3, **given: Any) -> Checkpoint:
        """Bring the files of a folder as a rank."""
        return self.rank(rank).deliver(
            path, [each.name for each in path.iterdir()], step=step, keep=2, best_steps=(), **given
        )

    def fetch(self, rank: str, path: Path) -> Path:
        return fetch_all(self.rank(rank), path, ask=lambda process, body: self.ask(rank, body))

    def checkpoint(self, folder: Path, step: int = 3) -> Checkpoint:
        state = {"weights/a": np.arange(ELEMENTS, dtype=np.float32) * step, "empty": np.zeros(0, np.float32)}
        return save_checkpoint(
            folder, step=step, stage="grpo", state=state, extra={"step": step}, model_files=(), keep=2
        )

    def stored(self) -> list[tuple[str, int]]:
        return [(body.name, body.offset) for body in self.requests if isinstance(body, StoreFile)]


@contextmanager
def opened_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run whose files travel in small pieces."""
    for module in (files, checkpoint_receiver, checkpoint_delivery):
        monkeypatch.setattr(module, "FILE_PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(checkpoint_delivery, "PART_BYTES", 4 * PIECE_BYTES)
    with processes() as made:
        yield Run(made, root)


def fetch_all(delivery: CheckpointDelivery, path: Path, *, ask: Ask, **given: Any) -> Path:
    """Read the whole state of a checkpoint; return where its files have been copied."""
    state, _ = delivery.open(path, ask=ask, **given)
    state.read({name: np.empty(place.shape, np.float32) for name, place in state.places.items()})
    return delivery.folder / f".fetched-{delivery._process}-{path.name}"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the parts that are read for a transfer, from now on."""
    sizes: list[int] = []
    original = files.DiskExport.attempt_region

    def counted(self: files.DiskExport, part: Any, remaining_s: float) -> Any:
        sizes.append(part.size)
        return original(self, part, remaining_s)

    monkeypatch.setattr(files.DiskExport, "attempt_region", counted)
    return sizes
