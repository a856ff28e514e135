from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.lab.faults.cpu import CpuQuota
from kintsugi.lab.faults.mechanism import FaultContext, FaultImpossible
from kintsugi.lab.injector.injection import Ability, Injection
from kintsugi.lab.injector.undo_log import ProcessIdentity, UndoJournal
from kintsugi.lab.testbed import cgroups

pytestmark = pytest.mark.skipif(cgroups.missing("cpu") is not None, reason=str(cgroups.missing("cpu")))


@pytest.fixture
def fault(tmp_path: Path) -> Iterator[CpuQuota]:
    """Prepared: there is a group, and nobody in it."""
    scene = FaultContext(
        injection=Injection(ability=Ability.CPU, target="model-0"),
        mechanism=CpuQuota.name,
        target=ProcessIdentity.of(os.getpid()),
        run_dir=str(tmp_path),
        journal=str(tmp_path / "undo.jsonl"),
    )
    fault = CpuQuota(scene, UndoJournal(tmp_path / "undo.jsonl"))
    fault.prepare()
    yield fault
    fault.end()


def test_what_the_kernel_does_not_have_can_not_be_done(fault: CpuQuota) -> None:
    with pytest.raises(FaultImpossible, match=r"this kernel has no cpu\.magic"):
        fault.write_control("cpu.magic", "1")


def test_a_group_that_was_undone_meanwhile_is_told_nothing(fault: CpuQuota) -> None:
    fault.group.rmdir()
    fault.write_control("cpu.magic", "1")
