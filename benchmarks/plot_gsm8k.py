"""Draws accuracy on held-out problems against minutes of training, of our runs and of TRL's.

    python benchmarks/plot_gsm8k.py --ours RUN [RUN …] --trl LOG [LOG …] [--out docs/gsm8k.svg]

RUN is a run folder, LOG the log.jsonl of `gsm8k_trl.py`. Evaluation and saving are not counted as minutes of training.
The shaded range is the 95 % confidence interval of each point. The points are printed too. A series of TRL that was not
evaluated before training begins at our first point: the weights are the same.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

OURS, TRL, INK = "#08519c", "#d94801", "#333333"


class Point(NamedTuple):
    minutes: float
    step: int
    accuracy: float
    problems: int


class Series(NamedTuple):
    name: str
    color: str
    points: list[Point]


def our_series(run_dir: Path) -> Series:
    """From the metrics of a run: minutes are the sum of its steps."""
    seconds, points = 0.0, []
    for line in _lines(run_dir / "metrics.jsonl"):
        if "timing/step" in line:
            seconds += line["timing/step"]
        if "eval/accuracy" in line:
            points.append(
                Point(seconds / 60, int(line["step"]), line["eval/accuracy"], int(line["eval/problems"]))
            )
    return Series("Kintsugi", OURS, points)


def trl_series(path: Path) -> Series:
    lines = _lines(path)
    points = [
        Point(line["train_s"] / 60, line["step"], line["accuracy"], line["problems"])
        for line in lines
        if "accuracy" in line
    ]
    return Series(lines[0]["what"], TRL, points)


def from_common_start(theirs: Series, ours: Series) -> Series:
    """Begin at our evaluation before training, if a series has none of its own: the weights are the same."""
    if theirs.points[0].step == 0 or ours.points[0].step != 0:
        return theirs
    return theirs._replace(points=[ours.points[0], *theirs.points])


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def interval(point: Point) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z, n, p = 1.96, point.problems, point.accuracy
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return middle - half, middle + half


def draw(found: Sequence[Series], *, out: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.2))
    shown: set[str] = set()
    for series in found:
        minutes = [point.minutes for point in series.points]
        accuracy = [100 * point.accuracy for point in series.points]
        label = series.name if series.name not in shown else None
        shown.add(series.name)
        axes.plot(
            minutes, accuracy, color=series.color, marker="o", markersize=3.5, linewidth=1.6, label=label
        )
        low, high = zip(*(interval(point) for point in series.points), strict=True)
        axes.fill_between(
            minutes,
            [100 * each for each in low],
            [100 * each for each in high],
            color=series.color,
            alpha=0.1,
        )
    axes.set_xlabel("minutes of training", color=INK)
    axes.set_ylabel("problems answered correctly, %", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ours", type=Path, nargs="*", default=[])
    parser.add_argument("--trl", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=Path("docs/gsm8k.svg"))
    arguments = parser.parse_args()
    ours = list(map(our_series, arguments.ours))
    theirs = list(map(trl_series, arguments.trl))
    found = [*ours, *(from_common_start(each, ours[0]) if ours else each for each in theirs)]
    for series in found:
        for point in series.points:
            print(
                f"{series.name:<24} step {point.step:>4}  {point.minutes:>6.2f} min  {100 * point.accuracy:.1f} %"
            )
    draw([series for series in found if series.points], out=arguments.out)


if __name__ == "__main__":
    main()
