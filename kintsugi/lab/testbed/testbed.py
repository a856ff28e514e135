"""RunTestbed of a run that faults are injected into: isolated hosts, and a disk of its own for the run folder.

    with RunTestbed(folder, num_hosts=2, disk_bytes=256 << 20) as testbed:
        run = MarkedRun(config, run_dir=testbed.run_dir("ours"), testbed=testbed)
        injector = Injector(run, folder / "lab")
        …
        testbed.keep(run.run_dir, folder / "ours")

The disk can be filled, slowed down and broken without an effect on the rest of the machine. It is an ext4 image where
the machine can mount one, else a tmpfs with a size limit.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from kintsugi.cluster.namespaces import HostNamespaces
from kintsugi.errors import UserError
from kintsugi.lab.injector.reaper import ReaperGuard
from kintsugi.lab.injector.undo_log import RemovePath, Undo, UnmountPath, mounts_at
from kintsugi.lab.testbed import tools
from kintsugi.lab.testbed.hosts import TESTBED_JOURNAL, Hosts
from kintsugi.lab.testbed.tools import ToolFailed
from kintsugi.runtime.waits import wait

LEASE_S = 1e9
"""Lease of the disk: unlimited. It is removed when the laboratory ends."""
SMALLEST_BYTES = 16 << 20
KEEP_TIMEOUT_S = 60.0


def missing_for_disk() -> str | None:
    """Return why this machine can not give a run a disk of its own; None when it can."""
    absent = [program for program in ("mount", "umount") if not tools.has(program)]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: mount)"
    return None if os.geteuid() == 0 else "expected root"


class RunTestbed:
    """Hosts and a disk, removed when the testbed is closed or the process that created it is killed."""

    def __init__(
        self,
        folder: Path,
        *,
        num_hosts: int = 0,
        named: bool = False,
        disk_bytes: int | None = None,
        disk_folder: Path | None = None,
    ) -> None:
        """Create hosts and disk; without hosts the run is on this machine as it is, without a disk in `folder`.

        `disk_folder` takes the place of a disk: a folder on a disk of the machine, which may be filled.
        """
        self.folder = folder
        self.named = named and num_hosts > 0
        folder.mkdir(parents=True, exist_ok=True)
        self._guard = ReaperGuard(folder / TESTBED_JOURNAL) if disk_bytes is not None else None
        self.disk = disk_folder
        """Mount point of the run's own disk, or the folder that takes its place."""
        self._hosts: Hosts | None = None
        try:
            # The disk comes first: hosts inherit the mounts that exist when they are created.
            if self.disk is not None:
                self.disk.mkdir(parents=True, exist_ok=True)
            elif disk_bytes is not None:
                self.disk = self._make_disk(disk_bytes)
            if num_hosts:
                self._hosts = Hosts(num_hosts, folder=folder / "etc", named=named, disk=self.disk)
        except BaseException:
            self.close()
            raise
        (folder / "hosts.json").write_bytes(msgspec.json.encode(self.hosts))

    @property
    def hosts(self) -> tuple[HostNamespaces, ...]:
        return self._hosts.places if self._hosts is not None else ()

    @property
    def hosts_file(self) -> Path:
        """File with the hosts, passed to the launcher."""
        return self.folder / "hosts.json"

    def host_of(self, network: int) -> str | None:
        """Return the host with this network namespace (inode number)."""
        return self._hosts.host_of(network) if self._hosts is not None else None

    def renew(self) -> None:
        """Restart a killed reaper: without one, the disk would outlive a laboratory that is killed later."""
        if self._guard is not None:
            self._guard.renew()

    def run_dir(self, name: str = "run") -> Path:
        """Return the path of a run folder on this testbed's disk."""
        return (self.disk or self.folder) / name

    def keep(self, run_dir: Path, to: Path) -> None:
        """Copy a run folder from the disk before the disk is removed."""

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
            self._before(UnmountPath(str(mount_point), mounts_at(str(mount_point))))
            tools.call("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mount_point))
        return mount_point

    def _mount_file(self, image: Path, mount_point: Path, *, size: int) -> None:
        self._before(RemovePath(str(image)))
        with image.open("wb") as file:
            file.truncate(size)
        tools.call("mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=0,nodiscard", str(image))
        self._before(UnmountPath(str(mount_point), mounts_at(str(mount_point))))
        # The kernel frees the device of `-o loop` with its last mount.
        tools.call("mount", "-o", "loop", str(image), str(mount_point))

    def _before(self, undo: Undo) -> None:
        assert self._guard is not None
        self._guard.before(undo, lease_s=LEASE_S)

    def close(self) -> None:
        """Remove hosts and disk. Runs must have ended; files on the disk are lost unless `keep` has copied them."""
        hosts, self._hosts = self._hosts, None
        guard, self._guard = self._guard, None
        # Callbacks run in reverse order, and an error in one does not skip the others.
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
