"""Undo journal: how each change of the laboratory is reverted, written before the change is made.

`<lab folder>/undo.jsonl` has a line for every change, with the process that made it and its lease, and a line for every
change that was undone. The process that made the change, the reaper, or the next laboratory on this machine can undo
it. Undoing twice, or undoing a change that was never made, has no effect.

The journal is acted upon, often as root. So only a file of this user that others can not write is opened, in folders
where no other user can replace it; an entry says what was changed, never which command undoes it; and paths are removed
or unmounted only below the folder of the journal, except files with the names that faults give them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from kintsugi.lab.faults import fpu_rounding
from kintsugi.lab.testbed import tools
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.owned_files import check_folders, open_owned
from kintsugi.runtime.proc import process_start_time
from kintsugi.runtime.processes import SystemProcesses
from kintsugi.runtime.waits import wait

GROUP_TIMEOUT_S = 5.0
POLL_S = 0.005
MARK_BASE = 0x6B000000
"""First of the marks of packets that iptables queues for us."""
IPTABLES_TABLE = ("ip", "filter")
"""Table that iptables makes with its first rule, where iptables is based on nftables."""
SHAPING_HANDLE = "6b01"
"""Handle by which our traffic shaping is recognised."""
_TABLE = re.compile(r"k[0-9a-f]{8}")
_INTERFACE = re.compile(r"[\w.:@-]{1,15}")
_FAULT_FILE = re.compile(r"\.[0-9a-f]{12}|kintsugi-grow-\d+")
"""Names of the files of faults that lie beside a run folder or in the folder for temporary files."""


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Process identified by pid and start time, so that a later process with the same pid is not mistaken for it."""

    pid: int
    born: int
    """Start time in clock ticks after boot."""

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Return the identity of a running process; ProcessLookupError when there is none."""
        born = process_start_time(pid)
        if born is None:
            raise ProcessLookupError(errno.ESRCH, f"there is no process {pid}")
        return cls(pid, born)

    @property
    def alive(self) -> bool:
        return process_start_time(self.pid) == self.born

    def signal(self, number: signal.Signals) -> bool:
        """Signal this process and no other; False when it has ended."""
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
    """Reversal of one change.

    `carry_out` raises OSError, ToolFailed or DeadlineExceeded when it failed and must be retried.
    """

    def carry_out(self) -> None:
        raise NotImplementedError

    def refusal(self, folder: Path) -> str | None:
        """Return why the laboratory can not have made this change, by a journal in `folder`; None if it can."""
        return None


class ResumeProcess(_Undo, frozen=True, tag="Continue"):
    """Resumes a process that was stopped."""

    who: ProcessIdentity

    def carry_out(self) -> None:
        self.who.signal(signal.SIGCONT)


class LeaveGroup(_Undo, frozen=True, tag="Leave"):
    """Removes a control group that was created, and moves its processes back."""

    group: str
    home: str

    def refusal(self, folder: Path) -> str | None:
        outside = [path for path in (self.group, self.home) if not _is_below(path, *_group_roots(), folder)]
        return f"expected a control group, got {outside[0]}" if outside else None

    def carry_out(self) -> None:
        """Move the processes back and remove the group; repeated until no process is left that was forked into it
        meanwhile."""
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
                # Either another process has undone it, or the home group has just been removed.
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


class GroupMount(NamedTuple):
    """A hierarchy of control groups: where it is mounted, and its controllers (`""` for the unified one)."""

    path: Path
    controllers: frozenset[str]


def group_mounts() -> list[GroupMount]:
    """Return the hierarchies of control groups that are mounted."""
    found = []
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, path, kind, options, *_ = line.split()
        if kind in ("cgroup", "cgroup2"):
            controllers = frozenset(options.split(",")) if kind == "cgroup" else frozenset({""})
            found.append(GroupMount(Path(unescaped(path)), controllers))
    return found


def _group_roots() -> list[Path]:
    """Return where hierarchies of control groups are mounted."""
    return [each.path for each in group_mounts()]


def _nearest(home: Path) -> Path:
    """Return the nearest existing group above a home group that was removed meanwhile."""
    return next((group for group in (home, *home.parents) if (group / "cgroup.procs").exists()), home)


def thaw(group: Path) -> None:
    """Resume the processes of a frozen group; no effect on a group that can not be frozen."""
    for file, word in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
        if (group / file).exists():
            (group / file).write_text(word)


class RemovePath(_Undo, frozen=True, tag="Remove"):
    """Removes a file or folder that was created. A folder contains only files of the laboratory."""

    path: str

    def refusal(self, folder: Path) -> str | None:
        if _is_below(self.path, folder) or _FAULT_FILE.fullmatch(Path(self.path).name):
            return None
        return f"expected a path below {folder} or the name of a fault's file, got {self.path}"

    def carry_out(self) -> None:
        path = Path(self.path)
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


class UnmountPath(_Undo, frozen=True, tag="Unmount"):
    """Unmounts a file system that was mounted, and no other at the same place."""

    path: str
    before: tuple[int, ...] = ()
    """Ids of the mounts at this place before, the topmost last; a mount with another id is ours."""

    def refusal(self, folder: Path) -> str | None:
        return None if _is_below(self.path, folder) else f"expected a mount below {folder}, got {self.path}"

    def carry_out(self) -> None:
        """Unmount; a mount that stays busy is detached lazily, and the kernel frees it with its last user.

        OSError if something else was mounted over ours: only its owner can remove that.
        """
        ours = [mount for mount in mounts_at(self.path) if mount not in self.before]
        if not ours:
            return
        if len(ours) > 1:
            raise OSError(errno.EBUSY, "another file system was mounted over this one", self.path)
        try:
            tools.call("umount", self.path)
        except tools.ToolFailed:
            if ours[0] in mounts_at(self.path):
                tools.call("umount", "--lazy", self.path)


def mounts_at(path: str) -> tuple[int, ...]:
    """Return the ids of the file systems that are mounted at a place, the topmost last."""
    place = os.path.realpath(path)
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    fields = (line.split(" ") for line in lines)
    return tuple(int(each[0]) for each in fields if unescaped(each[4]) == place)


def unescaped(path: str) -> str:
    """Decode a path of a table of mounts: `unescaped("/a\\040b") == "/a b"`."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), path)


class RestoreLimit(_Undo, frozen=True, tag="Limit"):
    """Restores a resource limit of a process."""

    who: ProcessIdentity
    name: str
    soft: int
    hard: int

    def carry_out(self) -> None:
        if self.who.alive:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(
                    self.who.pid, getattr(resource, f"RLIMIT_{self.name}"), (self.soft, self.hard)
                )


class RestoreOomScore(_Undo, frozen=True, tag="Score"):
    """Restores the OOM score of a process."""

    who: ProcessIdentity
    score: str

    def carry_out(self) -> None:
        if self.who.alive:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                Path("/proc", str(self.who.pid), "oom_score_adj").write_text(self.score)


class RestoreAffinity(_Undo, frozen=True, tag="Processors"):
    """Restores CPU affinity and niceness of the threads of a process."""

    who: ProcessIdentity
    processors: tuple[int, ...]
    nice: int

    def carry_out(self) -> None:
        if not self.who.alive:
            return
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            for thread in threads_of(self.who.pid):
                os.sched_setaffinity(thread, self.processors)
                # Raising the priority again needs a privilege; without it the laboratory never lowers the
                # priority.
                if os.getpriority(os.PRIO_PROCESS, thread) != self.nice:
                    os.setpriority(os.PRIO_PROCESS, thread, self.nice)


class RestoreRounding(_Undo, frozen=True, tag="Rounding"):
    """Restores the floating point rounding mode of the threads of a process."""

    who: ProcessIdentity

    def carry_out(self) -> None:
        if self.who.alive:
            fpu_rounding.set_rounding(self.who.pid, fpu_rounding.NEAREST)


class RemoveRules(_Undo, frozen=True, tag="Rules"):
    """Removes packet filter rules from a network namespace."""

    network: int
    """Inode number of the namespace; it is gone when its last process is."""
    table: str
    """Table of nftables; all its content is ours."""
    chains: tuple[Literal["OUTPUT", "INPUT"], ...] = ()
    """Chains of iptables in which packets with the mark are queued, for kernels where nftables can not queue."""
    mark: int = 0
    queue: int = 0
    is_table_made: bool = False
    """Whether iptables had no table before us: then the empty one is removed."""

    def refusal(self, folder: Path) -> str | None:
        return (
            None
            if _TABLE.fullmatch(self.table)
            else f"expected a table of the laboratory, got {self.table!r}"
        )

    def carry_out(self) -> None:
        pid = process_in(self.network)
        if pid is None:
            return
        there = ("nsenter", "--target", str(pid), "--net")
        for rule in queue_rules(self.chains, mark=self.mark, queue=self.queue):
            # The rule may not exist: the change was not made, or was undone.
            with contextlib.suppress(tools.ToolFailed):
                tools.call(*there, "iptables", "-D", *rule)
        if self.is_table_made and _rules_of_iptables(there) == []:
            # Another process may have undone the same change just now.
            with contextlib.suppress(tools.ToolFailed):
                tools.call(*there, "nft", "delete", "table", *IPTABLES_TABLE)
        if not self._has_table(there):
            return
        try:
            tools.call(*there, "nft", "delete", "table", "inet", self.table)
        except tools.ToolFailed:
            # Another process may have undone the same change just now.
            if self._has_table(there):
                raise

    def _has_table(self, there: tuple[str, ...]) -> bool:
        return f" {self.table}\n" in tools.call(*there, "nft", "list", "tables")


class RemoveShaping(_Undo, frozen=True, tag="Shaping"):
    """Removes traffic shaping from a network device."""

    network: int
    """Inode number of the network namespace."""
    interface: str

    def refusal(self, folder: Path) -> str | None:
        is_name = _INTERFACE.fullmatch(self.interface)
        return None if is_name else f"expected a network device, got {self.interface!r}"

    def carry_out(self) -> None:
        pid = process_in(self.network)
        if pid is None:
            return
        there = ("nsenter", "--target", str(pid), "--net", "tc", "qdisc")
        if not self._is_set(there):
            return
        try:
            tools.call(*there, "del", "dev", self.interface, "root")
        except tools.ToolFailed:
            # Another process may have undone the same change just now.
            if self._is_set(there):
                raise

    def _is_set(self, there: tuple[str, ...]) -> bool:
        """Whether our shaping is set; shaping of others is left alone, and the device may be gone."""
        try:
            return f" {SHAPING_HANDLE}: root" in tools.call(*there, "show", "dev", self.interface)
        except tools.ToolFailed as error:
            if "Cannot find device" in str(error):
                return False
            raise


Undo = (
    ResumeProcess
    | LeaveGroup
    | RemovePath
    | UnmountPath
    | RestoreLimit
    | RestoreOomScore
    | RestoreAffinity
    | RestoreRounding
    | RemoveRules
    | RemoveShaping
)


def queue_rules(
    chains: tuple[Literal["OUTPUT", "INPUT"], ...], *, mark: int, queue: int
) -> list[tuple[str, ...]]:
    """Return the rules of iptables that queue marked packets to a program, one per chain, without the operation."""
    match = ("-m", "mark", "--mark", hex(mark))
    target = ("-j", "NFQUEUE", "--queue-num", str(queue), "--queue-bypass")
    return [(chain, *match, *target) for chain in chains]


def iptables_is_nft() -> bool:
    """Whether iptables is based on nftables, so that its tables can be seen and removed."""
    return "nf_tables" in tools.call("iptables", "--version")


def iptables_table_is_ours() -> bool:
    """Whether the table of iptables in this network does not exist, or has no rules but ours."""
    rules = _rules_of_iptables(())
    own = f"mark {MARK_BASE >> 24:#x}"
    return rules is None or (bool(rules) and all(own in each for each in rules))


def _rules_of_iptables(there: tuple[str, ...]) -> list[str] | None:
    """Return the rules in the table of iptables, as nft shows them; None without that table."""
    if f"table {' '.join(IPTABLES_TABLE)}\n" not in tools.call(*there, "nft", "list", "tables"):
        return None
    shown = tools.call(*there, "nft", "list", "table", *IPTABLES_TABLE).splitlines()
    inside = [line.strip() for line in shown if line.startswith("\t\t")]
    return [line for line in inside if not line.startswith("type filter hook ")]


def _is_below(path: str, *folders: Path) -> bool:
    """Whether a path lies below one of the folders, symbolic links in its folders resolved."""
    resolved = Path(os.path.realpath(Path(path).parent)) / Path(path).name
    return any(resolved.is_relative_to(place) for place in map(os.path.realpath, folders))


def threads_of(pid: int) -> list[int]:
    return [int(entry) for entry in os.listdir(f"/proc/{pid}/task")]


def network_of(pid: int | str) -> int:
    """Return the inode number of a process's network namespace."""
    return os.stat(f"/proc/{pid}/ns/net").st_ino


def process_in(network: int) -> int | None:
    """Return a process in a network namespace; None when the namespace has no process and so no longer exists."""
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                if network_of(entry) == network:
                    return int(entry)
    return None


class UndoEntry(msgspec.Struct, frozen=True):
    """Journal line: a change that is about to be made."""

    number: str
    owner: ProcessIdentity
    until: float
    """Monotonic time at which the lease ends."""
    undo: Undo


class UndoDone(msgspec.Struct, frozen=True):
    """Journal line: a change was undone."""

    done: str


class UndoJournal:
    """Append-only journal of undo entries, written by several processes.

    UntrustedFile if another user could have written or replaced it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            check_folders(path)
        self._descriptor = open_owned(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._folder = Path(os.path.realpath(path.parent))
        self._owner = ProcessIdentity.of(os.getpid())
        self._count = 0

    def before(self, undo: Undo, *, lease_s: float) -> UndoEntry:
        """Write how a change is undone; the change may be made when this has returned."""
        self._count += 1
        number = f"{self._owner.pid}-{self._owner.born}-{self._count}"
        entry = UndoEntry(number, self._owner, SYSTEM_CLOCK.monotonic() + lease_s, undo)
        self._append(entry)
        return entry

    def undo(self, entry: UndoEntry) -> None:
        """Undo the change and journal that. PermissionError for a change that the laboratory does not make."""
        if (why := entry.undo.refusal(self._folder)) is not None:
            raise PermissionError(errno.EPERM, why)
        entry.undo.carry_out()
        self.forget(entry)

    def forget(self, entry: UndoEntry) -> None:
        self._append(UndoDone(entry.number))

    def _append(self, line: UndoEntry | UndoDone) -> None:
        # Starts with a newline: a killed process may have left a partial line.
        content = b"\n" + msgspec.json.encode(line) + b"\n"
        if os.write(self._descriptor, content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        os.fdatasync(self._descriptor)

    @property
    def size(self) -> int:
        """Size of the journal in bytes."""
        return os.fstat(self._descriptor).st_size

    def outstanding(self) -> list[UndoEntry]:
        """Return the changes that are not undone, the last one first: changes are undone in reverse order."""
        entries: dict[str, UndoEntry] = {}
        for line in self._lines():
            if isinstance(line, UndoEntry):
                entries[line.number] = line
            else:
                entries.pop(line.done, None)
        return list(reversed(entries.values()))

    def _lines(self) -> Iterator[UndoEntry | UndoDone]:
        # Read through the descriptor: the changes must be undone even after the folder of the experiment was
        # removed.
        for line in os.pread(self._descriptor, self.size, 0).splitlines():
            # A partial line of a killed process belongs to a change that it did not make.
            with contextlib.suppress(msgspec.MsgspecError):
                if line.startswith(b'{"done"'):
                    yield msgspec.json.decode(line, type=UndoDone)
                else:
                    yield msgspec.json.decode(line, type=UndoEntry)

    def close(self) -> None:
        os.close(self._descriptor)
