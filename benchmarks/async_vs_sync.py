"""Asynchronous against synchronous training: what is learned, and how fast; both by the same program.

    python benchmarks/async_vs_sync.py [--part learning|tail|latency] [--seeds 3] [--folder F] [--json FILE]

Both sides have the same processes on the same cores, the same recipe, starting weights, number of steps and of samples
in each, and differ in `asynchrony.max_staleness` only. Runs of both alternate. The layout (servers, slots, ranks) is
the one with which the *synchronous* side was fastest, of all that were tried beforehand.

    learning   recipes/grpo_arithmetic.yaml from the same SFT checkpoint: held-out accuracy after the same tokens
    tail       answers whose lengths have a long tail (`async_workloads.py`): trained tokens per second
    latency    answers of even length and a judge who takes as long as generating a batch does: the same

Time counts from the first ticket to the last commit, so it includes the filling of the pipeline. The ideal is a step in
which every core always computes, from the stage times of a synchronous run without latency:
max(T_gen, T_train, (T_gen × cores generating + T_train × cores training) / cores). It has no room for recomputing
log-probabilities, nor for what control costs while everything overlaps; on the other hand it does not count that
servers have more rows in each decoding step when batches overlap.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from benchmarks.async_workloads import (
    ROOT,
    Layout,
    Task,
    addition_model,
    countdown_model,
    kintsugi,
    recipe,
    rows,
    write_recipe,
    write_rows,
)
from kintsugi.telemetry.events import Transition, read_events

PARTS = ("learning", "tail", "latency")
LAYOUTS = (Layout(2, 2, 128), Layout(1, 1, 256), Layout(2, 1, 128))
"""Tried for the synchronous side; two cores. Slots that are not used cost nothing."""
BATCH_SIZE = 8
GROUP_SIZES: dict[Task, int] = {"tail": 8, "even": 4}
"""With 4, training takes half as long as generating, or less."""
TUNING_STEPS = 8
LEARNING_PROBLEMS = 1500
"""Held out: a point is more than their sampling error."""
GOALS = {"learning": -2.0, "tail": 1.15, "latency": 1.5}
IDEAL_GOAL = 0.85


@dataclass(frozen=True)
class Measured:
    """One run, from its first ticket to its last commit."""

    seconds: float
    steps: int
    tokens: float
    """Learned from."""
    generate_s: float
    """Median over the steps, the first ones left out: waiting for a batch."""
    train_s: float
    """The same: training, commit, publication."""
    staleness: dict[str, Any]
    idle_share: dict[str, float]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def measured(run_dir: Path) -> Measured:
    steps = list(step_lines(run_dir))
    began = next(
        record.stamp.time
        for record in read_events(run_dir, process="master-0")
        if isinstance(record.event, Transition) and record.event.after == "collecting"
    )
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    assert summary["outcome"] == "finished", f"{run_dir}: {summary['outcome']}"
    settled = steps[2:] or steps
    return Measured(
        seconds=steps[-1]["time"] - began,
        steps=len(steps),
        tokens=sum(step["loss_tokens"] for step in steps),
        generate_s=statistics.median(stage(step, "generate", "reward", "data") for step in settled),
        train_s=statistics.median(stage(step, "train", "commit", "weights") for step in settled),
        staleness=summary.get("staleness") or {},
        idle_share=summary.get("idle_share") or {},
    )


def step_lines(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Figures of every step; evaluations are left out."""
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        figures = json.loads(line)
        if "loss_tokens" in figures:
            yield figures


def stage(step: dict[str, Any], *names: str) -> float:
    return float(sum(step.get(f"timing/{name}", 0.0) for name in names))


def ideal_step_s(layout: Layout, *, generate_s: float, train_s: float, cores: int) -> float:
    """Seconds of a step in which no process waits for another.

    >>> ideal_step_s(Layout(2, 2, 64), generate_s=1.0, train_s=0.5, cores=2)
    1.5
    >>> ideal_step_s(Layout(1, 1, 64), generate_s=1.0, train_s=0.5, cores=2)
    1.0
    """
    generating, training = min(layout.servers, cores), min(layout.ranks, cores)
    return max(generate_s, train_s, (generate_s * generating + train_s * training) / cores)


@dataclass(frozen=True)
class Bench:
    """Where runs go, and what they have in common."""

    folder: Path
    seeds: int
    steps: int
    max_staleness: int

    def speed_run(
        self,
        name: str,
        task: Task,
        layout: Layout,
        *,
        steps: int,
        seed: int,
        max_staleness: int,
        latency_s: float,
    ) -> Measured:
        data = write_rows(self.folder / f"{name}.jsonl", rows(task, latency_s=latency_s))
        content = recipe(
            layout, name=name, model={"path": str(countdown_model(self.folder))}, data=data,
            reward="judged" if latency_s else "exact", steps=steps, batch_size=BATCH_SIZE, group_size=GROUP_SIZES[task],
            max_staleness=max_staleness, seed=seed,
        )  # fmt: skip
        path = write_recipe(self.folder / f"{name}.yaml", content)
        return measured(self.train(name, path))

    def train(self, name: str, path: Path, *overrides: str) -> Path:
        """The folder of the run of this name, which is run unless it was before."""
        run_dir = self.folder / name
        if not (run_dir / "summary.json").exists():
            kintsugi("train", path, *overrides, f"run_dir={run_dir}")
        return run_dir

    def tune(self, task: Task, *, latency_s: float = 0.0) -> tuple[Layout, Measured]:
        """The layout with which a synchronous run is fastest."""
        tried: list[tuple[Layout, Measured]] = []
        for number, layout in enumerate(LAYOUTS):
            run = self.speed_run(
                f"{task}-tuning-{number}", task, layout,
                steps=TUNING_STEPS, seed=0, max_staleness=0, latency_s=latency_s,
            )  # fmt: skip
            tried.append((layout, run))
            say(
                f"{task}: tuning sync: {layout}: {run.tokens_per_s:,.0f} tokens/s "
                f"(generate {run.generate_s:.3f} s, train {run.train_s:.3f} s)"
            )
        return max(tried, key=lambda each: each[1].tokens_per_s)

    def pairs(self, task: Task, layout: Layout, *, latency_s: float = 0.0) -> list[tuple[Measured, Measured]]:
        """(sync, async) for every seed; who goes first alternates."""
        found = []
        for seed in range(self.seeds):
            sides: dict[int, Measured] = {}
            for bound in (0, self.max_staleness)[:: -1 if seed % 2 else 1]:
                mode = "async" if bound else "sync"
                name = f"{'latency' if latency_s else task}-{mode}-{seed}"
                sides[bound] = run = self.speed_run(
                    name, task, layout, steps=self.steps, seed=seed, max_staleness=bound, latency_s=latency_s
                )
                say(
                    f"{name}: {run.seconds:.1f} s, {run.tokens:,.0f} tokens, {run.tokens_per_s:,.0f} tokens/s"
                )
            found.append((sides[0], sides[self.max_staleness]))
        return found


def tail(bench: Bench) -> dict[str, Any]:
    layout, _ = bench.tune("tail")
    return speed_row("tail", layout, bench.pairs("tail", layout))


def latency(bench: Bench) -> dict[str, Any]:
    """The layout is tuned without the judge, whose latency is then what generating takes on it."""
    layout, without = bench.tune("even")
    pairs = bench.pairs("even", layout, latency_s=without.generate_s)
    cores = len(os.sched_getaffinity(0))
    ideal_s = ideal_step_s(layout, generate_s=without.generate_s, train_s=without.train_s, cores=cores)
    step_s = statistics.fmean(fast.seconds / fast.steps for _, fast in pairs)
    return {
        **speed_row("latency", layout, pairs),
        "latency_s": round(without.generate_s, 4),
        "stage_s": {"generate": round(without.generate_s, 4), "train": round(without.train_s, 4)},
        "train_over_generate": round(without.train_s / without.generate_s, 3),
        "ideal_step_s": round(ideal_s, 4),
        "async_step_s": round(step_s, 4),
        "share_of_ideal": round(ideal_s / step_s, 3),
        "share_of_ideal_goal": IDEAL_GOAL,
    }


def speed_row(part: str, layout: Layout, pairs: Sequence[tuple[Measured, Measured]]) -> dict[str, Any]:
    ratios = [fast.tokens_per_s / slow.tokens_per_s for slow, fast in pairs]
    return {
        "part": part,
        "layout": asdict(layout),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ratio": round(statistics.fmean(ratios), 3),
        "goal": GOALS[part],
        "sync": [asdict(slow) for slow, _ in pairs],
        "async": [asdict(fast) for _, fast in pairs],
    }


def learning(bench: Bench) -> dict[str, Any]:
    model = addition_model(bench.folder, num_eval=LEARNING_PROBLEMS)
    path = ROOT / "kintsugi" / "recipes" / "grpo_arithmetic.yaml"
    found: dict[str, list[dict[str, Any]]] = {"sync": [], "async": []}
    for seed in range(bench.seeds):
        sides = {"sync": 0, "async": bench.max_staleness}
        for mode in list(sides)[:: -1 if seed % 2 else 1]:
            run_dir = bench.train(
                f"learning-{mode}-{seed}", path, "warmup=null", "model.new=null", f"model.path={model}",
                f"data.num_eval={LEARNING_PROBLEMS}", "eval.num_samples=0", "checkpoint.every=0",
                "deterministic=false", f"seed={seed}", f"asynchrony.max_staleness={sides[mode]}",
            )  # fmt: skip
            summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
            run = measured(run_dir)
            accuracy = [(each["step"], each["eval/accuracy"]) for each in summary["evaluations"]]
            found[mode].append({"seed": seed, "accuracy": accuracy, **asdict(run)})
            say(
                f"learning: {mode}, seed {seed}: {accuracy[0][1]:.1%} → {accuracy[-1][1]:.1%} "
                f"in {run.seconds:.1f} s, {run.tokens:,.0f} tokens, staleness {run.staleness}"
            )
    means = {mode: statistics.fmean(run["accuracy"][-1][1] for run in found[mode]) * 100 for mode in found}
    return {
        "part": "learning",
        "max_staleness": bench.max_staleness,
        "mean_accuracy": {mode: round(mean, 2) for mode, mean in means.items()},
        "difference": round(means["async"] - means["sync"], 2),
        "goal": GOALS["learning"],
        **found,
    }


def say(line: str) -> None:
    print(line, flush=True)


def describe(row: dict[str, Any]) -> str:
    if row["part"] == "learning":
        means = row["mean_accuracy"]
        return (
            f"learning: mean accuracy sync {means['sync']:.1f} %, async {means['async']:.1f} %: "
            f"{row['difference']:+.1f} points (goal ≥ {row['goal']:g})"
        )
    text = f"{row['part']}: async {row['ratio']:.2f} × sync {row['ratios']} (goal ≥ {row['goal']:g})"
    if "share_of_ideal" in row:
        text += (
            f"; step {row['async_step_s']:.3f} s, ideal {row['ideal_step_s']:.3f} s: {row['share_of_ideal']:.0%} of it "
            f"(goal ≥ {row['share_of_ideal_goal']:.0%}); T_train / T_gen {row['train_over_generate']:.2f}"
        )
    return text


@contextmanager
def folder_of(given: Path | None) -> Iterator[Path]:
    """The one that was named stays, with its runs; another is deleted."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="async-vs-sync-") as folder:
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, action="append", help="all of them if none is named")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="of a run for speed")
    parser.add_argument("--max-staleness", type=int, default=4, help="of the asynchronous side")
    parser.add_argument("--folder", type=Path, help="where runs are kept; those that are there already count")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    parts = {"learning": learning, "tail": tail, "latency": latency}
    with folder_of(arguments.folder) as folder:
        bench = Bench(folder, arguments.seeds, arguments.steps, arguments.max_staleness)
        found = [parts[part](bench) for part in arguments.part or PARTS]
    for row in found:
        say(describe(row))
    if arguments.json:
        cores = len(os.sched_getaffinity(0))
        host = f"{platform.system()} {platform.machine()}, {cores} cores, Python {platform.python_version()}"
        report = {"host": host, "date": datetime.now(UTC).isoformat(timespec="seconds"), "rows": found}
        arguments.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
