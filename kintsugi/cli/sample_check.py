"""`kintsugi check RECIPE --samples N`: sample and score some completions before anything is trained.

A run of its own without training steps, in a temporary folder, with one process of each role.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from kintsugi.cluster.launcher import launch
from kintsugi.config.recipe import Resolved, anchored, dump, rollout_only
from kintsugi.config.schema import LEARN_ROWS, Config
from kintsugi.data.dataset import pin_data
from kintsugi.errors import UserError, WorldError
from kintsugi.learning_health.sample_figures import figures_of
from kintsugi.process.exit_codes import EXIT_USER_ERROR
from kintsugi.run_folder import reader
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.telemetry.step_metrics import SampleRecord
from kintsugi.types import FinishReason

MOST_SHOWN = 16
CELL = 60


def sample_before_training(resolved: Resolved, *, count: int) -> str:
    """Sample `count` completions with the initial weights and describe what they earn."""
    config = _sampling_only(resolved, count=count)
    with TemporaryDirectory(prefix="kintsugi-check-") as path:
        folder = Path(path) / "run"
        folder.mkdir()
        dump(config, RunFolder(folder).config_file)
        pin_data(config, run_dir=folder)
        since = SYSTEM_CLOCK.wall()
        code = launch(config, run_dir=folder, on_tick=lambda: None)
        records = reader.read_samples(folder)
        if code != 0 or not records:
            faults = [
                f"{fault.process}: {fault.message}" for fault in reader.read_faults(folder, since=since)
            ]
            message = (
                f"no completion could be sampled and scored: {'; '.join(faults) or 'no cause was recorded'}"
            )
            raise UserError(message) if code == EXIT_USER_ERROR else WorldError(message)
    return "\n".join([*_lines(records), *(_caveat(resolved.config) or _remarks(records))])


def _caveat(config: Config) -> list[str]:
    """Say why the samples are not those that training would begin with, if so: nothing follows from their rewards."""
    if config.warmup is not None:
        warmup = f"{config.warmup.steps} steps of warm-up, which are not made here"
        return [
            f"  these weights still lack {warmup}: the samples show that the reward works, not what is earned"
        ]
    if config.model.path is None:
        return ["  the weights are random: the samples show that the reward works, not what a model earns"]
    return []


def _sampling_only(resolved: Resolved, *, count: int) -> Config:
    """Change a run to sample `count` completions, two of a prompt where that is possible, without a warm-up."""
    if resolved.config.algorithm.name in LEARN_ROWS:
        raise UserError(
            f"--samples: expected an algorithm that samples completions, got `{resolved.config.algorithm.name}`, which "
            "learns from rows of the data"
        )
    config = anchored(rollout_only(resolved, steps=1).config)
    group_size = 2 if count % 2 == 0 else 1
    return msgspec.structs.replace(
        config,
        warmup=None,
        run_dir=None,
        algorithm=msgspec.structs.replace(
            config.algorithm, batch_size=count // group_size, group_size=group_size
        ),
        actor=msgspec.structs.replace(config.actor, workers=1, logical_shards=None),
        generation=msgspec.structs.replace(config.generation, servers=1, urls=config.generation.urls[:1]),
        rollout=msgspec.structs.replace(config.rollout, workers=1),
        cluster=msgspec.structs.replace(config.cluster, hosts=1, spares=0),
    )


def _lines(records: Sequence[SampleRecord]) -> Iterator[str]:
    rewards = [record.reward for record in records]
    yield f"samples before training, {len(records)} with the initial weights"
    for record in records[:MOST_SHOWN]:
        expected = f", expected {_short(record.answer)}" if record.answer else ""
        yield f"  reward {record.reward:g}: {_short(record.prompt)} → {_short(record.completion)}{expected}"
    yield f"  reward: {sum(rewards) / len(rewards):.3f} on average, from {min(rewards):g} to {max(rewards):g}"
    parts: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.reward_components.items():
            parts[name].append(value)
    for name, values in parts.items():
        yield f"  {name}: {sum(values) / len(values):.3f} on average"


def _remarks(records: Sequence[SampleRecord]) -> Iterator[str]:
    """Say what would keep a run from learning, as far as a few samples show it."""
    figures = figures_of(records)
    if figures is None:
        return
    cut = sum(record.finish is FinishReason.LENGTH for record in records)
    if cut == len(records):
        yield "  all of them are truncated: raise `sampling.max_new_tokens`, or find out why the model does not end"
    if figures.lowest == figures.highest:
        yield f"  all of them earn {figures.lowest:g}: groups with equal rewards teach nothing"
        if figures.answered and figures.lowest <= 0:
            yield f"  {figures.answered} of them contain the expected answer: does the reward recognise their format?"
    if figures.garbled:
        yield f"  {figures.garbled} of them cannot be decoded: is it the tokenizer of this model?"


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= CELL else f"{shown[: CELL // 2]}…{shown[-CELL // 2 :]}"
