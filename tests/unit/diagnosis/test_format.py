"""A diagnosis as people and as programs are told it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from kintsugi.diagnosis.format import as_values, format_diagnosis
from kintsugi.diagnosis.verdict import Cause, Diagnosis, Evidence, FaultKind, Hop
from kintsugi.run_folder.layout import RunFolder
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.events import EventLog, ProcessBegan

EVENING = datetime(2026, 11, 16, 23, 0).timestamp()


def cause(process: str, *, at: float) -> Cause:
    return Cause(
        process=process,
        host="host-1",
        kind=FaultKind.CPU,
        onset=at - 3,
        confidence=0.96,
        summary=f"{process}: is starved",
        path=(Hop(process, "is starved", at),),
        evidence=(Evidence("figures/agent-1.jsonl", at, "starved"),),
    )


def diagnosis(run_dir: Path, process: str, *, at: float) -> Diagnosis:
    return Diagnosis(run=str(run_dir), at=at, since=at - 8, causes=(cause(process, at=at),))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a run that began in the evening, and had trouble a minute later."""
    clock = VirtualClock(wall=EVENING)
    log = EventLog(RunFolder(tmp_path).events_file("master-0"), process="master-0", clock=clock)
    log.emit(ProcessBegan("master", "1", 1))
    log.close()
    earlier = diagnosis(tmp_path, "server-0", at=EVENING + 60)
    RunFolder(tmp_path).diagnoses_file.write_bytes(msgspec.json.encode(earlier) + b"\n")
    return tmp_path


def test_programs_are_told_what_was_wrong_earlier_too(run_dir: Path) -> None:
    values = as_values(diagnosis(run_dir, "model-1", at=EVENING + 120))
    (before,) = values["earlier"]
    assert (before["process"], before["kind"], before["told"]) == ("server-0", "cpu", EVENING + 60)
    assert [each["process"] for each in values["causes"]] == ["model-1"]
    again = msgspec.json.decode(msgspec.json.encode(values), type=Diagnosis)
    assert again.causes[0].process == "model-1", "it is still a diagnosis"


def test_times_have_their_day_where_the_run_is_not_of_one_day_only(run_dir: Path) -> None:
    assert "2026-11" not in format_diagnosis(diagnosis(run_dir, "model-1", at=EVENING + 120))
    told = format_diagnosis(diagnosis(run_dir, "model-1", at=EVENING + 2 * 3600))
    assert f"{run_dir} at 2026-11-17 01:00:00.0, diagnosed since 2026-11-17 00:59:52.0" in told
    assert "  2026-11-16 23:00:57.0  cpu            server-0: is starved" in told


def test_a_folder_without_a_master_is_told_of_without_days(tmp_path: Path) -> None:
    assert (
        "2026" not in format_diagnosis(diagnosis(tmp_path, "model-1", at=EVENING)).partition("looked at")[2]
    )
