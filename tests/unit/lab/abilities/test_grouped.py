from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.lab import groups
from kintsugi.lab.abilities.fault import Impossible, Scene
from kintsugi.lab.abilities.processor import CpuQuota
from kintsugi.lab.injection import Ability, Injection
from kintsugi.lab.undo import UndoJournal, Who

pytestmark = pytest.mark.skipif(groups.missing("cpu") is not None, reason=str(groups.missing("cpu")))


@pytest.fixture
def fault(tmp_path: Path) -> Iterator[CpuQuota]:
    """Prepared: there is a group, and nobody in it."""
    scene = Scene(
        injection=Injection(ability=Ability.CPU, target="model-0"),
        mechanism=CpuQuota.name,
        target=Who.of(os.getpid()),
        run_dir=str(tmp_path),
        journal=str(tmp_path / "undo.jsonl"),
    )
    fault = CpuQuota(scene, UndoJournal(tmp_path / "undo.jsonl"))
    fault.prepare()
    yield fault
    fault.end()


def test_what_the_kernel_does_not_have_can_not_be_done(fault: CpuQuota) -> None:
    with pytest.raises(Impossible, match=r"this kernel has no cpu\.magic"):
        fault.say("cpu.magic", "1")


def test_a_group_that_was_undone_meanwhile_is_told_nothing(fault: CpuQuota) -> None:
    fault.group.rmdir()
    fault.say("cpu.magic", "1")
