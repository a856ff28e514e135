"""Progress of a run, read from its folder only, for every view of it: terminal, plain lines, notebook.

progress = RunProgress(config, run_dir=folder)
progress.read()             new metrics and alerts, and the current activity
progress.rows()             [("step", "25/420"), ("reward", "0.008"), …]
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from kintsugi.config.schema import Config
from kintsugi.config.stages import next_stage, stages
from kintsugi.control.phases.table import Phase
from kintsugi.errors import KintsugiError
from kintsugi.learning_health.follower import learning_lines
from kintsugi.run_folder import reader
from kintsugi.run_folder.incidents import headline
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.reader import MetricLine
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.counters import SAVE_BYTES, SAVED_BYTES
from kintsugi.runtime.proc import TICK_S
from kintsugi.telemetry.events import Alert, Record
from kintsugi.telemetry.process_reports import ProcessReports, read_processes

RECENT_STEPS = 20
"""Number of steps over which rates and the remaining time are estimated."""
RECENT_BYTES = 1 << 20
"""End of `metrics.jsonl` that is read of steps from before the view was opened."""
SILENT_S = 5.0
"""A report of the master that is older is called old."""
PAUSE_S = 1.0
"""Time between two steps beyond what they account for, from which it counts as a pause of the run."""

RECOVERED = "recovered by"
"""Begin of the alert that ends an incident; the strategy and the cause follow."""
SHARES = ("data", "generate", "reward", "train", "weights", "other")
_PHASES: Mapping[str, str] = {
    Phase.ADOPTING: "a new master takes over",
    Phase.PREPARING: "preparing the ranks",
    Phase.TRAINING: "training",
    Phase.COMMITTING: "committing the step",
    Phase.PUBLISHING: "sending weights to the servers",
    Phase.SAVING: "saving",
    Phase.ENDING: "hashing the final weights",
    Phase.ENDED: "ending",
}
"""Phase → words for it; phases that count something have words of their own."""


class StepProgress:
    """Metrics to show, accumulated from the lines of `metrics.jsonl`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.total = stages(config)[-1].last_step
        self.step = 0
        self.reward: float | None = None
        self.loss: float | None = None
        self.accuracy: float | None = None
        self.accuracy_step = 0
        self.tokens_per_s: float | None = None
        self.recent: deque[MetricLine] = deque(maxlen=RECENT_STEPS)

    @property
    def stage(self) -> str:
        return next_stage(self.config, step=self.step).name

    @property
    def shows_reward(self) -> bool:
        """Whether the stage of the last step samples completions; the others have a loss that means something."""
        return next_stage(self.config, step=max(0, self.step - 1)).samples_completions

    def take(self, line: MetricLine) -> None:
        if reader.is_evaluation(line):
            self.accuracy, self.accuracy_step = line["eval/accuracy"], int(line["step"] or 0)
            return
        self.step = int(line.get("step") or self.step)
        self.reward = line.get("reward/mean")
        self.loss = line.get("loss")
        self.recent.append(line)
        seconds = sum(_number(recent, "timing/step") for recent in self.recent)
        tokens = sum(
            _number(recent, "tokens_per_s") * _number(recent, "timing/step") for recent in self.recent
        )
        self.tokens_per_s = tokens / seconds if seconds else None

    def step_s(self) -> float | None:
        """Mean wall time of the recent steps. A pause of the run, as before a resume, does not count: what a step
        accounts for itself stands for the time since the step before."""
        if not self.recent:
            return None
        durations = [_accounted_s(self.recent[0])]
        for before, line in zip(self.recent, list(self.recent)[1:], strict=False):
            passed, accounted = _number(line, "time") - _number(before, "time"), _accounted_s(line)
            durations.append(passed if 0 <= passed <= 1.5 * accounted + PAUSE_S else accounted)
        return sum(durations) / len(durations)

    def eta_s(self) -> float | None:
        """Estimate the remaining seconds from the recent wall time per step."""
        step_s = self.step_s()
        return None if step_s is None or self.step >= self.total else step_s * (self.total - self.step)

    def shares(self) -> dict[str, float]:
        """Shares of the recent step time by activity."""
        totals = dict.fromkeys(SHARES, 0.0)
        for line in self.recent:
            for name, seconds in _shares_of(line).items():
                totals[name] += seconds
        whole = sum(totals.values())
        return {name: seconds / whole for name, seconds in totals.items() if seconds > 0}


def _accounted_s(line: MetricLine) -> float:
    return sum(_shares_of(line).values())


def _shares_of(line: MetricLine) -> dict[str, float]:
    """Seconds of one step by activity; evaluations, checkpoints and the like are `other`. The start of the run, which
    the first step accounts for, is not part of a step."""
    timing = {
        name.removeprefix("timing/"): value or 0.0
        for name, value in line.items()
        if name.startswith("timing/")
    }
    for name in ("step", "start"):
        timing.pop(name, None)
    timing["train"] = timing.get("train", 0.0) + timing.pop("commit", 0.0)
    known = {name: timing.pop(name, 0.0) for name in SHARES[:-1]}
    return known | {"other": sum(timing.values())}


def _number(line: MetricLine, name: str) -> float:
    return line.get(name) or 0.0


class RunProgress:
    """Everything that a view of a run shows. `read` takes what is new; it is cheap enough for five times a second."""

    def __init__(self, config: Config, *, run_dir: Path, clock: Clock = SYSTEM_CLOCK) -> None:
        self.steps = StepProgress(config)
        self.reports: ProcessReports | None = None
        self.num_stop_requests = 0
        """Stop requests of this view, which the master may not have reported yet."""
        self._run_dir, self._clock = run_dir, clock
        self._opened = clock.monotonic()
        self._opened_wall = clock.wall()
        self._age_s = _session_age_s(run_dir)
        _, self._alerts_offset = reader.read_new_alerts(run_dir, offset=0)
        self._offset = self._take_past()

    def _take_past(self) -> int:
        """Take the last steps and evaluation from before; returns the offset of what is new."""
        path = RunFolder(self._run_dir).metrics_file
        size = path.stat().st_size if path.exists() else 0
        lines, offset = reader.read_metrics(self._run_dir, offset=max(0, size - RECENT_BYTES))
        if size > RECENT_BYTES and not any(map(reader.is_evaluation, lines)):
            lines = [*reader.read_status(self._run_dir).evaluations[-1:], *lines]
        for line in lines:
            self.steps.take(line)
        return offset

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of this session of the run."""
        return self._age_s + self._clock.monotonic() - self._opened

    def read(self) -> tuple[list[MetricLine], list[Record]]:
        """Take new metrics and the master's last report; return new metrics and alerts.

        After a rollback the file of metrics is shorter. If it has grown again meanwhile, the offset is in the middle of
        a line, which is left out.
        """
        lines, self._offset = reader.read_metrics(self._run_dir, offset=self._offset)
        for line in lines:
            self.steps.take(line)
        alerts, self._alerts_offset = reader.read_new_alerts(self._run_dir, offset=self._alerts_offset)
        reports = read_processes(self._run_dir)
        # The file of an earlier session is there until the master of this one writes its first.
        if reports is not None and reports.time >= self._opened_wall - self._age_s - 1.0:
            self.reports = reports
        return lines, alerts

    def activity(self) -> str:
        """`collecting 300/1000 groups, 3.2 s`: what the run does now, and since when."""
        reports = self.reports
        if reports is None:
            return f"starting the master, {self.elapsed_s:.0f} s"
        wall = self._clock.wall()
        if (age_s := wall - reports.time) > SILENT_S:
            return f"{reports.phase}; no report of the master for {age_s:.0f} s"
        text = phase_text(reports, self.steps)
        since = reports.activity.since if reports.activity is not None else reports.time
        text = f"{text}, {seconds_text(max(0.0, wall - since))}"
        if reports.activity is not None and reports.activity.saving_step and reports.phase != Phase.SAVING:
            text = f"{text}; {saving_text(reports)}"
        return text

    @property
    def is_recovering(self) -> bool:
        return self.reports is not None and self.reports.phase in (Phase.RECOVERING, Phase.ADOPTING)

    @property
    def is_stopping(self) -> bool:
        activity = self.reports.activity if self.reports is not None else None
        return self.num_stop_requests > 0 or (activity is not None and activity.is_stopping)

    def rows(self) -> list[tuple[str, str]]:
        """Names and values to show, in their order; a value that is not known is left out."""
        steps = self.steps
        eta, step_s = steps.eta_s(), steps.step_s()
        remaining = "" if eta is None else f", ≈ {duration(eta)} remaining"
        speed = [] if steps.tokens_per_s is None else [f"{steps.tokens_per_s:,.0f} tokens/s"]
        speed += [] if step_s is None else [f"{seconds_text(step_s)} per step"]
        stopping = "after this step, with a checkpoint" if self.is_stopping else None
        values = {
            "now": self.activity(),
            "stopping": stopping,
            **self.results(),
            "speed": ", ".join(speed) or None,
            "time": "  ".join(f"{name} {share:.0%}" for name, share in steps.shares().items()) or None,
            "elapsed": f"{duration(self.elapsed_s)}{remaining}",
            "learning": "; ".join(learning_lines(self._run_dir)) or None,
        }
        return [(name, value) for name, value in values.items() if value is not None]

    def results(self) -> dict[str, str | None]:
        """Reward, or the loss of a stage that samples nothing, and the last held-out accuracy with its step."""
        steps = self.steps
        name, value = ("reward", steps.reward) if steps.shows_reward else ("loss", steps.loss)
        accuracy = steps.accuracy
        at = f" (step {steps.accuracy_step})" if steps.accuracy_step != steps.step else ""
        return {
            name: None if value is None else f"{value:.3f}",
            "accuracy": None if accuracy is None else f"{accuracy:.1%}{at}",
        }


def _session_age_s(run_dir: Path) -> float:
    """Seconds since the launcher of a running run was started; 0 if there is none yet."""
    try:
        launcher = reader.living_launcher(run_dir)
    except KintsugiError:
        return 0.0
    if launcher is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - launcher.start_time * TICK_S)


def phase_text(reports: ProcessReports, steps: StepProgress) -> str:
    """Name the work of the current phase, with what is counted in it."""
    activity = reports.activity
    counted = f"{activity.done}/{activity.total} {activity.unit}" if activity and activity.total else ""
    match reports.phase:
        case Phase.STARTING:
            return f"starting {counted}".rstrip()
        case Phase.COLLECTING:
            samples = next_stage(steps.config, step=steps.step).samples_completions
            return f"collecting {counted if samples else counted.replace('groups', 'rows')}".rstrip()
        case Phase.EVALUATING:
            return f"evaluating {counted}".rstrip()
        case Phase.RECOVERING:
            return f"recovering: {reports.recovery}"
        case Phase.SAVING:
            return saving_text(reports)
        case _:
            return _PHASES.get(reports.phase, reports.phase)


def saving_text(reports: ProcessReports) -> str:
    """`saving step 25: 4.1 of 21.0 GB`."""
    step = reports.activity.saving_step if reports.activity is not None else 0
    gauges = next((each.gauges for each in reports.processes if SAVE_BYTES in each.gauges), {})
    text = f"saving step {step}" if step else "saving"
    if SAVE_BYTES not in gauges:
        return text
    return f"{text}: {bytes_text(gauges[SAVED_BYTES], of=gauges[SAVE_BYTES])}"


def bytes_text(done: float, *, of: float) -> str:
    """`4.1 of 21.0 GB`, `12 of 480 MB`."""
    scale, unit, form = (1e9, "GB", ".1f") if of >= 1e9 else (1e6, "MB", ".1f" if of < 1e7 else ".0f")
    return f"{done / scale:{form}} of {of / scale:{form}} {unit}"


def alert_text(alert: Record) -> str:
    """Format an alert on one short line: its first sentence, with its duration if it was measured. `kintsugi incidents`
    has the rest."""
    assert isinstance(alert.event, Alert)
    first, _, _ = headline(alert.event.message).partition(". ")
    seconds = alert.event.values.get("total")
    if seconds is None:
        return first
    done, _, cause = first.partition(": ")
    if not done.startswith(RECOVERED):
        return first
    # A master that took over at the end of the incident has measured nothing of it.
    return f"recovered in {seconds_text(seconds)}: {cause}" if seconds > 0 else f"recovered: {cause}"


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
