"""Idle time of two pipeline stages, compared with the (p - 1) / (n + p - 1) of equally long stages.

    python benchmarks/pipeline_bubble.py [--batches 2 4 8 16] [--repeats 9] [--tokens 512]

Two processes, each on a core of its own with one thread, make forward and backward passes over n micro-batches, over
gloo, as a training call does (`training/pipeline.py`). The cases take turns, so that all of them see the same load of
the machine; medians are reported. `bound` is the formula. Two numbers say which part of a pass the stages are idle:

    waited      the seconds that they wait for each other; on a machine with other work also because of that
    replayed    what they would wait if each had its core for itself: an action begins when those that it needs have
                ended, and takes the median processor time of its kind in its stage (all micro-batches are alike)

`tied` has one matrix for embedding and output projection, `tied, shards of 4` sums the gradients of every four
micro-batches apart, as logical shards do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from kintsugi.model.architecture import ModelConfig
from kintsugi.model.attention import PackedLayout
from kintsugi.model.partition import is_embedding
from kintsugi.model.seats import Mesh
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.training.batch import MicroBatch
from kintsugi.training.group import Channel, Edge, Groups
from kintsugi.training.initial_weights import new_model
from kintsugi.training.losses import BatchLoss
from kintsugi.training.pipeline import Action, Work, completed, learning_pass, schedule
from kintsugi.training.process_group import join_groups
from kintsugi.training.tied_embedding import TiedGradient
from kintsugi.transport import new_key_pair
from kintsugi.transport.store import StoreServer

MESH = Mesh(stages=2)
CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=512,
    hidden_size=384,
    intermediate_size=1024,
    num_layers=8,
    num_heads=6,
    num_kv_heads=6,
    head_dim=64,
    max_positions=1024,
    qk_norm=True,
)
"""Few tokens in the vocabulary: the output projection makes the last stage 5 % longer than the first."""
TIMEOUT_S = 600.0


class Case(NamedTuple):
    name: str
    is_tied: bool
    num_batches: int
    shard: int
    """Micro-batches of one shard."""

    @property
    def ends(self) -> range:
        return range(self.shard - 1, self.num_batches, self.shard)

    @property
    def actions(self) -> tuple[list[Action], list[Action]]:
        first, last = (schedule(stage=stage, stages=2, num_batches=self.num_batches) for stage in range(2))
        last = completed(last, stages=2, ends=self.ends) if self.is_tied else last
        return list(first), list(last)


class Seconds(NamedTuple):
    """Times of one pass in one stage."""

    total: float
    waited: float
    work: list[float]
    """Processor time of each action, in their order, without that of waiting."""


class TimedChannel:
    """A channel that counts the time for which its owner waits."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.waited_s = 0.0
        self.waiting_cpu_s = 0.0
        """Processor time of waiting: a library is polled."""

    def send(self, tensor: Tensor) -> None:
        self._channel.send(tensor)

    def receive(self, into: Tensor, *, timeout_s: float) -> None:
        self._timed(lambda: self._channel.receive(into, timeout_s=timeout_s))

    def await_sent(self, *, timeout_s: float) -> None:
        self._timed(lambda: self._channel.await_sent(timeout_s=timeout_s))

    def _timed(self, wait: Callable[[], None]) -> None:
        started, cpu_started = time.perf_counter(), time.thread_time()
        wait()
        self.waited_s += time.perf_counter() - started
        self.waiting_cpu_s += time.thread_time() - cpu_started


class Stage:
    """One stage of a model, and its passes."""

    def __init__(self, rank: int, groups: Groups, *, is_tied: bool, num_tokens: int) -> None:
        config = msgspec.structs.replace(CONFIG, tie_embeddings=is_tied)
        self.model: Transformer = new_model(config, device=torch.device("cpu"), seat=MESH.seat(rank))
        initialize(self.model, seed=0)
        self._channels: list[TimedChannel] = []
        self._groups = replace(
            groups,
            previous=self._timed(groups.previous),
            following=self._timed(groups.following),
            embedding=self._timed(groups.embedding),
        )
        self._batch = _micro_batch(num_tokens, vocab_size=config.vocab_size)
        self._tied: TiedGradient | None = None
        if self.model.part.has_copy:
            for _, parameter in self._embedding:
                parameter.requires_grad = False
        elif self.model.part.is_tied:
            self._tied = TiedGradient(
                self.model, [(parameter, torch.zeros_like(parameter)) for _, parameter in self._embedding]
            )

    @property
    def _embedding(self) -> list[tuple[str, Tensor]]:
        return [(name, each) for name, each in self.model.named_parameters() if is_embedding(name)]

    def _timed(self, edge: Edge | None) -> Edge | None:
        if edge is None:
            return None
        channels = [TimedChannel(channel) for channel in edge]
        self._channels += channels
        return Edge(*(cast(Channel, channel) for channel in channels))

    def _cpu_s(self) -> float:
        return time.thread_time() - sum(channel.waiting_cpu_s for channel in self._channels)

    def run(self, case: Case) -> Seconds:
        for channel in self._channels:
            channel.waited_s = 0.0
        marks: list[float] = []
        self._meet()
        started = time.perf_counter()
        passes = learning_pass(
            self.model,
            [self._batch] * case.num_batches,
            groups=self._groups,
            loss=self._loss,
            check=lambda: marks.append(self._cpu_s()),  # Called before every action.
            tied=self._tied,
            ends=case.ends,
        )
        for _ in passes:
            pass
        marks.append(self._cpu_s())
        at_end = time.perf_counter()
        self._meet()
        ended = time.perf_counter()
        waited = sum(each.waited_s for each in self._channels) + ended - at_end
        return Seconds(ended - started, waited, [after - before for before, after in pairwise(marks)])

    def _meet(self) -> None:
        self._groups.world.all_gather(torch.zeros(1), timeout_s=TIMEOUT_S)

    def _loss(self, batch: MicroBatch) -> BatchLoss:
        hidden = self.model.forward_packed(batch.tokens, batch.layout.positions, batch.layout)
        logprobs, _ = self.model.token_logprobs(hidden, batch.targets)
        return BatchLoss(-logprobs.mean(), {}, {})


def _micro_batch(num_tokens: int, *, vocab_size: int) -> MicroBatch:
    lengths = [128] * (num_tokens // 128)
    layout = PackedLayout.from_lengths(lengths)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, vocab_size, (2, layout.num_tokens), generator=generator)
    nothing = torch.zeros(0)
    return MicroBatch(
        keys=tuple(map(str, range(len(lengths)))),
        loss_lengths=tuple(lengths),
        tokens=tokens,
        layout=layout,
        sources=torch.arange(layout.num_tokens),
        targets=targets,
        sampler_logprobs=nothing,
        versions=nothing,
        advantages=None,
        sequence_index=nothing,
        lasts=nothing,
        staleness=nothing,
    )


def cases(batches: Sequence[int]) -> list[Case]:
    found = []
    for count in batches:
        found += [Case("separate", False, count, count), Case("tied", True, count, count)]
        if count > 4:
            found.append(Case("tied, shards of 4", True, count, 4))
    return found


def run_rank(arguments: argparse.Namespace) -> None:
    """Measure one stage; writes the seconds of each case and repeat."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[arguments.rank]})
    torch.set_num_threads(1)
    keys = msgspec.json.decode(arguments.keys, type=tuple[bytes, bytes])
    stages = {}
    opened = []
    for generation, is_tied in enumerate((False, True), start=1):
        groups = join_groups(
            MESH,
            group_id=generation,
            ranks=["model-0", "model-1"],
            me=f"model-{arguments.rank}",
            store_address=arguments.store,
            keys=keys,
            device=torch.device("cpu"),
            timeout_s=TIMEOUT_S,
            is_tied=is_tied,
        )
        opened.append(groups)
        stages[is_tied] = Stage(arguments.rank, groups, is_tied=is_tied, num_tokens=arguments.tokens)
    found: dict[str, list[Seconds]] = {}
    for number in range(arguments.repeats + 1):
        for case in cases(arguments.batches):
            seconds = stages[case.is_tied].run(case)
            if number:  # The first pass allocates.
                found.setdefault(f"{case.num_batches}: {case.name}", []).append(seconds)
    for groups in opened:
        groups.close()
    sys.stdout.write(json.dumps(found))


def replayed(case: Case, first: Sequence[float], last: Sequence[float]) -> float:
    """Idle part of both stages if each action begins when those that it needs have ended."""
    queues = [deque(_typical(*each)) for each in zip(case.actions, (first, last), strict=True)]
    busy = sum(seconds for queue in queues for _, seconds in queue)
    ended: dict[tuple[int, Action], float] = {}
    now = [0.0, 0.0]
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue and (needed := _needed(stage, queue[0][0])) in ended | {None: 0.0}:
                action, seconds = queue.popleft()
                now[stage] = max(now[stage], 0.0 if needed is None else ended[needed]) + seconds
                ended[stage, action] = now[stage]
    return 1 - busy / (2 * max(now))


def _typical(actions: Sequence[Action], seconds: Sequence[float]) -> list[tuple[Action, float]]:
    """Actions with the median of the times of their kind."""
    kinds: dict[Work, list[float]] = {}
    for action, each in zip(actions, seconds, strict=True):
        kinds.setdefault(action.work, []).append(each)
    medians = {kind: statistics.median(found) for kind, found in kinds.items()}
    return [(action, medians[action.work]) for action in actions]


def _needed(stage: int, action: Action) -> tuple[int, Action] | None:
    """Action of the other stage whose result an action takes."""
    if action.work is Work.COMPLETION:
        return 0, Action(Work.BACKWARD, action.batch)
    takes = stage == (0 if action.work is Work.BACKWARD else 1)
    return (1 - stage, action) if takes else None


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    keys = new_key_pair()
    server = StoreServer(keys=keys)
    given = [f"--{name}={getattr(arguments, name)}" for name in ("repeats", "tokens")]
    given += ["--store", server.address, "--keys", msgspec.json.encode(keys).decode()]
    given += ["--batches", *map(str, arguments.batches)]
    load = os.getloadavg()[0]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, f"--rank={rank}", *given], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    outputs = [process.communicate()[0] for process in processes]
    server.close()
    if any(process.returncode for process in processes):
        raise SystemExit("a stage has failed")
    first, last = map(json.loads, outputs)
    report: dict[str, Any] = {"load": [load, os.getloadavg()[0]]}
    for case in cases(arguments.batches):
        name = f"{case.num_batches}: {case.name}"
        pairs = [(Seconds(*a), Seconds(*b)) for a, b in zip(first[name], last[name], strict=True)]
        waited = statistics.median((a.waited + b.waited) / (a.total + b.total) for a, b in pairs)
        alone = statistics.median(replayed(case, a.work, b.work) for a, b in pairs)
        bound = 1 / (case.num_batches + 1)
        numbers = {
            "seconds": statistics.median(a.total for a, _ in pairs),
            "work of the last / of the first": statistics.median(sum(b.work) / sum(a.work) for a, b in pairs),
            "waited": waited,
            "replayed": alone,
            "bound": bound,
            "replayed / bound": alone / bound,
        }
        report[name] = {key: round(number, 4) for key, number in numbers.items()}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--keys", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments)
        return
    sys.stdout.write(json.dumps(measure(arguments), indent=2) + "\n")


if __name__ == "__main__":
    main()
