"""Checkpoints of ranks on other hosts: brought to the run folder and fetched from it, over the bulk channel."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kintsugi.bulk import files
from kintsugi.bulk.exports import SLICE_BYTES
from kintsugi.bulk.files import file_digests
from kintsugi.checkpoint.store import (
    Checkpoint,
    keep_checkpoint,
    unfinished_folder,
    verify,
)
from kintsugi.cluster import checkpoint_receiver
from kintsugi.errors import (
    Fault,
    GroupBroken,
    ProcessDied,
    RefusedError,
    StorageError,
    StorageFull,
    WorldError,
)
from kintsugi.protocol.hosts import KeepCheckpoint, ListFiles, StoreFile
from kintsugi.protocol.messages import Body
from kintsugi.training import checkpoint_delivery
from kintsugi.training.checkpoint_delivery import MAX_ATTEMPTS, CheckpointDelivery
from kintsugi.transport import Reply
from tests.unit.cluster.delivering import (
    ELEMENTS,
    PAUSE_S,
    PIECE_BYTES,
    Run,
    contents,
    fetch_all,
    num_read,
    opened_run,
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    with opened_run(tmp_path, monkeypatch) as opened:
        yield opened


def test_a_checkpoint_arrives_in_the_run_folder_as_it_was_written_and_no_message_carries_its_bytes(
    run: Run,
) -> None:
    written = run.checkpoint(run.root / "written")
    kept = run.deliver("model-0", written.path)
    assert kept.path == run.run_folder / "step-000003"
    assert contents(kept.path) == contents(written.path)
    assert verify(kept.path).digest == written.digest
    assert not unfinished_folder(run.run_folder, step=3).exists()
    assert max(len(msgspec.msgpack.encode(body)) for body in run.requests) < 1000


def test_a_checkpoint_of_the_run_folder_is_fetched_by_several_ranks(run: Run) -> None:
    saved = run.checkpoint(run.run_folder)
    for rank in ("model-0", "model-1", "model-0"):
        copy = run.fetch(rank, saved.path)
        assert contents(copy) == contents(saved.path) and rank in copy.name


def test_a_save_that_another_rank_repeats_sends_only_what_has_not_arrived(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = run.checkpoint(run.root / "written")
    repeated = run.checkpoint(run.root / "repeated")

    def check() -> None:
        if len(run.loop.replies) >= 3:  # Two small files, and a part of the large one.
            raise RefusedError("this process ends")

    with pytest.raises(RefusedError, match="this process ends"):
        run.deliver("model-0", written.path, check=check)
    run.made.kill("model-0")
    read = num_read(monkeypatch)
    kept = run.deliver("model-1", repeated.path)
    assert kept.digest == written.digest == verify(kept.path).digest
    assert sum(read) < ELEMENTS * 4


@pytest.mark.parametrize("direction", ["deliver", "fetch"])
def test_a_connection_that_ends_in_the_middle_of_a_piece_is_replaced_with_the_same_bytes(
    run: Run, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    original = files.DiskExport.attempt_region
    ended: list[Any] = []

    def ending(self: files.DiskExport, part: Any, remaining_s: float) -> Any:
        if part.offset == 3 * SLICE_BYTES and not ended:
            ended.append(part)
            raise WorldError("the connection ends here")
        return original(self, part, remaining_s)

    monkeypatch.setattr(files.DiskExport, "attempt_region", ending)
    if direction == "deliver":
        written = run.checkpoint(run.root / "written")
        path = run.deliver("model-0", written.path).path
    else:
        written = run.checkpoint(run.run_folder)
        path = run.fetch("model-0", written.path)
    assert ended and contents(path) == contents(written.path)


def test_a_fetch_that_was_given_up_goes_on_where_it_ended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = run.checkpoint(run.run_folder)
    delivery = run.rank("model-0")

    def given_up() -> None:
        if any(index == 2 for index, _ in delivery._arrived):  # A piece of the large file.
            raise GroupBroken("a rank was lost")

    def ask(process: str, body: Body) -> Reply:
        return run.ask("model-0", body)

    with pytest.raises(GroupBroken, match="a rank was lost"):
        fetch_all(delivery, saved.path, ask=ask, check=given_up)
    read = num_read(monkeypatch)
    assert contents(fetch_all(delivery, saved.path, ask=ask)) == contents(saved.path)
    assert sum(read) <= sum(map(len, contents(saved.path).values())) - PIECE_BYTES


def test_bytes_that_do_not_have_their_digest_are_refused_and_named(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(path: Path, *, offset: int, size: int) -> tuple[str, ...]:
        return tuple("0" * 16 for _ in file_digests(path, offset=offset, size=size))

    monkeypatch.setattr(checkpoint_delivery, "file_digests", wrong)
    with pytest.raises(StorageError, match="from model-0: expected xxh3 0000000000000000 at 0"):
        run.deliver("model-0", run.checkpoint(run.root / "written").path)
    assert not list(run.run_folder.glob("step-*"))


@pytest.mark.parametrize(
    ("sender", "changed", "said"),
    [
        ("model-1", {}, "model-1 can not store a file that model-0 offers"),
        ("rollout-0", {}, "rollout-0 can not store"),
        ("model-0", {"name": "../x"}, "expected the name of a file of a checkpoint"),
        ("model-0", {"name": ".hidden"}, "expected the name of a file of a checkpoint"),
        ("model-0", {"offset": -1}, "not 1 pieces from -1 on"),
        ("model-0", {"digests": ("", "")}, "has 5 bytes, not 2 pieces from 0 on"),
        ("model-0", {"offset": 5}, "not 1 pieces from 5 on"),
    ],
)
def test_a_part_that_its_sender_may_not_store_is_refused_before_anything_is_written(
    run: Run, sender: str, changed: dict[str, Any], said: str
) -> None:
    path = run.root / "a"
    path.write_bytes(b"bytes")
    run.rank("model-0")
    offer = run.made.endpoints["model-0"].server.offer("checkpoint", files.DiskExport([path]))
    part = StoreFile(3, "a", 5, 0, file_digests(path, offset=0, size=5), offer, 0)
    with pytest.raises(RefusedError) as raised:
        run.ask(sender, msgspec.structs.replace(part, **changed))
    assert said in str(raised.value)
    assert not run.run_folder.exists()


@pytest.mark.parametrize("name", ["..", ".removed-step-000003", "step-x", "step-000003/../.."])
def test_only_folders_of_checkpoints_are_offered(run: Run, name: str) -> None:
    with pytest.raises(RefusedError, match="expected the name of a checkpoint"):
        run.ask("model-0", ListFiles(name))


def test_a_checkpoint_that_was_removed_is_not_offered_any_more(run: Run) -> None:
    for step in (3, 4, 5):
        saved = run.checkpoint(run.run_folder, step)
        run.fetch("model-0", saved.path)
    assert set(run.receiver._offered) == {"step-000004", "step-000005"}


def test_a_checkpoint_that_was_given_up_on_its_way_is_not_kept(run: Run) -> None:
    def check() -> None:
        if run.requests:
            raise RefusedError("the save of step 3 was given up: a rollback")

    with pytest.raises(RefusedError, match="given up: a rollback"):
        run.deliver("model-0", run.checkpoint(run.root / "written").path, check=check)
    assert not any(isinstance(body, KeepCheckpoint) for body in run.requests)
    assert not list(run.run_folder.glob("step-*"))
    assert not run.made.endpoints["model-0"].server._exports.by_name


def delivery_with(run: Run, call: Callable[[Body], Reply]) -> CheckpointDelivery:
    bulk = run.made.add("model-0")
    return CheckpointDelivery(
        lambda process, body, *, deadline_s: call(body),
        bulk,
        process="model-0",
        agent="agent-0",
        folder=run.root / "host-1",
        pause_s=PAUSE_S,
    )


@pytest.mark.parametrize(("kind", "expected"), [("StorageFull", StorageFull), ("StorageError", StorageError)])
def test_a_disk_that_fails_beside_the_master_is_a_failure_of_storage(
    kind: str, expected: type[StorageError], run: Run
) -> None:
    asked: list[Body] = []

    def call(body: Body) -> Reply:
        asked.append(body)
        raise WorldError("no space left", cause=Fault("id", kind, "agent-0", "no space left", 0.0))

    run.ranks["model-0"] = delivery_with(run, call)
    with pytest.raises(StorageError, match="no space left") as caught:
        run.deliver("model-0", run.checkpoint(run.root / "written").path)
    assert type(caught.value) is expected
    assert len(asked) >= MAX_ATTEMPTS, "a part is not given up at its first failure"


def test_a_part_is_brought_again_while_the_agent_beside_the_master_is_replaced(run: Run) -> None:
    died: list[Body] = []

    def call(body: Body) -> Reply:
        if isinstance(body, StoreFile) and len(died) < 3:
            died.append(body)
            raise ProcessDied("agent-0: killed")
        return run.ask("model-0", body)

    run.ranks["model-0"] = delivery_with(run, call)
    written = run.checkpoint(run.root / "written")
    assert run.deliver("model-0", written.path).digest == written.digest
    assert len(died) == 3


def test_a_file_that_shrinks_while_it_is_offered_ends_the_transfer(run: Run) -> None:
    path = run.root / "a"
    path.write_bytes(os.urandom(3 << 20))
    bulk = run.made.add("model-0")
    offer = bulk.server.offer("checkpoint", files.DiskExport([path]))
    os.truncate(path, 1 << 20)
    with pytest.raises(WorldError, match="bulk connection"):
        files.fetch_piece(
            run.made.endpoints["agent-0"].client,
            offer,
            index=0,
            offset=0,
            target=memoryview(bytearray(3 << 20)),
        )


def test_files_do_not_change_while_they_are_verified(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    written = run.checkpoint(run.root / "written")

    def slowly(folder: Path, **given: Any) -> Checkpoint:
        assert goes_on.wait(20)
        return keep_checkpoint(folder, **given)

    monkeypatch.setattr(checkpoint_receiver, "keep_checkpoint", slowly)
    refused: list[str] = []

    original = run.receiver.handle

    def handle(request: Any) -> None:
        original(request)
        if isinstance(request.body, KeepCheckpoint) and not goes_on.is_set():
            for body in (run.requests[0], request.body):
                again = run.loop.delivery("model-0", body)
                original(again)
                with pytest.raises(
                    RefusedError, match="step 3 is being verified for an earlier request"
                ) as told:
                    run.loop.until_answered(again.envelope.sequence)
                refused.append(str(told.value))
            goes_on.set()

    monkeypatch.setattr(run.receiver, "handle", handle)
    kept = run.deliver("model-0", written.path)
    assert len(refused) == 2
    assert kept.digest == written.digest


def test_what_a_killed_rank_has_sent_is_removed_when_a_later_checkpoint_is_kept(run: Run) -> None:
    for step in (2, 5):
        unfinished_folder(run.run_folder, step=step).mkdir(parents=True)
    kept = run.deliver("model-0", run.checkpoint(run.root / "written").path)
    assert kept.path == run.run_folder / "step-000003"
    assert not unfinished_folder(run.run_folder, step=2).exists()
    assert unfinished_folder(run.run_folder, step=5).exists()
