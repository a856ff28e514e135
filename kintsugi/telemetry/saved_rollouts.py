"""Files of `kintsugi rollout`: sampled and scored completions, one JSON line each, for any tool or for later training
(`data.source: <run>/rollouts`).

A file holds one logical shard of one step and appears whole or not at all. Its name identifies both, and its content
follows from the tickets of the step: written again after a fault, it is the same file. So every sample exists exactly
once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.errors import DataError, StorageError
from kintsugi.runtime.disk import write_atomically
from kintsugi.types import FinishReason

_TICKET = re.compile(r"\w+(:\d+)+")
_NAME = re.compile(r"step-(\d+)-shard-(\d+)-of-(\d+)\.jsonl")


class SavedSample(msgspec.Struct, frozen=True):
    """One line: a sample."""

    step: int
    ticket: str
    """Ticket, shared by the samples of one prompt."""
    sample: int
    prompt: str
    completion: str
    reward: float
    rewards: dict[str, float]
    """Rewards by function, before weights."""
    finish: FinishReason
    tokens: list[int]
    """Token ids of prompt and completion."""
    loss_mask: list[int]
    """1 where the policy chose the token."""
    logprobs: list[float]
    """Log-probabilities of the sampling policy; 0 where the mask is 0."""
    versions: list[int]
    """Weight version that sampled the token; -1 where the mask is 0."""
    columns: dict[str, Any] = {}
    """The other columns of the row, as reward functions get them: `{"answer": "46"}`."""


def write_shard(
    folder: Path, *, step: int, shard: int, num_shards: int, samples: Sequence[SavedSample]
) -> Path:
    """Write one file; a file of the same name is replaced by its equal."""
    path = folder / f"step-{step:06}-shard-{shard}-of-{num_shards}.jsonl"
    lines = (msgspec.json.encode(sample) + b"\n" for sample in samples)
    try:
        folder.mkdir(exist_ok=True)
        write_atomically(path, lines, durable=True)
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}") from error
    return path


def is_rollouts(source: str) -> bool:
    """Return whether a data source is a folder of saved rollouts."""
    folder = Path(source)
    return folder.is_dir() and any(_NAME.fullmatch(path.name) for path in folder.iterdir())


def read_groups(folder: Path) -> list[tuple[SavedSample, ...]]:
    """Yield the samples of each prompt together, in the order of sampling; an incomplete step is left out."""
    groups: dict[tuple[int, str], list[SavedSample]] = {}
    for path in _whole_steps(folder):
        for sample in _samples_in(path):
            groups.setdefault((sample.step, sample.ticket), []).append(sample)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], _place(item[0][1])))
    return [tuple(sorted(group, key=lambda sample: sample.sample)) for _, group in ordered]


def _place(ticket: str) -> tuple[str, tuple[int, ...]]:
    """Sort key of tickets: `rollout:0:17:0` comes after `rollout:0:2:0`."""
    stage, *numbers = ticket.split(":")
    return stage, tuple(map(int, numbers))


def _whole_steps(folder: Path) -> Iterator[Path]:
    shards: dict[tuple[int, int], dict[int, Path]] = {}
    for path in folder.iterdir():
        if found := _NAME.fullmatch(path.name):
            step, shard, count = map(int, found.groups())
            shards.setdefault((step, count), {})[shard] = path
    for (_, count), paths in sorted(shards.items()):
        if len(paths) == count:
            yield from paths.values()


def _samples_in(path: Path) -> Iterator[SavedSample]:
    decoder = msgspec.json.Decoder(SavedSample)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                sample = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise DataError(f"{path}, line {number}: expected a saved sample: {error}") from error
            lengths = {len(sample.tokens), len(sample.loss_mask), len(sample.logprobs), len(sample.versions)}
            if len(lengths) > 1 or not sample.tokens or not _TICKET.fullmatch(sample.ticket):
                raise DataError(
                    f"{path}, line {number}: expected a `ticket` like 'rollout:0:17:0' and tokens, each with its "
                    "`loss_mask`, `logprobs` and `versions`"
                )
            yield sample
