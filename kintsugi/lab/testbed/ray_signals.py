"""Orders of the laboratory for a host that is a node of a Ray cluster: a driver beside the laboratory.

    python -m kintsugi.lab.testbed.ray_signals HOST ADDRESS

    laboratory ── order ──► ray_signals ── Ray ──► HostSignals, an actor on the node ── signals

The actor is in the same bundle of the run's placement group as the one that has started the supervisor, so on the same
node, and ends with this process. The loop consumes one order per line of standard input and answers each with a line,
as `remote_signals.py` does; it waits for the next order, and for Ray with a deadline. When the node of the host is
another one meanwhile, a new actor is made there.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from kintsugi.cluster.backends.ray_protocol import group_of
from kintsugi.errors import DeadlineExceeded
from kintsugi.lab.testbed.remote_signals import HostSignals, Signalled, SignalOrder
from kintsugi.runtime.waits import wait

START_S = 90.0
"""Time for an actor to start: Ray starts an interpreter for it."""
ANSWER_S = 10.0


class HostNode:
    """The node of one host, whichever it is now."""

    def __init__(self, ray: Any, host: str, *, job: str) -> None:
        self._ray, self._host, self._group = ray, host, group_of(job)
        self._index = int(host.rpartition("-")[2]) - 1
        self._actor: Any = None

    def answer(self, line: bytes) -> bytes:
        """Carry out the order of a line; return the line of the answer. Where Ray does not reach the node, nothing is
        signalled."""
        order = msgspec.json.decode(line, type=SignalOrder)
        for _ in range(2):
            timeout_s = ANSWER_S if self._actor is not None else START_S
            try:
                self._actor = self._actor or self._make_actor()
                return self._take(self._actor.answer.remote(line), timeout_s=timeout_s)
            except DeadlineExceeded:
                if order.number:  # A fault must not come later, when it is not expected any more.
                    self._ray.kill(self._actor)
                    self._actor = None
                break  # Otherwise it may be starting; it fails when its node is gone.
            except (self._ray.exceptions.RayError, ValueError) as error:
                sys.stderr.write(f"{self._host}: {error}\n")
                self._actor = None
        return msgspec.json.encode(Signalled((), is_reached=False))

    def _take(self, asked: Any, *, timeout_s: float) -> bytes:
        """Wait for the answer of an actor; an error of Ray if it has none, DeadlineExceeded."""

        def attempt(remaining_s: float) -> bytes | None:
            there = self._ray.wait([asked], timeout=remaining_s)[0]
            return self._ray.get(asked) if there else None

        return wait(attempt, whom=self._host, what="its answer", timeout_s=timeout_s)

    def _make_actor(self) -> Any:
        """ValueError if the run has no placement group."""
        from ray.util import get_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            get_placement_group(self._group), placement_group_bundle_index=self._index
        )
        actor = self._ray.remote(HostSignals).options(
            num_cpus=0, max_restarts=0, scheduling_strategy=strategy
        )
        return actor.remote(self._host)


def main(arguments: list[str]) -> int:
    """Body of the process. Ray writes to standard output too: answers have a descriptor of their own."""
    host, address = arguments
    answers = os.dup(1)
    os.dup2(2, 1)
    node: HostNode | None = None
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=SignalOrder).job
        if node is None and job:  # A run that begins has none yet.
            node = _connect(host, address, job=job)
        told = msgspec.json.encode(Signalled((), is_reached=False)) if node is None else node.answer(line)
        os.write(answers, told + b"\n")
    return 0


def _connect(host: str, address: str, *, job: str) -> HostNode:
    import ray

    ray.init(
        address=address or "auto",
        namespace=group_of(job),
        log_to_driver=False,
        configure_logging=False,
    )
    return HostNode(ray, host, job=job)


if __name__ == "__main__":
    # Without Ray's exit handlers, which can wait for a cluster that is gone.
    os._exit(main(sys.argv[1:]))
