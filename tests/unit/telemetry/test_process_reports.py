from __future__ import annotations

from pathlib import Path

from kintsugi.telemetry.process_reports import ProcessReport, ProcessReports, read_processes, write_processes
from kintsugi.types import Wait

REPORTS = ProcessReports(
    5.0,
    (
        ProcessReport(
            process="model-0",
            role="model",
            host="host-0",
            pid=17,
            incarnation="1.2",
            status="live",
            load=0.5,
            silent_s=0.25,
            counters={"steps": 3},
            waits=(Wait("model-1", "all_reduce", 1.0, 31.0),),
        ),
    ),
)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    write_processes(tmp_path, REPORTS)
    assert read_processes(tmp_path) == REPORTS
    assert [path.name for path in tmp_path.iterdir()] == ["processes.json"]


def test_no_file_and_a_file_of_something_else_say_nothing(tmp_path: Path) -> None:
    assert read_processes(tmp_path) is None
    (tmp_path / "processes.json").write_text("{}")
    assert read_processes(tmp_path) is None
