"""What is done to a process by putting it into a control group of its own."""

from __future__ import annotations

from pathlib import Path

from kintsugi.lab import groups
from kintsugi.lab.abilities.fault import Fault, Impossible
from kintsugi.lab.undo import Leave


class GroupedFault(Fault):
    """Makes the group beforehand; the target moves in when the fault begins."""

    controller: str

    @classmethod
    def missing(cls) -> str | None:
        return groups.missing(cls.controller)

    def prepare(self) -> None:
        found = groups.hierarchy(self.controller)
        assert found is not None, "probed before"
        self.version = found.version
        self.group = found.new_path(self.pid)
        self.before(Leave(str(self.group), str(found.group_of(self.pid))))
        self.group.mkdir()

    def begin(self) -> None:
        self.set_up()
        self.move(self.pid)

    def set_up(self) -> None:
        """What the group says before anybody is in it."""

    def move(self, pid: int) -> None:
        try:
            (self.group / "cgroup.procs").write_text(str(pid))
        except ProcessLookupError as error:
            raise Impossible(f"process {pid} had ended before the fault could begin") from error

    def say(self, file: str, text: str) -> None:
        """Nothing is said to a group that is gone: the reaper has undone it meanwhile."""
        path = Path(self.group, file)
        try:
            path.write_text(text)
        except (FileNotFoundError, PermissionError) as error:
            if not self.group.exists():
                return
            if path.exists():
                raise
            # It says that no file may be made there, where it has none of this name.
            raise Impossible(f"this kernel has no {file}") from error
