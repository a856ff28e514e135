"""What `status`, `runs`, `samples` and `eval` print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from rich.table import Table

from kintsugi.display import accuracy_text
from kintsugi.errors import KintsugiError
from kintsugi.observe.events import Alert, Record
from kintsugi.observe.metrics import SampleRecord
from kintsugi.observe.processes import ProcessReports
from kintsugi.runs import CONFIG_FILE, JournalStatus, MetricLine, RunStatus


def status_table(status: RunStatus, journal: JournalStatus) -> Table:
    table = Table(title=str(status.folder), title_justify="left", show_header=False, min_width=60)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("state", status.state if status.pid is None else f"{status.state} (process {status.pid})")
    table.add_row("step", f"{status.step} of {status.total_steps}, stage {status.stage}")
    for label, name, form in _FIGURES:
        if (value := status.metrics.get(name)) is not None:
            table.add_row(label, format(value, form))
    for line in status.evaluations:
        table.add_row(f"accuracy after step {line['step']:.0f}", _accuracy(line))
    if journal.saved_steps:
        table.add_row("checkpoints written", ", ".join(map(str, journal.saved_steps)))
    return table


def processes_table(reports: ProcessReports) -> Table:
    """Who runs, what moves and what is waited for: enough to tell slow from stuck, and who keeps whom waiting."""
    table = Table(box=None, pad_edge=False)
    for name in ("process", "pid", "host", "status", "load", "heard", "counters", "waits for"):
        table.add_column(name, no_wrap=name in ("process", "pid"), overflow="fold")
    for report in reports.processes:
        table.add_row(
            report.process,
            str(report.pid or ""),
            report.host,
            report.status,
            f"{report.load:.2f}",
            "never" if report.silent_s is None else f"{report.silent_s:.1f} s ago",
            ", ".join(f"{name} {value:,}" for name, value in sorted(report.counters.items())),
            "; ".join(
                f"{wait.whom}: {wait.what} (at most {wait.until - wait.since:.1f} s)" for wait in report.waits
            ),
        )
    return table


def alert_line(record: Record) -> str:
    """`alert 2026-05-01 12:00:03: disk full`."""
    assert isinstance(record.event, Alert)
    values = "".join(f" {name}={value:g}" for name, value in record.event.values.items())
    return (
        f"alert {datetime.fromtimestamp(record.stamp.time):%Y-%m-%d %H:%M:%S}: {record.event.message}{values}"
    )


_FIGURES = (
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
            table.add_row(str(folder), f"unreadable: {status}")
            continue
        reward, accuracy = status.metrics.get("reward/mean"), status.metrics.get("eval/accuracy")
        started = datetime.fromtimestamp((folder / CONFIG_FILE).stat().st_mtime)
        table.add_row(
            str(folder),
            status.state,
            f"{status.step}/{status.total_steps}",
            "" if reward is None else f"{reward:.3f}",
            "" if accuracy is None else f"{accuracy:.1%}",
            f"{started:%Y-%m-%d %H:%M}",
        )
    return table


def sample_line(record: SampleRecord) -> str:
    """One sample on one line; the texts as Python would write them, so that nothing in them is lost."""
    components = " ".join(f"{name}={value:g}" for name, value in record.reward_components.items())
    advantage = "" if record.advantage is None else f" advantage {record.advantage:+.2f}"
    return (
        f"step {record.step} {record.ticket}/{record.sample} v{record.version} reward {record.reward:g} ({components})"
        f"{advantage} {record.finish}: {record.prompt!r} → {record.completion!r}"
    )


def evaluation_text(metrics: Mapping[str, float]) -> str:
    """Every figure of an evaluation with its interval, one a line."""
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
