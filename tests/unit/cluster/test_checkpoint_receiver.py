"""Checkpoints that arrive from other hosts, whatever happens to the ranks that send them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kintsugi.checkpoint.store import Checkpoint, arriving_folder, keep_checkpoint, save_checkpoint
from kintsugi.cluster import checkpoint_receiver
from kintsugi.cluster.checkpoint_receiver import CheckpointReceiver
from kintsugi.errors import RefusedError
from kintsugi.protocol.hosts import CheckpointKept, FetchFile, KeepCheckpoint, ListFiles, StoreFile
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.messages import Body
from tests.unit.bulk.loop import Loop


class AgentsEndpoint(Loop):
    """An agent's endpoint whose loop is the test."""

    def wake(self) -> None:
        """The test looks by itself."""


class Receiver:
    def __init__(self, folder: Path) -> None:
        self.endpoint = AgentsEndpoint()
        endpoint: Any = self.endpoint
        self._receiver = CheckpointReceiver(endpoint, folder)

    def send(self, body: Body) -> int:
        delivery = self.endpoint.delivery("model-0", body)
        self._receiver.handle(delivery)
        return delivery.envelope.sequence

    def ask(self, body: Body) -> Body:
        """Send a request and wait for the reply; raise its failure."""
        return self.answer(self.send(body))

    def answer(self, number: int) -> Body:
        deadline = time.monotonic() + 20.0
        while number not in self.endpoint.replies and number not in self.endpoint.errors:
            assert time.monotonic() < deadline, f"request {number} was not answered"
            self._receiver.send_answers()
        if number in self.endpoint.errors:
            raise self.endpoint.errors[number]
        return self.endpoint.replies[number]


def saved(folder: Path, step: int) -> Checkpoint:
    return save_checkpoint(
        folder,
        step=step,
        stage="grpo",
        state={"weights": torch.full((6,), float(step))},
        extra={},
        model_files=[("config.json", b"{}")],
        keep=2,
    )


def deliver(receiver: Receiver, checkpoint: Checkpoint) -> None:
    for path in checkpoint.path.iterdir():
        assert receiver.ask(StoreFile(checkpoint.step, path.name, 0, path.read_bytes())) == Ok()


def test_what_a_killed_rank_has_sent_is_removed_when_a_later_checkpoint_is_kept(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    receiver = Receiver(here)
    receiver.ask(StoreFile(3, "model.safetensors", 0, b"the first part"))
    receiver.ask(StoreFile(5, "model.safetensors", 0, b"of a save that has begun"))
    checkpoint = saved(there, 4)
    deliver(receiver, checkpoint)
    kept = receiver.ask(KeepCheckpoint(4, keep=2))
    assert kept == CheckpointKept(str(here / "step-000004"), checkpoint.digest)
    assert not arriving_folder(here, step=3).exists()
    assert arriving_folder(here, step=5).exists()


def test_files_do_not_change_while_they_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    receiver, goes_on = Receiver(here), threading.Event()

    def slowly(folder: Path, *, step: int, keep: int, best_steps: tuple[int, ...]) -> Checkpoint:
        assert goes_on.wait(20)
        return keep_checkpoint(folder, step=step, keep=keep, best_steps=best_steps)

    monkeypatch.setattr(checkpoint_receiver, "keep_checkpoint", slowly)
    checkpoint = saved(there, 4)
    deliver(receiver, checkpoint)
    number = receiver.send(KeepCheckpoint(4, keep=2))
    for body in (StoreFile(4, "config.json", 0, b"of a replacement"), KeepCheckpoint(4, keep=2)):
        with pytest.raises(RefusedError, match="step 4 is being verified for an earlier request"):
            receiver.ask(body)
    goes_on.set()
    assert receiver.answer(number) == CheckpointKept(str(here / "step-000004"), checkpoint.digest)
    assert receiver.ask(StoreFile(4, "config.json", 0, b"of a later save")) == Ok()


@pytest.mark.parametrize("name", ["..", "a/b", ".lock", "config.json\n", ""])
def test_only_files_of_a_checkpoint_are_taken_and_given(name: str, tmp_path: Path) -> None:
    receiver = Receiver(tmp_path)
    for body in (StoreFile(1, name, 0, b"x"), FetchFile(f"step-000001/{name}", 0), ListFiles("..")):
        with pytest.raises(RefusedError, match="expected"):
            receiver.ask(body)
