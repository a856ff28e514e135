"""The journal has one writer: a second is refused, a successor goes on at once, an overtaken one can do no harm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kintsugi.errors import FencedError, RefusedError, StorageFull
from kintsugi.journal import journal as journal_module
from kintsugi.journal.facts import Fact, RunStarted, TermStarted
from kintsugi.journal.journal import Journal, read_facts
from kintsugi.simulation.memory_disk import Crashed, MemoryDisk

RUN = Path("/run")
PATH = RUN / "journal"

WRITER = """
import sys
from pathlib import Path
from kintsugi.journal.journal import Journal
from kintsugi.errors import KintsugiError
from kintsugi.journal.facts import RunStarted

def say(text):
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()

journal = Journal.create(Path(sys.argv[1]), owner="master-0 old")
say("ready")
for line in sys.stdin:
    order, _, job = line.strip().partition(" ")
    try:
        journal.append([RunStarted(job, "d")]) if order == "append" else journal.sync()
        say("done")
    except KintsugiError as error:
        say(f"{type(error).__name__}: {error}")
"""


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Space is allocated in smaller steps, so that hundreds of journals are quickly made."""
    monkeypatch.setattr(journal_module, "_CHUNK_SIZE", 1 << 14)
    monkeypatch.setattr(journal_module, "_SPARE_SIZE", 1 << 12)


class Writer:
    """A real process that has the journal open and does as it is told."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._answer() == "ready"

    def ask(self, order: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(timeout=10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def old(path: Path) -> Iterator[Writer]:
    writer = Writer(path)
    yield writer
    writer.kill()


def fact(job: str) -> Fact:
    return RunStarted(job, "d")


def test_a_second_writer_is_refused_and_told_who_holds_the_journal(path: Path, old: Writer) -> None:
    with pytest.raises(RefusedError, match="in use by master-0 old"):
        Journal.open(path, owner="master-0 new")
    assert old.ask("append first") == "done"
    assert read_facts(path) == (fact("first"),)


@pytest.mark.parametrize("take_over", [False, True])
def test_the_successor_of_a_killed_writer_goes_on_at_once_in_the_same_file(
    path: Path, old: Writer, take_over: bool
) -> None:
    old.ask("append first")
    inode = path.stat().st_ino
    old.kill()
    journal, facts = Journal.open(path, owner="master-0 new", take_over=take_over)
    assert facts == (fact("first"),) and path.stat().st_ino == inode
    journal.append([fact("second")])
    journal.close()
    assert read_facts(path) == (fact("first"), fact("second"))


@pytest.mark.parametrize("order", ["append late", "sync"])
def test_a_stopped_writer_that_goes_on_after_its_successor_took_over_is_fenced(
    path: Path, old: Writer, order: str
) -> None:
    old.ask("append first")
    old.stop()
    journal, facts = Journal.open(path, owner="master-0 new", take_over=True)
    assert facts == (fact("first"),)
    journal.append([fact("second")])
    old.go_on()
    for _ in range(2):
        assert old.ask(order) == f"FencedError: {path} was taken over by master-0 new"
    journal.append([fact("third")])
    journal.sync()
    journal.close()
    assert read_facts(path) == (fact("first"), fact("second"), fact("third"))


def test_a_successor_holds_the_journal_against_others(path: Path, old: Writer) -> None:
    journal, _ = Journal.open(path, owner="master-0 new", take_over=True)
    with pytest.raises(RefusedError, match="in use by master-0 new"):
        Journal.open(path, owner="master-0 third")
    old.kill()
    with pytest.raises(RefusedError, match="in use by master-0 new"):
        Journal.open(path, owner="master-0 third")
    journal.close()
    third, _ = Journal.open(path, owner="master-0 third")
    third.close()


class InterruptedDisk(MemoryDisk):
    """Lets something else happen when a certain operation is about to."""

    def __init__(self) -> None:
        super().__init__()
        self._interruptions: dict[int, Callable[[], None]] = {}
        self.mkdir(RUN)

    def interrupt_at(self, operation: int, action: Callable[[], None]) -> None:
        self._interruptions[operation] = action

    def count(self, operation: str, **rest: object) -> None:
        if action := self._interruptions.pop(len(self.operations) + 1, None):
            action()
        super().count(operation, **rest)  # type: ignore[arg-type]


def interrupted(act: Callable[[Journal], None], *, operation: int) -> tuple[InterruptedDisk, list[Fact], str]:
    """Let a successor take over at an operation of the old writer: what it found, and how the old one fared."""
    disk = InterruptedDisk()
    journal = Journal.create(PATH, owner="master-0 old", disk=disk)
    journal.append([TermStarted(1, "old")])
    found: list[Fact] = []

    def take_over() -> None:
        successor, facts = Journal.open(PATH, owner="master-0 new", take_over=True, disk=disk)
        found.extend(facts)
        successor.append([TermStarted(2, "new")])
        successor.sync()

    disk.interrupt_at(len(disk.operations) + operation, take_over)
    try:
        act(journal)
    except FencedError:
        return disk, found, "fenced"
    return disk, found, "done"


@pytest.mark.parametrize("operation", [1, 2, 3])
def test_what_an_overtaken_writer_was_told_is_written_its_successor_has(operation: int) -> None:
    """However the take-over falls into an append: the two looks at the header and the write between them."""
    disk, found, outcome = interrupted(lambda journal: journal.append([fact("late")]), operation=operation)
    assert found, "nobody took over"
    assert outcome == "fenced"
    assert (fact("late") in found) == (operation == 3)
    assert list(read_facts(PATH, disk=disk)) == [*found, TermStarted(2, "new")]


def test_a_take_over_after_an_append_finds_what_it_wrote() -> None:
    def append_and_sync(journal: Journal) -> None:
        journal.append([fact("late")])
        journal.sync()

    _, found, outcome = interrupted(append_and_sync, operation=4)
    assert (found[-1], outcome) == (fact("late"), "fenced")


@pytest.mark.parametrize("old_lives", [False, True])
@pytest.mark.parametrize(("power_cut", "keep_names"), [(False, False), (True, False), (True, True)])
def test_a_successor_that_crashes_at_any_operation_loses_nothing(
    old_lives: bool, power_cut: bool, keep_names: bool
) -> None:
    for operation in range(1, 100):
        disk = MemoryDisk()
        disk.mkdir(RUN)
        journal = Journal.create(PATH, owner="master-0 old", disk=disk)
        journal.append([TermStarted(1, "old")])
        journal.sync()
        if not old_lives:
            journal.close()
        before = len(disk.operations)
        disk.crash_at(before + operation, keep=0.5)
        try:
            Journal.open(PATH, owner="master-0 new", take_over=True, disk=disk)
        except Crashed:
            disk = disk.restarted(power_cut=power_cut, keep_names=lambda _: keep_names)
            third, facts = Journal.open(PATH, owner="master-0 third", disk=disk)
            assert facts == (TermStarted(1, "old"),)
            third.append([TermStarted(2, "third")])
            continue
        assert len(disk.operations) < before + operation
        return


def test_a_take_over_without_space_changes_nothing_and_works_when_there_is_room() -> None:
    disk = MemoryDisk()
    disk.mkdir(RUN)
    old = Journal.create(PATH, owner="master-0 old", disk=disk)
    disk.full = True
    with pytest.raises(StorageFull, match="could not open /run/journal on disk: No space left"):
        Journal.open(PATH, owner="master-0 new", take_over=True, disk=disk)
    old.append([TermStarted(1, "old")])
    disk.full = False
    _, facts = Journal.open(PATH, owner="master-0 new", take_over=True, disk=disk)
    assert facts == (TermStarted(1, "old"),)
    with pytest.raises(FencedError):
        old.append([fact("late")])


def take_over(owner: str, *, disk: MemoryDisk, written: list[Fact], outcomes: set[str]) -> Journal | None:
    """Take the journal, which must have all that was written so far, and write one fact more."""
    try:
        journal, facts = Journal.open(PATH, owner=owner, take_over=True, disk=disk)
    except RefusedError:
        outcomes.add(f"{owner} refused")
        return None
    assert [each for each in facts if each in written] == written
    try:
        journal.append([fact(owner)])
    except FencedError:
        outcomes.add(f"{owner} fenced")
    else:
        written.append(fact(owner))
    return journal


@pytest.mark.parametrize("old_lives", [False, True])
@pytest.mark.parametrize("second_lives", [False, True])
def test_two_successors_at_the_same_moment_leave_one_journal_with_everything(
    old_lives: bool, second_lives: bool
) -> None:
    """Wherever the second one comes in between: who loses is told, and what either wrote is kept."""
    outcomes: set[str] = set()
    for operation in range(1, 100):
        disk = InterruptedDisk()
        old = Journal.create(PATH, owner="master-0 old", disk=disk)
        if not old_lives:
            old.close()
        written: list[Fact] = []

        def second(disk: MemoryDisk = disk, written: list[Fact] = written) -> None:
            journal = take_over("second", disk=disk, written=written, outcomes=outcomes)
            if journal and not second_lives:
                journal.close()

        last = len(disk.operations) + operation
        disk.interrupt_at(last, second)
        take_over("first", disk=disk, written=written, outcomes=outcomes)
        if len(disk.operations) < last:
            break
        kept = read_facts(PATH, disk=disk)
        assert written and [each for each in kept if each in written] == written, f"operation {operation}"
    assert outcomes == {"second refused", "first fenced"}
