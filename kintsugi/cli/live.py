"""Live view of a run: a block that is redrawn on a terminal, one line every few seconds elsewhere."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kintsugi.cli.closing import cell
from kintsugi.cli.output import console as new_console
from kintsugi.cli.progress import RunProgress, alert_text, duration
from kintsugi.config.schema import Config
from kintsugi.learning_health.follower import learning_lines
from kintsugi.run_folder import reader
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.printable import printable
from kintsugi.runtime.signals import Signals
from kintsugi.runtime.waits import wait_readable
from kintsugi.telemetry.events import Record

PLAIN_INTERVAL_S = 5.0
"""Interval of progress lines when the output is not a terminal."""
QUIET_INTERVAL_S = 30.0
"""The same while no step ends and the phase stays."""
LIVE_INTERVAL_S = 0.2
"""Refresh interval on a terminal."""
LABEL_WIDTH = 10
MOST_WIDTH = 100
"""Width of the block on a wider terminal."""
ECHO_WIDTH = len("^C")
"""Room that the table leaves at the right: what a terminal echoes there must not begin another line."""

RUNNING, STOPPING, RECOVERING, FINISHED = "cyan", "yellow", "magenta", "green"
"""Colours of the bar by the state of the run."""
UNUSUAL = "yellow"


class LiveView:
    """Live progress of a run. The loop of its session calls `tick`."""

    def __init__(
        self, config: Config, *, run_dir: Path, console: Console | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._name = config.name
        self._run_dir, self._clock = run_dir, clock
        self._console = console or new_console()
        self._live = (
            Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
            if self._console.is_terminal
            else None
        )
        self._progress = RunProgress(config, run_dir=run_dir, clock=clock)
        self._looked_at = self._shown_at = clock.monotonic()
        self._shown = ("", -1, "")
        self._shown_steps = -1
        self._findings: list[str] = []
        """Findings about learning that were printed as lines of their own."""

    def __enter__(self) -> Self:
        title = Text("run folder ").append(printable(str(self._run_dir)), style="bold")
        self._console.print(title, highlight=False, soft_wrap=True)
        if self._live is not None:
            self._live.start()
            self._redraw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._read()
        if self._live is not None:
            self._live.update(self._panel(is_over=True), refresh=True)
            self._live.stop()
        elif self._progress.steps.step != self._shown_steps:
            self._print_line(is_over=True)

    def tick(self) -> None:
        """Read new lines and refresh the display if it is due. Cheap enough to be called at any rate."""
        now = self._clock.monotonic()
        if now - self._looked_at < LIVE_INTERVAL_S:
            return
        self._looked_at = now
        self._read()
        if self._live is not None:
            self._redraw()
        elif self._is_line_due(now):
            self._shown_at = now
            self._print_line()

    def acknowledge_stop(self) -> None:
        """Say at once what a stop request does, and what a second one would do."""
        self._progress.num_stop_requests += 1
        if self._progress.num_stop_requests > 1:
            self.say("ending at once, without a checkpoint", style="bold red")
        else:
            again = "a second Ctrl-C ends it at once, without a checkpoint"
            self.say(f"stopping after this step, then saving a checkpoint; {again}", style="bold yellow")
        if self._live is not None:
            self._redraw()

    def say(self, text: str, *, style: str = "") -> None:
        """Print a line above the block."""
        self._console.print(Text(printable(text), style=style), highlight=False, soft_wrap=self._live is None)

    def _is_line_due(self, now: float) -> bool:
        """A line is due when a step has ended or the phase is another one, or rarely if neither."""
        waited_s = now - self._shown_at
        if waited_s < PLAIN_INTERVAL_S:
            return False
        return self._state() != self._shown or waited_s >= QUIET_INTERVAL_S

    def _state(self) -> tuple[str, int, str]:
        reports = self._progress.reports
        return self._progress.steps.stage, self._progress.steps.step, reports.phase if reports else ""

    def _read(self) -> None:
        _, alerts = self._progress.read()
        for alert in alerts:
            self._print_alert(alert)
        self._print_findings()

    def _print_findings(self) -> None:
        """Print new findings about learning, where no block shows them, and their end."""
        if self._live is not None:
            return
        before, self._findings = self._findings, learning_lines(self._run_dir)
        if before and not self._findings:
            self.say(f"{duration(self._progress.elapsed_s):>6}  learning: nothing unusual any more")
        for line in self._findings:
            if line not in before:
                self.say(f"{duration(self._progress.elapsed_s):>6}  learning: {line}")

    def _print_alert(self, alert: Record) -> None:
        """Print an alert of the master on one line: a process was lost, or the run has recovered."""
        text = f"{duration(self._progress.elapsed_s):>6}  {alert_text(alert)}"
        if self._live is not None and len(text) > self._console.width:
            text = f"{text[: self._console.width - 1]}…"
        recovered = alert_text(alert).startswith("recovered")
        self.say(text, style="green" if recovered else "yellow")

    def _redraw(self) -> None:
        assert self._live is not None
        self._live.update(self._panel(), refresh=True)

    def _print_line(self, *, is_over: bool = False) -> None:
        self._shown, self._shown_steps = self._state(), self._progress.steps.step
        progress = self._progress
        rows = {name: value for name, value in progress.rows() if name not in ("elapsed", "now", "learning")}
        eta = progress.steps.eta_s()
        parts = [
            f"{duration(progress.elapsed_s):>6}",
            f"step {progress.steps.step}/{progress.steps.total} ({progress.steps.stage})",
            *(f"{name} {value}" if name not in ("speed", "time") else value for name, value in rows.items()),
            *([] if eta is None else [f"≈ {duration(eta)} remaining"]),
            *([] if is_over else [f"now {progress.activity()}"]),
        ]
        self._console.print(printable("  ".join(parts)), highlight=False, soft_wrap=True, markup=False)

    def _panel(self, *, is_over: bool = False) -> Group:
        progress, steps = self._progress, self._progress.steps
        width = min(self._console.width, MOST_WIDTH)
        title = Text(no_wrap=True, overflow="ellipsis")
        title.append(f"step {steps.step}/{steps.total}", style="bold")
        title.append(f"  {steps.stage}  {printable(self._name)}", style="dim")
        table = Table.grid(padding=(0, 1))
        table.add_column(width=LABEL_WIDTH, no_wrap=True)
        table.add_column(max_width=width - LABEL_WIDTH - 1 - ECHO_WIDTH)
        for name, value in progress.rows():
            if is_over and name in ("now", "stopping"):
                continue
            glued = value.replace(" %", "\u00a0%") if name != "time" else _glued(value)
            shown = cell(glued)
            if name == "learning":
                shown.stylize(UNUSUAL)
            table.add_row(Text(name, style="dim"), shown)
        colour = self._colour()
        bar = ProgressBar(
            total=max(1, steps.total),
            completed=steps.step,
            width=width,
            complete_style=colour,
            finished_style=FINISHED,
        )
        # A bar does not end its line: the grid does.
        framed = Table.grid()
        framed.add_row(bar)
        return Group(title, framed, table)

    def _colour(self) -> str:
        if self._progress.is_recovering:
            return RECOVERING
        return STOPPING if self._progress.is_stopping else RUNNING


def _glued(shares: str) -> str:
    """Keep a name and its share on one line."""
    return "  ".join(part.replace(" ", "\u00a0") for part in shares.split("  "))


def follow_until_end(
    view: LiveView, *, folder: Path, interrupts: Signals, pause_s: float = LIVE_INTERVAL_S
) -> bool:
    """Show a run that another process has started, until it has ended or Ctrl-C; return whether it has ended."""
    while reader.living_launcher(folder) is not None:
        view.tick()
        wait_readable(interrupts.fileno(), whom="the run", what="something new", timeout_s=pause_s)
        if interrupts.received():
            return False
    return True
