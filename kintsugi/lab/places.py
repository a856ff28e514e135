"""Where a run that will be broken lives: on hosts of their own, with its folder on a disk of its own.

    with Place(folder, num_hosts=2, disk_bytes=256 << 20) as place:
        run = MarkedRun(config, run_dir=place.run_dir("ours"), place=place)
        injector = Injector(run, folder / "lab")
        …
        place.keep(run.run_dir, folder / "ours")

A disk of its own can be filled, slowed down and broken without anybody else noticing. It is a file with ext4 on it
where the machine can mount one, else memory with a size.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from kintsugi.cluster.hosts import HostPlace
from kintsugi.errors import UserError
from kintsugi.lab import tools
from kintsugi.lab.hosts import PLACE_JOURNAL, Hosts
from kintsugi.lab.reaper import Guard
from kintsugi.lab.tools import ToolFailed
from kintsugi.lab.undo import Remove, Undo, Unmount
from kintsugi.runtime import wait

LEASE_S = 1e9
"""Of a disk: none. The laboratory's own life is what ends it."""
SMALLEST_BYTES = 16 << 20
KEEP_TIMEOUT_S = 60.0


def missing_for_disk() -> str | None:
    """What keeps this machine from giving a run a disk of its own; None when nothing does."""
    absent = [program for program in ("mount", "umount") if not tools.has(program)]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: mount)"
    return None if os.geteuid() == 0 else "expected root"


class Place:
    """Hosts and a disk, of which nothing is left when it is closed, or when whoever made it is killed."""

    def __init__(
        self, folder: Path, *, num_hosts: int = 0, named: bool = False, disk_bytes: int | None = None
    ) -> None:
        """Without hosts, the run is on this machine as it is; without a disk, in `folder`."""
        self.folder = folder
        self.named = named and num_hosts > 0
        folder.mkdir(parents=True, exist_ok=True)
        self._guard = Guard(folder / PLACE_JOURNAL) if disk_bytes is not None else None
        self.disk: Path | None = None
        """Where it is mounted."""
        self._hosts: Hosts | None = None
        try:
            # The disk comes first: hosts have the mounts that were there when they were made.
            if disk_bytes is not None:
                self.disk = self._make_disk(disk_bytes)
            if num_hosts:
                self._hosts = Hosts(num_hosts, folder=folder / "etc", named=named, disk=self.disk)
        except BaseException:
            self.close()
            raise
        (folder / "hosts.json").write_bytes(msgspec.json.encode(self.hosts))

    @property
    def hosts(self) -> tuple[HostPlace, ...]:
        return self._hosts.places if self._hosts is not None else ()

    @property
    def hosts_file(self) -> Path:
        """What the launcher is handed."""
        return self.folder / "hosts.json"

    def host_of(self, network: int) -> str | None:
        """The host whose network namespace has this number."""
        return self._hosts.host_of(network) if self._hosts is not None else None

    def renew(self) -> None:
        """Start a reaper where it was killed: the disk would outlive a laboratory that is killed after it."""
        if self._guard is not None:
            self._guard.renew()

    def run_dir(self, name: str = "run") -> Path:
        """Where a run's folder goes so that it is on this place's disk."""
        return (self.disk or self.folder) / name

    def keep(self, run_dir: Path, to: Path) -> None:
        """Take a run's folder from a disk that is going to disappear."""

        def attempt(remaining_s: float) -> bool | None:
            shutil.copytree(run_dir, to, dirs_exist_ok=True, symlinks=True)
            return True

        wait(attempt, whom="disk", what="a copy of the run", timeout_s=KEEP_TIMEOUT_S)

    def _make_disk(self, size: int) -> Path:
        if size < SMALLEST_BYTES:
            raise UserError(f"expected a disk of at least {SMALLEST_BYTES >> 20} MiB, got {size} bytes")
        if why := missing_for_disk():
            raise UserError(f"a disk of its own can not be mounted here: {why}")
        mount_point, image = self.folder / "disk", self.folder / "disk.img"
        mount_point.mkdir(exist_ok=True)
        try:
            self._mount_file(image, mount_point, size=size)
        except ToolFailed:
            image.unlink(missing_ok=True)
            self._before(Unmount(str(mount_point)))
            tools.call("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mount_point))
        return mount_point

    def _mount_file(self, image: Path, mount_point: Path, *, size: int) -> None:
        self._before(Remove(str(image)))
        with image.open("wb") as file:
            file.truncate(size)
        tools.call("mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=0,nodiscard", str(image))
        self._before(Unmount(str(mount_point)))
        # The device of `-o loop` is freed by the kernel with the last mount of it.
        tools.call("mount", "-o", "loop", str(image), str(mount_point))

    def _before(self, undo: Undo) -> None:
        assert self._guard is not None
        self._guard.before(undo, lease_s=LEASE_S)

    def close(self) -> None:
        """Take hosts and disk away. Runs must have ended; what they left on the disk is lost unless it was kept."""
        hosts, self._hosts = self._hosts, None
        guard, self._guard = self._guard, None
        # What is put here last comes first, and what fails keeps no other from being closed.
        with ExitStack() as stack:
            stack.callback(self._remove_mount_point)
            if guard is not None:
                stack.callback(guard.close)
                for entry in reversed(guard.outstanding()):
                    stack.callback(guard.undo, entry)
            if hosts is not None:
                stack.callback(hosts.close)

    def _remove_mount_point(self) -> None:
        mount_point = self.folder / "disk"
        if mount_point.is_dir() and not os.path.ismount(mount_point):
            mount_point.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
