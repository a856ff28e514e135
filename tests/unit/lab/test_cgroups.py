from __future__ import annotations

import os
from pathlib import Path

import pytest

from kintsugi.lab.testbed.cgroups import Hierarchy, hierarchy


def mounts(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "mounts"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_the_first_version_is_found_by_its_options(tmp_path: Path) -> None:
    table = mounts(
        tmp_path, "cgroup /g/cpu cgroup rw,cpu,cpuacct 0 0", "cgroup /g/memory cgroup rw,memory 0 0"
    )
    assert hierarchy("memory", mounts=table) == Hierarchy("memory", 1, Path("/g/memory"))
    assert hierarchy("blkio", mounts=table) is None


def test_the_second_version_is_found_by_what_it_offers(tmp_path: Path) -> None:
    root = tmp_path / "unified"
    root.mkdir()
    (root / "cgroup.controllers").write_text("cpu memory\n")
    table = mounts(tmp_path, f"cgroup2 {root} cgroup2 rw 0 0")
    assert hierarchy("memory", mounts=table) == Hierarchy("memory", 2, root)
    assert hierarchy("io", mounts=table) is None
    assert hierarchy("freezer", mounts=table) == Hierarchy("freezer", 2, root)


def test_a_group_of_the_second_version_is_made_where_the_controller_is_handed_down(tmp_path: Path) -> None:
    root = tmp_path / "unified"
    own = root / "slice" / "scope"
    own.mkdir(parents=True)
    for folder, controllers in ((root, "cpu memory"), (root / "slice", "cpu"), (own, "")):
        (folder / "cgroup.subtree_control").write_text(controllers)

    class Placed(Hierarchy, frozen=True):
        def group_of(self, pid: int) -> Path:
            return own

    assert Placed("cpu", 2, root).parent_for(os.getpid()) == root / "slice"
    assert Placed("memory", 2, root).parent_for(os.getpid()) == root
    with pytest.raises(PermissionError, match="hands io down"):
        Placed("io", 2, root).parent_for(os.getpid())
    assert Placed("cpu", 1, root).parent_for(os.getpid()) == own
    # Every group of the second version can be frozen, whatever is handed down.
    assert Placed("freezer", 2, root).parent_for(os.getpid()) == own
