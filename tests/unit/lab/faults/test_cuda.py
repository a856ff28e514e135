from __future__ import annotations

import os
from pathlib import Path

import pytest

from kintsugi.lab.faults import cuda
from kintsugi.lab.faults.cuda import FullGpuMemory, address_of, gpus_of
from kintsugi.lab.faults.mechanism import FaultContext, FaultImpossible
from kintsugi.lab.injector.injection import Ability, Injection
from kintsugi.lab.injector.undo_log import ProcessIdentity, UndoJournal


def test_the_card_of_a_process_is_found_by_what_it_has_open(monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia3", "/dev/nvidia3", "/tmp/nvidia7"]
    monkeypatch.setattr(cuda, "opened", lambda pid: [(Path("/proc"), target) for target in files])
    assert gpus_of(1) == {3}


def test_a_card_is_known_to_the_driver_by_its_place_on_the_bus(tmp_path: Path) -> None:
    for minor, address in ((0, "0000:3b:00.0"), (10, "0000:86:00.0"), (1, "0000:af:00.0")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "information").write_text(f"Model: \t H200\nDevice Minor: \t {minor}\n")
    assert address_of(1, gpus=tmp_path) == "0000:af:00.0"
    assert address_of(7, gpus=tmp_path) is None


def test_of_several_cards_one_has_to_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["/dev/nvidia0", "/dev/nvidia1"]
    monkeypatch.setattr(cuda, "opened", lambda pid: [(Path("/proc"), target) for target in files])
    scene = FaultContext(
        injection=Injection(ability=Ability.DEVICE_MEMORY, target="model-0"),
        mechanism=FullGpuMemory.name,
        target=ProcessIdentity.of(os.getpid()),
        run_dir=str(tmp_path),
        journal=str(tmp_path / "undo.jsonl"),
    )
    with pytest.raises(FaultImpossible, match="has the GPUs 0, 1 open"):
        FullGpuMemory(scene, UndoJournal(tmp_path / "undo.jsonl")).prepare()
