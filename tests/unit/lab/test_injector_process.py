from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from kintsugi.lab.faults.mechanism import FaultContext
from kintsugi.lab.injector.injection import Ability, Injection
from kintsugi.lab.injector.injector_process import InjectorOrders, InjectorProcess
from kintsugi.lab.injector.reports import InjectorReport
from kintsugi.lab.injector.undo_log import ProcessIdentity

GONE = ProcessIdentity(2**22 - 1, 1)


def words_about(target: ProcessIdentity, run_dir: Path, *, orders: bytes = b"go\n") -> list[InjectorReport]:
    """What one says that is told to damage a run's checkpoint."""
    scene = FaultContext(
        injection=Injection(ability=Ability.CORRUPT, target="model-0"),
        mechanism="inverted bytes in its newest checkpoint",
        target=target,
        run_dir=str(run_dir),
        journal=str(run_dir / "undo.jsonl"),
    )
    reader, writer = os.pipe()
    os.write(writer, msgspec.json.encode(scene) + b"\n" + orders)
    os.close(writer)
    said: list[InjectorReport] = []
    InjectorProcess(InjectorOrders(reader), said.append).run()
    os.close(reader)
    return said


def a_checkpoint(run_dir: Path) -> Path:
    path = run_dir / "checkpoints" / "step-5" / "weights"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(4096))
    return path


def test_a_fault_is_prepared_begins_and_ends(tmp_path: Path) -> None:
    checkpoint = a_checkpoint(tmp_path)
    said = words_about(ProcessIdentity.of(os.getpid()), tmp_path)
    assert [word.what for word in said] == ["ready", "began", "ended"]
    assert any(checkpoint.read_bytes())


def test_a_fault_does_not_begin_when_its_target_has_ended(tmp_path: Path) -> None:
    checkpoint = a_checkpoint(tmp_path)
    said = words_about(GONE, tmp_path)
    assert [word.what for word in said] == ["ready", "failed"]
    assert "ended before the fault could begin" in said[-1].why
    assert not any(checkpoint.read_bytes())


def test_ports_of_the_other_end_begin_no_fault_and_end_none(tmp_path: Path) -> None:
    a_checkpoint(tmp_path)
    said = words_about(ProcessIdentity.of(os.getpid()), tmp_path, orders=b"ports [80,443]\nports []\ngo\n")
    assert [word.what for word in said] == ["ready", "began", "ended"]
    said = words_about(ProcessIdentity.of(os.getpid()), tmp_path, orders=b"ports [80]\nend\n")
    assert [word.what for word in said] == ["ready"]


def test_one_that_fails_in_a_way_that_nobody_foresaw_says_so_and_writes_nothing_to_the_terminal() -> None:
    orders, words = os.pipe(), os.pipe()
    os.write(orders[1], b"no scene\n")
    result = subprocess.run(
        [sys.executable, "-m", "kintsugi.lab.injector.injector_process", str(orders[0]), str(words[1])],
        pass_fds=(orders[0], words[1]),
        capture_output=True,
        timeout=30,
        check=False,
    )
    said = msgspec.json.decode(os.read(words[0], 4096), type=InjectorReport)
    for descriptor in (*orders, *words):
        os.close(descriptor)
    assert (result.returncode, result.stderr) == (1, b"")
    assert said.what == "failed" and said.why.startswith("the injector failed: DecodeError")
