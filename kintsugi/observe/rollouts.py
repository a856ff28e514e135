"""What `kintsugi rollout` keeps: sampled and scored completions, one JSON line each, to be read by any tool and trained
on later (`data.source: <run>/rollouts`).

A file holds one logical shard of one step and appears whole or not at all. Its name says which, and its content follows
from the step's tickets: written again after a fault, it is the same file. So every sample is there exactly once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import msgspec

from kintsugi.errors import DataError, StorageError
from kintsugi.types import Finish

ROLLOUTS_FOLDER = "rollouts"
_TICKET = re.compile(r"\w+(:\d+)+")
_NAME = re.compile(r"step-(\d+)-shard-(\d+)-of-(\d+)\.jsonl")


class SavedSample(msgspec.Struct, frozen=True):
    """One line."""

    step: int
    ticket: str
    """Samples of one prompt share it."""
    sample: int
    prompt: str
    completion: str
    reward: float
    rewards: dict[str, float]
    """By function, before weights."""
    finish: Finish
    tokens: list[int]
    """Prompt and completion as the model was fed and wrote them."""
    loss_mask: list[int]
    """1 where the policy chose the token."""
    logprobs: list[float]
    """Of the policy that sampled; 0 where the mask is 0."""
    versions: list[int]
    """The weight version that wrote the token; -1 where the mask is 0."""


def write_shard(
    folder: Path, *, step: int, shard: int, num_shards: int, samples: Sequence[SavedSample]
) -> Path:
    """Write one file; a file of the same name is replaced by its equal."""
    path = folder / f"step-{step:06}-shard-{shard}-of-{num_shards}.jsonl"
    temporary = folder / f".{path.name}.{uuid4().hex[:8]}"
    try:
        folder.mkdir(exist_ok=True)
        with temporary.open("wb") as file:
            file.writelines(msgspec.json.encode(sample) + b"\n" for sample in samples)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(f"could not write {path}: {error.strerror or error}") from error
    return path


def is_rollouts(source: str) -> bool:
    """Whether a data source is a folder of saved rollouts."""
    folder = Path(source)
    return folder.is_dir() and any(_NAME.fullmatch(path.name) for path in folder.iterdir())


def read_groups(folder: Path) -> list[tuple[SavedSample, ...]]:
    """The samples of each prompt together, in the order in which they were sampled; half a step is left out."""
    groups: dict[tuple[int, str], list[SavedSample]] = {}
    for path in _whole_steps(folder):
        for sample in _samples_in(path):
            groups.setdefault((sample.step, sample.ticket), []).append(sample)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], _place(item[0][1])))
    return [tuple(sorted(group, key=lambda sample: sample.sample)) for _, group in ordered]


def _place(ticket: str) -> tuple[str, tuple[int, ...]]:
    """`rollout:0:17:0` stands behind `rollout:0:2:0`."""
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
