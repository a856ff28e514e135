"""The Ray side of `control_plane.py`: an actor, and a driver that runs one case per line of its standard input.

Runs in an environment of its own that has Ray and numpy. Reads `{"case": …, "count": …}`, writes `{"seconds": …}`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import deque
from typing import Any

import numpy as np
import ray

OUTSTANDING = 64
NUM_TOKENS = 512


class Receiver:
    """Answers with as little as possible."""

    def ping(self, payload: bytes) -> None:
        del payload

    def take(self, record: dict[str, Any]) -> int:
        return len(record["tokens"])


def record() -> dict[str, Any]:
    """A 512-token sample as numpy arrays, which Ray passes without walking their elements."""
    return {
        "key": "grpo:0:17:0/3",
        "tokens": np.arange(NUM_TOKENS, dtype=np.int32),
        "loss_mask": np.ones(NUM_TOKENS, dtype=np.uint8),
        "logprobs": np.linspace(-3, 0, NUM_TOKENS, dtype=np.float32),
        "versions": np.full(NUM_TOKENS, 7, dtype=np.int32),
        "finish": "eos",
    }


def sequential(receiver: Any, count: int) -> None:
    for _ in range(count):
        ray.get(receiver.ping.remote(b""))


def outstanding(receiver: Any, count: int) -> None:
    under_way: deque[Any] = deque()
    for _ in range(count):
        under_way.append(receiver.ping.remote(b""))
        if len(under_way) == OUTSTANDING:
            ray.get(under_way.popleft())
    ray.get(list(under_way))


def outstanding_in_batches(receiver: Any, count: int) -> None:
    for _ in range(count // OUTSTANDING):
        ray.get([receiver.ping.remote(b"") for _ in range(OUTSTANDING)])


def hand_over(receiver: Any, count: int) -> None:
    sample = record()
    for _ in range(count):
        ray.get(receiver.take.remote(sample))


CASES = {
    "sequential": sequential,
    "outstanding": outstanding,
    "outstanding_in_batches": outstanding_in_batches,
    "hand_over": hand_over,
}


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    receiver = ray.remote(num_cpus=0)(Receiver).remote()
    ray.get(receiver.ping.remote(b""))
    sys.stdout.write(json.dumps({"version": ray.__version__}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        order = json.loads(line)
        start = time.perf_counter()
        CASES[order["case"]](receiver, order["count"])
        sys.stdout.write(json.dumps({"seconds": time.perf_counter() - start}) + "\n")
        sys.stdout.flush()
    ray.shutdown()


if __name__ == "__main__":
    main()
