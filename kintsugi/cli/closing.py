"""Closing table of a run, and commands to try next."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kintsugi.cli.progress import duration, seconds_text
from kintsugi.config.schema import Config
from kintsugi.config.stages import has_servers, stages
from kintsugi.learning_health.follower import learning_lines
from kintsugi.run_folder import reader
from kintsugi.run_folder.layout import RELATIVE
from kintsugi.run_folder.summary import Summary
from kintsugi.runtime.printable import printable
from kintsugi.telemetry.eval_stats import wilson_interval

ROLLOUT = "rollout"
"""Algorithm of a run that samples and scores only."""


def cell(text: str) -> Text:
    """Return a text for a table in which nothing is markup and no character controls the terminal."""
    return Text(printable(text))


def print_closing(console: Console, summary: Summary, *, config: Config, folder: Path) -> None:
    """Print the results of a run and commands to try next."""
    console.print(closing_table(summary, config=config, folder=folder))
    if summary.incidents:
        see = f"{program()} incidents {folder}"
        text = printable(f"incidents: {incidents_text(summary)}; details: {see}")
        console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)
    for line in learning_lines(folder):
        text = printable(f"learning: {line}; details: {program()} diagnose {folder} --learning")
        console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)
    console.print("try next:", highlight=False)
    for command in suggestions(summary, config=config, folder=folder):
        console.print(printable(f"  {command}"), highlight=False, markup=False, soft_wrap=True)


def closing_table(summary: Summary, *, config: Config, folder: Path) -> Table:
    """Table of the results of a run."""
    table = Table(
        title=cell(f"{summary.name}: {summary.outcome}"),
        show_header=False,
        title_justify="left",
        min_width=60,
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    is_rollout = summary.algorithm == ROLLOUT
    for name, value in (_rollout_rows if is_rollout else _training_rows)(summary, config):
        table.add_row(name, cell(value))
    for end, reasons in (
        ("filtered", summary.samples_filtered),
        ("expired", summary.samples_expired),
        ("quarantined", summary.samples_quarantined),
    ):
        if reasons:
            table.add_row(
                f"samples {end}", cell("\n".join(f"{n:,}: {reason}" for reason, n in reasons.items()))
            )
    if summary.tokens_generated:
        table.add_row("tokens generated", f"{summary.tokens_generated:,}")
    if summary.staleness.max and not is_rollout:
        stale = summary.staleness
        table.add_row("staleness", f"{stale.mean:.1f} steps, at most {stale.max}")
    spent = sorted(summary.timing.items(), key=lambda item: -item[1])
    table.add_row("time per stage", cell("\n".join(f"{name} {seconds:.1f} s" for name, seconds in spent)))
    if summary.weights_sha256 and summary.weight_version >= 0 and not is_rollout:
        table.add_row("weights", f"version {summary.weight_version}, sha256 {summary.weights_sha256[:16]}…")
    table.add_row("run folder", cell(str(folder)))
    return table


def _rollout_rows(summary: Summary, config: Config) -> Iterator[tuple[str, str]]:
    """Rows of a run that sampled and scored only."""
    yield "samples scored", f"{summary.samples_trained:,} in {duration(summary.wall_s)}"
    if summary.reward_first is not None and summary.reward_last is not None and summary.steps > 1:
        rewards = f"{summary.reward_first:.3f}, {summary.reward_last:.3f}"
        yield "mean reward, first and last batch", rewards
    elif summary.reward_last is not None:
        yield "mean reward", f"{summary.reward_last:.3f}"
    if summary.eval_accuracy_after is not None:
        yield "held-out accuracy", _measured(summary, config, index=-1)


def _training_rows(summary: Summary, config: Config) -> Iterator[tuple[str, str]]:
    what = "accuracy" if has_servers(config) else "pairs ranked right"
    yield f"held-out {what} before", _measured(summary, config, index=0)
    yield f"held-out {what} after", _measured(summary, config, index=-1)
    if summary.reward_first is not None and summary.reward_last is not None:
        yield "reward, first and last step", f"{summary.reward_first:.3f} → {summary.reward_last:.3f}"
    if summary.loss_first is not None and summary.loss_last is not None:
        yield "loss, first and last step", f"{summary.loss_first:.3f} → {summary.loss_last:.3f}"
    yield "steps", f"{summary.steps} in {duration(summary.wall_s)}"
    yield "samples trained", f"{summary.samples_trained:,} ({summary.tokens_trained:,} tokens)"


def _measured(summary: Summary, config: Config, *, index: int) -> str:
    """Text of the first or the last evaluation. What was not measured has no number."""
    accuracy = summary.eval_accuracy_after if index else summary.eval_accuracy_before
    if not summary.evaluations:
        of = config.data.num_eval
        return accuracy_text(accuracy, count=of, of="problems" if has_servers(config) else "pairs")
    found = summary.evaluations[index]
    count, step = int(found.get("eval/problems") or config.data.num_eval), int(found.get("step", 0))
    unscored = int(found.get("eval/unscored", 0))
    if unscored >= count:
        return "not measured: no answer could be scored"
    if index == 0 and step >= stages(config)[-1].first_step:
        return "not measured"
    if index == -1 and step < summary.steps:
        since = f"not measured since step {step}"
        return since if step == 0 else f"{since}, when it was {accuracy:.1%}"
    text = accuracy_text(accuracy, count=count, of="problems" if has_servers(config) else "pairs")
    return f"{text}; {unscored} could not be scored and count as wrong" if unscored else text


def incidents_text(summary: Summary) -> str:
    """`2 recovered, 1 unresolved, 1.3 s lost`."""
    recovered = len(summary.incidents) + summary.incidents_earlier - summary.incidents_open
    lost_s = sum((each.seconds or 0.0 for each in summary.incidents), summary.incidents_earlier_s)
    unresolved = f", {summary.incidents_open} unresolved" if summary.incidents_open else ""
    return f"{recovered} recovered{unresolved}, {seconds_text(lost_s)} lost"


def suggestions(summary: Summary, *, config: Config, folder: Path) -> list[str]:
    """Commands to try next, depending on the outcome of the run."""
    if summary.outcome != reader.RunState.FINISHED:
        return [f"{program()} resume {folder}", f"{program()} status {folder}"]
    if summary.algorithm == ROLLOUT:
        source, algorithm = f"data.source={folder}/{RELATIVE.rollouts_folder}", "algorithm.name=grpo"
        return [
            f"{program()} samples {folder} --worst 10",
            f"{program()} train {folder}/config.yaml {source} {algorithm} algorithm.steps=100 run_dir=null",
        ]
    looks = f"{program()} samples {folder}"
    return [
        f"{looks} --worst 10" if summary.reward_last is not None else looks,
        f"{program()} eval {folder}",
        f"{program()} serve {folder}",
        f"{program()} export {folder} --to my-model",
        f"{program('tensorboard')} --logdir {folder}/tensorboard",
        f"{program()} resume {folder} algorithm.steps={2 * config.algorithm.steps}",
        f"{program()} train {folder}/config.yaml seed=1 run_dir={folder}-seed-1",
    ]


def program(name: str = "kintsugi") -> str:
    """Command for a program of this environment: its name, or its path if it is not on the PATH."""
    if shutil.which(name) is not None:
        return name
    path = Path(sys.executable).with_name(name)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def accuracy_text(accuracy: float | None, *, count: int, of: str = "problems") -> str:
    """`91.2% (88.4% – 93.4% at 95 %, 500 problems)`, with the Wilson interval."""
    if accuracy is None:
        return "not measured"
    low, high = wilson_interval(accuracy, count=count)
    noun = of.removesuffix("s") if count == 1 else of
    return f"{accuracy:.1%} ({low:.1%} – {high:.1%} at 95 %, {count} {noun})"
