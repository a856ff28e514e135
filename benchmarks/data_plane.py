"""Trajectories between two hosts: every rank for itself, one rank for its host, and what the planner chooses.

    python benchmarks/data_plane.py [--steps 24] [--json FILE]

Four ranks and two holders, half of them on each of two hosts, all of them processes of this machine: real endpoints
(ZeroMQ, CURVE, loopback), real memory of a host's agent, the code that ranks run (`training/sample_fetch.py`). What
is not real is the link between the hosts: a shim in front of the holders' answers to the other host lets one answer
through at a time, takes so long for each request and for each byte, and keeps everything back for the latency. The
planner is told nothing of it. Rows are medians over the last half of the steps, the three ways taking turns;
`expected` is what the planner's estimate said before each of its steps."""

from __future__ import annotations

import argparse
import heapq
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from kintsugi.cluster.shared_memory import SegmentClient, SegmentServer
from kintsugi.dataplane.plan import TransferPlan, candidates, made
from kintsugi.dataplane.planner import TransferPlanner
from kintsugi.protocol.rollout import FetchSamples, SamplesFetched
from kintsugi.protocol.sample_transfer import FetchRelayed, Routes, Transfer
from kintsugi.samples.sharding import logical_shards, shards_of_rank
from kintsugi.training.sample_fetch import StepSamples
from kintsugi.transport import Delivery, Endpoint, new_key_pair
from kintsugi.types import FinishReason, LogicalShard, Peer, ShardItem, Trajectory

RANKS = ("model-0", "model-1", "model-2", "model-3")
HOLDERS = ("rollout-0", "rollout-1")
HOSTS = {name: f"host-{int(name[-1]) % 2}" for name in (*RANKS, *HOLDERS)}
JOB = f"bench-{os.getpid()}"


class Link(msgspec.Struct, frozen=True):
    """Between the hosts, in each direction."""

    name: str
    latency_s: float = 0.0
    request_s: float = 0.0
    bytes_per_s: float = 0.0
    """0: as fast as the machine is."""
    num_samples: int = 64
    num_tokens: int = 512
    crossed: bool = False
    """Every shard's samples lie on one host, and on the other one than the rank's whose turn it is."""


LINKS = (
    Link("loopback as it is"),
    Link("one request at a time, 20 ms each", request_s=0.02),
    Link("latency 20 ms", latency_s=0.02),
    Link("10 MB/s", bytes_per_s=10e6),
    Link("10 MB/s, samples on the wrong side", bytes_per_s=10e6, crossed=True),
    Link("loopback, 4096 tokens × 256", num_samples=256, num_tokens=4096),
    Link("loopback, 4000 tokens × 512", num_samples=512, num_tokens=4000),
)


class Order(msgspec.Struct, frozen=True):
    """To a rank: one step."""

    step: int
    shards: tuple[LogicalShard, ...]
    routes: Routes


def trajectory(key: str, num_tokens: int) -> Trajectory:
    numbers = np.random.default_rng(xxhash.xxh3_64_intdigest(key.encode())).integers(0, 1 << 15, num_tokens)
    return Trajectory(
        key=key,
        tokens=numbers.astype("<i4").tobytes(),
        loss_mask=(np.arange(num_tokens) > 0).astype("u1").tobytes(),
        logprobs=numbers.astype("<f4").tobytes(),
        versions=np.zeros(num_tokens, dtype="<i4").tobytes(),
        finish=FinishReason.EOS,
    )


def batch(link: Link) -> tuple[LogicalShard, ...]:
    """Four shards of equal size."""
    items = []
    for number in range(link.num_samples):
        key = f"t:0:{number:05}:0/0"
        # Samples of equal length are dealt out to the shards in turn; rank r has shard r, on host r % 2.
        holder = HOLDERS[(number + 1) % 2 if link.crossed else number // len(RANKS) % 2]
        digest = xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(trajectory(key, link.num_tokens)))
        items.append(ShardItem(key, holder, digest, link.num_tokens, link.num_tokens - 1))
    return logical_shards(items, num_shards=len(RANKS))


def meet(process: str, pipe: Connection) -> Endpoint:
    """An endpoint that knows all the others: tells its address, and is told theirs."""
    public_key, secret_key = new_key_pair()
    endpoint = Endpoint(
        job=JOB, process=process, incarnation="a", public_key=public_key, secret_key=secret_key
    )
    pipe.send_bytes(msgspec.msgpack.encode(endpoint.peer(host=HOSTS[process])))
    for peer in msgspec.msgpack.decode(pipe.recv_bytes(), type=list[Peer]):
        if peer.process != process:
            endpoint.admit(peer)
    return endpoint


def hold(process: str, link: Link, pipe: Connection) -> None:
    """A holder, behind the link; its loop also serves its host's memory."""
    endpoint = meet(process, pipe)
    SegmentServer(endpoint, job=JOB, host=HOSTS[process], capacity=1 << 30)
    pipe.send_bytes(b"ready")
    kept = {item.key: trajectory(item.key, link.num_tokens) for shard in batch(link) for item in shard.items}
    travelling: list[tuple[float, int, Delivery]] = []
    number, free_at = 0, 0.0
    while True:
        now = time.monotonic()
        for delivery in endpoint.poll(max(0.0, min(1.0, travelling[0][0] - now) if travelling else 1.0)):
            assert isinstance(delivery.body, FetchSamples)
            due = time.monotonic()
            if delivery.peer.host != HOSTS[process]:
                size = sum(13 * kept[key].num_tokens for key in delivery.body.keys)
                free_at = max(due, free_at) + link.request_s
                free_at += size / link.bytes_per_s if link.bytes_per_s else 0.0
                due = free_at + link.latency_s
            number += 1
            heapq.heappush(travelling, (due, number, delivery))
        while travelling and travelling[0][0] <= time.monotonic():
            _, _, delivery = heapq.heappop(travelling)
            assert isinstance(delivery.body, FetchSamples)
            endpoint.reply(delivery, SamplesFetched(tuple(kept[key] for key in delivery.body.keys)))


class Rank:
    """Fetches what it is told to; meanwhile it answers neighbours, as a model worker does."""

    def __init__(self, process: str, pipe: Connection) -> None:
        self._endpoint = meet(process, pipe)
        pipe.send_bytes(b"ready")
        self._waiting: list[Delivery] = []
        self._pipe = pipe
        pipe.recv_bytes()
        self._samples = StepSamples(
            self._endpoint.request,
            check=self._look,
            process=process,
            segments=SegmentClient(f"kintsugi-{JOB}-{HOSTS[process]}"),
        )

    def run(self) -> None:
        while True:
            order = msgspec.msgpack.decode(self._told(), type=Order)
            self._samples.of_shards(order.shards, step=order.step, routes=order.routes)
            self._pipe.send_bytes(msgspec.msgpack.encode(self._samples.take_transfers()))
            assert self._told() == b"forget"  # Everybody has read what was relayed.
            self._samples.forget()
            self._pipe.send_bytes(b"forgotten")

    def _told(self) -> bytes:
        """What the master says next; neighbours are answered meanwhile."""
        while not self._pipe.poll(0.0005):
            self._look()
        return self._pipe.recv_bytes()

    def _look(self) -> None:
        """Answer who asks; what is not there yet waits."""
        self._waiting += self._endpoint.poll(0.0)
        if not self._samples.is_fetching:
            waiting, self._waiting = self._waiting, []
            for delivery in waiting:
                assert isinstance(delivery.body, FetchRelayed)
                self._endpoint.reply(delivery, self._samples.relayed(delivery.body))


def rank_main(process: str, pipe: Connection) -> None:
    Rank(process, pipe).run()


class Cluster:
    """All the processes, and the master's side of a step."""

    def __init__(self, link: Link) -> None:
        context = multiprocessing.get_context("fork")
        self._children: list[Any] = []
        self._pipes: dict[str, Connection] = {}
        for name in (*HOLDERS, *RANKS):
            ours, theirs = context.Pipe()
            arguments = (name, link, theirs) if name in HOLDERS else (name, theirs)
            child = context.Process(
                target=hold if name in HOLDERS else rank_main, args=arguments, daemon=True
            )
            child.start()
            self._children.append(child)
            self._pipes[name] = ours
        peers = [msgspec.msgpack.decode(pipe.recv_bytes(), type=Peer) for pipe in self._pipes.values()]
        for pipe in self._pipes.values():
            pipe.send_bytes(msgspec.msgpack.encode(peers))
        for pipe in self._pipes.values():
            assert pipe.recv_bytes() == b"ready"
        for name in RANKS:
            self._pipes[name].send_bytes(b"the memory is there")

    def step(
        self, number: int, shards: Sequence[LogicalShard], plan: TransferPlan
    ) -> tuple[float, dict[str, list[Transfer]]]:
        """Seconds until every rank has its samples, and what they measured."""
        start = time.perf_counter()
        for rank, (name, routes) in enumerate(zip(RANKS, plan.routes, strict=True)):
            mine = shards_of_rank(len(shards), rank=plan.blocks[rank], world_size=len(RANKS))
            order = Order(number, tuple(shards[index] for index in mine), routes)
            self._pipes[name].send_bytes(msgspec.msgpack.encode(order))
        transfers = {
            name: msgspec.msgpack.decode(self._pipes[name].recv_bytes(), type=list[Transfer])
            for name in RANKS
        }
        seconds = time.perf_counter() - start
        for name in RANKS:
            self._pipes[name].send_bytes(b"forget")
        for name in RANKS:
            assert self._pipes[name].recv_bytes() == b"forgotten"
        return seconds, transfers

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.join()


def measure(link: Link, *, steps: int) -> dict[str, Any]:
    """One link: direct, relay and planner in turn, step by step."""
    shards, plane = batch(link), TransferPlanner()
    seconds: dict[str, list[float]] = {"direct": [], "relay": [], "planner": []}
    expected: list[float] = []
    with closing(Cluster(link)) as cluster:
        for number in range(steps):
            every = candidates(shards, ranks=RANKS, hosts=HOSTS, links=plane.links)
            direct = next(each for each in every if each.name == "direct")
            relay = next(each for each in every if each.name.startswith("relay"))
            for way, candidate in (("direct", direct), ("relay", relay)):
                took_s, _ = cluster.step(number, shards, made(candidate, links=plane.links))
                seconds[way].append(took_s)
            plan, _ = plane.plan(shards, ranks=RANKS, hosts=HOSTS)
            took_s, transfers = cluster.step(number, shards, plan)
            plane.learn(plan, transfers)
            seconds["planner"].append(took_s)
            expected.append(plan.estimated_s)
    late = slice(steps // 2, None)
    size = sum(13 * item.num_tokens for shard in shards for item in shard.items)
    return {
        "link": link.name,
        "bytes": size,
        **{f"{way}_ms": 1e3 * statistics.median(each[late]) for way, each in seconds.items()},
        "expected_ms": 1e3 * statistics.median(expected[late]),
        "first_expected_ms": 1e3 * expected[0],
        "chosen": plan.name,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [measure(link, steps=options.steps) for link in LINKS]
    write = sys.stdout.write
    write(
        "| link between hosts | MB | direct, ms | relay, ms | planner, ms | expected, ms | at first | chosen |\n"
    )
    write("|---|---|---|---|---|---|---|---|\n")
    for row in rows:
        write(
            f"| {row['link']} | {row['bytes'] / 1e6:.2f} | {row['direct_ms']:.1f} | {row['relay_ms']:.1f} "
            f"| {row['planner_ms']:.1f} | {row['expected_ms']:.1f} | {row['first_expected_ms']:.1f} "
            f"| {row['chosen']} |\n"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
