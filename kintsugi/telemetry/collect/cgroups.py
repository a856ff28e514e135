"""Limits, usage and throttling of the control groups of a process, versions 1 and 2.

A process may be moved to another group at any time, so its groups are read each time; the folders of groups are
cached. A limit of a group holds for all groups below it, so the tightest one up to the root is that of the process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import msgspec
import psutil

UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as the largest number of pages, which is above this."""
MOST_GROUPS = 4096
"""Bound of a search through all groups of a host."""


class ProcessGroups(msgspec.Struct, frozen=True):
    """Folders of the groups of one process; None where the host has no such controller."""

    memory: Path | None = None
    cpu: Path | None = None
    freezer: Path | None = None
    unified: bool = False
    """The memory group is of version 2."""


class GroupAllowance(msgspec.Struct, frozen=True):
    """`Allowance(memory_limit_bytes=2e9, memory_used_bytes=1e9, throttled_s=0.4)`."""

    memory_limit_bytes: float | None = None
    memory_used_bytes: float | None = None
    """Usage without inactive file cache."""
    throttled_s: float | None = None
    frozen: bool = False


class CgroupMount(msgspec.Struct, frozen=True):
    """Mount point of a hierarchy: `Mount("/", Path("/sys/fs/cgroup/memory"), frozenset({"memory"}))`."""

    root: str
    path: Path
    controllers: frozenset[str]
    """Empty: version 2."""


def mounts(mountinfo: str) -> list[CgroupMount]:
    """Return the control group mounts in the text of /proc/self/mountinfo."""
    found = []
    for line in mountinfo.splitlines():
        own, _, kind = line.partition(" - ")
        fields, described = own.split(), kind.split()
        if len(described) < 3 or described[0] not in ("cgroup", "cgroup2"):
            continue
        options = described[2].split(",") if described[0] == "cgroup" else []
        found.append(CgroupMount(fields[3], Path(fields[4]), frozenset(options)))
    return found


def groups_of(membership: str, where: list[CgroupMount]) -> ProcessGroups:
    """Return the groups in the text of /proc/PID/cgroup."""
    folders: dict[str, Path] = {}
    unified: Path | None = None
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if path.endswith(" (deleted)"):
            continue
        for mount in where:
            if not controllers and not mount.controllers:
                unified = _folder(mount, path)
            for name in mount.controllers & set(controllers.split(",")) - {""}:
                folders[name] = _folder(mount, path)
    memory = folders.get("memory", unified)
    return ProcessGroups(
        memory=memory,
        cpu=folders.get("cpu", unified),
        freezer=folders.get("freezer", unified),
        unified=memory is unified and unified is not None,
    )


def _folder(mount: CgroupMount, path: str) -> Path:
    """Return the folder of a group. In a container, /proc may have paths of the host, of which only a part is
    mounted."""
    inner = path.removeprefix(mount.root) if mount.root != "/" else path
    folder = mount.path / inner.lstrip("/")
    return folder if folder.is_dir() else mount.path


class ControlGroups:
    """Reads the groups of processes. A missing file counts as "no limit"."""

    def __init__(self) -> None:
        try:
            self._mounts = mounts(Path("/proc/self/mountinfo").read_text())
        except OSError:
            self._mounts = []
        self._known: dict[str, ProcessGroups] = {}
        self._allowances: dict[ProcessGroups, GroupAllowance] = {}

    def of(self, pid: int) -> ProcessGroups:
        """Return the groups of a process; raises OSError if it is gone. A zombie still has groups."""
        with open(f"/proc/{pid}/cgroup", "rb", buffering=0) as file:
            text = file.readall().decode()
        if text not in self._known:
            if len(self._known) > 256:
                self._known.clear()
            self._known[text] = groups_of(text, self._mounts)
        return self._known[text]

    def begin_round(self) -> None:
        """Begin a round of reads: within a round, groups that processes share are read once."""
        self._allowances = {}

    def allowance(self, groups: ProcessGroups) -> GroupAllowance:
        if groups not in self._allowances:
            limit, used = self._memory(groups)
            throttled_s, frozen = _throttled_s(groups.cpu), _is_frozen(groups.freezer)
            self._allowances[groups] = GroupAllowance(limit, used, throttled_s, frozen)
        return self._allowances[groups]

    def _memory(self, groups: ProcessGroups) -> tuple[float | None, float | None]:
        """Return the tightest limit and its usage."""
        limit_name = "memory.max" if groups.unified else "memory.limit_in_bytes"
        tightest: tuple[float, Path] | None = None
        for folder in self._upwards(groups.memory):
            limit = _number(folder / limit_name)
            if limit is not None and limit < UNLIMITED and (tightest is None or limit < tightest[0]):
                tightest = limit, folder
        return (None, None) if tightest is None else (tightest[0], _used(tightest[1], groups.unified))

    def is_frozen(self, pid: int) -> bool:
        """Return whether the group of a process is frozen now; False if the process is gone."""
        try:
            return _is_frozen(self.of(pid).freezer)
        except OSError:
            return False

    def oom_kills(self, groups: ProcessGroups) -> int | None:
        """Return how many processes of exactly this memory group the kernel has killed; None where it does not
        count."""
        if groups.memory is None:
            return None
        # In version 2 the plain counters include the groups below.
        names = ("memory.events.local", "memory.events") if groups.unified else ("memory.oom_control",)
        counts = (_entry(groups.memory / name, "oom_kill") for name in names)
        return next((int(count) for count in counts if count is not None), None)

    def created_since(self, wall: float) -> Iterator[ProcessGroups]:
        """Yield the memory groups of version 1 that were created since a time, among the first MOST_GROUPS."""
        root = next((mount.path for mount in self._mounts if "memory" in mount.controllers), None)
        if root is None:
            return
        for folder, _, _ in islice(os.walk(root), MOST_GROUPS):
            with suppress(OSError):
                if os.stat(folder).st_mtime >= wall and Path(folder) != root:
                    yield ProcessGroups(memory=Path(folder))

    def _upwards(self, folder: Path | None) -> Iterator[Path]:
        roots = {mount.path for mount in self._mounts}
        while folder is not None:
            yield folder
            folder = None if folder in roots or folder == folder.parent else folder.parent


def available_memory_bytes() -> int:
    """Return how much memory this process may still use: what the host has, and what its control group is allowed."""
    available = int(psutil.virtual_memory().available)
    allowance = _own_allowance()
    if allowance.memory_limit_bytes is None:
        return available
    left = allowance.memory_limit_bytes - (allowance.memory_used_bytes or 0.0)
    return min(available, max(0, int(left)))


def usable_memory_bytes() -> int:
    """Return how much memory the processes of a group like this one have together: that of the host, or the limit of
    the control group in which an engine, a container or systemd has started this process."""
    total, limit = int(psutil.virtual_memory().total), _own_allowance().memory_limit_bytes
    return total if limit is None else min(total, int(limit))


def swap_bytes() -> int:
    """Return the size of the host's swap space."""
    return int(psutil.swap_memory().total)


def _own_allowance() -> GroupAllowance:
    groups = ControlGroups()
    try:
        return groups.allowance(groups.of(os.getpid()))
    except OSError:
        return GroupAllowance()


def _used(folder: Path, unified: bool) -> float | None:
    """Return the usage of a memory group without inactive file cache, which the kernel reclaims when memory is
    short."""
    used_name, idle_name = (
        ("memory.current", "inactive_file") if unified else ("memory.usage_in_bytes", "total_inactive_file")
    )
    used = _number(folder / used_name)
    return None if used is None else max(0.0, used - (_entry(folder / "memory.stat", idle_name) or 0.0))


def _throttled_s(folder: Path | None) -> float | None:
    """Return the time in which the group was runnable and had used up its quota."""
    if folder is None:
        return None
    microseconds = _entry(folder / "cpu.stat", "throttled_usec")
    if microseconds is not None:
        return microseconds / 1e6
    nanoseconds = _entry(folder / "cpu.stat", "throttled_time")
    return None if nanoseconds is None else nanoseconds / 1e9


def _is_frozen(folder: Path | None) -> bool:
    if folder is None:
        return False
    return _read(folder / "freezer.state").startswith(("FROZEN", "FREEZING")) or bool(
        _entry(folder / "cgroup.events", "frozen")
    )


def _read(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.pread(descriptor, 4096, 0).decode()
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _number(path: Path) -> float | None:
    text = _read(path).strip()
    if text == "max":
        return math.inf
    return float(text) if text.isdecimal() else None


def _entry(path: Path, name: str) -> float | None:
    """Return the number of a name in a file of lines `name number`."""
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return float(value)
    return None
