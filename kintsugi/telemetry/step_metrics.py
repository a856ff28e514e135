"""Metrics of a step, under names that are usual in the field, and the files they are written to. `docs/metrics.md`
explains each name.

`metrics.jsonl` has one object a line: `{"step": 12, "time": 1.7e9, "reward/mean": 0.4, …}`; an evaluation is a line of
its own. `samples.jsonl` has one line per trained sample; it is put aside when it is large, and the oldest samples are
removed (`sample_files.py`). Both are cut back, in place, when a run resumes or rolls back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from heapq import nsmallest
from io import FileIO
from itertools import accumulate, pairwise
from math import isfinite, sqrt
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from kintsugi.config.schema import LoggingSection
from kintsugi.errors import StorageError
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import Clock, SystemClock
from kintsugi.runtime.disk import append_whole
from kintsugi.telemetry.jsonl_log import lines_backwards
from kintsugi.telemetry.sample_files import numbered_parts, numbered_path, start_of_newest
from kintsugi.telemetry.samples_index import NUM_WORST, SamplesOfStep
from kintsugi.telemetry.trackers.mlflow_runs import MlflowRun
from kintsugi.telemetry.trackers.opening import InBackground, OpenedLate
from kintsugi.telemetry.trackers.system_metrics import SystemMetrics
from kintsugi.telemetry.trackers.tensorboard_files import TensorBoardFiles
from kintsugi.telemetry.trackers.tracker import TrackedRun, Tracker, TrackerTable, tracker_tag
from kintsugi.telemetry.trackers.trackio_runs import TrackioRun
from kintsugi.telemetry.trackers.weights_and_biases import WeightsAndBiases
from kintsugi.types import FinishReason, SampleMeta, SampleText

_BLOCK_SIZE = 1 << 16
SOURCE = "source/"
"""Begin of the names of metrics of one source of a mixture: `source/gsm8k.jsonl/reward`."""
TABLE_EVERY, TABLE_ROWS, CELL_LENGTH = 10, 8, 1000
"""Steps between tables of completions in the trackers, rows of a table, characters of a cell: they bound the files."""
FIGURES = {"reward": "reward/mean", "loss": "loss"}
"""Figures of the span of a step, which `kintsugi watch` prints: name → metric."""
NOT_ALSO = LoggingSection()
SAMPLES_SIZE = 16 << 30
"""Disk space of the samples of a run: those of five days with a million samples of three kilobytes a day."""
NUM_PARTS, MOST_PARTS, LARGEST_PART = 16, 64, 256 << 20
"""The samples are kept in so many parts at least, none of which is larger (but for the step that exceeds it): the
oldest of them is removed at once."""

_Result = TypeVar("_Result")


class SampleRecord(msgspec.Struct, frozen=True):
    """One line of `samples.jsonl`."""

    step: int
    ticket: str
    sample: int
    version: int
    prompt: str
    completion: str
    reward: float
    reward_components: dict[str, float]
    finish: FinishReason
    advantage: float | None
    answer: str = ""
    """Expected answer, if the row has one."""
    source: str = ""
    """Data source of the row, where several are mixed."""


class EvalAnswerRecord(msgspec.Struct, frozen=True):
    """One line of `verdicts.jsonl`: held-out problems that the greedy answers of one evaluation solved."""

    step: int
    problems: str
    """Digest of the held-out set; runs with equal digests had the same problems in the same order."""
    right: tuple[bool, ...]


def step_metrics(
    metas: Sequence[SampleMeta],
    *,
    advantages: Mapping[str, float],
    call_metrics: Mapping[str, float],
    timing: Mapping[str, float],
) -> dict[str, float]:
    """Return all metrics of one step.

    `call_metrics` come from the model calls under their final names (kl, entropy, clip_ratio, grad_norm,
    logprob_abs_diff_mean, …). `timing` has the seconds of each phase and of the whole `step`. Without rewards (SFT)
    there are no reward metrics.
    """
    lengths = [float(meta.num_loss_tokens) for meta in metas]
    tokens = sum(lengths)
    metrics = dict(call_metrics)
    if any(meta.reward_components for meta in metas):
        metrics |= _reward_metrics(metas, lengths=lengths)
        if advantages:
            metrics["advantage/abs_mean"] = _mean([abs(advantages.get(meta.key, 0.0)) for meta in metas])
        truncated = [meta.finish is FinishReason.LENGTH for meta in metas]
        metrics["completions/clipped_ratio"] = _mean([float(cut) for cut in truncated])
        cut_tokens = sum(length for length, cut in zip(lengths, truncated, strict=True) if cut)
        metrics["truncated_share"] = cut_tokens / tokens if tokens else 0.0
        metrics["repetition"] = _mean([meta.repetition for meta in metas])
    if metas:
        metrics["completions/mean_length"] = _mean(lengths)
        metrics["completions/min_length"] = min(lengths)
        metrics["completions/max_length"] = max(lengths)
    step_s = timing.get("step", 0.0)
    metrics["tokens_per_s"] = tokens / step_s if step_s > 0 else 0.0
    return metrics | {f"timing/{phase}": seconds for phase, seconds in timing.items()}


def _reward_metrics(metas: Sequence[SampleMeta], *, lengths: Sequence[float]) -> dict[str, float]:
    """Return reward metrics by component; `reward_std` is the mean over groups of their deviations, as in TRL."""
    rewards = [meta.reward for meta in metas]
    groups: dict[str, list[float]] = {}
    components: dict[str, list[float]] = {}
    for meta in metas:
        groups.setdefault(meta.ticket, []).append(meta.reward)
        for name, value in meta.reward_components.items():
            components.setdefault(name, []).append(value)
    deviations = [_deviation(group) for group in groups.values()]
    metrics = {f"reward/{name}": _mean(values) for name, values in components.items()}
    return metrics | {
        "reward/mean": _mean(rewards),
        "reward_std": _mean(deviations),
        "frac_reward_zero_std": _mean([float(deviation == 0.0) for deviation in deviations]),
        "reward_length_correlation": _correlation(rewards, lengths),
    }


def source_metrics(metas: Sequence[SampleMeta], *, texts: Mapping[str, SampleText]) -> dict[str, float]:
    """Return mean reward and number of samples of every source of a mixture; nothing where there is one source."""
    rewards: dict[str, list[float]] = {}
    for meta in metas:
        text = texts.get(meta.key)
        if text is not None and text.source and meta.reward_components:
            rewards.setdefault(text.source, []).append(meta.reward)
    means = {f"{SOURCE}{source}/reward": _mean(values) for source, values in rewards.items()}
    return means | {f"{SOURCE}{source}/samples": float(len(values)) for source, values in rewards.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation (n − 1); exactly 0 when all values are equal."""
    if len(values) < 2 or min(values) == max(values):
        return 0.0
    mean = _mean(values)
    return sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Pearson's correlation; 0 where one of the two does not vary."""
    deviations = _deviation(first) * _deviation(second)
    if deviations == 0.0:
        return 0.0
    first_mean, second_mean = _mean(first), _mean(second)
    covariance = sum((a - first_mean) * (b - second_mean) for a, b in zip(first, second, strict=True))
    return covariance / (len(first) - 1) / deviations


class _Lines:
    """An append-only file of JSON objects with a step each; a torn last line is cut when it is opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._encoder = msgspec.json.Encoder()
        self._opened: FileIO | None = None
        with suppress(StorageError):  # The next write tries again, and says what is the matter.
            self._guarded(lambda: self._file)

    @property
    def _file(self) -> FileIO:
        """The file, opened unbuffered: a later flush must not repeat what a full disk refused."""
        if self._opened is None:
            self._repair()
            self._opened = self._path.open("ab", buffering=0)
        return self._opened

    def size(self) -> int:
        return self._guarded(lambda: os.fstat(self._file.fileno()).st_size)

    def put_aside(self, path: Path) -> None:
        """Rename the file; the next write begins a new one."""
        self._guarded(lambda: self._path.replace(path))
        self.close()

    def take_back(self, path: Path) -> None:
        """Continue the file that was put aside there, in the place of this one."""
        self._guarded(lambda: path.replace(self._path))
        self.close()

    def append(self, records: Sequence[Any]) -> list[int]:
        """Append all lines or none: half a line would make the rest of the file unreadable. Return the offset of each
        line, and that of the end."""
        lines = [self._encoder.encode(record) + b"\n" for record in records]

        def append() -> int:
            start = os.fstat(self._file.fileno()).st_size
            append_whole(self._file, b"".join(lines))
            return start

        return list(accumulate(map(len, lines), initial=self._guarded(append)))

    def truncate_after(self, step: int) -> None:
        """Cut off the lines of later steps, in place: they are the last ones. A line that cannot be decoded has no
        step, and is cut off with those that follow it."""

        def cut() -> None:
            size, end = os.fstat(self._file.fileno()).st_size, _end_of(step, self._path)
            if end is not None and end < size:
                os.ftruncate(self._file.fileno(), end)

        self._guarded(cut)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _repair(self) -> None:
        """Cut off what follows the last complete line, searched from the back."""
        if not self._path.is_file():
            return
        with self._path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            start = end
            while start > 0:
                start = max(0, start - _BLOCK_SIZE)
                file.seek(start)
                newline = file.read(_BLOCK_SIZE).rfind(b"\n")
                if newline >= 0:
                    start += newline + 1
                    break
            if start < end:
                file.truncate(start)

    def _guarded(self, action: Callable[[], _Result]) -> _Result:
        try:
            return action()
        except OSError as error:
            raise StorageError(f"{self._path}: {error.strerror or error}") from error


class _Stepped(msgspec.Struct):
    step: int


_step_decoder = msgspec.json.Decoder(_Stepped)


def _end_of(step: int, path: Path) -> int | None:
    """Return where the lines of later steps begin in a file, which is searched from its end; None if it has none."""
    end = None
    for offset, line in lines_backwards(path):
        try:
            is_kept = _step_decoder.decode(line).step <= step
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        if is_kept:
            break
        end = offset
    return end


class MetricsWriter:
    """Writes the metrics of a step to `metrics.jsonl`, TensorBoard and the other trackers that are configured.

    A failure of one does not keep the metrics from the others; StorageError then names those that failed. Trackers are
    opened when they are first written to, and again after a failure; all but TensorBoard are called in threads of their
    own.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        run_id: str = "",
        parameters: Mapping[str, Any] = {},
        also: LoggingSection = NOT_ALSO,
        clock: Clock | None = None,
    ) -> None:
        """`run_id` and `parameters` are what the trackers know the run by; `also` names those besides TensorBoard."""
        self._clock = clock or SystemClock()
        self._lines = _Lines(RunFolder(run_dir).metrics_file)
        self._system = SystemMetrics(run_dir)
        self._trackers = _trackers(TrackedRun(run_dir, run_id, parameters), also=also, clock=self._clock)
        self._has_table = False

    def write(self, step: int, values: Mapping[str, float], *, stage: str = "") -> None:
        """Write one line; a value that is not finite becomes null. The trackers show it under tags (`tracker_tag`)."""
        time = self._clock.wall()
        finite = {tracker_tag(name, stage=stage): value for name, value in values.items() if isfinite(value)}
        _try_all(
            lambda: self._lines.append([{"step": step, "time": time, **values}]),
            *(partial(tracker.write, step, finite, time=time) for tracker in self._trackers),
        )

    def write_system(self, step: int) -> None:
        """Give the trackers the figures of hosts and accelerators, if they are due."""
        time = self._clock.wall()
        if figures := self._system.due(time):
            _try_all(*(partial(tracker.write, step, figures, time=time) for tracker in self._trackers))

    def write_completions(
        self, step: int, metas: Sequence[SampleMeta], *, texts: Mapping[str, SampleText]
    ) -> None:
        """Give the trackers a table of completions at the first step and every tenth: the best and worst rewards."""
        scored = sorted(
            (meta for meta in metas if meta.reward_components and meta.key in texts),
            key=lambda meta: meta.reward,
        )
        if not scored or (step % TABLE_EVERY and self._has_table):
            return
        self._has_table = True
        half = TABLE_ROWS // 2
        chosen = scored if len(scored) <= TABLE_ROWS else [*scored[:half], *scored[-half:]]
        rows = [
            (texts[meta.key].prompt[-CELL_LENGTH:], texts[meta.key].completion[:CELL_LENGTH], meta.reward)
            for meta in chosen
        ]
        self._write_table("completions", step, TrackerTable(("prompt", "completion", "reward"), rows))

    def write_incident(self, step: int, *, incident: int, text: str) -> None:
        """Give the trackers a line about an incident."""
        table = TrackerTable(("incident", "step", "text"), [(incident, step, text[:CELL_LENGTH])])
        self._write_table("incidents", step, table)

    def _write_table(self, name: str, step: int, table: TrackerTable) -> None:
        time = self._clock.wall()
        _try_all(*(partial(tracker.write_table, name, step, table, time=time) for tracker in self._trackers))

    def truncate_after(self, step: int) -> None:
        time = self._clock.wall()
        _try_all(
            lambda: self._lines.truncate_after(step),
            *(partial(tracker.truncate_after, step, time=time) for tracker in self._trackers),
        )

    def close(self) -> None:
        _try_all(self._lines.close, *(tracker.close for tracker in self._trackers))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _trackers(run: TrackedRun, *, also: LoggingSection, clock: Clock) -> list[Tracker]:
    folder = RunFolder(run.run_dir).tensorboard_folder
    wanted: list[tuple[bool, str, Callable[[], Tracker]]] = [
        (also.wandb, "W&B", lambda: WeightsAndBiases(run)),
        (also.mlflow, "MLflow", lambda: MlflowRun(run)),
        (also.trackio, "Trackio", lambda: TrackioRun(run)),
    ]
    return [
        OpenedLate("TensorBoard", lambda: TensorBoardFiles(folder, run=run, time=clock.wall())),
        *(InBackground(name, open_run, clock=clock) for is_wanted, name, open_run in wanted if is_wanted),
    ]


def _try_all(*actions: Callable[[], object]) -> None:
    """Call all of them, then raise the errors of any."""
    failures: list[str] = []
    for action in actions:
        try:
            action()
        except (StorageError, OSError) as error:
            failures.append(str(error))
    if failures:
        raise StorageError("; ".join(failures))


class SamplesWriter:
    """Writes every trained sample to `samples.jsonl`, and the place of each step to `samples.index`.

    Both are put aside when the samples have the size of a part, between two steps. A process that is killed at any
    moment of that leaves files that readers and the next writer understand: offsets in an index do not depend on the
    name of the file that they lead to, nor on that of the index.
    """

    def __init__(self, run_dir: Path, *, most_size: int = SAMPLES_SIZE) -> None:
        """`most_size`: bytes of all parts, with their indexes, beyond which the oldest part is removed."""
        run = RunFolder(run_dir)
        self._samples_path, self._index_path = run.samples_file, run.samples_index_file
        self._lines, self._index = _Lines(self._samples_path), _Lines(self._index_path)
        self._most_size = most_size
        # Readers open all parts at once, so there are not many, however large the budget is.
        self._part_size = max(most_size // MOST_PARTS, min(LARGEST_PART, most_size // NUM_PARTS))
        self._start: int | None = None
        """Offset of the first byte of `samples.jsonl`; None if it has to be found."""

    def write(
        self,
        step: int,
        metas: Sequence[SampleMeta],
        *,
        texts: Mapping[str, SampleText],
        advantages: Mapping[str, float],
    ) -> None:
        nothing = SampleText("", "")
        records = [
            SampleRecord(
                step=step,
                ticket=meta.ticket,
                sample=int(meta.key.rsplit("/", 1)[1]),
                version=meta.version,
                prompt=texts.get(meta.key, nothing).prompt,
                completion=texts.get(meta.key, nothing).completion,
                reward=meta.reward,
                reward_components=meta.reward_components,
                finish=meta.finish,
                advantage=advantages.get(meta.key),
                answer=texts.get(meta.key, nothing).answer,
                source=texts.get(meta.key, nothing).source,
            )
            for meta in metas
        ]
        _try_all(self._put_aside_if_large, lambda: self._append(step, records))

    def _append(self, step: int, records: Sequence[SampleRecord]) -> None:
        start = self._find_start()
        offsets = [start + offset for offset in self._lines.append(records)]
        scored = [
            (record.reward, offset, end)
            for record, (offset, end) in zip(records, pairwise(offsets), strict=True)
            if record.reward_components and isfinite(record.reward)
        ]
        worst = tuple(nsmallest(NUM_WORST, scored))
        self._index.append([SamplesOfStep(step, offsets[0], offsets[-1], len(scored), worst)])

    def _find_start(self) -> int:
        if self._start is None:
            try:
                self._start = start_of_newest(self._samples_path)
            except OSError as error:
                raise StorageError(f"{self._samples_path}: {error.strerror or error}") from error
        return self._start

    def _put_aside_if_large(self) -> None:
        """Continue in new files, and remove the oldest ones that exceed the budget."""
        if self._lines.size() < self._part_size:
            return
        start, self._start = self._find_start(), None
        self._lines.put_aside(numbered_path(self._samples_path, start))
        self._index.put_aside(numbered_path(self._index_path, start))
        try:
            self._remove_oldest()
        except OSError as error:
            raise StorageError(f"{error.filename}: {error.strerror or error}") from error

    def _remove_oldest(self) -> None:
        """Keep the newest part at least: its end is where the next one begins."""
        *older, newest = numbered_parts(self._samples_path)
        kept_from, total = newest, self._part_size + self._size_of_part(newest)
        for start in reversed(older):
            total += self._size_of_part(start)
            if total > self._most_size:
                break
            kept_from = start
        # The index goes last: without its samples it is ignored, but samples without an index are searched.
        for path in (self._samples_path, self._index_path):
            for start in numbered_parts(path):
                if start < kept_from:
                    numbered_path(path, start).unlink()

    def _size_of_part(self, start: int) -> int:
        paths = (numbered_path(path, start) for path in (self._samples_path, self._index_path))
        return sum(path.stat().st_size for path in paths if path.exists())

    def truncate_after(self, step: int) -> None:
        """Cut off the samples of later steps. Parts that have none of them are not touched."""
        _try_all(lambda: self._index.truncate_after(step), lambda: self._lines.truncate_after(step))
        while self._lines.size() == 0 and (starts := numbered_parts(self._samples_path)):
            samples, index = (
                numbered_path(path, starts[-1]) for path in (self._samples_path, self._index_path)
            )
            if _end_of(step, samples) is None:
                return
            self._start = None
            if index.exists():
                # The index comes first: entries of a later step must not be left where no cut would find them.
                self._index.take_back(index)
                self._index.truncate_after(step)
            self._lines.take_back(samples)
            self._lines.truncate_after(step)

    def close(self) -> None:
        self._lines.close()
        self._index.close()


class EvalAnswersWriter:
    """Writes the verdicts of every evaluation to `verdicts.jsonl`."""

    def __init__(self, run_dir: Path) -> None:
        self._lines = _Lines(RunFolder(run_dir).eval_answers_file)

    def write(self, record: EvalAnswerRecord) -> None:
        self._lines.append([record])

    def truncate_after(self, step: int) -> None:
        self._lines.truncate_after(step)

    def close(self) -> None:
        self._lines.close()
