"""Output of `kintsugi status`, `incidents`, `runs`, `samples` and `eval`."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from rich.table import Table

from kintsugi.cli.live import accuracy_text, cell, seconds_text
from kintsugi.control.phases.table import Phase
from kintsugi.errors import KintsugiError
from kintsugi.journal.facts import CauseDiagnosed
from kintsugi.run_folder.ending import RunEnd
from kintsugi.run_folder.incidents import (
    INTERRUPTED,
    ChosenStrategy,
    IncidentHistory,
    IncidentReport,
    ProcessLoss,
    ReportedFault,
    headline,
)
from kintsugi.run_folder.layout import RELATIVE, RunFolder
from kintsugi.run_folder.reader import JournalStatus, MetricLine, RunStatus
from kintsugi.telemetry.events import Alert, Record
from kintsugi.telemetry.process_reports import ProcessReports
from kintsugi.telemetry.step_metrics import SampleRecord
from kintsugi.types import Role, Wait, role_of


def end_text(end: RunEnd, *, run: str) -> str:
    """`interrupted at 2026-05-01 12:00:03: …; `kintsugi resume runs/a` continues it`."""
    moment = f" at {_moment(end.time)}" if end.time else ""
    return f"{end.state}{moment}: {end.what}; `kintsugi resume {run}` continues it"


def status_table(status: RunStatus, journal: JournalStatus, *, end: RunEnd | None = None) -> Table:
    table = Table(title=cell(str(status.folder)), title_justify="left", show_header=False, min_width=60)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    where = (
        f" (process {status.pid})" if status.pid is not None else f" on {status.host}" if status.host else ""
    )
    table.add_row("state", cell(f"{status.state}{where}"))
    if end is not None:
        table.add_row("end", cell(end_text(end, run=str(status.folder))))
    table.add_row("step", cell(f"{status.step} of {status.total_steps}, stage {status.stage}"))
    for label, name, form in _METRICS:
        if (value := status.metrics.get(name)) is not None:
            table.add_row(label, format(value, form))
    for line in status.evaluations:
        table.add_row(f"accuracy after step {line['step']:.0f}", cell(_accuracy(line)))
    if journal.scaled_to is not None:
        table.add_row("servers", cell(_servers_text(status, journal)))
    if journal.saved_steps:
        table.add_row("checkpoints written", ", ".join(map(str, journal.saved_steps)))
    if journal.incident is not None:
        table.add_row(
            f"open incident {journal.incident.incident}", cell(headline(journal.incident.cause.message))
        )
        for choice in journal.incident.choices[-1:]:
            table.add_row("recovery", cell(f"{choice.strategy}: {choice.reason}"))
    return table


def _servers_text(status: RunStatus, journal: JournalStatus) -> str:
    """`4, scaled from 2; 3 running`: servers take a moment to start and to stop."""
    text = f"{journal.scaled_to}, scaled from {status.config.generation.servers}"
    running = sum(role_of(name) is Role.SERVER for name in journal.processes)
    return text if status.pid is None or running == journal.scaled_to else f"{text}; {running} running"


def recovery_line(reports: ProcessReports) -> str | None:
    """`recovering: wait for replacements, as of 12:00:03`; None unless the run is recovering."""
    if reports.phase != Phase.RECOVERING:
        return None
    return f"recovering: {reports.recovery}, as of {datetime.fromtimestamp(reports.time):%H:%M:%S}"


def processes_table(reports: ProcessReports) -> Table:
    """Processes with their counters and waits: distinguishes slow from stuck and shows which process is waited for."""
    table = Table(box=None, pad_edge=False)
    for name in ("process", "pid", "host", "status", "load", "heartbeat", "counters", "waits for"):
        table.add_column(name, no_wrap=name in ("process", "pid"), overflow="fold")
    for report in reports.processes:
        texts = (
            report.process,
            str(report.pid or ""),
            report.host,
            report.status,
            f"{report.load:.2f}",
            "never" if report.silent_s is None else f"{report.silent_s:.1f} s ago",
            ", ".join(
                f"{name} {value:,.10g}"
                for name, value in sorted({**report.gauges, **report.counters}.items())
            ),
            "; ".join(map(_wait_text, report.waits)),
        )
        table.add_row(*map(cell, texts))
    return table


def _wait_text(wait: Wait) -> str:
    """`model-0: a reply to RunCall (at most 30.0 s)`."""
    return wait.whom + f": {wait.what} (at most {wait.until - wait.since:.1f} s)"


def alert_line(record: Record) -> str:
    """`alert 2026-05-01 12:00:03: disk full`."""
    assert isinstance(record.event, Alert)
    values = "".join(f" {name}={value:g}" for name, value in record.event.values.items())
    return f"alert {_moment(record.stamp.time)}: {headline(record.event.message)}{values}"


WIDTH = 80
_LABEL = 10
_PARTS = ("start", "lock", "rebuild", "repair", "replay", "total")
"""Parts of the recovery time of an incident, in their order."""


def incidents_text(report: IncidentReport, *, run: str, running: bool, end: RunEnd | None = None) -> str:
    """Format the incidents of a run, one block each, the newest last, and what ended it if it did not finish."""
    blocks = [incident_text(incident, running=running) for incident in report.incidents]
    if report.other_losses:
        rows = [_row("lost", _loss_text(loss)) for loss in report.other_losses]
        blocks.append("\n".join(["processes replaced without affecting training", *rows]))
    if report.other_diagnoses:
        rows = [_row("diagnosed", _diagnosed_text(found)) for found in report.other_diagnoses]
        blocks.append("\n".join(["slowdowns without a failure", *rows]))
    if end is not None:
        blocks.append(textwrap.fill(f"{run}: {end_text(end, run=run)}", WIDTH, break_on_hyphens=False))
    return "\n\n".join(blocks) or f"{run}: no incidents"


def incident_text(incident: IncidentHistory, *, running: bool) -> str:
    """Format one incident: cause, consequences, recovery, outcome and cost."""
    return "\n".join(_incident_lines(incident, running=running))


def _incident_lines(incident: IncidentHistory, *, running: bool) -> Iterator[str]:
    yield f"incident {incident.incident}: {_outcome(incident, running=running)}"
    for (relation, text), times in Counter((f.relation, _fault_text(f)) for f in incident.faults).items():
        yield _row(relation, text + _repeated(times))
    for found in incident.diagnosed:
        yield _row("diagnosed", _diagnosed_text(found))
    yield _row("when", _when(incident))
    for loss in incident.losses:
        yield _row("lost", _loss_text(loss))
    for choice in incident.choices:
        yield from _choice_lines(choice)
    if incident.losses and not incident.choices:
        yield _row("action", "replaced; the ranks continued")
    if incident.timing:
        parts = (
            f"{name} {seconds_text(incident.timing[name])}" for name in _PARTS if name in incident.timing
        )
        yield _row("took", ", ".join(parts))
    yield _row("cost", _cost(incident))
    words = [fault for fault in incident.faults if "\n" in fault.message]
    for process in dict.fromkeys(fault.process for fault in words):
        yield _row("see", f"{RELATIVE.log_file(process)} in the run folder for the full message")


def _diagnosed_text(found: CauseDiagnosed) -> str:
    return f"{found.summary} ({found.kind}, {found.confidence:.0%} sure; seen at {' → '.join(found.path)})"


def _row(label: str, text: str) -> str:
    """Format a label and its text, wrapped; a number and its unit stay on one line."""
    glued = re.sub(r"(\d) (m?s)\b", "\\1\u00a0\\2", text)
    return textwrap.fill(
        glued,
        WIDTH,
        initial_indent=f"  {label:{_LABEL}}",
        subsequent_indent=" " * (2 + _LABEL),
        break_on_hyphens=False,
    ).replace("\u00a0", " ")


def _fault_text(fault: ReportedFault) -> str:
    """Format a fault; the process is prefixed unless the message begins with it."""
    message = headline(fault.message)
    prefix = "" if message.startswith(fault.process) else f"{fault.process}: "
    return f"{prefix}{message} ({fault.kind})"


def _outcome(incident: IncidentHistory, *, running: bool) -> str:
    if incident.is_open:
        return "recovering" if running else "unresolved: the run ended"
    if incident.mended_step is None:
        ended = "was interrupted" if incident.run_ended == INTERRUPTED else incident.run_ended
        return f"unresolved: the run {ended}"
    return f"recovered ({incident.strategy}) in {seconds_text(incident.seconds or 0.0)}"


def _when(incident: IncidentHistory) -> str:
    """Format time, step and phase of an incident; the phase is omitted if the master was already recovering."""
    moment = f"{_moment(incident.time)}, " if incident.time else ""
    phase = "" if incident.phase == Phase.RECOVERING else f", {incident.phase}"
    return f"{moment}after step {incident.step}{phase}"


def _loss_text(loss: ProcessLoss) -> str:
    was = f"{loss.process}, {_incarnation(loss.incarnation, loss.pid)}"
    if not loss.replacement:
        return f"{was}, not replaced"
    return f"{was}, replaced by {_incarnation(loss.replacement, loss.replacement_pid)}"


def _incarnation(name: str, pid: int) -> str:
    return f"{name} (pid {pid})" if pid else name


def _choice_lines(choice: ChosenStrategy) -> Iterator[str]:
    yield _row("action", f"{choice.strategy}: {choice.reason}{_repeated(choice.times)}")
    if choice.alternatives:
        yield _row("rejected", "; ".join(choice.alternatives))


def _cost(incident: IncidentHistory) -> str:
    seconds = "" if incident.seconds is None else f"{seconds_text(incident.seconds)}, "
    undone = _counted(incident.steps_undone, "step")
    return f"{seconds}{undone} undone, {_counted(incident.groups_again, 'group')} sampled again"


def _repeated(times: int) -> str:
    return f" ({times} times)" if times > 1 else ""


def _counted(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def _moment(time: float) -> str:
    return f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M:%S}"


_METRICS = (
    ("reward", "reward/mean", ".3f"),
    ("tokens per second", "tokens_per_s", ",.0f"),
    ("gradient norm", "grad_norm", ".3f"),
    ("sampler–trainer logprob difference", "logprob_abs_diff_mean", ".2e"),
)


def runs_table(found: Sequence[tuple[Path, RunStatus | KintsugiError]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("run", "state", "step", "reward", "accuracy", "started"):
        table.add_column(name, no_wrap=name != "state")
    for folder, status in found:
        if isinstance(status, KintsugiError):
            table.add_row(cell(str(folder)), cell(f"unreadable: {status}"))
            continue
        reward, accuracy = status.metrics.get("reward/mean"), status.metrics.get("eval/accuracy")
        started = datetime.fromtimestamp(RunFolder(folder).config_file.stat().st_mtime)
        table.add_row(
            cell(str(folder)),
            status.state,
            f"{status.step}/{status.total_steps}",
            "" if reward is None else f"{reward:.3f}",
            "" if accuracy is None else f"{accuracy:.1%}",
            f"{started:%Y-%m-%d %H:%M}",
        )
    return table


def sample_line(record: SampleRecord) -> str:
    """Format a sample on one line; texts are Python literals, so that whitespace is visible."""
    components = " ".join(f"{name}={value:g}" for name, value in record.reward_components.items())
    advantage = "" if record.advantage is None else f" advantage {record.advantage:+.2f}"
    return (
        f"step {record.step} {record.ticket}/{record.sample} v{record.version} reward {record.reward:g} ({components})"
        f"{advantage} {record.finish}: {record.prompt!r} → {record.completion!r}"
    )


def evaluation_text(metrics: Mapping[str, float]) -> str:
    """Format the metrics of an evaluation with their intervals, one per line."""
    names = [name for name in metrics if f"{name}_low" in metrics]
    width = max(map(len, names), default=0)
    lines = [
        f"{name.removeprefix('eval/'):{width - 5}}  {metrics[name]:.1%}  "
        f"({metrics[f'{name}_low']:.1%} – {metrics[f'{name}_high']:.1%} at 95 %)"
        for name in names
    ]
    return "\n".join([*lines, f"{metrics['eval/problems']:.0f} problems"])


def _accuracy(line: MetricLine) -> str:
    return accuracy_text(line["eval/accuracy"], count=int(line.get("eval/problems") or 0))
