"""Where the gain of asynchronous training goes on larger clusters: a model that is fed with traces of real runs.

    python benchmarks/async_vs_sync.py --part tail --part latency --folder F
    python benchmarks/async_model.py F [--svg docs/async.svg] [--json FILE]

What things cost is fitted to the *synchronous* runs in F: seconds to collect and to train each step, by the lengths of
the samples in it. The model then has to tell how long the *asynchronous* runs of F took, of which it has seen nothing
but how fast the machine was during their synchronous twins; the table gives what it said and what was measured. Last,
it is asked about clusters that we do not have, with the same lengths and costs, a core of this machine for a device.
Synchronous ones use every device for generating, then every device for training. Asynchronous ones divide them, in the
best of several proportions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from benchmarks.async_simulation import Cluster, Costs, Groups, Outcome, Run, Span, simulate
from benchmarks.async_vs_sync import stage, step_lines
from kintsugi.config.recipe import load_config
from kintsugi.config.schema import Config

DEVICES = (2, 16, 64, 512)
GROUPS_PER_DEVICE = 16
FIXED_GROUPS = 512
"""A batch that does not grow with the cluster: 4,096 samples, eight for each of 512 devices."""
SPLITS = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
"""Shares of the devices that generate."""
STEPS = 12
MAX_STALENESS = 4
FILLING, DRAINING = 4, MAX_STALENESS
"""Steps at either end of a run that are not counted: what is wanted is how it goes on for hours."""
SKIPPED_STEPS = 2
"""First answers are slow."""
CAPACITY = 64
"""Groups that one rollout worker runs at once."""
INK, COLORS = "#333333", ("#08519c", "#9ecae1", "#fd8d3c", "#eeeeee")


@dataclass(frozen=True)
class Trace:
    """One run as it was measured."""

    name: str
    config: Config
    steps: tuple[tuple[tuple[int, ...], ...], ...]
    """Tokens of every sample of every group, by step."""
    collect_s: tuple[float, ...]
    train_s: tuple[float, ...]
    publish_s: float
    tokens: tuple[float, ...]
    """Trained, prompts included."""
    step_s: float
    """Mean over the steps after the first ones."""

    judge_s: float

    @property
    def workload(self) -> str:
        return self.name.partition("-")[0]

    @property
    def groups(self) -> Groups:
        return tuple(itertools.chain.from_iterable(self.steps))

    @property
    def cluster(self) -> Cluster:
        config = self.config
        return Cluster(
            servers=config.generation.servers,
            ranks=config.actor.workers,
            slots=config.generation.slots,
            cores=2,
            most_groups=CAPACITY * config.rollout.workers,
        )

    @property
    def prompt_tokens(self) -> int:
        samples = sum(len(group) for group in self.groups)
        return round((sum(self.tokens) - sum(map(sum, self.groups))) / samples)


def read_trace(run_dir: Path) -> Trace:
    """A character is a token in these tasks, and the end is one more."""
    found: dict[int, dict[str, list[int]]] = {}
    for line in (run_dir / "samples.jsonl").read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        group = found.setdefault(sample["step"], {}).setdefault(sample["ticket"], [])
        group.append(len(sample["completion"]) + (sample["finish"] == "eos"))
    lines = list(step_lines(run_dir))
    config = load_config(run_dir / "config.yaml")
    with Path(config.data.source).open(encoding="utf-8") as rows:
        judge_s = float(json.loads(next(rows))["latency_s"])
    return Trace(
        name=run_dir.name,
        config=config,
        judge_s=judge_s,
        steps=tuple(tuple(map(tuple, found[line["step"]].values())) for line in lines),
        collect_s=tuple(stage(line, "generate", "reward", "data") for line in lines),
        train_s=tuple(stage(line, "train") for line in lines),
        publish_s=statistics.median(stage(line, "commit", "weights") for line in lines[SKIPPED_STEPS:]),
        tokens=tuple(line["tokens"] for line in lines),
        step_s=(lines[-1]["time"] - lines[SKIPPED_STEPS - 1]["time"]) / (len(lines) - SKIPPED_STEPS),
    )


def fit(traces: Sequence[Trace]) -> dict[str, Costs]:
    """From synchronous runs, by workload: what is collected and trained in a step is known to the token there.

    A step's rows do not depend on the costs, so collecting takes decode_s × steps + decode_row_s × rows + group_s ×
    groups + the judge. Decoding is fitted to the long tails, where the number of rows varies; training to each
    workload, because how much of a batch is padding differs.
    """
    collect = [line for trace in traces if trace.workload == "tail" for line in _collected(trace)]
    decode_s, decode_row_s, group_s = _least_squares(np.array(collect))
    found = {}
    for workload in sorted({trace.workload for trace in traces}):
        own = [trace for trace in traces if trace.workload == workload]
        train = [
            (1.0, trace.tokens[number] / trace.cluster.ranks, trace.train_s[number])
            for trace in own
            for number in range(SKIPPED_STEPS, len(trace.steps))
        ]
        train_s, train_token_s = _least_squares(np.array(train))
        publish_s = statistics.fmean(trace.publish_s for trace in own)
        found[workload] = Costs(
            decode_s, decode_row_s, group_s, train_s, train_token_s, publish_s, own[0].judge_s
        )
    return found


def _collected(trace: Trace) -> Iterator[tuple[float, float, float, float]]:
    """(decoding steps, rows in them, groups, seconds without the judge) for each step of a run."""
    nothing = Costs(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    cluster = replace(trace.cluster, cores=None)
    for groups, seconds in list(zip(trace.steps, trace.collect_s, strict=True))[SKIPPED_STEPS:]:
        run = Run(len(groups), trace.prompt_tokens, 0, 1)
        num_steps = simulate(replace(nothing, decode_s=1.0), cluster, run, groups).whole.seconds
        num_rows = simulate(replace(nothing, decode_row_s=1.0), cluster, run, groups).whole.seconds
        yield num_steps, num_rows, float(len(groups)), seconds - trace.judge_s


def _least_squares(table: NDArray[np.float64]) -> list[float]:
    """The last column by the others, in relative error, which steps that were disturbed weigh less in; nothing costs
    less than nothing."""
    terms, target = table[:, :-1] / table[:, -1:], np.ones(len(table))
    best: tuple[float, list[float]] | None = None
    for size in range(1, terms.shape[1] + 1):
        for used in itertools.combinations(range(terms.shape[1]), size):
            solution, *_ = np.linalg.lstsq(terms[:, used], target, rcond=None)
            error = float(np.square(terms[:, used] @ solution - target).sum())
            if (solution >= 0).all() and (best is None or error < best[0]):
                values = dict(zip(used, solution.tolist(), strict=True))
                best = error, [values.get(index, 0.0) for index in range(terms.shape[1])]
    assert best is not None, "no cost of any single term would be positive"
    return best[1]


def predict(costs: Costs, trace: Trace, *, groups: Groups) -> float:
    """Seconds of a step, the first ones left out."""
    size, num_steps = trace.config.algorithm.batch_size, len(trace.steps)
    run = Run(size, trace.prompt_tokens, trace.config.asynchrony.max_staleness, num_steps)
    told = simulate(costs, trace.cluster, run, groups)
    return told.steps(SKIPPED_STEPS, num_steps).seconds / (num_steps - SKIPPED_STEPS)


def at_speed_of(costs: Costs, twin: Trace) -> Costs:
    """The same costs on a machine that is as fast as it was during this synchronous run; others use it too."""
    told_s = predict(costs, twin, groups=twin.groups) - costs.judge_s
    factor = (twin.step_s - costs.judge_s) / told_s
    scaled = {name: value * factor for name, value in asdict(costs).items() if name != "judge_s"}
    return replace(costs, **scaled)


def validate(costs: Mapping[str, Costs], traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """Every asynchronous run, as the model tells it from its synchronous twin: the lengths, and the machine's speed."""
    twins = {trace.name: trace for trace in traces}
    checked = []
    for trace in traces:
        if trace.config.asynchrony.max_staleness:
            twin = twins[trace.name.replace("async", "sync")]
            told_s = predict(at_speed_of(costs[trace.workload], twin), trace, groups=twin.groups)
            checked.append(
                {
                    "run": trace.name,
                    "step_s": round(trace.step_s, 4),
                    "model_s": round(told_s, 4),
                    "error": round(told_s / trace.step_s - 1, 3),
                }
            )
    return checked


def scale(costs: Costs, trace: Trace) -> list[dict[str, Any]]:
    """The traced lengths, in another order, on other numbers of devices."""
    found = []
    slots = trace.config.generation.slots
    for devices, batch in itertools.product(DEVICES, ("fixed", "per device")):
        size = FIXED_GROUPS if batch == "fixed" else GROUPS_PER_DEVICE * devices
        run = Run(size, trace.prompt_tokens, 0, STEPS)
        groups = random.Random(0).choices(trace.groups, k=size * STEPS)
        sync = _steady(simulate(costs, Cluster(devices, devices, slots), run, groups))
        run = replace(run, max_staleness=MAX_STALENESS)
        servers = sorted({min(max(round(devices * share), 1), devices - 1) for share in SPLITS})
        split = {k: _steady(simulate(costs, Cluster(k, devices - k, slots), run, groups)) for k in servers}
        best = min(split, key=lambda k: split[k].seconds)
        found.append(
            {
                "devices": devices,
                "batch": batch,
                "groups": size,
                "servers": best,
                "ratio": round(sync.seconds / split[best].seconds, 3),
                "sync": _shares(sync, devices=devices),
                "async": _shares(split[best], devices=devices),
            }
        )
    return found


def _steady(outcome: Outcome) -> Span:
    return outcome.steps(FILLING, STEPS - DRAINING)


def _shares(span: Span, *, devices: int) -> dict[str, float]:
    """Of all device time."""
    total = span.seconds * devices
    used = {"rows": span.row_s, "steps": span.base_s, "training": span.train_s}
    shares = {name: round(seconds / total, 3) for name, seconds in used.items()}
    step_s = span.seconds / (STEPS - FILLING - DRAINING)
    return {"step_s": round(step_s, 4), **shares, "idle": round(1 - sum(shares.values()), 3)}


def draw(path: Path, scaled: Sequence[dict[str, Any]]) -> None:
    mpl.rcParams["svg.hashsalt"] = "kintsugi"  # The same figures, the same file.
    figure, (gain, *shares) = plt.subplots(1, 3, figsize=(12.0, 3.6), layout="constrained")
    for batch, color in (("fixed", "#08519c"), ("per device", "#fd8d3c")):
        lines = [row for row in scaled if row["batch"] == batch]
        label = f"{FIXED_GROUPS} groups" if batch == "fixed" else f"{GROUPS_PER_DEVICE} groups per device"
        gain.plot(
            [row["devices"] for row in lines],
            [row["ratio"] for row in lines],
            color=color,
            marker="o",
            label=label,
        )
    gain.set_xscale("log", base=2)
    gain.set_xticks(DEVICES, list(map(str, DEVICES)))
    gain.axhline(1.0, color="#bbbbbb", linewidth=0.8)
    gain.set_ylim(bottom=0.0)
    gain.set_xlabel("devices", color=INK)
    gain.legend(frameon=False, fontsize=8)
    _title(gain, "times as fast as synchronous")
    for axes, batch in zip(shares, ("fixed", "per device"), strict=True):
        _draw_shares(axes, [row for row in scaled if row["batch"] == batch])
        _title(axes, f"device time, batch {batch}")
    shares[0].legend(frameon=False, fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_shares(axes: Axes, lines: Sequence[dict[str, Any]]) -> None:
    """Two bars for each number of devices."""
    names = {
        "rows": "decoding, by rows",
        "steps": "decoding, by steps",
        "training": "training",
        "idle": "idle",
    }
    places = [2.5 * index + side for index in range(len(lines)) for side in (0, 1)]
    bars = [line[side] for line in lines for side in ("sync", "async")]
    bottom = np.zeros(len(bars))
    for (name, label), color in zip(names.items(), COLORS, strict=True):
        heights = np.array([bar[name] for bar in bars])
        axes.bar(places, heights, bottom=bottom, color=color, width=0.9, label=label)
        bottom += heights
    labels = [f"{side}\n{line['devices']}" for line in lines for side in ("sync", "async")]
    axes.set_xticks(places, labels)


def _title(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.tick_params(colors=INK, labelsize=8, which="both")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of async_vs_sync.py")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = ("tail-sync-*", "tail-async-*", "latency-sync-*", "latency-async-*")
    traces = [
        read_trace(path) for name in names for path in sorted(arguments.folder.glob(name)) if path.is_dir()
    ]
    fitted = [trace for trace in traces if not trace.config.asynchrony.max_staleness]
    if not any(trace.workload == "tail" for trace in fitted):
        parser.error(f"expected runs named tail-sync-0 … in {arguments.folder}, found none")
    costs = fit(fitted)
    for workload, each in costs.items():
        print(workload, ", ".join(f"{name} {value * 1e3:.4g} ms" for name, value in asdict(each).items()))
    checked = validate(costs, traces)
    for row in checked:
        print(
            f"{row['run']:16} measured {row['step_s']:.3f} s, model {row['model_s']:.3f} s: {row['error']:+.1%}"
        )
    scaled = scale(costs["tail"], fitted[0])
    for row in scaled:
        print(
            f"{row['devices']:4} devices, {row['groups']:5} groups: {row['ratio']:.2f} × ({row['servers']} generate); "
            f"sync {row['sync']}; async {row['async']}"
        )
    if arguments.svg:
        draw(arguments.svg, scaled)
    if arguments.json:
        report = {
            "costs": {name: asdict(each) for name, each in costs.items()},
            "checked": checked,
            "scaled": scaled,
        }
        arguments.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
