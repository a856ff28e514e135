"""Draws how speed grows with batch and context, from what `generation.py --part growth --json F` wrote.

    python benchmarks/plot_generation.py F [F …] [--out docs/generation.svg]

One panel for each model and host: tokens per second of all sequences together by their number, a line per context.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

TITLES = {
    "tiny": "1.3 M parameters",
    "135m": "SmolLM2-135M shape",
    "0.6b": "Qwen3-0.6B shape",
    "1.5b": "Qwen2.5-1.5B shape",
}
SHORTEST, LONGEST = "#9ecae1", "#08306b"
"""Longer contexts are darker."""
INK = "#333333"

Panel = dict[int, dict[int, float]]
"""Context → batch → tokens per second."""


def panels(paths: Sequence[Path]) -> dict[str, Panel]:
    """By title; rows of later files replace earlier ones."""
    found: dict[str, Panel] = {}
    for path in paths:
        report = json.loads(path.read_text(encoding="utf-8"))
        device = next((name for name in ("H200", "H100", "A100") if name in report["host"]), "one CPU core")
        for row in report["rows"]:
            if row["part"] == "growth":
                case: dict[str, Any] = row["case"]
                title = f"{TITLES[case['model']]}, {device}"
                found.setdefault(title, {}).setdefault(case["context"], {})[case["batch"]] = row["ours"]
    return found


def draw(axes: Axes, panel: Panel, *, title: str) -> None:
    contexts = sorted(panel)
    shades = mpl.colors.LinearSegmentedColormap.from_list("contexts", [SHORTEST, LONGEST])
    for index, context in enumerate(contexts):
        speeds = sorted(panel[context].items())
        color = shades(index / max(len(contexts) - 1, 1))
        axes.plot(*zip(*speeds, strict=True), color=color, marker="o", markersize=4, linewidth=1.8)
    label_ends(axes, panel)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    batches = sorted({batch for speeds in panel.values() for batch in speeds})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlim(batches[0] / 1.3, batches[-1] * 2.6)
    axes.set_xlabel("sequences at once", color=INK)
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8, which="both")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def label_ends(axes: Axes, panel: Panel, *, gap: float = 1.22) -> None:
    """Each line's context beside its last point, moved apart where two would lie on each other."""
    ends = sorted((max(speeds.items()), context) for context, speeds in panel.items())
    lowest: dict[int, float] = {}
    for (batch, speed), context in sorted(ends, key=lambda end: end[0][1]):
        height = max(speed, lowest.get(batch, 0.0) * gap)
        lowest[batch] = height
        axes.annotate(
            f"{context:,} context",
            (batch, height),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
            color=INK,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("docs/generation.svg"))
    arguments = parser.parse_args()
    found = panels(arguments.reports)
    if not found:
        parser.error("expected rows of the part `growth` in one of the files, found none")
    mpl.rcParams["svg.hashsalt"] = "kintsugi"  # The same figures, the same file.
    figure, every = plt.subplots(
        1, len(found), figsize=(0.6 + 4.4 * len(found), 3.6), squeeze=False, layout="constrained"
    )
    for axes, (title, panel) in zip(every[0], found.items(), strict=True):
        draw(axes, panel, title=title)
    every[0][0].set_ylabel("tokens per second, all sequences", color=INK)
    figure.savefig(
        arguments.out, metadata={"Date": None} if arguments.out.suffix == ".svg" else None, dpi=150
    )


if __name__ == "__main__":
    main()
