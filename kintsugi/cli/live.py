"""Progress of a running run and the closing table, read from the run folder only."""

from __future__ import annotations

import shutil
import sys
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kintsugi.config.schema import Config
from kintsugi.config.stages import has_servers, next_stage, stages
from kintsugi.errors import StorageError
from kintsugi.learning_health.follower import learning_lines
from kintsugi.run_folder import reader
from kintsugi.run_folder.incidents import headline
from kintsugi.run_folder.reader import MetricLine
from kintsugi.run_folder.summary import Summary
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.printable import printable
from kintsugi.telemetry.eval_stats import wilson_interval
from kintsugi.telemetry.events import Alert, Record

PLAIN_INTERVAL_S = 5.0
"""Interval of progress lines when the output is not a terminal."""
LIVE_INTERVAL_S = 0.2
"""Refresh interval on a terminal."""
RECENT_STEPS = 20
"""Number of steps over which rates and the remaining time are estimated."""

SHARES = ("data", "generate", "reward", "train", "weights", "other")


class ProgressView:
    """Metrics to show, accumulated from the lines of `metrics.jsonl`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.total = stages(config)[-1].last_step
        self.step = 0
        self.reward: float | None = None
        self.accuracy: float | None = None
        self.tokens_per_s: float | None = None
        self.recent: deque[MetricLine] = deque(maxlen=RECENT_STEPS)

    @property
    def stage(self) -> str:
        return next_stage(self.config, step=self.step).name

    def take(self, line: MetricLine) -> None:
        if reader.is_evaluation(line):
            self.accuracy = line["eval/accuracy"]
            return
        self.step = int(line.get("step") or self.step)
        self.reward = line.get("reward/mean", self.reward)
        self.recent.append(line)
        seconds = sum(_number(recent, "timing/step") for recent in self.recent)
        tokens = sum(
            _number(recent, "tokens_per_s") * _number(recent, "timing/step") for recent in self.recent
        )
        self.tokens_per_s = tokens / seconds if seconds else None

    def eta_s(self) -> float | None:
        """Estimate the remaining seconds from the recent wall time per step, including pauses."""
        times = [_number(line, "time") for line in self.recent]
        if len(times) < 2 or self.step >= self.total:
            return None
        return (times[-1] - times[0]) / (len(times) - 1) * (self.total - self.step)

    def shares(self) -> dict[str, float]:
        """Shares of the recent step time by activity."""
        totals = dict.fromkeys(SHARES, 0.0)
        for line in self.recent:
            for name, seconds in _shares_of(line).items():
                totals[name] += seconds
        whole = sum(totals.values())
        return {name: seconds / whole for name, seconds in totals.items() if seconds > 0}


def _shares_of(line: MetricLine) -> dict[str, float]:
    """Seconds of one step by activity; evaluations, checkpoints and the like are `other`."""
    timing = {
        name.removeprefix("timing/"): value or 0.0
        for name, value in line.items()
        if name.startswith("timing/")
    }
    timing.pop("step", None)
    timing["train"] = timing.get("train", 0.0) + timing.pop("commit", 0.0)
    known = {name: timing.pop(name, 0.0) for name in SHARES[:-1]}
    return known | {"other": sum(timing.values())}


def _number(line: MetricLine, name: str) -> float:
    return line.get(name) or 0.0


class LiveView:
    """Live progress on a terminal, or one line every few seconds elsewhere. The launcher's loop calls `tick`."""

    def __init__(
        self, config: Config, *, run_dir: Path, console: Console | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._progress = ProgressView(config)
        self._run_dir, self._clock = run_dir, clock
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._offset = 0
        _, self._alerts_offset = reader.read_new_alerts(run_dir, offset=0)
        self._started = self._looked_at = self._shown_at = clock.monotonic()
        self._shown = ("", -1)

    def __enter__(self) -> Self:
        title = Text("run folder ").append(printable(str(self._run_dir)), style="bold")
        self._console.print(title, highlight=False, soft_wrap=True)
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._print_alerts()
        self._read()
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)
            self._live.stop()
        elif self._progress.step != self._shown[1]:
            self._print_line()

    def tick(self) -> None:
        """Read new lines and refresh the display if it is due. Cheap enough to be called at any rate."""
        now = self._clock.monotonic()
        if now - self._looked_at < LIVE_INTERVAL_S:
            return
        self._looked_at = now
        self._print_alerts()
        if self._live is not None:
            self._read()
            self._live.update(self._panel(), refresh=True)
        elif now - self._shown_at >= PLAIN_INTERVAL_S:
            self._shown_at = now
            self._read()
            if self._shown != (self._progress.stage, self._progress.step):
                self._print_line()

    def _read(self) -> None:
        """Read new metrics. After a rollback the file is shorter; if it has grown again meanwhile, the offset is in the
        middle of a line, and the whole file is read the next time."""
        try:
            lines, self._offset = reader.read_metrics(self._run_dir, offset=self._offset)
        except StorageError:
            self._offset = 0
            return
        for line in lines:
            self._progress.take(line)

    def _print_alerts(self) -> None:
        """Print new alerts of the master, one line each: a process was lost, or the run has recovered."""
        alerts, self._alerts_offset = reader.read_new_alerts(self._run_dir, offset=self._alerts_offset)
        for alert in alerts:
            elapsed = duration(self._clock.monotonic() - self._started)
            text = printable(f"{elapsed:>6}  {alert_text(alert)}")
            self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _print_line(self) -> None:
        self._shown = (self._progress.stage, self._progress.step)
        elapsed = duration(self._clock.monotonic() - self._started)
        parts = [f"{elapsed:>6}", *(f"{name} {value}" for name, value in self._metrics())]
        self._console.print(printable("  ".join(parts)), highlight=False, soft_wrap=True, markup=False)

    def _panel(self) -> Group:
        progress = self._progress
        table = Table.grid(padding=(0, 2))
        for name, value in self._metrics():
            table.add_row(Text(name, style="dim"), cell(value))
        return Group(ProgressBar(total=progress.total, completed=progress.step, width=60), table)

    def _metrics(self) -> list[tuple[str, str]]:
        progress = self._progress
        eta, shares = progress.eta_s(), progress.shares()
        values = {
            "step": f"{progress.step}/{progress.total}",
            "stage": progress.stage,
            "reward": None if progress.reward is None else f"{progress.reward:.3f}",
            "accuracy": None if progress.accuracy is None else f"{progress.accuracy:.1%}",
            "tokens/s": None if progress.tokens_per_s is None else f"{progress.tokens_per_s:,.0f}",
            "time": " ".join(f"{name} {share:.0%}" for name, share in shares.items()) or None,
            "remaining": None if eta is None else f"≈ {duration(eta)}",
            "learning": "; ".join(learning_lines(self._run_dir)) or None,
        }
        return [(name, value) for name, value in values.items() if value is not None]


def cell(text: str) -> Text:
    """Return a text for a table in which nothing is markup and no character controls the terminal."""
    return Text(printable(text))


def print_closing(console: Console, summary: Summary, *, config: Config, folder: Path) -> None:
    """Print the results of a run and commands to try next."""
    console.print(closing_table(summary, config=config, folder=folder))
    if summary.incidents:
        see = f"{program()} incidents {folder}"
        text = printable(f"incidents: {incidents_text(summary)}; details: {see}")
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    console.print("try next:", highlight=False)
    for command in suggestions(summary, folder=folder):
        console.print(printable(f"  {command}"), highlight=False, markup=False, soft_wrap=True)


def closing_table(summary: Summary, *, config: Config, folder: Path) -> Table:
    """Table of the results of a run."""
    table = Table(
        title=cell(f"{summary.name}: {summary.outcome}"),
        show_header=False,
        title_justify="left",
        min_width=60,
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    problems = summary.evaluations[-1].get("eval/problems") if summary.evaluations else None
    count = int(problems or config.data.num_eval)
    what, of = ("accuracy", "problems") if has_servers(config) else ("pairs ranked right", "pairs")
    for when, accuracy in (("before", summary.eval_accuracy_before), ("after", summary.eval_accuracy_after)):
        table.add_row(f"held-out {what} {when}", accuracy_text(accuracy, count=count, of=of))
    if summary.reward_first is not None and summary.reward_last is not None:
        table.add_row(
            "reward, first and last step", f"{summary.reward_first:.3f} → {summary.reward_last:.3f}"
        )
    table.add_row("steps", f"{summary.steps} in {duration(summary.wall_s)}")
    table.add_row("samples trained", f"{summary.samples_trained:,} ({summary.tokens_trained:,} tokens)")
    for end, reasons in (
        ("filtered", summary.samples_filtered),
        ("expired", summary.samples_expired),
        ("quarantined", summary.samples_quarantined),
    ):
        if reasons:
            table.add_row(
                f"samples {end}", cell("\n".join(f"{n:,}: {reason}" for reason, n in reasons.items()))
            )
    table.add_row("tokens generated", f"{summary.tokens_generated:,}")
    if summary.staleness.max:
        stale = summary.staleness
        table.add_row("staleness", f"{stale.mean:.1f} steps, at most {stale.max}")
    spent = sorted(summary.timing.items(), key=lambda item: -item[1])
    table.add_row("time per stage", cell("\n".join(f"{name} {seconds:.1f} s" for name, seconds in spent)))
    if summary.weights_sha256 is not None:
        table.add_row("weights", f"version {summary.weight_version}, sha256 {summary.weights_sha256[:16]}…")
    table.add_row("run folder", cell(str(folder)))
    return table


def incidents_text(summary: Summary) -> str:
    """`2 recovered, 1 unresolved, 1.3 s lost`."""
    recovered = len(summary.incidents) - summary.incidents_open
    lost_s = sum(incident.seconds or 0.0 for incident in summary.incidents)
    unresolved = f", {summary.incidents_open} unresolved" if summary.incidents_open else ""
    return f"{recovered} recovered{unresolved}, {seconds_text(lost_s)} lost"


def alert_text(alert: Record) -> str:
    """Format an alert on one line, with its duration if it has one."""
    assert isinstance(alert.event, Alert)
    seconds = alert.event.values.get("total")
    return headline(alert.event.message) + ("" if seconds is None else f" ({seconds_text(seconds)})")


def suggestions(summary: Summary, *, folder: Path) -> list[str]:
    """Commands to try next, depending on the outcome of the run."""
    if summary.outcome != reader.RunState.FINISHED:
        return [f"{program()} resume {folder}", f"{program()} status {folder}"]
    return [
        f"{program()} samples {folder} --worst 10",
        f"{program()} eval {folder}",
        f"{program()} export {folder} --to my-model",
        f"{program('tensorboard')} --logdir {folder}/tensorboard",
        f"{program()} train {folder}/config.yaml seed=1 run_dir={folder}-seed-1",
    ]


def program(name: str = "kintsugi") -> str:
    """Command for a program of this environment: its name, or its path if it is not on the PATH."""
    if shutil.which(name) is not None:
        return name
    path = Path(sys.executable).with_name(name)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def accuracy_text(accuracy: float | None, *, count: int, of: str = "problems") -> str:
    """`91.2% (88.4% – 93.4% at 95 %, 500 problems)`, with the Wilson interval."""
    if accuracy is None:
        return "not measured"
    low, high = wilson_interval(accuracy, count=count)
    return f"{accuracy:.1%} ({low:.1%} – {high:.1%} at 95 %, {count} {of})"


def duration(seconds: float) -> str:
    """`1:05`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def seconds_text(seconds: float) -> str:
    """`240 ms`, `1.3 s`, `1:05`."""
    if round(seconds) >= 60:
        return duration(seconds)
    return f"{seconds * 1000:.0f} ms" if seconds < 1.0 else f"{seconds:.1f} s"
