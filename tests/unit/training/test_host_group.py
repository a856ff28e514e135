"""Groups of ranks over sockets of our own: ordered sums, interruptions, and rebuilding in a living process."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

import numpy as np
import psutil
import pytest

from kintsugi.errors import GroupBroken
from kintsugi.training.host_group import FRAME_BYTES, HostGroup, join_host_group
from kintsugi.transport import new_key_pair
from kintsugi.transport.store import StoreServer

KEYS = new_key_pair()
NAMES = ("model-0", "model-1", "model-2")
TIMEOUT_S = 30.0
T = TypeVar("T")


@pytest.fixture
def store() -> Iterator[str]:
    with closing(StoreServer(keys=KEYS)) as server:
        yield server.address


def joined(store: str, *, group_id: int, size: int) -> list[HostGroup]:
    def join(name: str) -> HostGroup:
        return join_host_group(
            group_id=group_id,
            ranks=NAMES[:size],
            me=name,
            store_address=store,
            keys=KEYS,
            timeout_s=TIMEOUT_S,
        )

    with ThreadPoolExecutor(max_workers=size) as pool:
        return list(pool.map(join, NAMES[:size]))


def on_all(groups: list[HostGroup], do: Callable[[HostGroup], T]) -> list[T]:
    with ThreadPoolExecutor(max_workers=len(groups)) as pool:
        return list(pool.map(do, groups))


def end(groups: list[HostGroup]) -> None:
    for group in groups:
        group.close()


def test_every_rank_has_the_same_bits_of_a_sum_in_the_order_of_ranks(store: str) -> None:
    groups = joined(store, group_id=1, size=3)
    parts = [np.random.default_rng(rank).normal(size=1001).astype(np.float32) for rank in range(3)]

    def reduce(group: HostGroup) -> bytes:
        array = parts[group.rank].copy()
        group.all_reduce(array, timeout_s=TIMEOUT_S)
        return array.tobytes()

    try:
        assert set(on_all(groups, reduce)) == {((parts[0] + parts[1]) + parts[2]).tobytes()}
    finally:
        end(groups)


def test_an_array_larger_than_a_frame_and_an_empty_one_arrive_whole(store: str) -> None:
    groups = joined(store, group_id=1, size=2)
    large = np.arange(FRAME_BYTES // 4 + 5, dtype=np.float32)

    def gather(group: HostGroup) -> bool:
        found = group.all_gather(large + group.rank, timeout_s=TIMEOUT_S)
        empty = group.all_gather(large[:0], timeout_s=TIMEOUT_S)
        return bool((found == np.stack([large, large + 1])).all()) and empty.shape == (2, 0)

    try:
        assert on_all(groups, gather) == [True, True]
    finally:
        end(groups)


def test_parts_go_to_the_rank_that_they_are_for(store: str) -> None:
    groups = joined(store, group_id=1, size=2)

    def exchange(group: HostGroup) -> list[int]:
        own = np.array([10 * group.rank, 10 * group.rank + 1, 10 * group.rank + 2])
        received = [1, 1] if group.rank == 0 else [2, 2]
        return [
            int(each) for each in group.all_to_all(own, sent=[1, 2], received=received, timeout_s=TIMEOUT_S)
        ]

    try:
        assert on_all(groups, exchange) == [[0, 10], [1, 2, 11, 12]]
    finally:
        end(groups)


def test_a_collective_that_waits_for_a_lost_rank_ends_when_the_group_is_ended(store: str) -> None:
    first, second = joined(store, group_id=1, size=2)
    second.close()  # As after a kill: its sockets are gone, and no message says so.
    ending = threading.Timer(0.05, first.end, ["this rank was told to stop"])
    ending.start()
    try:
        with pytest.raises(GroupBroken, match="told to stop"):
            first.all_reduce(np.ones(4, dtype=np.float32), timeout_s=TIMEOUT_S)
    finally:
        ending.join()
        first.close()


def test_a_rank_that_never_answers_is_named_at_the_deadline(store: str) -> None:
    first, second = joined(store, group_id=1, size=2)
    try:
        with pytest.raises(GroupBroken, match="model-1"):
            first.all_reduce(np.ones(4, dtype=np.float32), timeout_s=0.05)
    finally:
        end([first, second])


def count_what_groups_leave() -> None:
    """Print how many descriptors, threads and bytes twenty groups add to a process."""
    process = psutil.Process(os.getpid())
    array = np.ones(1 << 18, dtype=np.float32)
    with closing(StoreServer(keys=KEYS)) as server:

        def round_of(group_id: int) -> None:
            groups = joined(server.address, group_id=group_id, size=2)
            on_all(groups, lambda group: group.all_reduce(array.copy(), timeout_s=TIMEOUT_S))
            end(groups)
            gc.collect()

        for group_id in range(1, 6):  # What the first groups allocate once.
            round_of(group_id)
        before = process.num_fds(), process.num_threads(), process.memory_info().rss
        for group_id in range(6, 26):
            round_of(group_id)
        after = process.num_fds(), process.num_threads(), process.memory_info().rss
    json.dump([new - old for new, old in zip(after, before, strict=True)], sys.stdout)


@pytest.mark.slow
def test_twenty_groups_in_one_process_leave_no_descriptor_thread_or_memory() -> None:
    # In a process of its own: what other tests leave to the allocator would count as well.
    program = "from tests.unit.training.test_host_group import count_what_groups_leave as count; count()"
    output = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE).stdout
    descriptors, threads, memory = json.loads(output)
    assert descriptors <= 0 and threads <= 0
    # A group that kept one array of one rank would leave 20 MiB.
    assert memory < 10 << 20
