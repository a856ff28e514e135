"""A compacted journal keeps what counts in one record, whatever interrupts it, and the history for people."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

import pytest

from kintsugi.errors import FencedError, RefusedError, StorageError, StorageFull
from kintsugi.journal import journal as journal_module
from kintsugi.journal.facts import Fact, StateFolded, StepCommitted, TermStarted
from kintsugi.journal.journal import Journal, kept_files, read_facts, read_records, scan_facts
from kintsugi.simulation.memory_disk import Crashed, MemoryDisk

RUN = Path("/run")
PATH = RUN / "journal"


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Space is allocated in smaller steps, so that many journals are quickly made."""
    monkeypatch.setattr(journal_module, "_CHUNK_SIZE", 1 << 14)
    monkeypatch.setattr(journal_module, "_SPARE_SIZE", 1 << 12)


def new_disk() -> MemoryDisk:
    disk = MemoryDisk()
    disk.mkdir(RUN)
    return disk


def folded(*, term: int = 1, step: int = 0) -> StateFolded:
    parts = {"ledger": b"l" * 300}
    return StateFolded(
        term=term,
        job="j",
        step=step,
        processes={},
        saved_steps=(step,),
        servers=None,
        answers={},
        parts=parts,
    )


def fact(step: int) -> Fact:
    return StepCommitted(step, f"state {step}")


def begun(disk: MemoryDisk, *, steps: int) -> Journal:
    """A journal of one term with these steps, all durable."""
    journal = Journal.create(PATH, owner="master-0", disk=disk)
    journal.append([TermStarted(1, "a")])
    for step in range(1, steps + 1):
        journal.append([fact(step)])
    journal.sync()
    return journal


def found(disk: MemoryDisk) -> list[Fact]:
    facts: list[Fact] = []
    scan_facts(PATH, facts.append, disk=disk)
    return facts


def all_of(steps: int) -> tuple[Fact, ...]:
    return (TermStarted(1, "a"), *(fact(step) for step in range(1, steps + 1)))


def test_a_compacted_journal_begins_with_the_folded_state_and_goes_on() -> None:
    disk = new_disk()
    journal = begun(disk, steps=3)
    journal.compact(folded(step=3))
    journal.append([fact(4)])
    journal.sync()
    assert (found(disk), journal.sequence) == ([folded(step=3), fact(4)], 5)
    journal.close()
    journal, facts = Journal.open(PATH, owner="master-1", disk=disk)
    assert (list(facts), journal.sequence, journal.term) == ([folded(step=3), fact(4)], 5, 1)
    journal.append([TermStarted(2, "b")])
    assert found(disk)[-1] == TermStarted(2, "b")


def test_all_facts_are_still_readable_through_several_compactions() -> None:
    disk = new_disk()
    journal = begun(disk, steps=2)
    for step in range(3, 8):
        journal.compact(folded(step=step - 1))
        journal.append([fact(step)])
    assert list(kept_files(PATH, disk=disk)) == [1, 3, 4, 5, 6]
    assert read_facts(PATH, disk=disk) == all_of(7)
    assert found(disk) == [folded(step=6), fact(7)]


def test_kept_files_have_a_budget_and_without_the_oldest_the_history_begins_with_a_folded_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal_module, "ARCHIVE_SIZE", 1500)
    disk = new_disk()
    journal = begun(disk, steps=2)
    for step in range(3, 20):
        journal.compact(folded(step=step - 1))
        journal.append([fact(step)])
        kept = kept_files(PATH, disk=disk).values()
        assert sum(disk.open_to_read(path).size() for path in kept) <= 1500
    history = read_facts(PATH, disk=disk)
    assert isinstance(history[0], StateFolded) and len(kept_files(PATH, disk=disk)) > 1
    assert history[1:] == tuple(fact(step) for step in range(history[0].step + 1, 20))


def test_a_compaction_pays_only_when_enough_was_appended_since() -> None:
    disk = new_disk()
    journal = begun(disk, steps=1)
    assert not journal.is_compaction_due(min_size=1000) and journal.is_compaction_due(min_size=50)
    journal.compact(folded())
    assert not journal.is_compaction_due(min_size=1)
    while not journal.is_compaction_due(min_size=1):
        journal.append([fact(2)])
    assert journal.sequence > 5, "as much as the folded state has must follow it"


def compact_and_go_on(journal: Journal) -> None:
    journal.compact(folded(step=3))
    journal.append([fact(4)])
    journal.sync()


@pytest.mark.parametrize("power_cut", [False, True])
@pytest.mark.parametrize("keep_names", [False, True])
def test_a_crash_at_any_operation_of_a_compaction_loses_nothing(power_cut: bool, keep_names: bool) -> None:
    """Names that were not synced may be there after a power cut, or not."""
    disk = new_disk()
    journal = begun(disk, steps=3)
    before = len(disk.operations)
    compact_and_go_on(journal)
    num_operations = len(disk.operations) - before
    for number in range(1, num_operations + 1):
        for keep in (0.0, 0.5, 1.0):
            disk = new_disk()
            journal = begun(disk, steps=3)
            disk.crash_at(len(disk.operations) + number, keep=keep)
            with pytest.raises(Crashed):
                compact_and_go_on(journal)
            after = disk.restarted(power_cut=power_cut, keep_names=lambda _: keep_names)
            history = read_facts(PATH, disk=after)
            assert history in (all_of(3), all_of(4)), f"operation {number} ({disk.operations[-1]})"
            successor, _ = Journal.open(PATH, owner="master-1", disk=after)
            assert successor.sequence == len(history)
            successor.append([TermStarted(2, "b")])
            successor.compact(folded(term=2, step=len(history) - 1))
            assert read_facts(PATH, disk=after) == (*history, TermStarted(2, "b"))


def test_a_failure_at_any_operation_leaves_a_journal_that_goes_on_and_is_durable_when_synced() -> None:
    disk = new_disk()
    journal = begun(disk, steps=2)
    before = len(disk.operations)
    journal.compact(folded(step=2))
    for number in range(1, len(disk.operations) - before + 1):
        disk = new_disk()
        journal = begun(disk, steps=2)
        disk.fail_at(len(disk.operations) + number, code=errno.EIO)
        with suppress(StorageError):
            journal.compact(folded(step=2))
        journal.append([fact(3)])
        journal.sync()
        after = disk.restarted(power_cut=True)
        assert read_facts(PATH, disk=after) == all_of(3), f"operation {number}"
        journal.compact(folded(step=3))
        assert found(disk.restarted(power_cut=True)) == [folded(step=3)]


def test_facts_are_not_durable_before_the_name_of_the_new_file_is() -> None:
    disk = new_disk()
    journal = begun(disk, steps=1)
    before = len(disk.operations)
    journal.compact(folded(step=1))
    (position,) = (
        number for number, name in enumerate(disk.operations[before:], start=1) if name == "sync_folder"
    )
    disk = new_disk()
    journal = begun(disk, steps=1)
    folder_sync = len(disk.operations) + position
    disk.fail_at(folder_sync)
    journal.compact(folded(step=1))
    journal.append([fact(2)])
    disk.fail_at(len(disk.operations) + 2)
    with pytest.raises(StorageError):
        journal.sync()
    assert read_facts(PATH, disk=disk.restarted(power_cut=True)) == all_of(1)
    journal.sync()
    assert read_facts(PATH, disk=disk.restarted(power_cut=True)) == all_of(2)


def test_a_full_disk_refuses_a_compaction_and_nothing_else() -> None:
    disk = new_disk()
    journal = begun(disk, steps=2)
    disk.full = True
    with pytest.raises(StorageFull):
        journal.compact(folded(step=2))
    journal.append([fact(3)])
    journal.sync()
    assert found(disk) == list(all_of(3))
    disk.full = False
    journal.compact(folded(step=3))
    assert found(disk) == [folded(step=3)]


def test_a_writer_that_was_replaced_can_not_put_its_own_file_in_place() -> None:
    disk = new_disk()
    old = begun(disk, steps=2)
    new, _ = Journal.open(PATH, owner="master-0 new", take_over=True, disk=disk)
    new.append([TermStarted(2, "b")])
    with pytest.raises(FencedError):
        old.compact(folded(step=2))
    assert found(disk) == [*all_of(2), TermStarted(2, "b")]


def test_a_compaction_waits_while_a_successor_is_opening_the_journal() -> None:
    disk = new_disk()
    journal = begun(disk, steps=2)
    lock = disk.open(PATH.with_name("journal.lock"), create=True)
    lock.lock()
    with pytest.raises(RefusedError, match="is being opened"):
        journal.compact(folded(step=2))
    lock.close()
    journal.append([fact(3)])
    assert found(disk) == list(all_of(3))


def test_a_successor_of_a_live_writer_takes_over_a_compacted_journal() -> None:
    disk = new_disk()
    old = begun(disk, steps=2)
    old.compact(folded(step=2))
    old.append([fact(3)])
    new, facts = Journal.open(PATH, owner="master-0 new", take_over=True, disk=disk)
    assert list(facts) == [folded(step=2), fact(3)]
    with pytest.raises(FencedError):
        old.append([fact(4)])
    new.append([TermStarted(2, "b")])
    assert read_facts(PATH, disk=disk) == (*all_of(3), TermStarted(2, "b"))


def test_every_damaged_byte_of_a_folded_state_is_reported() -> None:
    disk = new_disk()
    journal = begun(disk, steps=2)
    journal.compact(folded(step=2))
    journal.close()
    data = disk.read(PATH).rstrip(b"\0")
    for offset in range(128, len(data)):
        damaged = new_disk()
        file = damaged.open(PATH, create=True)
        file.pwrite(data[:offset] + bytes([data[offset] ^ 0x40]) + data[offset + 1 :], offset=0)
        with pytest.raises(StorageError, match="damaged"):
            found(damaged)


def test_a_folded_state_in_the_middle_of_a_journal_is_damage() -> None:
    disk = new_disk()
    journal = begun(disk, steps=2)
    journal.append([folded(step=2)])
    with pytest.raises(StorageError, match="damaged"):
        found(disk)


def test_without_second_names_the_journal_is_compacted_and_its_history_not_kept() -> None:
    class WithoutLinks(MemoryDisk):
        def link(self, source: Path, target: Path) -> None:
            raise OSError(errno.EPERM, "not here")

    disk = WithoutLinks()
    disk.mkdir(RUN)
    journal = begun(disk, steps=2)
    journal.compact(folded(step=2))
    journal.append([fact(3)])
    assert (kept_files(PATH, disk=disk), read_facts(PATH, disk=disk)) == ({}, (folded(step=2), fact(3)))


def test_a_damaged_kept_file_costs_the_history_before_it_only() -> None:
    disk = new_disk()
    journal = begun(disk, steps=2)
    journal.compact(folded(step=2))
    journal.append([fact(3)])
    journal.compact(folded(step=3))
    journal.append([fact(4)])
    disk.open(PATH.with_name("journal.1")).pwrite(b"nothing", offset=0)
    assert read_facts(PATH, disk=disk) == (folded(step=2), fact(3), fact(4))


def test_records_keep_their_numbers_on_a_real_disk(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal.create(path, owner="master-0") as journal:
        journal.append([TermStarted(1, "a")])
        journal.append([fact(1)])
        journal.compact(folded(step=1))
        journal.append([fact(2)])
        assert [(record.sequence, record.facts) for record in read_records(path)] == [
            (2, (folded(step=1),)),
            (3, (fact(2),)),
        ]
        assert read_facts(path) == (TermStarted(1, "a"), fact(1), fact(2))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["journal", "journal.1", "journal.lock"]
    assert (tmp_path / "journal.1").stat().st_size < 1 << 12, "space that was allocated ahead is given back"
