from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kintsugi.errors import StorageError, StorageFull
from kintsugi.journal.facts import Fact, StepCommitted
from kintsugi.journal.journal import Journal, read_facts
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.disk import Disk, SystemDisk, storage_errors, write_atomically
from kintsugi.simulation.memory_disk import Crashed, MemoryDisk
from kintsugi.telemetry.events import EventLog, Note
from tests.unit.conftest import SmallDisk

FOLDER = Path("/run")
JOURNAL = FOLDER / "journal"


def memory_disk() -> MemoryDisk:
    disk = MemoryDisk()
    disk.mkdir(FOLDER)
    return disk


@pytest.fixture(params=["system", "memory"])
def disk_and_folder(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Disk, Path]:
    if request.param == "system":
        return SystemDisk(), tmp_path
    return memory_disk(), FOLDER


def test_both_disks_write_read_list_rename_and_remove_alike(disk_and_folder: tuple[Disk, Path]) -> None:
    disk, folder = disk_and_folder
    disk.mkdir(folder / "a")
    file = disk.open(folder / "a" / "new", create=True)
    file.preallocate(16)
    file.pwrite(b"hello", offset=2)
    file.sync()
    assert (file.size(), file.pread(100, offset=1)) == (16, b"\0hello" + bytes(9))
    file.truncate(7)
    file.close()
    disk.sync_folder(folder / "a")
    disk.rename(folder / "a" / "new", folder / "a" / "old")
    assert disk.list(folder / "a") == ["old"]
    assert disk.read(folder / "a" / "old") == b"\0\0hello"
    disk.rename(folder / "a", folder / "b")
    assert disk.exists(folder / "b" / "old") and not disk.exists(folder / "a")
    disk.remove(folder / "b" / "old")
    disk.remove(folder / "b")
    assert disk.list(folder) == []


def test_both_disks_know_what_is_missing(disk_and_folder: tuple[Disk, Path]) -> None:
    disk, folder = disk_and_folder
    with pytest.raises(FileNotFoundError):
        disk.open(folder / "none")
    with pytest.raises(FileNotFoundError):
        disk.read(folder / "none")
    with pytest.raises(FileNotFoundError):
        disk.open(folder / "none" / "file", create=True)
    with pytest.raises(FileNotFoundError):
        disk.remove(folder / "none")


def test_both_disks_lock_a_file_for_one_holder(disk_and_folder: tuple[Disk, Path]) -> None:
    disk, folder = disk_and_folder
    first = disk.open(folder / "journal", create=True)
    second = disk.open(folder / "journal")
    first.lock()
    with pytest.raises(BlockingIOError):
        second.lock()
    first.close()
    second.lock()
    second.close()


def test_both_disks_read_zeros_where_room_was_allocated_and_nothing_was_written(
    disk_and_folder: tuple[Disk, Path],
) -> None:
    disk, folder = disk_and_folder
    file = disk.open(folder / "roomy", create=True)
    file.pwrite(b"abc", offset=0)
    file.preallocate(10)
    assert file.size() == 10
    assert file.pread(100, offset=1) == b"bc" + bytes(7)
    assert (file.pread(4, offset=8), file.pread(4, offset=12)) == (bytes(2), b"")
    file.pwrite(b"z", offset=5)
    file.truncate(7)
    assert file.pread(100, offset=0) == b"abc" + bytes(2) + b"z" + bytes(1)
    assert disk.read(folder / "roomy") == file.pread(100, offset=0)


def test_what_a_process_did_not_sync_before_its_end_is_still_lost_when_the_power_goes() -> None:
    disk = memory_disk()
    file = disk.open(FOLDER / "a", create=True)
    file.pwrite(b"old", offset=0)
    file.preallocate(6)
    file.sync()
    disk.sync_folder(FOLDER)
    file.pwrite(b"new", offset=0)
    after_exit = disk.restarted()
    assert after_exit.read(FOLDER / "a") == b"new" + bytes(3)
    assert after_exit.restarted(power_cut=True, torn_bytes=1).read(FOLDER / "a") == b"nld" + bytes(3)


def test_an_operation_fails_on_demand_without_effect() -> None:
    disk = memory_disk()
    file = disk.open(JOURNAL, create=True)
    disk.fail_at(len(disk.operations) + 1, code=errno.ENOSPC)
    with pytest.raises(OSError, match="No space left") as caught:
        file.pwrite(b"record", offset=0)
    assert caught.value.errno == errno.ENOSPC
    assert file.size() == 0
    file.pwrite(b"record", offset=0)
    assert disk.read(JOURNAL) == b"record"


def test_a_crash_tears_the_write_and_stops_the_disk() -> None:
    disk = memory_disk()
    file = disk.open(JOURNAL, create=True)
    disk.crash_at(len(disk.operations) + 1, keep=0.5)
    with pytest.raises(Crashed):
        file.pwrite(b"record", offset=0)
    with pytest.raises(Crashed):
        disk.read(JOURNAL)
    assert disk.restarted().read(JOURNAL) == b"rec"


def test_a_power_cut_loses_what_was_not_synced_and_may_tear_the_last_write() -> None:
    disk = memory_disk()
    file = disk.open(JOURNAL, create=True)
    disk.sync_folder(FOLDER)
    file.pwrite(b"one,", offset=0)
    file.sync()
    file.pwrite(b"two,", offset=4)
    file.pwrite(b"three", offset=8)
    assert disk.restarted().read(JOURNAL) == b"one,two,three"
    assert disk.restarted(power_cut=True, torn_bytes=2).read(JOURNAL) == b"one,\0\0\0\0th"


def test_a_power_cut_loses_a_name_whose_folder_was_not_synced() -> None:
    disk = memory_disk()
    file = disk.open(FOLDER / "new", create=True)
    file.pwrite(b"x", offset=0)
    file.sync()
    assert not disk.restarted(power_cut=True).exists(FOLDER / "new")
    disk.sync_folder(FOLDER)
    disk.rename(FOLDER / "new", JOURNAL)
    assert disk.restarted(power_cut=True).exists(FOLDER / "new")
    disk.sync_folder(FOLDER)
    assert disk.restarted(power_cut=True).list(FOLDER) == ["journal"]


def test_a_power_cut_loses_names_below_a_folder_that_was_synced_when_their_own_was_not() -> None:
    disk = memory_disk()
    disk.mkdir(FOLDER / "unfinished")
    disk.open(FOLDER / "unfinished" / "file", create=True).sync()
    disk.rename(FOLDER / "unfinished", FOLDER / "whole")
    disk.sync_folder(FOLDER)
    assert disk.restarted(power_cut=True).list(FOLDER / "whole") == []
    assert disk.restarted(power_cut=True, keep_names=lambda _: True).list(FOLDER / "whole") == ["file"]


def test_a_write_that_fails_may_have_stored_a_part() -> None:
    disk = memory_disk()
    file = disk.open(JOURNAL, create=True)
    disk.fail_at(len(disk.operations) + 1, keep=0.5)
    with pytest.raises(OSError, match="Input/output"):
        file.pwrite(b"record", offset=0)
    assert disk.read(JOURNAL) == b"rec"


def test_a_full_disk_takes_what_fits_into_space_allocated_before() -> None:
    disk = memory_disk()
    file = disk.open(JOURNAL, create=True)
    file.preallocate(4)
    disk.full = True
    file.pwrite(b"four", offset=0)
    for refused in (
        lambda: file.pwrite(b"more", offset=2),
        lambda: file.preallocate(5),
        lambda: disk.open(FOLDER / "new", create=True),
        lambda: disk.mkdir(FOLDER / "new"),
    ):
        with pytest.raises(OSError, match="No space left"):
            refused()
    assert disk.read(JOURNAL) == b"fomo" and disk.list(FOLDER) == ["journal"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS])
def test_an_error_of_the_disk_says_what_failed_and_whether_room_would_help(code: int) -> None:
    with pytest.raises(StorageError, match="could not read a on disk: ") as caught:
        with storage_errors("could not read a"):
            raise OSError(code, os.strerror(code))
    assert os.strerror(code) in str(caught.value)
    assert isinstance(caught.value, StorageFull) == (code not in (errno.EIO, errno.EROFS))


def test_on_a_real_full_disk_journal_and_events_go_on_and_a_journal_at_its_end_goes_on_when_there_is_room(
    small_disk: SmallDisk,
) -> None:
    journal = Journal.create(small_disk.folder / "journal", owner="master-0")
    log = EventLog(RunFolder(small_disk.folder).events_file("master-0"), process="master-0")
    assert log.try_emit(Note("begin"))
    small_disk.fill()
    with pytest.raises(OSError, match="No space left"):
        (small_disk.folder / "other").write_bytes(bytes(8192))
    facts: list[Fact] = [StepCommitted(number, "d" * 2_000) for number in range(600)]
    for number, fact in enumerate(facts):
        journal.append([fact])
        journal.sync()
        if number % 10 == 0:
            assert log.try_emit(Note("the disk is full"))
    with suppress(StorageFull):
        for _ in range(100):
            journal.append(facts[:100])
            facts += facts[:100]
    with pytest.raises(StorageFull, match="No space left"):
        journal.append(facts[:100])
    small_disk.clear()
    journal.append([facts[0]])
    journal.sync()
    journal.close()
    log.close()
    assert list(read_facts(small_disk.folder / "journal")) == [*facts, facts[0]]


@pytest.mark.parametrize("durable", [False, True])
def test_an_atomic_write_replaces_a_file_and_leaves_nothing_else(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "a.json"
    for data in (b"old and longer", b"new"):
        write_atomically(path, data, durable=durable)
        assert path.read_bytes() == data
    assert os.listdir(tmp_path) == ["a.json"]


def test_an_atomic_write_takes_parts_and_an_empty_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "parts", (part for part in (b"one ", memoryview(b"two"))), durable=False)
    write_atomically(tmp_path / "empty", b"", durable=False)
    assert (tmp_path / "parts").read_bytes() == b"one two"
    assert (tmp_path / "empty").read_bytes() == b""


def test_a_failed_atomic_write_leaves_the_old_file_and_no_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")

    def parts() -> Iterator[bytes]:
        yield b"new"
        raise KeyError("a mistake in the data")

    with pytest.raises(KeyError):
        write_atomically(path, parts(), durable=True)
    assert (os.listdir(tmp_path), path.read_bytes()) == (["a.json"], b"old")


def test_an_atomic_write_to_a_full_disk_raises_and_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_atomically(path, b"new", durable=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (os.listdir(tmp_path), path.read_bytes()) == (["a.json"], b"old")


def test_an_atomic_write_follows_no_link_in_the_place_of_its_temporary_file(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / f".a.json.{os.getpid()}.new").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        write_atomically(tmp_path / "a.json", b"new", durable=False)
    assert victim.read_bytes() == b"mine"


def test_a_durable_write_syncs_the_file_before_its_name_and_then_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    replace, fsync = os.replace, os.fsync

    def recorded_fsync(descriptor: int) -> None:
        calls.append(f"fsync {os.path.basename(os.readlink(f'/proc/self/fd/{descriptor}'))}")
        fsync(descriptor)

    def recorded_replace(source: Path, target: Path) -> None:
        calls.append(f"replace {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    write_atomically(tmp_path / "a", b"data", durable=False)
    assert calls == ["replace a"]
    calls.clear()
    write_atomically(tmp_path / "a", b"data", durable=True)
    assert calls == [f"fsync .a.{os.getpid()}.new", "replace a", f"fsync {tmp_path.name}"]
