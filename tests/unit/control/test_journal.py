"""The journal keeps what was synced, cuts what was not, and reports damage instead of dropping it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kintsugi.control.journal import Journal, read_facts
from kintsugi.disk import Crashed, MemoryDisk
from kintsugi.errors import RefusedError, StorageError
from kintsugi.facts import BatchFormed, EpochStarted, Fact, RunStarted, StepCommitted, TicketsIssued
from kintsugi.types import Ticket

RUN = Path("/run")
PATH = RUN / "journal"
HEADER_SIZE = 64
WATERMARK = range(32, 48)


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
        "from kintsugi.control.journal import Journal\n"
        "from kintsugi.facts import RunStarted\n"
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
@pytest.mark.parametrize("power_cut", [False, True])
def test_a_crash_at_any_operation_loses_nothing_that_was_promised(keep: float, power_cut: bool) -> None:
    every = [fact for number in range(6) for fact in decision(number)]
    for operation in range(2, num_operations() + 1):
        disk = new_disk()
        disk.crash_at(operation, keep=keep)
        appended: list[Fact] = []
        synced: list[Fact] = []
        with pytest.raises(Crashed):
            write_and_note(disk, appended, synced)
        disk = disk.restarted(power_cut=power_cut)
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
        assert contents(torn) == before


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
        if place in range(48, HEADER_SIZE):
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
    with pytest.raises(StorageError, match="damaged at offset 64"):
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


def test_a_second_writer_is_refused_and_told_who_holds_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = Journal.create(path, owner="master-0 of pid 17")
    with pytest.raises(RefusedError, match="in use by master-0 of pid 17"):
        Journal.open(path, owner="master-1")
    first.close()
    second, _ = Journal.open(path, owner="master-1")
    second.close()


def test_a_writer_that_was_overtaken_stops_at_its_next_sync() -> None:
    disk = new_disk()
    journal = Journal.create(PATH, owner="master-0 a", disk=disk)
    lock = disk.open(RUN / "journal.lock")
    lock.pwrite(b"master-0 b", offset=0)
    journal.append(decision(0))
    with pytest.raises(RefusedError, match="taken over by master-0 b"):
        journal.sync()
    with pytest.raises(StorageError):
        journal.append(decision(1))


def test_epochs_only_grow() -> None:
    disk = new_disk()
    with Journal.create(PATH, owner="master-0", disk=disk) as journal:
        journal.append([EpochStarted(1, "a")])
        with pytest.raises(AssertionError, match="epoch 1 after 1"):
            journal.append([EpochStarted(1, "b")])
    journal, _ = Journal.open(PATH, owner="master-0", disk=disk)
    assert journal.epoch == 1


class FullDisk(MemoryDisk):
    """Has no space beyond what is already allocated, once `full` is set."""

    full = False

    def count(self, operation: str, **rest: object) -> None:
        if self.full and operation == "preallocate":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().count(operation)


def append_until_refused(journal: Journal, facts: list[Fact]) -> None:
    for _ in range(20):
        journal.append(facts)


def test_a_full_disk_is_reported_while_there_is_still_room_for_the_last_words() -> None:
    disk = FullDisk()
    disk.mkdir(RUN)
    journal = Journal.create(PATH, owner="master-0", disk=disk)
    disk.full = True
    big: list[Fact] = [RunStarted("j" * 500_000, "d")]
    with pytest.raises(StorageError, match="No space left"):
        append_until_refused(journal, big)
    told = len(read_facts(PATH, disk=disk))
    journal.append(decision(1))
    journal.sync()
    assert list(read_facts(PATH, disk=disk))[told:] == decision(1)
    with pytest.raises(StorageError, match="No space left"):
        append_until_refused(journal, big)
    disk.full = False
    journal.append(big)


def test_a_real_full_file_system_is_an_error_of_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    script = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from kintsugi.control.journal import Journal\n"
        "from kintsugi.errors import StorageError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n"
        "    Journal.create(Path(sys.argv[1]), owner='master-0')\n"
        "except StorageError as error:\n"
        "    sys.exit(str(error))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], check=False, capture_output=True, text=True, timeout=20
    )
    assert "could not create" in done.stderr and not path.exists()


def test_a_failed_sync_is_final() -> None:
    disk = new_disk()
    journal = Journal.create(PATH, owner="master-0", disk=disk)
    journal.append(decision(0))
    disk.fail_at(len(disk.operations) + 2, code=errno.EIO)
    with pytest.raises(StorageError, match="could not sync"):
        journal.sync()
    with pytest.raises(StorageError, match="failed to sync"):
        journal.sync()


def test_a_failed_write_leaves_the_journal_usable() -> None:
    disk = new_disk()
    journal = Journal.create(PATH, owner="master-0", disk=disk)
    journal.append(decision(0))
    disk.fail_at(len(disk.operations) + 1, code=errno.EIO)
    with pytest.raises(StorageError, match="could not write"):
        journal.append(decision(1))
    journal.append(decision(2))
    journal.sync()
    assert list(read_facts(PATH, disk=disk)) == [*decision(0), *decision(2)]


def test_a_journal_grows_beyond_the_space_allocated_first() -> None:
    disk = new_disk()
    journal = Journal.create(PATH, owner="master-0", disk=disk)
    facts = [RunStarted("j" * 700_000, str(number)) for number in range(9)]
    for fact in facts:
        journal.append([fact])
    journal.sync()
    assert list(read_facts(PATH, disk=disk.restarted(power_cut=True))) == facts
