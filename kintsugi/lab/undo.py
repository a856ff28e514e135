"""How each thing that the laboratory changes is changed back, written down before it is changed.

`<lab folder>/undo.jsonl` has a line for every change, with who made it and until when it may last, and a line for
every one that was undone. Whoever is left can undo it: the one who did it, the reaper, or the next laboratory on this
machine.
Undoing twice, or undoing what was never done, does nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kintsugi.lab import floating, tools
from kintsugi.runtime import SYSTEM_CLOCK, SystemProcesses, wait

GROUP_TIMEOUT_S = 5.0
POLL_S = 0.005
SHAPING_HANDLE = "6b01"
"""By which queues of packets are known to be ours."""


def _start_time(pid: int) -> int | None:
    """In clock ticks after boot; None when there is no such process, or only its remains."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = content.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


class Who(msgspec.Struct, frozen=True):
    """A process that can not be mistaken for a later one with the same number."""

    pid: int
    born: int
    """Clock ticks after boot."""

    @classmethod
    def of(cls, pid: int) -> Who:
        """ProcessLookupError when there is none."""
        born = _start_time(pid)
        if born is None:
            raise ProcessLookupError(errno.ESRCH, f"there is no process {pid}")
        return cls(pid, born)

    @property
    def alive(self) -> bool:
        return _start_time(self.pid) == self.born

    def signal(self, number: signal.Signals) -> bool:
        """Signal this one and no other; False when it has ended."""
        try:
            child = SystemProcesses().adopt(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.alive:
                return False
            child.send_signal(number)
            return True
        finally:
            child.close()


class _Undo(msgspec.Struct, frozen=True, tag=True):
    """One change, as it is undone.

    Raises OSError, ToolFailed or DeadlineExceeded when it could not be; to be tried again then.
    """

    def carry_out(self) -> None:
        raise NotImplementedError


class Continue(_Undo, frozen=True):
    """A process was stopped."""

    who: Who

    def carry_out(self) -> None:
        self.who.signal(signal.SIGCONT)


class Leave(_Undo, frozen=True):
    """A control group was made, and processes moved there from another."""

    group: str
    home: str

    def carry_out(self) -> None:
        """Whoever is in it goes home; a group that processes are born into is emptied again until it can be removed."""
        group = Path(self.group)

        def attempt(remaining_s: float) -> bool | None:
            try:
                thaw(group)
                home = _nearest(Path(self.home))
                for pid in (group / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        (home / "cgroup.procs").write_text(pid)
                group.rmdir()
            except FileNotFoundError:
                # Either somebody else has undone it, or home has just been removed.
                if not group.exists():
                    return True
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
            else:
                return True
            time.sleep(min(remaining_s, POLL_S))
            return None

        wait(attempt, whom=f"control group {group}", what="to be empty", timeout_s=GROUP_TIMEOUT_S)


def _nearest(home: Path) -> Path:
    """Where processes go whose group was removed meanwhile: the group above it."""
    return next((group for group in (home, *home.parents) if (group / "cgroup.procs").exists()), home)


def thaw(group: Path) -> None:
    """Let the processes of a group run; those of one that can not be frozen do."""
    for file, word in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
        if (group / file).exists():
            (group / file).write_text(word)


class Remove(_Undo, frozen=True):
    """A file or folder was made. Folders only with what the laboratory put there."""

    path: str

    def carry_out(self) -> None:
        path = Path(self.path)
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


class Unmount(_Undo, frozen=True):
    """Something was mounted."""

    path: str

    def carry_out(self) -> None:
        """One that stays busy is taken out of sight; the kernel lets go of it with its last user."""
        for patience in (True, False):
            while os.path.ismount(self.path):
                try:
                    tools.call("umount", *([] if patience else ["--lazy"]), self.path)
                except tools.ToolFailed:
                    if not patience:
                        raise
                    break


class Limit(_Undo, frozen=True):
    """A resource limit of a process was changed."""

    who: Who
    name: str
    soft: int
    hard: int

    def carry_out(self) -> None:
        if self.who.alive:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(
                    self.who.pid, getattr(resource, f"RLIMIT_{self.name}"), (self.soft, self.hard)
                )


class Score(_Undo, frozen=True):
    """How gladly the kernel kills a process when memory is short was changed."""

    who: Who
    score: str

    def carry_out(self) -> None:
        if self.who.alive:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                Path(f"/proc/{self.who.pid}/oom_score_adj").write_text(self.score)


class Processors(_Undo, frozen=True):
    """The threads of a process were bound to fewer processors, or made to stand back."""

    who: Who
    processors: tuple[int, ...]
    nice: int

    def carry_out(self) -> None:
        if not self.who.alive:
            return
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            for thread in threads_of(self.who.pid):
                os.sched_setaffinity(thread, self.processors)
                # Only who has the right may give priority back; it is lost for good otherwise, and never taken.
                if os.getpriority(os.PRIO_PROCESS, thread) != self.nice:
                    os.setpriority(os.PRIO_PROCESS, thread, self.nice)


class Rounding(_Undo, frozen=True):
    """How the threads of a process round was changed."""

    who: Who

    def carry_out(self) -> None:
        if self.who.alive:
            floating.set_rounding(self.who.pid, floating.NEAREST)


class Rules(_Undo, frozen=True):
    """Rules about packets were added to a network."""

    network: int
    """The namespace, by its number: it is gone when its last process is."""
    table: str
    """Of nftables; everything in it is ours."""
    commands: tuple[tuple[str, ...], ...] = ()
    """What takes other rules back, one by one; it may fail, where there is none."""

    def carry_out(self) -> None:
        pid = inside(self.network)
        if pid is None:
            return
        there = ("nsenter", "--target", str(pid), "--net")
        for command in self.commands:
            with contextlib.suppress(tools.ToolFailed):
                tools.call(*there, *command)
        if not self._has_table(there):
            return
        try:
            tools.call(*there, "nft", "delete", "table", "inet", self.table)
        except tools.ToolFailed:
            # Somebody else may have undone the same just now.
            if self._has_table(there):
                raise

    def _has_table(self, there: tuple[str, ...]) -> bool:
        return f" {self.table}\n" in tools.call(*there, "nft", "list", "tables")


class Shaping(_Undo, frozen=True):
    """Queues of packets were set on a network device."""

    network: int
    """The namespace, by its number."""
    interface: str

    def carry_out(self) -> None:
        pid = inside(self.network)
        if pid is None:
            return
        there = ("nsenter", "--target", str(pid), "--net", "tc", "qdisc")
        if not self._is_set(there):
            return
        try:
            tools.call(*there, "del", "dev", self.interface, "root")
        except tools.ToolFailed:
            # Somebody else may have undone the same just now.
            if self._is_set(there):
                raise

    def _is_set(self, there: tuple[str, ...]) -> bool:
        """Those that are not ours are left alone; and a device may be gone."""
        try:
            return f" {SHAPING_HANDLE}: root" in tools.call(*there, "show", "dev", self.interface)
        except tools.ToolFailed as error:
            if "Cannot find device" in str(error):
                return False
            raise


Undo = Continue | Leave | Remove | Unmount | Limit | Score | Processors | Rounding | Rules | Shaping


def threads_of(pid: int) -> list[int]:
    return [int(entry) for entry in os.listdir(f"/proc/{pid}/task")]


def network_of(pid: int | str) -> int:
    """The number of a process's network namespace."""
    return os.stat(f"/proc/{pid}/ns/net").st_ino


def inside(network: int) -> int | None:
    """Some process in a network namespace; None when there is none, and so no such namespace either."""
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                if network_of(entry) == network:
                    return int(entry)
    return None


class Entry(msgspec.Struct, frozen=True):
    """A line of the journal: a change that is about to be made."""

    number: str
    owner: Who
    until: float
    """Monotonic: its lease."""
    undo: Undo


class Done(msgspec.Struct, frozen=True):
    """A line of the journal: that one is undone."""

    done: str


class UndoJournal:
    """Appends to the journal, and reads what is still to be undone. Several processes write it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._owner = Who.of(os.getpid())
        self._count = 0

    def before(self, undo: Undo, *, lease_s: float) -> Entry:
        """Write down how a change is undone; the change may be made when this has returned."""
        self._count += 1
        number = f"{self._owner.pid}-{self._owner.born}-{self._count}"
        entry = Entry(number, self._owner, SYSTEM_CLOCK.monotonic() + lease_s, undo)
        self._append(entry)
        return entry

    def undo(self, entry: Entry) -> None:
        """Carry it out and write that down."""
        entry.undo.carry_out()
        self.forget(entry)

    def forget(self, entry: Entry) -> None:
        self._append(Done(entry.number))

    def _append(self, line: Entry | Done) -> None:
        # Begins a line of its own, whatever a killed process left of its last one.
        content = b"\n" + msgspec.json.encode(line) + b"\n"
        if os.write(self._descriptor, content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        os.fdatasync(self._descriptor)

    @property
    def size(self) -> int:
        """Bytes that were written."""
        return os.fstat(self._descriptor).st_size

    def outstanding(self) -> list[Entry]:
        """What is not undone, the last change first: changes are undone in reverse."""
        entries: dict[str, Entry] = {}
        for line in self._lines():
            if isinstance(line, Entry):
                entries[line.number] = line
            else:
                entries.pop(line.done, None)
        return list(reversed(entries.values()))

    def _lines(self) -> Iterator[Entry | Done]:
        # By its descriptor: whoever removes the folder of an experiment does not make its changes undone.
        for line in os.pread(self._descriptor, self.size, 0).splitlines():
            # What a killed process left of a line tells of a change that it did not come to make.
            with contextlib.suppress(msgspec.MsgspecError):
                if line.startswith(b'{"done"'):
                    yield msgspec.json.decode(line, type=Done)
                else:
                    yield msgspec.json.decode(line, type=Entry)

    def close(self) -> None:
        os.close(self._descriptor)
