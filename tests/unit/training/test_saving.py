"""A rank saves beside training: it answers, trains and is heard meanwhile; a save that is cut short leaves nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest
import torch

from kintsugi.checkpoint import store
from kintsugi.checkpoint.snapshot import Snapshots
from kintsugi.checkpoint.store import latest, load_checkpoint
from kintsugi.errors import StorageError
from kintsugi.protocol.membership import Failed, Ok
from kintsugi.protocol.recovery import RankReady, Repair
from kintsugi.protocol.training import CallDone, CommitStep, Save, Saved
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.disk import SystemDisk, SystemFile
from kintsugi.training.saving import CheckpointSaver
from kintsugi.training.snapshots import CopyCounters, HeldState, StateSnapshots
from kintsugi.transport import Delivery
from tests.unit.training.fakes import Rank, rebuild

GAP_S = 1.0
"""Longest silence of a rank that saves."""


class Gate:
    """Lets a save stand still at its first piece until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        write = store._PieceWriter._write

        def gated(writer: store._PieceWriter, piece: memoryview) -> None:
            self.reached.set()
            assert self._open.wait(10)
            write(writer, piece)

        monkeypatch.setattr(store._PieceWriter, "_write", gated)

    def open(self) -> None:
        self._open.set()


@contextmanager
def saving(rank: Rank, gate: Gate, folder: Path, *, step: int) -> Iterator[threading.Thread]:
    """A save of the committed step that stands at the gate."""
    rank.saves_beside = True
    rank.put(Save(step, rank.stage.name, str(folder)))
    assert gate.reached.wait(10)
    thread = rank.worker._saver._thread
    assert thread is not None
    try:
        yield thread
    finally:
        gate.open()
        thread.join(10)


def answers(rank: Rank) -> list[object]:
    return list(rank.shell.replies)


def test_a_rank_trains_on_while_it_saves_and_what_it_saved_is_the_step_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rank, gate = Rank().start(), Gate(monkeypatch)
    rank.train(3)
    digest = rank.state.committed_digest
    with saving(rank, gate, tmp_path, step=3):
        rank.train(4)
        (call,) = rank.calls(5)
        assert isinstance(rank.ask(call), CallDone), "the step after the next is prepared as well"
        assert not any(isinstance(body, Saved) for body in answers(rank))
    (saved,) = [body for body in answers(rank) if isinstance(body, Saved)]
    assert saved.step == 3 and saved.timing["bytes"] > 0
    assert rank.ask(CommitStep(5)) == Ok()
    restored = Rank(seed=99)
    restored.ask(rebuild(1))
    ready = restored.ask(Repair(3, (saved.path,), 2, digest))
    assert isinstance(ready, RankReady) and ready.step == 3
    assert restored.state.digest() == digest


def test_a_save_that_is_asked_for_again_is_joined_and_answers_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rank, gate = Rank().start(), Gate(monkeypatch)
    rank.train(3)
    with saving(rank, gate, tmp_path, step=3):
        rank.train(4)
        rank.put(Save(4, rank.stage.name, str(tmp_path)))
    saved = [body for body in answers(rank) if isinstance(body, Saved)]
    assert [body.step for body in saved] == [3, 3]
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-000003"]


def test_a_save_of_a_state_that_is_replaced_is_given_up_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rank = Rank().start()
    earlier = rank.ask(Save(2, rank.stage.name, str(tmp_path / "earlier")))
    assert isinstance(earlier, Saved)
    rank.train(3)
    gate = Gate(monkeypatch)
    with saving(rank, gate, tmp_path / "given up", step=3):
        threading.Timer(0.1, gate.open).start()
        rank.put(Repair(2, (earlier.path,), 2))
    assert rank.state.committed_step == 2
    (failed,) = [body for body in answers(rank) if isinstance(body, Failed)]
    assert "was given up: the state of this rank was replaced" in failed.fault.message
    assert [path.name for path in (tmp_path / "given up").iterdir()] == [".lock"]


def test_a_rank_that_ends_gives_its_save_up_and_leaves_the_checkpoint_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rank = Rank().start()
    rank.train(3)
    before = rank.ask(Save(3, rank.stage.name, str(tmp_path)))
    assert isinstance(before, Saved)
    rank.train(4)
    gate = Gate(monkeypatch)
    with saving(rank, gate, tmp_path, step=4):
        threading.Timer(0.1, gate.open).start()
        rank.worker.close()
    assert [path.name for path in sorted(tmp_path.glob("[!.]*"))] == ["step-000003"]
    newest = latest(tmp_path)
    assert newest is not None and str(newest.path) == before.path


def test_a_full_disk_is_the_answer_and_the_rank_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rank = Rank().start()

    def full(writer: store._PieceWriter, piece: memoryview) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(store._PieceWriter, "_write", full)
    assert "StorageFull" in rank.refusal(Save(2, rank.stage.name, str(tmp_path)))
    rank.train(3)


class LargeRank:
    """Snapshots and saver of a rank with a state of some size, its training replaced by changes of the live state."""

    def __init__(self, num_bytes: int) -> None:
        self.live = torch.zeros(num_bytes // 4)
        self.live[:: 1 << 10] = 1.0
        slots = Snapshots("model-0", size=self.live.nbytes, segments=None)
        self.copies = StateSnapshots(self.live, snapshots=slots)
        self.answers: list[object] = []
        self.saver = CheckpointSaver(
            model_files=lambda held, others: iter(()),
            keep=1,
            reply=lambda delivery, body: self.answers.append(body),
            fail=lambda delivery, error: self.answers.append(error),
        )

    def train(self, step: int) -> None:
        self.copies.settle()
        self.live[:1000].add_(1.0)
        self.copies.prepare(CopyCounters(step))
        self.copies.commit()

    def begin_save(self, delivery: Delivery, folder: Path, *, step: int) -> None:
        view, await_copy, hold = self.copies.hold_committed(step)
        tensors = {f"part{index}": part for index, part in enumerate(view.split(50_000_000))}
        held = HeldState(CopyCounters(step), tensors, {}, torch.float32, await_copy, hold)
        self.saver.begin(delivery, request=Save(step, "", str(folder)), held=held)


class Heartbeats:
    """A thread that wants to run every 20 ms."""

    def __init__(self) -> None:
        self.gaps = [0.0]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(0.02):
            now = time.monotonic()
            self.gaps.append(now - last)
            last = now


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))


@pytest.mark.slow
def test_a_rank_is_heard_while_it_saves_and_loads_a_gigabyte_and_needs_no_memory_for_a_copy(
    tmp_path: Path,
) -> None:
    rank = LargeRank(1 << 30)
    rank.train(1)
    rank.copies.settle()
    digest = rank.copies.digest(CopyCounters(1))
    delivery = Rank().shell.delivery_of(Save(1, "", ""))
    before, counted = anonymous_bytes(), COUNTERS.snapshot().counters.get("bytes_saved", 0)
    most = 0
    with Heartbeats() as heartbeats:
        rank.begin_save(delivery, tmp_path, step=1)
        rank.train(2)
        while not rank.answers:
            most = max(most, anonymous_bytes())
            time.sleep(0.01)
    (saved,) = rank.answers
    assert isinstance(saved, Saved)
    assert max(heartbeats.gaps) < GAP_S
    assert saved.timing["stall"] == 0.0
    # The other slot is written for the first time meanwhile.
    assert most - before < rank.live.nbytes + (300 << 20)
    assert COUNTERS.snapshot().counters["bytes_saved"] - counted >= 2 * rank.live.nbytes
    stored, _ = load_checkpoint(Path(saved.path))
    before = anonymous_bytes()
    with Heartbeats() as heartbeats:
        found, _ = rank.copies.fill(
            CopyCounters(1),
            lambda view: stored.read(
                {f"part{index}": part for index, part in enumerate(view.split(50_000_000))}
            ),
        )
    assert found == digest
    assert max(heartbeats.gaps) < GAP_S
    assert anonymous_bytes() - before < 300 << 20


class KilledAt(SystemDisk):
    """The machine's disk, on which this process is killed in the middle of a streamed file."""

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes

    def open(self, path: Path, *, create: bool = False) -> SystemFile:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o644)
        return KillingFile(descriptor, disk=self)


class KillingFile(SystemFile):
    def __init__(self, descriptor: int, *, disk: KilledAt) -> None:
        super().__init__(descriptor)
        self._disk = disk

    def pwrite(self, data: bytes | memoryview, *, offset: int) -> None:
        super().pwrite(data, offset=offset)
        self._disk.left -= len(data)
        if self._disk.left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_in_the_middle_of_a_streamed_file_leaves_the_checkpoint_before_and_the_next_save_cleans_up(
    tmp_path: Path,
) -> None:
    def save(step: int, disk: SystemDisk) -> None:
        state = {"w": torch.full((12 << 20,), float(step))}
        store.save_checkpoint(
            tmp_path, step=step, stage="", state=state, extra={}, model_files=(), keep=1, disk=disk
        )

    save(1, SystemDisk())
    child = os.fork()
    if child == 0:
        try:
            save(2, KilledAt(20 << 20))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = tmp_path / ".saving-step-000002" / store.STATE_FILE
    assert 0 < left.stat().st_size < 48 << 20, "the kill came within the file"
    newest = latest(tmp_path)
    assert newest is not None and newest.step == 1
    save(2, SystemDisk())
    newest = latest(tmp_path)
    assert newest is not None and newest.step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-000002"]


def test_a_save_is_verified_by_reads_that_go_past_the_page_cache(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Watched(SystemDisk):
        def open_to_read(self, path: Path, *, uncached: bool = False) -> SystemFile:
            seen.append(uncached)
            return super().open_to_read(path, uncached=uncached)

    state = {"w": torch.ones(4 << 20)}
    saved = store.save_checkpoint(
        tmp_path, step=1, stage="", state=state, extra={}, model_files=(), keep=1, disk=Watched()
    )
    assert seen and all(seen)
    (saved.path / store.STATE_FILE).write_bytes(b"x" * (saved.path / store.STATE_FILE).stat().st_size)
    with pytest.raises(StorageError, match="is damaged on disk"):
        store.verify(saved.path, uncached=True)
