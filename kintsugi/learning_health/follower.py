"""Reads what a run recorded about its learning, and keeps the findings in `learning.jsonl` of its folder.

A line of that file is a `LearningReport`; one is added whenever the findings change. Reading is bounded: of each
step some samples, of each stage its first steps and the latest ones.
"""

from __future__ import annotations

import json
from contextlib import closing, suppress
from math import nan
from pathlib import Path

import msgspec

from kintsugi.config.recipe import load_config
from kintsugi.config.schema import Config
from kintsugi.config.stages import stages
from kintsugi.errors import UserError
from kintsugi.learning_health.finding import LearningFinding, LearningReport
from kintsugi.learning_health.format import finding_line
from kintsugi.learning_health.history import FIRST_KEPT, LAST_KEPT, StageHistory, StepFigures, facts_of
from kintsugi.learning_health.judge import judge
from kintsugi.learning_health.sample_figures import SampleFigures, figures_of
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.jsonl_log import LineTail, lines_backwards
from kintsugi.telemetry.sample_files import SampleFiles, numbered_parts, numbered_path
from kintsugi.telemetry.samples_index import SamplesOfStep
from kintsugi.telemetry.saved_rollouts import is_rollouts
from kintsugi.telemetry.step_metrics import SampleRecord

MOST_SAMPLES = 256 << 10
"""Bytes of the samples of one step that are read: about a thousand short completions."""
MOST_METRICS = 8 << 20
"""Bytes of metrics that are read at once."""
MOST_CHANGES = 256
EVALUATION = "eval/problems"
SPECIAL_TOKENS = 2
"""Tokens of a new model besides its alphabet."""


class LearningFollower:
    """Follows the metrics and samples of one run; `look` reads what is new and judges it."""

    def __init__(self, run_dir: Path) -> None:
        """Raises UserError if there is no run."""
        self._run_dir, self._folder = run_dir, RunFolder(run_dir)
        if not self._folder.config_file.is_file():
            raise UserError(f"{run_dir}: expected a run folder, found no {self._folder.config_file.name}")
        config = load_config(self._folder.config_file)
        vocabulary = _vocabulary(config)
        replays = is_rollouts(config.data.source)
        self.histories = [
            StageHistory(facts_of(config, stage, vocabulary=vocabulary, replays=replays))
            for stage in stages(config)
        ]
        self._metrics = LineTail(self._folder.metrics_file, most_read=MOST_METRICS)
        index = self._folder.samples_index_file
        paths = [*(numbered_path(index, start) for start in numbered_parts(index)), index]
        self._indexes = [LineTail(path, most_read=MOST_METRICS) for path in paths]
        """Parts of the index that were put aside and not read yet, and the one that is written."""
        self._places: dict[int, SamplesOfStep] = {}
        self._waiting: dict[str, float | None] | None = None
        """Metrics of the latest step, while its samples are not written yet."""
        self.step, self.time = 0, 0.0
        self._findings: tuple[LearningFinding, ...] = ()
        self.changes: list[LearningReport] = []
        """Reports at which the kinds of findings changed, the latest last."""

    def look(self, *, is_over: bool = False) -> LearningReport:
        """Read new steps and judge the stage of the latest one; `is_over`: nothing more will be written."""
        while self._read(is_over=is_over):
            pass
        return self.report()

    def report(self) -> LearningReport:
        history = self._history_of(self.step)
        abstained = ""
        if not self._findings:
            steps = f"steps {history.steps[0].step}–{self.step}" if history.steps else "no step so far"
            abstained = (
                f"nothing unusual in {steps} of stage {history.facts.name}" if history.steps else steps
            )
        return LearningReport(
            run=str(self._run_dir),
            step=self.step,
            time=self.time,
            findings=self._findings,
            abstained=abstained,
        )

    def _read(self, *, is_over: bool) -> bool:
        """Read a part of the files; whether there may be more."""
        lines = self._metrics.lines()
        self._read_places(until=_last_step(lines, or_of=self._waiting))
        if self._waiting is not None and (lines or is_over or self._waiting["step"] in self._places):
            waiting, self._waiting = self._waiting, None
            self._take_step(waiting, is_recent=True)
        for number, line in enumerate(lines, start=1):
            try:
                values = msgspec.json.decode(line, type=dict[str, float | None])
                step = int(values["step"] or 0)
            except (msgspec.MsgspecError, UnicodeDecodeError, KeyError):
                continue
            if EVALUATION in values:
                history = self._history_of(step)
                history.add_evaluation(StepFigures(step, _numbers(values)))
                self._judge(history)
            elif number == len(lines) and step not in self._places and not is_over:
                self._waiting = values
            else:
                self._take_step(values, is_recent=len(lines) - number < LAST_KEPT)
        return bool(lines) and self._waiting is None

    def _read_places(self, *, until: int) -> None:
        """Read the places of samples up to a step, as far as they are written."""
        while until and until not in self._places:
            lines = self._indexes[0].lines()
            for line in lines:
                with suppress(msgspec.MsgspecError, UnicodeDecodeError):
                    place = msgspec.json.decode(line, type=SamplesOfStep)
                    self._places[place.step] = place
            if not lines:
                if len(self._indexes) == 1:
                    return
                self._indexes.pop(0).close()

    def close(self) -> None:
        for tail in (self._metrics, *self._indexes):
            tail.close()

    def _take_step(self, values: dict[str, float | None], *, is_recent: bool) -> None:
        step = int(values["step"] or 0)
        if step <= self.step:
            for history in self.histories:
                history.truncate_after(step - 1)
        history = self._history_of(step)
        samples = None
        if is_recent or step - history.facts.first_step < FIRST_KEPT:
            samples = self._samples_of(step)
        self._places = {each: place for each, place in self._places.items() if each > step}
        history.add_step(StepFigures(step, _numbers(values), samples))
        self.step, self.time = step, values.get("time") or 0.0
        if is_recent:
            self._judge(history)

    def _judge(self, history: StageHistory) -> None:
        """Judge a stage after a step or an evaluation; findings of the stage before are over."""
        before = [each.kind for each in self._findings]
        earlier = [each for each in self._findings if history.facts.first_step <= each.step <= self.step]
        self._findings = judge(history, earlier=earlier) if history.steps else ()
        if [each.kind for each in self._findings] != before:
            self.changes = [*self.changes, self.report()][-MOST_CHANGES:]

    def _samples_of(self, step: int) -> SampleFigures | None:
        place = self._places.get(step)
        if place is None or place.num_scored == 0:
            return None
        try:
            with SampleFiles(self._run_dir) as files:
                content = files.bytes_at(place.offset, min(place.end, place.offset + MOST_SAMPLES))
        except OSError:
            return None
        records = []
        for line in content[: content.rfind(b"\n") + 1].splitlines():
            with suppress(msgspec.MsgspecError, UnicodeDecodeError):
                records.append(msgspec.json.decode(line, type=SampleRecord))
        return figures_of(records)

    def _history_of(self, step: int) -> StageHistory:
        """Return the history of the stage that a step belongs to; an evaluation before a stage is the stage's."""
        begun = [each for each in self.histories if each.facts.first_step <= max(step, 1)]
        return begun[-1]


def assess_learning(run_dir: str | Path) -> LearningReport:
    """Judge the learning of a run, running or ended, from its folder alone. Raises UserError if there is no run."""
    with closing(LearningFollower(Path(run_dir))) as follower:
        return follower.look(is_over=True)


def recorded_findings(run_dir: Path) -> LearningReport | None:
    """Return the latest report that the watcher recorded; None if there is none: always healthy."""
    with suppress(OSError):  # No file, as of a run that was always healthy, or one that may not be read.
        for _, line in lines_backwards(RunFolder(run_dir).learning_file):
            with suppress(msgspec.MsgspecError, UnicodeDecodeError):
                return msgspec.json.decode(line, type=LearningReport)
    return None


def learning_lines(run_dir: Path) -> list[str]:
    """Return one line per finding that stands, for a live view; none of a healthy run."""
    report = recorded_findings(run_dir)
    return [] if report is None else [finding_line(finding) for finding in report.findings]


def _last_step(lines: list[bytes], *, or_of: dict[str, float | None] | None) -> int:
    """Return the step of the last line of metrics that can be decoded, or that of these metrics; 0 without any."""
    for line in reversed(lines):
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, KeyError):
            return int(msgspec.json.decode(line, type=dict[str, float | None])["step"] or 0)
    return int(or_of["step"] or 0) if or_of is not None else 0


def _numbers(values: dict[str, float | None]) -> dict[str, float]:
    return {name: nan if value is None else value for name, value in values.items()}


def _vocabulary(config: Config) -> int:
    """Return the number of tokens of the model; 0 if its folder does not say."""
    if config.model.path is None:
        return len(config.model.new.alphabet) + SPECIAL_TOKENS if config.model.new is not None else 0
    with suppress(OSError, ValueError, KeyError, TypeError):
        described = json.loads((Path(config.model.path).expanduser() / "config.json").read_text())
        return int(described["vocab_size"])
    return 0
