"""Curves of `metrics.jsonl`: read once, then only what was added; thinned to the points that a screen shows."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from kintsugi.page.line_files import lines_from
from kintsugi.page.schema import EvaluationPoint
from kintsugi.run_folder.layout import RELATIVE, RunFolder
from kintsugi.run_folder.reader import MetricLine, is_evaluation
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock

READ_S = 0.5
"""Longest time that one request spends on reading; the rest is read by the next one."""
MOST_PROBLEMS = 8
MOST_KEYS = 512
"""Names of metrics that are kept; a run has about sixty."""
PIECE_BYTES = 4 << 20
_NAN = float("nan")
_decoder = msgspec.json.Decoder(MetricLine)
_NAME = RELATIVE.metrics_file


class MetricsTable:
    """Columns of the metrics of one run. Not safe for several threads."""

    def __init__(self, run_dir: Path, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._path, self._clock = RunFolder(run_dir).metrics_file, clock
        self._reset()

    def _reset(self) -> None:
        self._inode, self._offset, self._line = 0, 0, 0
        self.steps = array("q")
        self.times = array("d")
        self._columns: dict[str, array[float]] = {}
        self.evaluations: list[EvaluationPoint] = []
        self.last: MetricLine = {}
        """Latest value of each metric, evaluations included."""
        self.problems: list[str] = []
        self._num_damaged = 0
        self.share = 1.0
        """Part of the file that has been read."""

    @property
    def keys(self) -> list[str]:
        return sorted(self._columns)

    def refresh(self, *, budget_s: float = READ_S) -> None:
        """Read what was added; a file that was replaced or cut back is read from its start."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if self._offset or not isinstance(error, FileNotFoundError):
                self._reset()
            if not isinstance(error, FileNotFoundError):
                self.problems = [f"{_NAME}: {error.strerror or error}"]
            return
        try:
            status = os.fstat(descriptor)
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._reset()
                self._inode = status.st_ino
            deadline = self._clock.monotonic() + budget_s
            while self._offset < status.st_size and self._clock.monotonic() < deadline:
                before = self._offset
                for start, line in lines_from(descriptor, self._offset, most_bytes=PIECE_BYTES):
                    self._line += 1
                    self._take(line)
                    self._offset = start + len(line) + 1
                if self._offset == before:
                    break
            self.share = self._offset / status.st_size if status.st_size else 1.0
        finally:
            os.close(descriptor)

    def _take(self, line: bytes) -> None:
        try:
            values = _decoder.decode(line)
            step, time = int(values.pop("step") or 0), float(values.pop("time", 0.0) or 0.0)
        except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, ValueError):
            self._num_damaged += 1
            if len(self.problems) < MOST_PROBLEMS:
                shown = line[:40].decode(errors="replace")
                self.problems.append(
                    f"{_NAME}, line {self._line}: expected a JSON object with a step, got {shown!r}"
                )
            return
        self.last.update(values, step=step, time=time)
        if is_evaluation(values):
            self._take_evaluation(step, time, values)
            return
        self._cut(step)
        self.steps.append(step)
        self.times.append(time)
        count = len(self.steps)
        for name, value in values.items():
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= MOST_KEYS:
                    continue
                column = self._columns[name] = array("d")
            if len(column) < count - 1:
                column.extend([_NAN] * (count - 1 - len(column)))
            column.append(_NAN if value is None else value)

    def _cut(self, step: int) -> None:
        """Forget steps from this one on: a run that returned to an earlier step repeats them."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.times.pop()
        for column in self._columns.values():
            del column[len(self.steps) :]

    def _take_evaluation(self, step: int, time: float, values: MetricLine) -> None:
        while self.evaluations and self.evaluations[-1].step >= step:
            self.evaluations.pop()
        self.evaluations.append(
            EvaluationPoint(
                step=step,
                time=time,
                accuracy=values["eval/accuracy"] or 0.0,
                low=values.get("eval/accuracy_low"),
                high=values.get("eval/accuracy_high"),
                problems=int(values.get("eval/problems") or 0),
            )
        )

    def column(self, name: str) -> np.ndarray:
        """Return the values of a metric, one per step, NaN where it has none."""
        values = np.full(len(self.steps), np.nan)
        if name in self._columns:
            own = np.array(self._columns[name])
            values[: len(own)] = own
        return values

    def all_problems(self) -> tuple[str, ...]:
        """Return the problems, the number of further ones, and whether reading goes on."""
        found = list(self.problems)
        if self._num_damaged > len(self.problems):
            found.append(f"{_NAME}: {self._num_damaged - len(self.problems)} more lines could not be read")
        if self.share < 0.999:
            found.append(f"{_NAME} is still being read: {self.share:.0%}")
        return tuple(found)


def thinned(values: np.ndarray, *, every: int) -> list[float | None]:
    """Return the means of consecutive `every` values, without those that are not finite; None where none is.

    >>> thinned(np.array([1.0, 3.0, float("nan"), float("nan"), 5.0]), every=2)
    [2.0, None, 5.0]
    """
    if not len(values):
        return []
    is_known = np.isfinite(values)
    starts = np.arange(0, len(values), every)
    sums = np.add.reduceat(np.where(is_known, values, 0.0), starts)
    counts = np.add.reduceat(is_known.astype(np.int64), starts)
    return [
        total / count if count else None for total, count in zip(sums.tolist(), counts.tolist(), strict=True)
    ]


def places(values: Sequence[float], *, every: int) -> list[float]:
    """Return the last of each `every` values: the step or time that a thinned place stands at."""
    return [values[min(start + every, len(values)) - 1] for start in range(0, len(values), every)]
