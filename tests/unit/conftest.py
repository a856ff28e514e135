"""A real disk that can be filled."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SIZE = "16m"


class SmallDisk:
    """A file system of its own, part of which is taken by a file of ours."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self, *, room: int = 0) -> None:
        """Leave this many bytes free."""
        self.clear()
        found = os.statvfs(self.folder)
        self._ballast.write_bytes(bytes(found.f_bavail * found.f_bsize - room))

    def clear(self) -> None:
        self._ballast.unlink(missing_ok=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("file systems can not be mounted here")
    yield SmallDisk(folder)
    # A descriptor that a failed test left open must not keep the file system.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
