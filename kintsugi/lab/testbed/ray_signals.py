"""Orders of the laboratory for a host that is a node of a Ray cluster: a driver beside the laboratory.

    python -m kintsugi.lab.testbed.ray_signals HOST ADDRESS

    laboratory ── order ──► ray_signals ── Ray ──► NodeSignals, an actor on the node ── signals
                                                        └── kintsugi host-signals ── other faults

The actor is in the same bundle of the run's placement group as the one that has started the supervisor, so on the same
node, and ends with this process. The loop consumes one order per line of standard input and answers each with a line,
as `remote_signals.py` does; it waits for the next order, and for Ray with a deadline. When the node of the host is
another one meanwhile, a new actor is made there.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from kintsugi.cluster.backends.command import Conversation
from kintsugi.cluster.backends.ray_protocol import group_of
from kintsugi.cluster.host_supervisor import default_scratch
from kintsugi.errors import DeadlineExceeded
from kintsugi.lab.testbed.remote_orders import (
    ANSWER_BEGINS,
    PROGRAM,
    FaultOrder,
    SignalOrder,
    read_order,
    unreached,
)
from kintsugi.lab.testbed.remote_signals import HostSignals
from kintsugi.runtime.waits import wait

START_S = 90.0
"""Time for an actor to start: Ray starts an interpreter for it."""
ANSWER_S = 10.0
CLOSE_S = 3.0
_BETWEEN = """
import os, subprocess, sys
subprocess.Popen(sys.argv[1:], start_new_session=True)
os._exit(0)
"""
"""The process between an actor and its program."""


class NodeSignals:
    """The actor. Faults that are undone have a program of their own, no child of the actor: Ray kills the children of
    its workers, and the program undoes everything when its input ends with the actor."""

    def __init__(self, host: str) -> None:
        self._host, self._signals = host, HostSignals(host)
        self._program: Conversation | None = None

    def answer(self, line: bytes) -> bytes:
        """Carry out the order of a line; return the line of the answer."""
        order = read_order(line)
        if isinstance(order, SignalOrder):
            return self._signals.answer(line)
        if self._program is None:
            program = (*PROGRAM, self._host, str(default_scratch()))
            self._program = Conversation([sys.executable, "-P", "-c", _BETWEEN, sys.executable, *program])
        self._program.say(line.strip())
        answer = self._program.hear(begin=ANSWER_BEGINS, timeout_s=START_S)
        if answer is None:
            self._program.close(timeout_s=CLOSE_S)
            self._program = None
            return unreached(order)
        return answer


class HostNode:
    """The node of one host, whichever it is now."""

    def __init__(self, ray: Any, host: str, *, job: str) -> None:
        """Without a job any node of the cluster is meant, one for each host where there are enough."""
        self._ray, self._host, self._group = ray, host, group_of(job) if job else ""
        self._index = int(host.rpartition("-")[2]) - 1
        self._actor: Any = None

    def answer(self, line: bytes) -> bytes:
        """Carry out the order of a line; return the line of the answer. Where Ray does not reach the node, nothing is
        signalled."""
        order = read_order(line)
        is_quick = isinstance(order, SignalOrder) and self._actor is not None
        for _ in range(2):
            timeout_s = ANSWER_S if is_quick else START_S
            try:
                self._actor = self._actor or self._make_actor()
                return self._take(self._actor.answer.remote(line), timeout_s=timeout_s)
            except DeadlineExceeded:
                if (
                    isinstance(order, FaultOrder) or order.number
                ):  # A fault must not come later, when it is not expected any more.
                    self._ray.kill(self._actor)
                    self._actor = None
                break  # Otherwise it may be starting; it fails when its node is gone.
            except (self._ray.exceptions.RayError, ValueError) as error:
                sys.stderr.write(f"{self._host}: {error}\n")
                self._actor = None
        return unreached(order)

    def _take(self, asked: Any, *, timeout_s: float) -> bytes:
        """Wait for the answer of an actor; an error of Ray if it has none, DeadlineExceeded."""

        def attempt(remaining_s: float) -> bytes | None:
            there = self._ray.wait([asked], timeout=remaining_s)[0]
            return self._ray.get(asked) if there else None

        return wait(attempt, whom=self._host, what="its answer", timeout_s=timeout_s)

    def _make_actor(self) -> Any:
        """ValueError if the run has no placement group."""
        from ray.util import get_placement_group
        from ray.util.scheduling_strategies import (
            NodeAffinitySchedulingStrategy,
            PlacementGroupSchedulingStrategy,
        )

        # By the name of the module: this one runs as `__main__`, which a node can not import.
        from kintsugi.lab.testbed.ray_signals import NodeSignals as Actor

        strategy: Any
        if self._group:
            strategy = PlacementGroupSchedulingStrategy(
                get_placement_group(self._group), placement_group_bundle_index=self._index
            )
        else:
            nodes = sorted(node["NodeID"] for node in self._ray.nodes() if node["Alive"])
            strategy = NodeAffinitySchedulingStrategy(nodes[self._index % len(nodes)], soft=False)
        actor = self._ray.remote(Actor).options(num_cpus=0, max_restarts=0, scheduling_strategy=strategy)
        return actor.remote(self._host)


def main(arguments: list[str]) -> int:
    """Body of the process. Ray writes to standard output too: answers have a descriptor of their own."""
    host, address = arguments
    answers = os.dup(1)
    os.dup2(2, 1)
    node: HostNode | None = None
    for line in sys.stdin.buffer:
        order = read_order(line)
        is_probe = isinstance(order, FaultOrder) and order.do == "probe"
        if node is None and (order.job or is_probe):  # A run that begins has no job yet.
            node = _connect(host, address, job=order.job)
        told = unreached(order) if node is None else node.answer(line)
        os.write(answers, told + b"\n")
    return 0


def _connect(host: str, address: str, *, job: str) -> HostNode:
    import ray

    ray.init(
        address=address or "auto",
        namespace=group_of(job) if job else None,
        log_to_driver=False,
        configure_logging=False,
    )
    return HostNode(ray, host, job=job)


if __name__ == "__main__":
    # Without Ray's exit handlers, which can wait for a cluster that is gone.
    os._exit(main(sys.argv[1:]))
