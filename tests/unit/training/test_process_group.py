"""Groups of real processes that are destroyed and rebuilt while the processes live."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from zmq.utils import z85

from kintsugi.errors import GroupBroken, Unfit
from kintsugi.runtime.waits import wait
from kintsugi.training.process_group import ProcessGroup, Route, choose_route, join_group
from kintsugi.transport import new_key_pair
from kintsugi.transport.store import StoreServer
from tests.unit.training.world import CPU, every_length, in_world, new_stage, train

ROOT = Path(__file__).parents[3]
KEYS = new_key_pair()
"""Key pair that the ranks of a test share: a store admits its own key."""


class RankProcess:
    """One rank in a process of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.training.rank_process", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        self._store = ""
        assert self._popen.stdin is not None
        self._popen.stdin.write(b" ".join(KEYS).decode() + "\n")
        self._popen.stdin.flush()

    @property
    def store(self) -> str:
        if not self._store:
            self._store = self._read()
        return self._store

    def ask(self, do: str, **arguments: Any) -> None:
        assert self._popen.stdin is not None and self.store
        self._popen.stdin.write(msgspec.json.encode({"do": do, **arguments}).decode() + "\n")
        self._popen.stdin.flush()

    def answer(self) -> dict[str, Any]:
        return msgspec.json.decode(self._read(), type=dict[str, Any])

    def signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def end(self) -> int:
        """Let it end by itself, or make it; its exit status."""
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._popen.stdin.close()
        try:
            status = self._popen.wait(10)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            status = self._popen.wait()
        self._popen.stdout.close()
        return status

    def _read(self) -> str:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline().strip()
        assert line, f"{self.name} has ended"
        return line


@pytest.fixture(scope="module")
def processes() -> Iterator[list[RankProcess]]:
    """Two ranks and a spare, started together because the import is what takes time."""
    started = [RankProcess("model-0"), RankProcess("model-1"), RankProcess("model-1")]
    yield started
    for process in started:
        process.signal(signal.SIGCONT)
        process.end()


def join(*members: RankProcess, group_id: int, timeout_s: float = 20.0) -> list[dict[str, Any]]:
    names = [member.name for member in members]
    for member in members:
        member.ask("join", group_id=group_id, ranks=names, store=members[0].store, timeout_s=timeout_s)
    return [member.answer() for member in members]


def sum_of(*members: RankProcess, timeout_s: float = 20.0) -> list[dict[str, Any]]:
    for value, member in enumerate(members, start=1):
        member.ask("sum", value=float(value), timeout_s=timeout_s)
    return [member.answer() for member in members]


def descriptors(*members: RankProcess) -> list[dict[str, Any]]:
    for member in members:
        member.ask("descriptors")
    return [member.answer() for member in members]


@pytest.mark.slow
def test_twenty_rebuilds_in_living_processes_leave_no_descriptor_and_no_thread_behind(
    processes: list[RankProcess],
) -> None:
    pair = processes[:2]
    assert join(*pair, group_id=1) == [{"result": 0}, {"result": 1}]
    assert sum_of(*pair) == [{"result": 3.0}] * 2
    before = descriptors(*pair)
    for group_id in range(2, 22):
        join(*pair, group_id=group_id)
        assert sum_of(*pair) == [{"result": 3.0}] * 2
    assert descriptors(*pair) == before


def test_two_processes_train_to_the_bits_of_one(processes: list[RankProcess]) -> None:
    pair = processes[:2]
    join(*pair, group_id=30)
    for member in pair:
        member.ask("train", num_steps=2)
    (alone,) = train(every_length(), stage=new_stage(), world_size=1, num_shards=4, num_steps=2)
    assert [member.answer() for member in pair] == [{"result": alone.digests}] * 2


def test_a_stopped_rank_costs_its_deadline_and_not_the_process(processes: list[RankProcess]) -> None:
    survivor, stopped, _ = processes
    join(survivor, stopped, group_id=40)
    stopped.signal(signal.SIGSTOP)
    survivor.ask("sum", value=1.0, timeout_s=0.3)
    broken = survivor.answer()
    stopped.signal(signal.SIGCONT)
    assert broken["error"] == "GroupBroken" and "model-1" in broken["message"]
    assert broken["detail"]["type"] == "GroupFailed"
    assert (broken["detail"]["group"], broken["detail"]["peers"]) == (40, ["model-1"])
    survivor.ask("sum", value=1.0, timeout_s=0.3)
    assert "generation 40 is over" in survivor.answer()["message"]


def test_a_killed_rank_is_noticed_at_once_and_replaced_in_the_next_generation(
    processes: list[RankProcess],
) -> None:
    survivor, victim, spare = processes
    join(survivor, victim, group_id=50)
    survivor.ask("sum", value=1.0, timeout_s=20.0)
    start = time.monotonic()
    victim.signal(signal.SIGKILL)
    broken = survivor.answer()
    assert broken["error"] == "GroupBroken"
    assert time.monotonic() - start < 10.0, "not at the deadline of the sum"
    assert join(survivor, spare, group_id=51) == [{"result": 0}, {"result": 1}]
    assert sum_of(survivor, spare) == [{"result": 3.0}] * 2


def test_processes_end_cleanly_with_a_group_still_open(processes: list[RankProcess]) -> None:
    survivor, _, spare = processes
    join(survivor, spare, group_id=60)
    assert [survivor.end(), spare.end()] == [0, 0]


def new_group(*, ranks: list[str], timeout_s: float = 0.3, why_over: str | None = None) -> ProcessGroup:
    server = StoreServer(keys=KEYS)
    try:
        return join_group(
            group_id=1,
            ranks=ranks,
            me=ranks[0],
            store_address=server.address,
            keys=KEYS,
            device=CPU,
            timeout_s=timeout_s,
            interruption=lambda: why_over,
        )
    finally:
        server.close()


def test_a_group_of_one_needs_no_sockets() -> None:
    before = len(os.listdir("/proc/self/fd"))
    group = join_group(
        group_id=1, ranks=["model-0"], me="model-0", store_address="", keys=KEYS, device=CPU, timeout_s=1.0
    )
    assert (group.size, group.rank, len(os.listdir("/proc/self/fd"))) == (1, 0, before)
    group.close()


@pytest.mark.parametrize(
    ("identities", "route"),
    [
        (["cpu", "cpu"], Route.HOST),
        (["GPU-a", "cpu"], Route.HOST),
        (["GPU-a", "GPU-b", "GPU-a"], Route.STAGED),
        (["GPU-a", "GPU-b"], Route.NCCL),
    ],
)
def test_nccl_is_for_ranks_with_an_accelerator_each(identities: list[str], route: Route) -> None:
    assert choose_route(identities) is route


def test_a_rank_whose_peers_do_not_come_says_whom_it_waited_for() -> None:
    with pytest.raises(GroupBroken, match=r"generation 1 .* with model-1, model-2"):
        new_group(ranks=["model-0", "model-1", "model-2"])


def test_a_store_that_nobody_serves_is_waited_for_only_so_long() -> None:
    server = StoreServer(keys=KEYS)
    server.close()
    with pytest.raises(GroupBroken, match=r"waited 0\.3 s for model-1"):
        join_group(
            group_id=1,
            ranks=["model-1", "model-0"],
            me="model-0",
            store_address=server.address,
            keys=KEYS,
            device=CPU,
            timeout_s=0.3,
        )


def test_the_first_rank_is_unfit_when_its_own_store_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        host, port = mute.getsockname()
        with pytest.raises(Unfit, match="does not answer"):
            join_group(
                group_id=1,
                ranks=["model-0", "model-1"],
                me="model-0",
                store_address=f"{host}:{port}#{z85.decode(KEYS[0]).hex()}",
                keys=KEYS,
                device=CPU,
                timeout_s=0.3,
            )


def test_a_join_that_failed_leaves_no_connection_to_the_collector(no_collector: None) -> None:
    def num_connections() -> int:
        return sum(descriptor.is_socket() for descriptor in Path("/proc/self/fd").iterdir())

    before = num_connections()
    for _ in range(3):
        with pytest.raises(GroupBroken):
            new_group(ranks=["model-0", "model-1"], timeout_s=0.05)
    # The thread that was left behind ends a moment after nobody waits for it.
    wait(lambda _: num_connections() == before or None, whom="a thread", what="its end", timeout_s=5.0)


def test_joining_is_given_up_when_the_generation_is_over() -> None:
    start = time.monotonic()
    with pytest.raises(GroupBroken, match="told to stop"):
        new_group(ranks=["model-0", "model-1"], timeout_s=20.0, why_over="told to stop")
    assert time.monotonic() - start < 10.0


def test_a_waiting_rank_is_freed_when_its_generation_ends() -> None:
    waiting: queue.SimpleQueue[ProcessGroup] = queue.SimpleQueue()

    def rank_main(rank: int, group: ProcessGroup) -> str:
        if rank == 1:
            waiting.get(timeout=10).end("another generation has begun")
            return ""
        waiting.put(group)
        with pytest.raises(GroupBroken, match="another generation") as broken:
            group.all_reduce(torch.ones(3), timeout_s=30.0)
        return str(broken.value)

    start = time.monotonic()
    assert "all-reduce" in in_world(2, rank_main)[0]
    assert time.monotonic() - start < 20.0


def test_gathered_tensors_keep_their_shape_and_the_order_of_ranks() -> None:
    def rank_main(rank: int, group: ProcessGroup) -> list[list[list[float]]]:
        return group.all_gather(torch.full((2, 2), float(rank)), timeout_s=10.0).tolist()

    assert in_world(2, rank_main) == [[[[0.0] * 2] * 2, [[1.0] * 2] * 2]] * 2


def test_exchanges_in_the_background_arrive_in_their_order_beside_other_collectives() -> None:
    def rank_main(rank: int, group: ProcessGroup) -> list[list[float]]:
        first, second = (
            group.start_all_to_all(
                torch.full((4,), 10.0 * number + rank), sent=[2, 2], received=[2, 2], timeout_s=10.0
            )
            for number in (1, 2)
        )
        total = torch.ones(1)
        group.all_reduce(total, timeout_s=10.0)
        return [*(each.received(timeout_s=10.0).tolist() for each in (first, second)), total.tolist()]

    assert in_world(2, rank_main) == [[[10.0, 10.0, 11.0, 11.0], [20.0, 20.0, 21.0, 21.0], [2.0]]] * 2


def test_a_group_with_an_exchange_under_way_can_be_ended_and_closed() -> None:
    waiting: queue.SimpleQueue[ProcessGroup] = queue.SimpleQueue()

    def rank_main(rank: int, group: ProcessGroup) -> str:
        if rank == 1:
            waiting.get(timeout=10).end("another generation has begun")
            return ""
        exchange = group.start_all_to_all(torch.ones(2), sent=[1, 1], received=[1, 1], timeout_s=30.0)
        waiting.put(group)
        with pytest.raises(GroupBroken, match="another generation") as broken:
            exchange.received(timeout_s=30.0)
        group.close()
        return str(broken.value)

    start = time.monotonic()
    assert "exchange" in in_world(2, rank_main)[0]
    assert time.monotonic() - start < 20.0
