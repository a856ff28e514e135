"""Text that a model or another user wrote, in every command that shows it: no control character, no markup."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kintsugi.cli import tables
from kintsugi.cli.closing import print_closing
from kintsugi.cli.live import LiveView
from kintsugi.cli.watch import RunFollower
from kintsugi.errors import Fault
from kintsugi.journal.facts import Fact, IncidentOpened, ProcessLost
from kintsugi.journal.journal import Journal
from kintsugi.run_folder.incidents import report_of
from kintsugi.run_folder.layout import RunFolder
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.events import Alert, EventLog
from tests.unit.cli.test_live import CONFIG, SUMMARY
from tests.unit.cli.test_main import GRPO, FakeCluster, Kintsugi, cluster, kintsugi
from tests.unit.run_folder.test_incidents import OPENED
from tests.unit.telemetry.recorded_run import begun_run
from tests.unit.telemetry.test_process_reports import REPORTS

__all__ = ["cluster", "kintsugi"]
HOSTILE = "[/data/a] \x1b]52;c;cm0=\x07 \x9b2J \u202e [bold]x[/bold]"
SHOWN = "[/data/a] \\x1b]52;c;cm0=\\x07 \\x9b2J \\u202e [bold]x[/bold]"
CLI = Path(tables.__file__).parent


def is_safe(text: str) -> bool:
    return all(char.isprintable() or char in "\n\t" for char in text)


def squeezed(text: str) -> str:
    """Text without the borders and breaks of tables."""
    return "".join(char for char in text if char not in " \n│┃")


def hostile_facts() -> tuple[Fact, ...]:
    return tuple(
        msgspec.structs.replace(fact, fault=msgspec.structs.replace(fact.fault, message=HOSTILE))
        if isinstance(fact, IncidentOpened | ProcessLost)
        else fact
        for fact in OPENED
    )


def test_the_tables_of_status_show_markup_as_text(kintsugi: Kintsugi, cluster: FakeCluster) -> None:
    kintsugi("train", GRPO)
    folder = Path("runs/grpo_arithmetic-1")
    log = EventLog(RunFolder(folder).events_file("master-0"), process="master-0")
    log.emit(Alert(HOSTILE))
    log.close()
    with Journal.create(RunFolder(folder).journal_file, owner="test") as journal:
        journal.append(hostile_facts())
    result = kintsugi("status", str(folder))
    assert (result.code, is_safe(result.output)) == (0, True)
    assert squeezed(result.output).count(squeezed(SHOWN)) == 2
    result = kintsugi("incidents", str(folder))
    assert (result.code, is_safe(result.output)) == (0, True)
    assert squeezed(SHOWN) in squeezed(result.output)
    result = kintsugi("incidents", str(folder), "--json")
    (incident,) = msgspec.json.decode(result.output)["incidents"]
    assert is_safe(result.output) and incident["faults"][0]["message"] == HOSTILE


def test_the_table_of_processes_shows_markup_as_text(tmp_path: Path) -> None:
    reports = msgspec.structs.replace(
        REPORTS,
        processes=tuple(msgspec.structs.replace(each, status=HOSTILE) for each in REPORTS.processes),
    )
    console = Console(file=io.StringIO(), width=400)
    console.print(tables.processes_table(reports))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert is_safe(shown) and SHOWN in shown


def test_alerts_and_the_closing_table_of_a_live_run_are_text(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    log = EventLog(RunFolder(tmp_path).events_file("master-0"), process="master-0")
    with LiveView(CONFIG, run_dir=tmp_path, console=console, clock=VirtualClock()):
        log.emit(Alert(HOSTILE))
        log.close()
    summary = msgspec.structs.replace(SUMMARY, name=HOSTILE, samples_quarantined={HOSTILE: 3})
    print_closing(console, summary, config=CONFIG, folder=tmp_path)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert is_safe(shown) and shown.count(SHOWN) == 3


def test_the_errors_of_a_session_and_a_followed_run_are_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kintsugi.cli.session import print_faults

    print_faults([Fault("f", "RewardFailed", "rollout-0", HOSTILE, 0.0)])
    assert SHOWN in (errors := capsys.readouterr().err) and is_safe(errors)
    run = begun_run(tmp_path / "run")
    told: list[str] = []
    follower = RunFollower(run.folder, say=told.append)
    run.say("master-0", Alert(f"first\n{HOSTILE}"), at=2.0)
    follower.look()
    follower.close()
    assert len(told) == 1 and is_safe(told[0]) and "\n" not in told[0]


def test_incidents_of_a_report_are_the_same_text() -> None:
    text = tables.incidents_text(report_of(hostile_facts()), run="r", running=False)
    assert squeezed("[/data/a]") in squeezed(text)


def test_commands_print_through_one_function() -> None:
    raw = {
        f"{path.name}:{node.lineno}"
        for path in CLI.glob("*.py")
        if path.name != "output.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("echo", "secho")
    }
    assert raw == set()
