"""The journal keeps what was synced, cuts what was not, and reports damage instead of dropping it."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from kintsugi.errors import StorageError, StorageFull
from kintsugi.journal import journal as journal_module
from kintsugi.journal.facts import BatchFormed, Fact, RunStarted, StepCommitted, TermStarted, TicketsIssued
from kintsugi.journal.journal import Journal, read_facts, read_records
from kintsugi.simulation.memory_disk import Crashed, MemoryDisk
from kintsugi.types import Ticket

RUN = Path("/run")
PATH = RUN / "journal"
HEADER_SIZE = 128
WATERMARK = range(32, 48)
OWNER = range(48, HEADER_SIZE)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Space is allocated in smaller steps, so that thousands of journals are quickly made."""
    monkeypatch.setattr(journal_module, "_CHUNK_SIZE", 1 << 14)
    monkeypatch.setattr(journal_module, "_SPARE_SIZE", 1 << 12)


def decision(number: int) -> list[Fact]:
    ticket = Ticket(f"g:0:{number}:0", "g", 0, number, 0, 2)
    return [TicketsIssued((ticket,)), BatchFormed(number, (ticket.id,)), StepCommitted(number, "d" * number)]


def new_disk() -> MemoryDisk:
    disk = MemoryDisk()
    disk.mkdir(RUN)
    return disk


def written(num_decisions: int, *, disk: MemoryDisk) -> list[Fact]:
    """A closed journal with this many synced decisions."""
    with Journal.create(PATH, owner="master-0", disk=disk) as journal:
        for number in range(num_decisions):
            journal.append(decision(number))
            journal.sync()
    return [fact for number in range(num_decisions) for fact in decision(number)]


def with_contents(data: bytes) -> MemoryDisk:
    disk = new_disk()
    file = disk.open(PATH, create=True)
    file.pwrite(data, offset=0)
    file.sync()
    disk.sync_folder(RUN)
    return disk


def contents(disk: MemoryDisk) -> bytes:
    """Without the zeros allocated ahead."""
    return disk.read(PATH).rstrip(b"\0").ljust(HEADER_SIZE, b"\0")


def test_what_was_written_is_read_back_in_order() -> None:
    disk = new_disk()
    facts = written(5, disk=disk)
    assert list(read_facts(PATH, disk=disk)) == facts
    journal, reread = Journal.open(PATH, owner="master-0", disk=disk)
    journal.append(decision(5))
    journal.close()
    assert list(reread) == facts
    assert list(read_facts(PATH, disk=disk)) == [*facts, *decision(5)]


def test_facts_survive_the_process_without_a_sync(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from kintsugi.journal.journal import Journal\n"
        "from kintsugi.journal.facts import RunStarted\n"
        "journal = Journal.create(Path(sys.argv[1]), owner='master-0')\n"
        "journal.append([RunStarted('job', 'digest')])\n"
        "os._exit(1)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "journal")], check=False, timeout=20)
    journal, facts = Journal.open(tmp_path / "journal", owner="master-1")
    journal.close()
    assert facts == (RunStarted("job", "digest"),)


def test_a_reader_sees_the_journal_while_it_is_written() -> None:
    disk = new_disk()
    with Journal.create(PATH, owner="master-0", disk=disk) as journal:
        assert read_facts(PATH, disk=disk) == ()
        journal.append(decision(0))
        assert list(read_facts(PATH, disk=disk)) == decision(0)


def write_and_note(disk: MemoryDisk, appended: list[Fact], synced: list[Fact]) -> None:
    """Two decisions per sync; notes what was certainly appended and certainly synced."""
    journal = Journal.create(PATH, owner="master-0", disk=disk)
    for number in range(6):
        journal.append(decision(number))
        appended += decision(number)
        if number % 2:
            journal.sync()
            synced[:] = appended


def num_operations() -> int:
    disk = new_disk()
    write_and_note(disk, [], [])
    return len(disk.operations)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize(("power_cut", "keep_names"), [(False, False), (True, False), (True, True)])
def test_a_crash_at_any_operation_loses_nothing_that_was_promised(
    keep: float, power_cut: bool, keep_names: bool
) -> None:
    every = [fact for number in range(6) for fact in decision(number)]
    for operation in range(2, num_operations() + 1):
        disk = new_disk()
        disk.crash_at(operation, keep=keep)
        appended: list[Fact] = []
        synced: list[Fact] = []
        with pytest.raises(Crashed):
            write_and_note(disk, appended, synced)
        disk = disk.restarted(power_cut=power_cut, keep_names=lambda _: keep_names)
        if not disk.exists(PATH):
            assert not appended, f"operation {operation} lost the journal"
            continue
        journal, facts = Journal.open(PATH, owner="master-1", disk=disk)
        promised = synced if power_cut else appended
        assert list(facts) == every[: len(facts)] and len(facts) >= len(promised), f"operation {operation}"
        assert len(facts) % 3 == 0, "half of a decision was kept"
        journal.append(decision(9))
        journal.sync()
        journal.close()
        survived = read_facts(PATH, disk=disk.restarted(power_cut=True))
        assert list(survived) == [*facts, *decision(9)], f"operation {operation}"


def test_what_a_dead_writer_did_not_sync_is_durable_once_its_successor_has_read_it() -> None:
    disk = new_disk()
    with Journal.create(PATH, owner="master-0", disk=disk) as journal:
        journal.append(decision(0))
    Journal.open(PATH, owner="master-1", disk=disk)
    assert list(read_facts(PATH, disk=disk.restarted(power_cut=True))) == decision(0)


def test_what_an_unfinished_journal_left_behind_does_not_come_into_the_next() -> None:
    disk = new_disk()
    written(3, disk=disk)
    disk.rename(PATH, RUN / "journal.new")
    Journal.create(PATH, owner="master-1", disk=disk)
    assert read_facts(PATH, disk=disk) == ()
    assert contents(disk)[HEADER_SIZE:] == b""


def test_an_unsynced_tail_torn_at_any_byte_is_cut_and_the_rest_is_kept() -> None:
    disk = new_disk()
    written(2, disk=disk)
    before = contents(disk)
    journal, facts = Journal.open(PATH, owner="master-0", disk=disk)
    journal.append(decision(7))
    journal.close()
    after = contents(disk)
    for size in range(len(before), len(after)):
        torn = with_contents(after[:size].ljust(len(after) + 500, b"\0"))
        journal, kept = Journal.open(PATH, owner="master-1", disk=torn)
        journal.close()
        assert kept == facts
        assert contents(torn)[HEADER_SIZE:] == before[HEADER_SIZE:]


def test_an_unsynced_record_that_is_lost_before_another_takes_that_one_along() -> None:
    disk = new_disk()
    facts = written(2, disk=disk)
    start = len(contents(disk))
    journal, _ = Journal.open(PATH, owner="master-0", disk=disk)
    journal.append(decision(2))
    middle = len(contents(disk))
    journal.append(decision(3))
    journal.close()
    data = bytearray(contents(disk))
    data[start:middle] = bytes(middle - start)
    journal, kept = Journal.open(PATH, owner="master-1", disk=with_contents(bytes(data)))
    assert list(kept) == facts


def test_a_flipped_byte_anywhere_is_reported_with_its_place() -> None:
    disk = new_disk()
    facts = written(3, disk=disk)
    data = contents(disk)
    for place in range(len(data)):
        if place in OWNER:
            continue
        damaged = bytearray(data)
        damaged[place] ^= 0x10
        other = with_contents(bytes(damaged))
        if place in WATERMARK:
            assert list(read_facts(PATH, disk=other)) == facts
            continue
        with pytest.raises(StorageError, match="header" if place < HEADER_SIZE else "damaged at offset"):
            read_facts(PATH, disk=other)
        with pytest.raises(StorageError):
            Journal.open(PATH, owner="master-1", disk=other)


def test_damage_is_proven_by_later_records_even_when_the_watermark_is_lost() -> None:
    disk = new_disk()
    written(3, disk=disk)
    damaged = bytearray(contents(disk))
    damaged[WATERMARK.start : WATERMARK.stop] = bytes(len(WATERMARK))
    damaged[HEADER_SIZE + 40] ^= 1
    with pytest.raises(StorageError, match=f"damaged at offset {HEADER_SIZE}"):
        read_facts(PATH, disk=with_contents(bytes(damaged)))


def test_a_file_that_is_no_journal_is_refused() -> None:
    with pytest.raises(StorageError, match="not a journal"):
        read_facts(PATH, disk=with_contents(b"hello"))
    with pytest.raises(StorageError, match="could not read /run/journal on disk"):
        read_facts(PATH, disk=new_disk())


def test_a_journal_is_never_overwritten() -> None:
    disk = new_disk()
    facts = written(1, disk=disk)
    with pytest.raises(StorageError, match="exists already"):
        Journal.create(PATH, owner="master-1", disk=disk)
    assert list(read_facts(PATH, disk=disk)) == facts


def test_terms_only_grow() -> None:
    disk = new_disk()
    with Journal.create(PATH, owner="master-0", disk=disk) as journal:
        journal.append([TermStarted(1, "a")])
        with pytest.raises(AssertionError, match="term 1 after 1"):
            journal.append([TermStarted(1, "b")])
    journal, _ = Journal.open(PATH, owner="master-0", disk=disk)
    assert journal.term == 1


def append_until_full(journal: Journal) -> list[Fact]:
    """Decisions that were taken until one was refused for want of space."""
    appended: list[Fact] = []
    try:
        for number in range(10_000):
            journal.append(decision(number))
            appended += decision(number)
    except StorageFull:
        return appended
    raise AssertionError("the disk was never full")


def test_a_run_lives_on_the_space_kept_for_it_while_the_disk_is_full() -> None:
    disk = new_disk()
    journal = Journal.create(PATH, owner="master-0", disk=disk)
    while "preallocate" not in disk.operations[-4:]:
        journal.append(decision(1))
    before = len(contents(disk))
    disk.full = True
    append_until_full(journal)
    journal.sync()
    assert len(contents(disk)) - before >= 1 << 12


def test_an_append_without_space_changes_nothing_and_the_same_works_when_there_is_room() -> None:
    disk = new_disk()
    journal = Journal.create(PATH, owner="master-0", disk=disk)
    disk.full = True
    appended = append_until_full(journal)
    for _ in range(3):
        before = disk.read(PATH)
        with pytest.raises(
            StorageFull, match="could not write to /run/journal on disk: No space left on device"
        ):
            journal.append(decision(7))
        assert disk.read(PATH) == before
    disk.full = False
    journal.append(decision(7))
    journal.sync()
    assert list(read_facts(PATH, disk=disk.restarted(power_cut=True))) == [*appended, *decision(7)]


def test_a_little_room_is_enough_for_a_little_record() -> None:
    class AlmostFull(MemoryDisk):
        """Once it is full, some room is found for every other request: for a record, not for all asked for ahead."""

        num_requests = 0

        def check_space(self) -> None:
            self.num_requests += self.full
            if self.num_requests % 2:
                raise OSError(errno.ENOSPC, "No space left on device")

    disk = AlmostFull()
    disk.mkdir(RUN)
    journal = Journal.create(PATH, owner="master-0", disk=disk)
    disk.full = True
    facts = [fact for number in range(200) for fact in decision(number)]
    for number in range(200):
        journal.append(decision(number))
    assert disk.num_requests > 2
    assert list(read_facts(PATH, disk=disk)) == facts


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, StorageFull), (errno.EIO, StorageError)])
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_an_error_at_any_operation_of_an_append_leaves_the_journal_as_it_was(
    code: int, kind: type[StorageError], keep: float
) -> None:
    """The preallocation that makes it grow included; what comes next may be the same facts or fewer."""
    big: list[Fact] = [RunStarted("j" * 13_000, "d")]
    for again in (big, decision(9)):
        for operation in range(1, 100):
            disk = new_disk()
            journal = Journal.create(PATH, owner="master-0", disk=disk)
            journal.append(decision(0))
            whole = contents(disk)
            before = len(disk.operations)
            disk.fail_at(before + operation, code=code, keep=keep)
            expected = [*decision(0), *big, *again]
            try:
                journal.append(big)
            except kind:
                expected = [*decision(0), *again]
                assert contents(disk) == whole
            if len(disk.operations) < before + operation:
                assert operation == 5, "an append looks, allocates, writes and looks again"
                break
            journal.append(again)
            journal.sync()
            journal.close()
            assert list(read_facts(PATH, disk=disk.restarted(power_cut=True))) == expected
            _, facts = Journal.open(PATH, owner="master-1", disk=disk)
            assert list(facts) == expected


class ForgetfulDisk(MemoryDisk):
    """A failed sync throws away what it should have written, and the next one knows nothing of it."""

    def count(self, operation: str, **rest: object) -> None:
        try:
            super().count(operation)
        except OSError:
            if operation == "sync":
                inode = self.find(PATH)
                inode.unsynced.clear()  # type: ignore[union-attr]
            raise


@pytest.mark.parametrize("place", ["sync", "pwrite"])
def test_a_failed_sync_can_be_repeated_and_then_keeps_its_promise(place: str) -> None:
    disk = ForgetfulDisk()
    disk.mkdir(RUN)
    journal = Journal.create(PATH, owner="master-0", disk=disk)
    for number in range(3):
        journal.append(decision(number))
    disk.fail_at(len(disk.operations) + (2 if place == "sync" else 3))
    with pytest.raises(StorageError, match="could not sync"):
        journal.sync()
    assert disk.operations[-1] == place
    journal.append(decision(3))
    journal.sync()
    expected = [fact for number in range(4) for fact in decision(number)]
    assert list(read_facts(PATH, disk=disk.restarted(power_cut=True, torn_bytes=0))) == expected


def test_a_real_full_file_system_is_an_error_of_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    script = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from kintsugi.journal.journal import Journal\n"
        "from kintsugi.errors import StorageError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, 1 << 12))\n"
        "try:\n"
        "    Journal.create(Path(sys.argv[1]), owner='master-0')\n"
        "except StorageError as error:\n"
        "    sys.exit(str(error))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], check=False, capture_output=True, text=True, timeout=20
    )
    assert "could not create" in done.stderr and "File too large" in done.stderr and not path.exists()


def test_a_journal_grows_beyond_the_space_allocated_first() -> None:
    disk = new_disk()
    journal = Journal.create(PATH, owner="master-0", disk=disk)
    facts = [RunStarted("j" * 3_000, str(number)) for number in range(9)]
    for fact in facts:
        journal.append([fact])
    journal.sync()
    assert list(read_facts(PATH, disk=disk.restarted(power_cut=True))) == facts


def test_decisions_are_read_one_by_one_from_where_the_last_ended(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "journal", owner="master")
    found: list[tuple[int, Fact]] = []
    offset = 0
    for number in range(1, 4):
        journal.append(decision(number))
        assert journal.sequence == number
        for record in read_records(tmp_path / "journal", offset=offset):
            found += [(record.sequence, fact) for fact in record.facts]
            offset = record.end
    journal.close()
    assert found == [(number, fact) for number in range(1, 4) for fact in decision(number)]
    assert len(read_records(tmp_path / "journal", most=2)) == 2
    assert read_records(tmp_path / "journal", offset=offset) == []
