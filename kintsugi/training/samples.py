"""Trajectories of the current step, fetched from the processes that hold them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import xxhash

from kintsugi.errors import IntegrityError
from kintsugi.messages import FetchSamples, SamplesFetched
from kintsugi.runtime import wait
from kintsugi.training.batch import Sample, sample_of
from kintsugi.transport import Reply
from kintsugi.types import LogicalShard, ShardItem, Trajectory

FETCH_TIMEOUT_S = 60.0
POLL_S = 0.001


class Answer(Protocol):
    """A request under way (`worker.Future`)."""

    @property
    def done(self) -> bool: ...

    def result(self) -> Reply: ...


class Submit(Protocol):
    """`worker.Shell.submit`: ask a process, without waiting."""

    def __call__(self, process: str, body: FetchSamples, *, deadline_s: float) -> Answer: ...


class StepSamples:
    """Fetches each trajectory once per step: calls of the same step share them."""

    def __init__(self, submit: Submit, *, check: Callable[[], None]) -> None:
        """`check` is called while waiting and raises when the call is to be given up."""
        self._submit = submit
        self._check = check
        self.trajectories: dict[str, Trajectory] = {}
        """Of this step, by sample key."""

    def forget(self) -> None:
        self.trajectories = {}

    def of_shards(self, shards: Sequence[LogicalShard]) -> dict[int, list[Sample]]:
        """The shards' samples by shard index, every trajectory verified."""
        self._fetch([item for shard in shards for item in shard.items if item.key not in self.trajectories])
        return {
            shard.index: [sample_of(item, self.trajectories[item.key]) for item in shard.items]
            for shard in shards
        }

    def _fetch(self, items: Sequence[ShardItem]) -> None:
        """Ask all holders at once, then verify what came."""
        by_holder: dict[str, list[ShardItem]] = {}
        for item in items:
            by_holder.setdefault(item.holder, []).append(item)
        answers = {
            holder: self._submit(
                holder, FetchSamples(tuple(item.key for item in held)), deadline_s=FETCH_TIMEOUT_S
            )
            for holder, held in by_holder.items()
        }
        self._await(answers)
        for holder, held in by_holder.items():
            samples = answers[holder].result().expect(SamplesFetched).samples
            for item, trajectory in _paired(held, samples, holder=holder):
                self.trajectories[item.key] = trajectory

    def _await(self, answers: dict[str, Answer]) -> None:
        idle = threading.Event()

        def attempt(remaining_s: float) -> bool | None:
            self._check()
            if all(answer.done for answer in answers.values()):
                return True
            idle.wait(min(POLL_S, remaining_s))
            return None

        wait(attempt, whom=", ".join(answers), what="trajectories", timeout_s=FETCH_TIMEOUT_S)


def _paired(
    items: Sequence[ShardItem], trajectories: Sequence[Trajectory], *, holder: str
) -> list[tuple[ShardItem, Trajectory]]:
    """Each item with its trajectory, whose bytes must be those that were scored."""
    by_key = {trajectory.key: trajectory for trajectory in trajectories}
    pairs = []
    for item in items:
        if item.key not in by_key:
            raise IntegrityError(f"{holder} answered without sample {item.key}")
        found = xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(by_key[item.key]))
        if found != item.digest:
            raise IntegrityError(f"sample {item.key} from {holder}: expected xxh3 {item.digest}, got {found}")
        pairs.append((item, by_key[item.key]))
    return pairs
