"""Output of `kintsugi status`, `incidents`, `runs`, `samples` and `eval`."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial

from rich.table import Table

from kintsugi.cli.closing import accuracy_text, cell
from kintsugi.cli.output import counted
from kintsugi.cli.progress import StepProgress, alert_text, phase_text, seconds_text
from kintsugi.control.phases.table import Phase
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
from kintsugi.run_folder.layout import RELATIVE
from kintsugi.run_folder.listing import RunLine
from kintsugi.run_folder.pruning import PartSize
from kintsugi.run_folder.reader import JournalStatus, MetricLine, RunStatus
from kintsugi.telemetry.events import Alert, Record
from kintsugi.telemetry.process_reports import ProcessReports
from kintsugi.telemetry.step_metrics import SampleRecord
from kintsugi.types import Role, Wait, role_of

EVALUATIONS_SHOWN = 3
SAMPLE_TEXTS = ("prompt", "completion")


def end_text(end: RunEnd, *, run: str) -> str:
    """`interrupted at 2026-05-01 12:00:03: …; `kintsugi resume runs/a` continues it`."""
    moment = f" at {_moment(end.time)}" if end.time else ""
    return f"{end.state}{moment}: {end.what}; `kintsugi resume {run}` continues it"


def status_table(
    status: RunStatus, journal: JournalStatus, *, kept: Sequence[int] = (), end: RunEnd | None = None
) -> Table:
    """State, latest metrics, last evaluations and the checkpoints that are `kept`."""
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
    for line in status.evaluations[-EVALUATIONS_SHOWN:]:
        table.add_row(f"accuracy after step {line['step']:.0f}", cell(_accuracy(line)))
    if (earlier := len(status.evaluations) - EVALUATIONS_SHOWN) > 0:
        table.add_row("", f"{counted(earlier, 'earlier evaluation')}: --json shows them")
    if journal.scaled_to is not None:
        table.add_row("servers", cell(_servers_text(status, journal)))
    if kept:
        table.add_row(
            "checkpoints", f"of {'step' if len(kept) == 1 else 'steps'} {', '.join(map(str, kept))}"
        )
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


def activity_line(reports: ProcessReports, status: RunStatus) -> str | None:
    """`now: collecting 300/1000 groups, as of 12:00:03`; None while the run recovers, which has a line of its own."""
    if reports.phase == Phase.RECOVERING or not reports.phase:
        return None
    steps = StepProgress(status.config)
    steps.step = status.step
    return f"now: {phase_text(reports, steps)}, as of {datetime.fromtimestamp(reports.time):%H:%M:%S}"


def recovery_line(reports: ProcessReports) -> str | None:
    """`recovering: wait for replacements, as of 12:00:03`; None unless the run is recovering."""
    if reports.phase != Phase.RECOVERING:
        return None
    return f"recovering: {reports.recovery}, as of {datetime.fromtimestamp(reports.time):%H:%M:%S}"


def processes_table(reports: ProcessReports, *, with_counters: bool = False) -> Table:
    """Processes with what they wait for, which distinguishes slow from stuck; with all their counters if asked for."""
    table = Table(box=None, pad_edge=False)
    names = (
        "process",
        "pid",
        "host",
        "status",
        "heartbeat",
        *(("counters",) if with_counters else ()),
        "waits for",
    )
    for name in names:
        table.add_column(name, no_wrap=name not in ("status", "counters", "waits for"), overflow="fold")
    for report in reports.processes:
        texts = [
            report.process,
            str(report.pid or ""),
            report.host,
            report.status,
            "never" if report.silent_s is None else f"{report.silent_s:.1f} s ago",
        ]
        if with_counters:
            values = sorted({"load": round(report.load, 2), **report.gauges, **report.counters}.items())
            texts.append("\n".join(f"{name} {value:,.10g}" for name, value in values))
        waits = report.waits if with_counters else report.waits[:1]
        more = f" (+{len(report.waits) - 1})" if len(report.waits) > len(waits) else ""
        texts.append("\n".join(map(_wait_text, waits)) + more)
        table.add_row(*map(cell, texts))
    return table


def _wait_text(wait: Wait) -> str:
    """`model-0: a reply to RunCall (at most 30.0 s)`."""
    return wait.whom + f": {wait.what} (at most {wait.until - wait.since:.1f} s)"


def alert_line(record: Record) -> str:
    """`alert 2026-05-01 12:00:03: disk full`."""
    assert isinstance(record.event, Alert)
    values = record.event.values
    # The parts of a recovery are in `kintsugi incidents`.
    text = "" if "total" in values else "".join(f" {name}={value:g}" for name, value in values.items())
    return f"alert {_moment(record.stamp.time)}: {alert_text(record)}{text}"


WIDTH = 80
_LABEL = 10
_PARTS = ("start", "lock", "rebuild", "repair", "replay", "total")
"""Parts of the recovery time of an incident, in their order."""


def incidents_text(
    report: IncidentReport, *, run: str, running: bool, end: RunEnd | None = None, width: int = WIDTH
) -> str:
    """Format the incidents of a run, one block each, the newest last, and what ended it if it did not finish."""
    row = partial(_row, width=min(width, WIDTH))
    blocks = [incident_text(incident, running=running, width=width) for incident in report.incidents]
    lost = {loss.process for loss in report.other_losses}
    if lost:
        rows = [row("lost", _loss_text(loss)) for loss in report.other_losses]
        rows += [
            row("diagnosed", _diagnosed_text(each)) for each in report.other_diagnoses if each.process in lost
        ]
        blocks.append("\n".join(["processes replaced without affecting training", *rows]))
    if others := [each for each in report.other_diagnoses if each.process not in lost]:
        rows = [row("diagnosed", _diagnosed_text(found)) for found in others]
        blocks.append("\n".join(["diagnosed without an incident", *rows]))
    if end is not None:
        text = f"{run}: {end_text(end, run=run)}"
        blocks.append(textwrap.fill(text, min(width, WIDTH), break_long_words=False, break_on_hyphens=False))
    return "\n\n".join(blocks) or f"{run}: no incidents"


def incident_text(incident: IncidentHistory, *, running: bool, width: int = WIDTH) -> str:
    """Format one incident: cause, consequences, recovery, outcome and cost."""
    rows = [_row(label, text, width=min(width, WIDTH)) for label, text in _incident_rows(incident)]
    return "\n".join([f"incident {incident.incident}: {_outcome(incident, running=running)}", *rows])


def _incident_rows(incident: IncidentHistory) -> Iterator[tuple[str, str]]:
    for (relation, text), times in Counter((f.relation, _fault_text(f)) for f in incident.faults).items():
        yield (relation, text + _repeated(times))
    for found in incident.diagnosed:
        yield ("diagnosed", _diagnosed_text(found))
    yield ("when", _when(incident))
    for loss in incident.losses:
        yield ("lost", _loss_text(loss))
    for choice in incident.choices:
        yield from _choice_rows(choice)
    if incident.losses and not incident.choices:
        yield ("action", "replaced; the ranks continued")
    if incident.timing.get("total"):
        parts = (
            f"{name} {seconds_text(incident.timing[name])}" for name in _PARTS if name in incident.timing
        )
        yield ("took", ", ".join(parts))
    yield ("cost", _cost(incident))
    words = [fault for fault in incident.faults if "\n" in fault.message]
    for process in dict.fromkeys(fault.process for fault in words):
        yield ("see", f"{RELATIVE.log_file(process)} in the run folder for the full message")


def _diagnosed_text(found: CauseDiagnosed) -> str:
    return f"{found.summary} ({found.kind}, {found.confidence:.0%} sure; seen at {' → '.join(found.path)})"


def _row(label: str, text: str, *, width: int) -> str:
    """Format a label and its text, wrapped; a number and its unit stay on one line."""
    glued = re.sub(r"(\d) (m?s)\b", "\\1\u00a0\\2", text)
    return textwrap.fill(
        glued,
        width,
        initial_indent=f"  {label:{_LABEL}}",
        subsequent_indent=" " * (2 + _LABEL),
        break_long_words=False,
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


def _choice_rows(choice: ChosenStrategy) -> Iterator[tuple[str, str]]:
    yield ("action", f"{choice.strategy}: {choice.reason}{_repeated(choice.times)}")
    if choice.alternatives:
        yield ("rejected", "; ".join(choice.alternatives))


def _cost(incident: IncidentHistory) -> str:
    seconds = "" if incident.seconds is None else f"{seconds_text(incident.seconds)}, "
    undone = counted(incident.steps_undone, "step")
    return f"{seconds}{undone} undone, {counted(incident.groups_again, 'group')} sampled again"


def _repeated(times: int) -> str:
    return f" ({times} times)" if times > 1 else ""


def _moment(time: float) -> str:
    return f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M:%S}"


_METRICS = (
    ("reward", "reward/mean", ".3f"),
    ("loss", "loss", ".4g"),
    ("tokens per second", "tokens_per_s", ",.0f"),
    ("gradient norm", "grad_norm", ".3f"),
    ("sampler–trainer logprob difference", "logprob_abs_diff_mean", ".2e"),
)


def runs_table(found: Sequence[RunLine], *, width: int) -> Table:
    """One line per run; in a narrow terminal, folders and times are broken and columns are closer."""
    table = Table(box=None, pad_edge=False, padding=(0, 1) if width >= WIDTH else (0, 1, 0, 0))
    has_tags = any(line.tags for line in found)
    states = max((len(line.state) for line in found if not line.problem), default=0)
    table.add_column("run", overflow="fold", min_width=8)
    table.add_column("state", min_width=states)
    for name in ("step", "reward", "accuracy"):
        table.add_column(name, no_wrap=True)
    table.add_column("started", min_width=len("2026-11-18"))
    if has_tags:
        table.add_column("tags")
    for line in found:
        if line.problem:
            table.add_row(cell(line.folder), cell(f"unreadable: {line.problem}"))
            continue
        texts = [
            line.folder,
            line.state,
            f"{line.step}/{line.total_steps}",
            "" if line.reward is None else f"{line.reward:.3f}",
            "" if line.accuracy is None else f"{line.accuracy:.1%}",
            f"{datetime.fromtimestamp(line.started):%Y-%m-%d %H:%M}",
            *([", ".join(line.tags)] if has_tags else []),
        ]
        table.add_row(*map(cell, texts))
    return table


def sizes_table(parts: Sequence[PartSize]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("part")
    table.add_column("MB", justify="right", no_wrap=True)
    table.add_column("contents")
    table.add_column("does not work without it")
    for part in parts:
        table.add_row(part.name, f"{part.size / 1e6:,.1f}", part.contents, part.without or "the run")
    return table


def sample_text(record: SampleRecord, *, columns: Mapping[str, object], width: int) -> str:
    """Format a sample: where it comes from, prompt and completion, and the columns of its row; those of equal values
    are shown once. Texts are Python literals, so that whitespace is visible."""
    components = " ".join(f"{name}={value:g}" for name, value in record.reward_components.items())
    reward = f"reward {record.reward:g} ({components})" if components else "no reward"
    advantage = "" if record.advantage is None else f"  advantage {record.advantage:+.2f}"
    weights = "" if record.version < 0 else f"  weights {record.version}"
    head = (
        f"step {record.step}  {record.ticket}/{record.sample}{weights}  {reward}{advantage}  {record.finish}"
    )
    short = f"  {record.prompt!r} → {record.completion!r}"
    labelled = _labelled(columns)
    short += "".join(f"  {name}: {value}" for name, value in labelled)
    if len(short) <= width:
        return f"{head}\n{short}"
    parts = [("prompt", repr(record.prompt)), ("completion", repr(record.completion)), *labelled]
    label = max(len(name) for name, _ in parts)
    return "\n".join([head, *(f"  {name:{label}}  {value}" for name, value in parts)])


def _labelled(columns: Mapping[str, object]) -> list[tuple[str, str]]:
    """Names and values of columns; one that is called like a text of the sample is marked as a column.

    >>> _labelled({"answer": "12", "completion": "12", "rejected": "13"})
    [('answer', "'12' (also completion)"), ('rejected', "'13'")]
    >>> _labelled({"completion": "12"})
    [('column completion', "'12'")]
    """
    names: dict[str, list[str]] = {}
    for name, value in columns.items():
        names.setdefault(repr(value), []).append(name)
    return [
        (
            f"column {first}" if first in SAMPLE_TEXTS else first,
            f"{value} (also {', '.join(others)})" if others else value,
        )
        for value, (first, *others) in names.items()
    ]


def evaluation_text(metrics: Mapping[str, float]) -> str:
    """Format the metrics of an evaluation with their intervals, one per line."""
    names = [name for name in metrics if f"{name}_low" in metrics]
    width = max(map(len, names), default=0)
    lines = [
        f"{name.removeprefix('eval/'):{width - 5}}  {metrics[name]:.1%}  "
        f"({metrics[f'{name}_low']:.1%} – {metrics[f'{name}_high']:.1%} at 95 %)"
        for name in names
    ]
    return "\n".join([*lines, counted(round(metrics["eval/problems"]), "problem")])


def _accuracy(line: MetricLine) -> str:
    return accuracy_text(line["eval/accuracy"], count=int(line.get("eval/problems") or 0))
