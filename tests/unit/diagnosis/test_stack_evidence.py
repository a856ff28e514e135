"""The stack of a hung process as evidence."""

from __future__ import annotations

from pathlib import Path

from kintsugi.diagnosis.diagnose import with_stacks
from kintsugi.diagnosis.verdict import Cause, Diagnosis, FaultKind
from kintsugi.telemetry.stack_dump import header


def diagnosis_of(kind: FaultKind, *, onset: float = 1000.0) -> Diagnosis:
    cause = Cause(
        process="model-0",
        host="host-0",
        kind=kind,
        onset=onset,
        confidence=0.9,
        summary="model-0 hangs",
        path=(),
        evidence=(),
    )
    return Diagnosis(run="run", at=1010.0, since=990.0, causes=(cause,))


def write_log(run_dir: Path, *, time: float) -> None:
    log = run_dir / "logs" / "model-0.log"
    log.parent.mkdir(exist_ok=True)
    stacks = (
        'Current thread 0x1 (most recent call first):\n  File "/a/kintsugi/worker.py", line 7 in _forward\n'
    )
    log.write_text(header(process="model-0", incarnation="1", pid=1, time=time) + stacks)


def test_the_stack_of_a_hung_process_is_quoted_with_its_log(tmp_path: Path) -> None:
    write_log(tmp_path, time=1005.5)
    (evidence,) = with_stacks(diagnosis_of(FaultKind.HUNG), tmp_path).causes[0].evidence
    assert (evidence.source, evidence.time) == ("logs/model-0.log", 1005.5)
    assert evidence.quote == "its main thread was in _forward (kintsugi/worker.py:7)"


def test_a_stack_of_an_earlier_hang_is_not_quoted(tmp_path: Path) -> None:
    write_log(tmp_path, time=900.0)
    assert with_stacks(diagnosis_of(FaultKind.HUNG), tmp_path).causes[0].evidence == ()


def test_nothing_is_quoted_without_a_log_or_for_another_fault(tmp_path: Path) -> None:
    assert with_stacks(diagnosis_of(FaultKind.HUNG), tmp_path).causes[0].evidence == ()
    write_log(tmp_path, time=1005.5)
    assert with_stacks(diagnosis_of(FaultKind.SLOW), tmp_path).causes[0].evidence == ()
