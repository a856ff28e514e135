"""A recorded run for notebooks and scripts: `kintsugi.load("runs/x")`, running, ended or killed.

    run = kintsugi.load("runs/x")
    run.metrics["reward/mean"]                  a column, one value per step
    run.samples(step=12).to_pandas()            a data frame
    run.incidents
    run.plot()                                  the learning curves of `kintsugi page`, with incidents as marks

Tables are read from the files of the run folder when they are asked for. A damaged line costs that line and is named in
`problems`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.config.schema import Config
from kintsugi.errors import KintsugiError, UserError
from kintsugi.run_folder import reader
from kintsugi.run_folder.layout import RELATIVE, RunFolder
from kintsugi.telemetry.jsonl_log import lines_between
from kintsugi.telemetry.sample_files import SampleFiles
from kintsugi.telemetry.samples_index import SamplesIndex
from kintsugi.telemetry.step_metrics import SampleRecord

SHOWN_ROWS = 10
CURVES = (
    ("reward/mean", "reward"),
    ("eval/accuracy", "held-out accuracy"),
    ("entropy", "entropy"),
    ("kl", "KL"),
    ("completions/mean_length", "tokens per completion"),
    ("grad_norm", "gradient norm"),
)
"""Metric and title of the plots; those that a run does not have are left out."""
ROUNDING = 1e-9
CURVE_COLOUR, MARK_COLOUR = "#0072b2", "#d55e00"


def is_rounding(points: Iterable[tuple[float, float | None]]) -> bool:
    """Whether a curve has nothing but rounding errors, as the KL of a run without a reference model."""
    values = [abs(value) for _, value in points if value]
    return bool(values) and max(values) < ROUNDING


class Table:
    """Columns of equal length: `table["step"]`, `len(table)`, `table.rows()`; a data frame by `to_pandas()`."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        lengths = {len(values) for values in columns.values()}
        assert len(lengths) <= 1, f"columns of different lengths: {lengths}"
        self._columns = {name: list(values) for name, values in columns.items()}

    @classmethod
    def of_rows(cls, rows: Iterable[Mapping[str, Any]]) -> Table:
        """Make a table of mappings; a value that a row does not have is None."""
        kept = list(rows)
        names = dict.fromkeys(name for row in kept for name in row)
        return cls({name: [row.get(name) for row in kept] for name in names})

    @property
    def columns(self) -> list[str]:
        return list(self._columns)

    def __getitem__(self, name: str) -> list[Any]:
        if name not in self._columns:
            raise KeyError(f"expected one of the columns {', '.join(self._columns)}, got {name!r}")
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), []))

    def rows(self) -> Iterator[dict[str, Any]]:
        for values in zip(*self._columns.values(), strict=True):
            yield dict(zip(self._columns, values, strict=True))

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame`; needs the extra `notebook`."""
        try:
            import pandas as pd
        except ImportError as error:
            raise UserError("to_pandas needs pandas: `pip install 'kintsugi[notebook]'`") from error
        return pd.DataFrame(self._columns)

    def __repr__(self) -> str:
        return f"Table({len(self)} rows: {', '.join(self._columns)})"

    def _repr_html_(self) -> str:
        """First rows as a table of a notebook."""
        head = "".join(f"<th>{escape(name)}</th>" for name in self._columns)
        rows = [row for _, row in zip(range(SHOWN_ROWS), self.rows(), strict=False)]
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(str(value)[:200])}</td>' for value in row.values())}</tr>"
            for row in rows
        )
        more = f"<p>{len(self) - len(rows)} more rows</p>" if len(self) > len(rows) else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


class RecordedRun:
    """One run folder. Every table is read again when it is asked for, so a running run can be followed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []
        """Sentences about what could not be read so far."""

    @property
    def status(self) -> reader.RunStatus:
        return reader.read_status(self.folder)

    @property
    def state(self) -> str:
        """`running`, `finished`, `stopped`, `failed` or `interrupted`."""
        return self.status.state.value

    @property
    def config(self) -> Config:
        return self.status.config

    @property
    def metrics(self) -> Table:
        """Metrics of the steps, one row per step."""
        return Table.of_rows(line for line in self._metric_lines() if not reader.is_evaluation(line))

    @property
    def evaluations(self) -> Table:
        """Metrics of the held-out evaluations, in order."""
        return Table.of_rows(line for line in self._metric_lines() if reader.is_evaluation(line))

    def samples(self, *, step: int | None = None) -> Table:
        """Trained samples, of one step or of all, with a column for each component of the reward."""
        with SampleFiles(self.folder) as files:
            parts = [(files.start, files.end)] if step is None else SamplesIndex(files).of_step(step)
            lines = (line for begin, end in parts for line in files.lines_between(begin, end))
            return Table.of_rows(
                {**{name: value for name, value in record.items() if name != "reward_components"}}
                | {f"reward/{name}": value for name, value in record["reward_components"].items()}
                for record in self._decoded(RELATIVE.samples_file, lines, SampleRecord)
                if step is None or record["step"] == step
            )

    @property
    def incidents(self) -> Table:
        """Incidents: when, what broke, the answer, the cost."""
        return Table.of_rows(
            {
                "incident": each.incident,
                "time": each.time,
                "step": each.step,
                "phase": each.phase,
                "process": each.cause.process,
                "cause": each.cause.message,
                "diagnosed": each.diagnosed[0].kind if each.diagnosed else None,
                "strategy": each.strategy,
                "seconds": each.seconds,
                "steps_undone": each.steps_undone,
                "is_open": each.is_open,
            }
            for each in reader.read_incidents(self.folder).incidents
        )

    def plot(self) -> Any:
        """Return a matplotlib figure of the learning curves, with incidents as dashed lines; needs `plots`."""
        metrics, evaluations, incidents = self.metrics, self.evaluations, self.incidents
        curves = [
            (name, title)
            for name, title in CURVES
            if name in evaluations or (name in metrics and not is_rounding(enumerate(metrics[name])))
        ]
        if not curves:
            raise UserError(f"{self.folder}: expected a run with at least one step, it has none yet")
        figure = _new_figure((9, 2.2 * len(curves)))
        axes = figure.subplots(len(curves), sharex=True, squeeze=False)[:, 0]
        for axis, (name, title) in zip(axes, curves, strict=True):
            table = metrics if name in metrics else evaluations
            values = [float("nan") if value is None else value for value in table[name]]
            axis.plot(table["step"], values, color=CURVE_COLOUR, marker="o" if table is evaluations else None)
            if f"{name}_low" in table:
                low, high = (_numbers(table[f"{name}_{end}"]) for end in ("low", "high"))
                axis.fill_between(table["step"], low, high, color=CURVE_COLOUR, alpha=0.2)
            for step in incidents["step"] if len(incidents) else ():
                axis.axvline(step, color=MARK_COLOUR, linestyle="--", linewidth=1)
            axis.set_title(title, loc="left", fontsize=10)
            axis.grid(alpha=0.3)
        axes[-1].set_xlabel("step")
        return figure

    def _metric_lines(self) -> Iterator[reader.MetricLine]:
        path = RunFolder(self.folder).metrics_file
        if path.exists():
            yield from self._decoded(RELATIVE.metrics_file, lines_between(path), reader.MetricLine)

    def _decoded(self, name: Path, lines: Iterable[tuple[int, bytes]], kind: Any) -> Iterator[dict[str, Any]]:
        """Decode (offset, line) of a file; a damaged line becomes a problem."""
        decoder = msgspec.json.Decoder(kind)
        for offset, line in lines:
            try:
                yield msgspec.to_builtins(decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                problem = f"{name}, line at byte {offset}: {error}"
                if problem not in self.problems:
                    self.problems.append(problem)

    def __repr__(self) -> str:
        try:
            status = self.status
        except KintsugiError as error:
            return f"RecordedRun('{self.folder}': {error})"
        return (
            f"RecordedRun('{self.folder}', {status.state.value}, step {status.step} of {status.total_steps})"
        )


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def load(folder: str | os.PathLike[str]) -> RecordedRun:
    """Open a run by its folder, or by its name in `runs/`; UserError if there is none."""
    return RecordedRun(reader.find_run(os.fspath(folder)).resolve())


def _new_figure(size: tuple[float, float]) -> Any:
    """Return a figure that a notebook shows also where pyplot was not imported."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("plot needs matplotlib: `pip install 'kintsugi[plots]'`") from error

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            image = BytesIO()
            self.savefig(image, format="png", dpi=100)
            return image.getvalue()

    return ShownFigure(figsize=size, layout="constrained")
