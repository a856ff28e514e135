from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from kintsugi.lab.faults.mechanism import FaultContext
from kintsugi.lab.faults.storage import NUM_WRITERS, ContendingWriters, DiskFiller, SmallFiles
from kintsugi.lab.injector.injection import Ability, Injection
from kintsugi.lab.injector.undo_log import ProcessIdentity, UndoJournal

TIMEOUT_S = 10.0


def scene(disk: Path, ability: Ability, tmp_path: Path, **fields: Any) -> tuple[FaultContext, UndoJournal]:
    journal = tmp_path / "undo.jsonl"
    told = FaultContext(
        injection=Injection(ability=ability, target="model-0", **fields),
        mechanism="",
        target=ProcessIdentity.of(os.getpid()),
        run_dir=str(disk),
        disk=str(disk),
        journal=str(journal),
    )
    return told, UndoJournal(journal)


def free_share(disk: Path) -> float:
    found = os.statvfs(disk)
    return found.f_bavail / found.f_blocks


def test_a_disk_is_as_full_as_was_asked(small_disk: Any, tmp_path: Path) -> None:
    fault = DiskFiller(*scene(small_disk.folder, Ability.DISK_FILL, tmp_path, amount={"share": 0.5}))
    fault.prepare()
    fault.begin()
    assert 0.49 < free_share(small_disk.folder) < 0.51
    fault.end()
    assert free_share(small_disk.folder) > 0.99


def test_a_disk_fills_as_the_ramp_says(small_disk: Any, tmp_path: Path) -> None:
    fault = DiskFiller(*scene(small_disk.folder, Ability.DISK_FILL, tmp_path, ramp_s=4.0))
    fault.prepare()
    fault.begin()
    assert free_share(small_disk.folder) > 0.99
    fault.tick(0.25)
    assert 0.74 < free_share(small_disk.folder) < 0.76
    fault.tick(1.0)
    assert free_share(small_disk.folder) == 0.0
    fault.end()


def test_a_disk_without_inodes_has_room_and_takes_no_file(small_disk: Any, tmp_path: Path) -> None:
    remount = ["mount", "-o", "remount,nr_inodes=500", str(small_disk.folder)]
    subprocess.run(remount, check=True)
    before = os.statvfs(small_disk.folder)
    fault = SmallFiles(*scene(small_disk.folder, Ability.DISK_FILL, tmp_path, amount={"share": 1.0}))
    fault.prepare()
    fault.begin()
    assert os.statvfs(small_disk.folder).f_favail == 0
    assert free_share(small_disk.folder) > 0.5
    with pytest.raises(OSError, match="No space left"):
        (small_disk.folder / "one more").touch()
    fault.end()
    assert os.statvfs(small_disk.folder).f_favail == before.f_favail


class PausingWriters(ContendingWriters):
    """Tells that everybody has paused."""

    def prepare(self) -> None:
        super().prepare()
        self.paused: set[str] = set()
        self.all_paused = threading.Event()

    def _pause(self, seconds: float) -> None:
        self.paused.add(threading.current_thread().name)
        if len(self.paused) == NUM_WRITERS:
            self.all_paused.set()
        super()._pause(seconds)


def test_who_writes_to_a_full_disk_pauses_instead_of_taking_the_processor(
    small_disk: Any, tmp_path: Path
) -> None:
    fault = PausingWriters(*scene(small_disk.folder, Ability.DISK_LOAD, tmp_path))
    fault.prepare()
    small_disk.fill()
    fault.begin()
    try:
        assert fault.all_paused.wait(TIMEOUT_S)
        assert sum(fault._written) == 0
    finally:
        fault.end()
