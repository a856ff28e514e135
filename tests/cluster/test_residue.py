"""Injections with random kills leave nothing behind: a few of what `kintsugi lab residue` does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kintsugi.lab.residue.residue import run_residue


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="most mechanisms need root: see `kintsugi lab abilities`")
def test_killed_injectors_targets_and_laboratories_leave_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    report = run_residue(12, seed=3, folder=tmp_path / "residue", say=said.append)
    assert report.injections == 12
    assert report.took_effect >= 6
    assert report.killed
    # What else happens on this machine is none of ours.
    ours = [
        line
        for line in report.left
        if str(tmp_path) in line
        or line.startswith(("injection", "process of the experiment", "control group"))
    ]
    assert ours == []
