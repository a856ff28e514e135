from __future__ import annotations

from io import StringIO

import msgspec
import pytest
from rich.console import Console

from kintsugi.cli import tables
from kintsugi.run_folder.incidents import IncidentReport, ProcessLoss, report_of
from kintsugi.run_folder.listing import RunLine
from kintsugi.telemetry.process_reports import ProcessReport, ProcessReports
from kintsugi.telemetry.step_metrics import SampleRecord
from kintsugi.types import FinishReason
from tests.unit.run_folder.test_incidents import OPENED, RECOVERED, fault

RECOVERED_REPORT, OPEN_REPORT = report_of(RECOVERED), report_of(OPENED)


def text_of(report: IncidentReport, *, running: bool = False) -> str:
    return tables.incidents_text(report, run="runs/mine-1", running=running)


def test_a_run_without_incidents_is_one_sentence() -> None:
    assert text_of(IncidentReport((), ())) == "runs/mine-1: no incidents"


def test_an_incident_begins_with_its_cause() -> None:
    lines = text_of(RECOVERED_REPORT).splitlines()
    assert lines[0] == "incident 1: recovered (recover) in 500 ms"
    assert lines[1] == "  cause     model-1 broke (ProcessDied)"
    assert lines[-1] == "  cost      500 ms, no steps undone, no groups sampled again"


def test_losses_and_rejected_strategies_are_printed() -> None:
    text = text_of(RECOVERED_REPORT)
    assert "lost      model-1, 1.3 (pid 11), replaced by 1.8 (pid 21)" in text
    assert "action    recover: model-1 replaced\n" in text
    assert "rejected  retry: not possible, model-1 lost; elastic: about 0.2 s" in text
    assert "took      start 200 ms, total 500 ms" in text


def test_a_duration_that_was_not_measured_is_left_out() -> None:
    """A master that takes over when the incident is over has measured nothing of it."""
    (incident,) = RECOVERED_REPORT.incidents
    adopted = msgspec.structs.replace(incident, timing={"start": 0.0, "total": 0.0, "outage": 0.0})
    text = text_of(IncidentReport((adopted,), ()))
    assert "took" not in text and "cost      500 ms" in text


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_list_of_runs_is_complete_in_a_narrow_terminal(width: int) -> None:
    line = RunLine(
        folder="runs/grpo_arithmetic-1", state="interrupted", step=233, total_steps=405, reward=0.275
    )
    output = StringIO()
    runs = [msgspec.structs.replace(line, accuracy=0.426)]
    Console(file=output, width=width).print(tables.runs_table(runs, width=width))
    text = output.getvalue()
    assert max(len(each.rstrip()) for each in text.splitlines()) <= width
    assert all(each in text for each in ("interrupted", "233/405", "0.275", "42.6%", "1970-01-01"))


SAMPLE = SampleRecord(3, "grpo:0:0:0", 1, 2, "12+39=", "15", 1.0, {"exact": 1.0}, FinishReason.EOS, 0.35)


@pytest.mark.parametrize("width", [200, 40])
def test_a_column_named_like_a_text_of_the_sample_never_stands_for_it(width: int) -> None:
    columns = {"answer": "51", "completion": "51", "rejected": "99"}
    text = tables.sample_text(SAMPLE, columns=columns, width=width)
    flat = " ".join(text.split())
    assert "'51' (also completion)" in flat and text.count("'51'") == 1
    assert ("completion '15'" in flat) if width == 40 else ("'12+39=' → '15' answer: '51'" in flat)


def test_an_open_incident_is_recovering_only_while_its_run_is_running() -> None:
    assert text_of(OPEN_REPORT, running=True).startswith("incident 1: recovering\n")
    assert text_of(OPEN_REPORT).startswith("incident 1: unresolved: the run ended\n")


def test_incidents_are_readable_at_80_columns_and_a_traceback_is_one_line() -> None:
    (incident,) = RECOVERED_REPORT.incidents
    words = (
        "exited with code 1; its last words: Traceback (most recent call last):\n  File f\nKeyError: 'x'\n"
    )
    talking = msgspec.structs.replace(incident.cause, message=f"model-1 (pid 11) was lost: {words}")
    many = msgspec.structs.replace(incident, faults=(talking,) * 3, losses=incident.losses * 5)
    text = text_of(IncidentReport((many,), ()))
    assert max(map(len, text.splitlines())) <= tables.WIDTH
    flat = " ".join(text.split())
    assert "exited with code 1: KeyError: 'x' (ProcessDied) (3 times)" in flat and "Traceback" not in flat
    assert "see       logs/model-1.log in the run folder" in text


def test_incidents_fit_a_terminal_of_60_columns_and_no_path_is_broken() -> None:
    (incident,) = RECOVERED_REPORT.incidents
    path = "/data/runs/experiment-of-november/checkpoints/.saving-step-000060/trainer.safetensors"
    full = msgspec.structs.replace(incident.cause, message=f"{path} on disk: No space left on device")
    many = msgspec.structs.replace(incident, faults=(incident.cause, full))
    text = tables.incidents_text(IncidentReport((many,), ()), run="runs/mine-1", running=False, width=60)
    assert max(len(line) for line in text.splitlines() if path not in line) <= 60
    assert path in text


def test_a_number_and_its_unit_are_never_on_two_lines() -> None:
    (incident,) = RECOVERED_REPORT.incidents
    timing = dict.fromkeys(("start", "lock", "rebuild", "repair", "replay", "total"), 0.1)
    text = text_of(IncidentReport((msgspec.structs.replace(incident, timing=timing),), ()))
    assert not any(line.lstrip().startswith("ms") for line in text.splitlines())


def test_a_loss_without_consequences_is_listed_after_the_incidents() -> None:
    text = text_of(IncidentReport((), (ProcessLoss("agent-0", "0", 10, "1", 22),)))
    assert "agent-0, 0 (pid 10), replaced by 1 (pid 22)" in text


def test_a_phase_that_says_nothing_is_left_out() -> None:
    (incident,) = RECOVERED_REPORT.incidents
    assert "after step 7, training" in text_of(RECOVERED_REPORT)
    taken_over = msgspec.structs.replace(incident, phase="recovering")
    assert "after step 7\n" in text_of(IncidentReport((taken_over,), ()))


def test_a_run_that_recovers_says_how_far_it_is() -> None:
    assert tables.recovery_line(ProcessReports(5.0, (), "training", "normal")) is None
    line = tables.recovery_line(ProcessReports(5.0, (), "recovering", "wait for replacements"))
    assert line is not None and line.startswith("recovering: wait for replacements, as of ")


def test_a_fault_is_prefixed_by_its_process_if_the_message_does_not_name_it() -> None:
    (incident,) = RECOVERED_REPORT.incidents
    told = msgspec.structs.replace(incident.cause, message="disk full", kind="StorageError")
    text = text_of(IncidentReport((msgspec.structs.replace(incident, faults=(told,)),), ()))
    assert f"cause     {fault('model-1').process}: disk full (StorageError)" in text


def test_the_table_of_processes_has_counters_and_gauges_beside_each_other() -> None:
    report = ProcessReport(
        process="server-0",
        role="server",
        host="host-0",
        pid=17,
        incarnation="1",
        status="live",
        counters={"tokens": 1234567},
        gauges={"pages_free": 7.0, "tokens_per_s": 12.5},
    )
    console = Console(width=200, file=StringIO())
    console.print(tables.processes_table(ProcessReports(5.0, (report,)), with_counters=True))
    assert isinstance(console.file, StringIO)
    for counter in ("pages_free 7", "tokens 1,234,567", "tokens_per_s 12.5"):
        assert counter in console.file.getvalue()
