"""Control groups of both versions: where a controller is mounted, and a group for one process."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

import msgspec

MOUNTS = Path("/proc/mounts")
FREEZER = "freezer"


class Hierarchy(msgspec.Struct, frozen=True):
    """Mount of the groups of one controller."""

    controller: str
    version: int
    root: Path

    def group_of(self, pid: int) -> Path:
        """Return the group that a process is in now."""
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if (self.version == 2 and not controllers) or self.controller in controllers.split(","):
                return self.root / path.lstrip("/")
        raise FileNotFoundError(f"process {pid} is in no group of {self.controller}")

    def parent_for(self, pid: int) -> Path:
        """Return the parent of a new group for a process.

        In version 1 that is the process's own group: its limits stay in force. In version 2 a group with processes
        can not have children with controllers, so it is the nearest group above that delegates the controller. The
        freezer is no controller in version 2 and needs no delegation.
        """
        group = self.group_of(pid)
        if self.version == 1 or self.controller == FREEZER:
            return group
        for ancestor in (group, *group.parents):
            enabled = ancestor / "cgroup.subtree_control"
            if enabled.exists() and self.controller in enabled.read_text().split():
                return ancestor
            if ancestor == self.root:
                break
        raise PermissionError(f"no control group above that of process {pid} hands {self.controller} down")

    def new_path(self, pid: int) -> Path:
        """Return the path of a group that does not exist yet."""
        return self.parent_for(pid) / f"g{uuid4().hex[:10]}"


def hierarchy(controller: str, *, mounts: Path = MOUNTS) -> Hierarchy | None:
    """Return the mount of a controller; None where the kernel does not have it, or it is not mounted."""
    unified: Hierarchy | None = None
    for line in mounts.read_text().splitlines():
        _, path, kind, options, *_ = line.split()
        if kind == "cgroup" and controller in options.split(","):
            return Hierarchy(controller, 1, Path(path))
        if kind == "cgroup2":
            available = Path(path, "cgroup.controllers")
            # The freezer is no controller of version 2: every group can be frozen.
            if controller == FREEZER or (available.exists() and controller in available.read_text().split()):
                unified = Hierarchy(controller, 2, Path(path))
    return unified


def missing(controller: str) -> str | None:
    """Return why a process can not be put into a group of this controller; None when it can."""
    found = hierarchy(controller)
    if found is None:
        return f"no control group controller {controller!r} is mounted"
    if os.geteuid() != 0:
        return f"expected root, to move a process to another {controller} control group"
    try:
        parent = found.parent_for(os.getpid())
    except (OSError, KeyError) as error:
        return str(error)
    if not os.access(parent, os.W_OK):
        return f"{parent} is mounted read-only"
    return None
