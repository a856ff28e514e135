"""Progress of a run in a notebook: one block of HTML that is updated in place and keeps the final state."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from kintsugi.cli.progress import RunProgress, alert_text, duration
from kintsugi.config.schema import Config
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.printable import printable

INTERVAL_S = 0.5
ALERTS_SHOWN = 8
CURVE_WIDTH, CURVE_HEIGHT = 420, 90
CURVE_COLOUR = "#0072b2"


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


def _display(html: str) -> Any:
    """Display a block; returns a handle to update it with."""
    shown = import_module("IPython.display")
    return shown.display(shown.HTML(html), display_id=True)


def _update(handle: Any, html: str) -> None:
    handle.update(import_module("IPython.display").HTML(html))


class NotebookView:
    """One block in the output of a cell. The loop that waits for the run calls `tick`."""

    def __init__(
        self,
        config: Config,
        *,
        run_dir: Path,
        clock: Clock = SYSTEM_CLOCK,
        display: Any = _display,
        update: Any = _update,
    ) -> None:
        self._progress = RunProgress(config, run_dir=run_dir, clock=clock)
        self._run_dir, self._clock, self._update = run_dir, clock, update
        self._alerts: deque[str] = deque(maxlen=ALERTS_SHOWN)
        self._drawn_at = clock.monotonic()
        self._html = self._render(is_over=False)
        self._handle = display(self._html)

    def tick(self) -> None:
        """Update the block if it is due and something is new."""
        now = self._clock.monotonic()
        if now - self._drawn_at >= INTERVAL_S:
            self._drawn_at = now
            self._draw(is_over=False)

    def close(self) -> None:
        """Draw the final state."""
        self._draw(is_over=True)

    def _draw(self, *, is_over: bool) -> None:
        _, alerts = self._progress.read()
        for alert in alerts:
            self._alerts.append(f"{duration(self._progress.elapsed_s)}  {alert_text(alert)}")
        html = self._render(is_over=is_over)
        if html != self._html:
            self._html = html
            self._update(self._handle, html)

    def _render(self, *, is_over: bool) -> str:
        steps = self._progress.steps
        bar = f'<progress value="{steps.step}" max="{max(1, steps.total)}" style="width:100%"></progress>'
        rows = [
            (name, value)
            for name, value in self._progress.rows()
            if not (is_over and name in ("now", "stopping"))
        ]
        alerts = "".join(f"<li>{_text(alert)}</li>" for alert in self._alerts)
        return (
            f'<div style="max-width:42em"><b>step {steps.step}/{steps.total}</b> {_text(steps.stage)} '
            f"<code>{_text(str(self._run_dir))}</code>{bar}{table_html(rows)}"
            f"{f'<ul>{alerts}</ul>' if alerts else ''}</div>"
        )


def table_html(rows: Sequence[tuple[str, str]]) -> str:
    """A table of names and values; nothing in it is markup."""
    cells = "".join(
        f'<tr><td style="text-align:left;opacity:.6">{_text(name)}</td>'
        f'<td style="text-align:left">{_text(value)}</td></tr>'
        for name, value in rows
    )
    return f"<table>{cells}</table>"


def curve_html(title: str, points: Sequence[tuple[float, float]]) -> str:
    """A curve as SVG, with its first and last step and its range of values; nothing for fewer than two points."""
    if len(points) < 2:
        return ""
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = min(values), max(values)
    width, height = max(1e-12, max(steps) - min(steps)), (high - low) or 1.0
    path = " ".join(
        f"{(step - min(steps)) / width * CURVE_WIDTH:.1f},{(high - value) / height * CURVE_HEIGHT:.1f}"
        for step, value in points
    )
    return (
        f'<figure style="display:inline-block;margin:0 1em 0 0"><figcaption>{_text(title)}: '
        f"{values[0]:.3g} → {values[-1]:.3g} (steps {min(steps):.0f}–{max(steps):.0f}, "
        f"{low:.3g} to {high:.3g})</figcaption>"
        f'<svg width="{CURVE_WIDTH}" height="{CURVE_HEIGHT + 4}" viewBox="-2 -2 {CURVE_WIDTH + 4} '
        f'{CURVE_HEIGHT + 4}"><polyline fill="none" stroke="{CURVE_COLOUR}" stroke-width="1.5" '
        f'points="{path}"/></svg></figure>'
    )


def _text(text: str) -> str:
    return escape(printable(text))
