"""Base class of the faults that move the target into a control group of its own."""

from __future__ import annotations

from pathlib import Path

from kintsugi.lab.faults.mechanism import FaultImpossible, FaultMechanism
from kintsugi.lab.injector.undo_log import LeaveGroup
from kintsugi.lab.testbed import cgroups


class GroupedFault(FaultMechanism):
    """Creates the group beforehand; the target is moved into it when the fault begins."""

    controller: str

    @classmethod
    def missing(cls) -> str | None:
        return cgroups.missing(cls.controller)

    def prepare(self) -> None:
        found = cgroups.hierarchy(self.controller)
        assert found is not None, "probed before"
        self.version = found.version
        self.group = found.new_path(self.pid)
        self.before(LeaveGroup(str(self.group), str(found.group_of(self.pid))))
        self.group.mkdir()

    def begin(self) -> None:
        self.set_up()
        self.move(self.pid)

    def set_up(self) -> None:
        """Configure the group before a process is in it."""

    def move(self, pid: int) -> None:
        try:
            (self.group / "cgroup.procs").write_text(str(pid))
        except ProcessLookupError as error:
            raise FaultImpossible(f"process {pid} had ended before the fault could begin") from error

    def write_control(self, file: str, text: str) -> None:
        """Write a control file; no effect when the reaper has removed the group meanwhile."""
        path = Path(self.group, file)
        try:
            path.write_text(text)
        except (FileNotFoundError, PermissionError) as error:
            if not self.group.exists():
                return
            if path.exists():
                raise
            # The kernel reports EACCES for a control file that does not exist: no file can be created there.
            raise FaultImpossible(f"this kernel has no {file}") from error
