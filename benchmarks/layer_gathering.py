"""Ranks that compute with sharded weights: peak of memory and time of a step, gathered per step and per layer.

    python benchmarks/layer_gathering.py [--model tiny|135m] [--dtype float32|bfloat16] [--shards 4] [--tokens 512]
                                         [--micro-batches 4] [--steps 3] [--rounds 2]
                                         [--ways step step-recomputed layer]

One process per shard makes steps of SFT on random tokens, over gloo, with one thread: `--tokens` per rank and step, in
so many micro-batches. The ways run in turns, so that they meet the same machine. The peak is that of the anonymous
memory of rank 0 during the steps, sampled every 2 ms, minus the memory before its model was made; the snapshots are not
in it. With `recompute` per step as well, the ratio of times is that of gathering alone.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from benchmarks.sharded_memory import MODELS, Peak, resident
from kintsugi.config.schema import ActorSection, AlgorithmSection, CriticSection, ReferenceSection, resolved
from kintsugi.config.stages import Stage
from kintsugi.model.seats import Mesh
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.protocol.training import RunCall
from kintsugi.training.group import Groups
from kintsugi.training.model_calls import ModelCalls
from kintsugi.training.packing import BatchSample
from kintsugi.training.process_group import join_groups
from kintsugi.training.state import TrainingState
from kintsugi.transport import new_key_pair
from kintsugi.transport.store import StoreServer

WAYS = {"step": ("step", False), "step-recomputed": ("step", True), "layer": ("layer", True)}
"""When weights are gathered, and whether layers are computed again without that."""


class Rank(msgspec.Struct, frozen=True):
    """Orders of one process."""

    number: int
    model: str
    dtype: str
    shards: int
    gather: str
    recompute: bool
    tokens: int
    micro_batches: int
    steps: int
    store: str
    keys: tuple[str, str]


def samples_of(rank: Rank) -> list[BatchSample]:
    """One sample per micro-batch, of equal length."""
    length, vocabulary = rank.tokens // rank.micro_batches, MODELS[rank.model].vocab_size
    random = np.random.default_rng(rank.number)
    positions = np.arange(1, length, dtype=np.int64)
    return [
        BatchSample(
            f"{rank.number}/{index}",
            random.integers(0, vocabulary, length).astype(np.int32),
            loss_positions=positions,
            logprobs=np.zeros(len(positions), dtype=np.float32),
            versions=np.full(len(positions), -1, dtype=np.int32),
            values={},
        )
        for index in range(rank.micro_batches)
    ]


def work(rank: Rank) -> dict[str, float | str]:
    """Make the steps of one rank in this process."""
    torch.set_num_threads(1)
    settings = ActorSection(micro_batch_tokens=rank.tokens // rank.micro_batches, recompute=rank.recompute)
    stage = Stage(
        "sft",
        1,
        resolved(AlgorithmSection(name="sft", steps=rank.steps)),
        settings,
        0,
        CriticSection(),
        ReferenceSection(),
    )
    groups = join_groups(
        Mesh(rank.shards),
        group_id=1,
        ranks=[f"model-{number}" for number in range(rank.shards)],
        me=f"model-{rank.number}",
        store_address=rank.store,
        keys=(rank.keys[0].encode(), rank.keys[1].encode()),
        device=torch.device("cpu"),
        timeout_s=120.0,
    )
    before = resident()["RssAnon"]
    whole = Transformer(MODELS[rank.model])
    initialize(whole, seed=1)
    count = sum(parameter.numel() for parameter in whole.parameters())
    state = TrainingState(
        whole,
        compute_dtype=getattr(torch, rank.dtype),
        recompute=rank.recompute,
        seat=Mesh(rank.shards).seat(rank.number),
        gathers_layers=rank.gather == "layer",
    )
    del whole
    gc.collect()
    state.start_stage(stage, step=0)
    calls, samples = ModelCalls(state, deterministic=True), samples_of(rank)
    at_rest = resident()["RssAnon"]
    peak, times = Peak(), list[float]()
    for step in range(1, rank.steps + 1):
        start = time.perf_counter()
        calls.run(_call(rank, step), {rank.number: samples}, groups=groups)
        times.append(time.perf_counter() - start)
        state.commit(step)
    highest = peak.end()
    weights = _digest(state, groups)
    groups.close()
    return {
        "parameters": count,
        "rest": (at_rest - before) / count,
        "peak": (highest - before) / count,
        "step_s": min(times),
        "weights": weights,
    }


def _call(rank: Rank, step: int) -> RunCall:
    learned = rank.shards * rank.micro_batches * (rank.tokens // rank.micro_batches - 1)
    return RunCall(
        call="sft_train",
        interface="sft_train",
        step=step,
        shards=(),
        num_shards=rank.shards,
        totals={
            "tokens": float(learned),
            "sequences": float(rank.shards * rank.micro_batches),
            "groups": 1.0,
        },
        generation=1,
        arguments={},
        stage="sft",
        prepares=True,
    )


def _digest(state: TrainingState, groups: Groups) -> str:
    weights = state.gathered_weights(groups.data) if state.gathers_layers else state.weights()
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(weights[name].view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def play(rank: Rank) -> dict[str, float | str]:
    """Run all ranks as processes; what the first one measured."""
    ranks = [msgspec.structs.replace(rank, number=number) for number in range(rank.shards)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", msgspec.json.encode(each).decode()],
            stdout=subprocess.PIPE,
            text=True,
        )
        for each in ranks
    ]
    outputs = [process.communicate(timeout=1800)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "a rank failed"
    found: dict[str, float | str] = json.loads(outputs[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="135m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", choices=list(WAYS), nargs="+", default=list(WAYS))
    parser.add_argument("--rank", help="In this process, for one rank.")
    given = parser.parse_args()
    if given.rank is not None:
        sys.stdout.write(json.dumps(work(msgspec.json.decode(given.rank, type=Rank))) + "\n")
        sys.stdout.flush()
        os._exit(0)  # The thread in which the library ends its group may still run.
    keys = new_key_pair()
    times: dict[str, list[float]] = {way: [] for way in given.ways}
    for number in range(given.rounds):
        for way in given.ways:
            gather, recompute = WAYS[way]
            server = StoreServer(keys=keys)
            rank = Rank(
                number=0,
                model=given.model,
                dtype=given.dtype,
                shards=given.shards,
                gather=gather,
                recompute=recompute,
                tokens=given.tokens,
                micro_batches=given.micro_batches,
                steps=given.steps,
                store=server.address,
                keys=(keys[0].decode(), keys[1].decode()),
            )
            found = play(rank)
            server.close()
            times[way].append(float(found["step_s"]))
            sys.stdout.write(
                f"round {number + 1}, by {way}: at rest {found['rest']:.2f}, peak {found['peak']:.2f} bytes per "
                f"parameter, step {found['step_s']:.2f} s, weights {found['weights']}\n"
            )
            sys.stdout.flush()
    best = {way: min(each) for way, each in times.items()}
    for way in [way for way in best if way != "layer" and "layer" in best]:
        sys.stdout.write(f"step by layer: {best['layer'] / best[way]:.2f} of that by {way}\n")


if __name__ == "__main__":
    main()
