"""The process that talks to Ray; no other process of a run imports it.

    python -m kintsugi.cluster.backends.ray_driver JOB             orders on standard input, events on standard output
    python -m kintsugi.cluster.backends.ray_driver JOB --nodes     the living nodes
    python -m kintsugi.cluster.backends.ray_driver JOB --facts ADDRESS   what each node has to say of itself

Ray starts threads, takes signals, blocks while its head is away, and ends the process whose raylet dies: all that stays
here. The loop consumes orders and the answers of Ray; it waits for neither longer than `TURN_S`. A driver that is
killed leaves a detached placement group (one bundle per host, STRICT_SPREAD) with one detached actor per bundle; the
next one finds them by name and goes on.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from contextlib import suppress
from typing import Any

import msgspec

from kintsugi.cluster.backends.ray_actor import HostActor, leave_in_turn
from kintsugi.cluster.backends.ray_protocol import (
    Came,
    Connected,
    Event,
    Facts,
    Failed,
    GiveBack,
    Nodes,
    Order,
    RayJob,
    RayNode,
    StartHost,
    Went,
    seal,
    supervisor_environment,
    write_line,
)
from kintsugi.errors import DeadlineExceeded
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.waits import wait, wait_readable

TURN_S = 0.2
LOOK_S = 0.5
"""Interval at which each actor is asked for its supervisor."""
PLACE_S = 15.0
"""Time for Ray to place all hosts for the first time."""
FACTS_S = 30.0
"""Time for a node to say what it has."""
ALL_FACTS_S = 60.0
"""Time for all nodes, with the start of Ray's workers."""
GONE_S = 2.0
"""Time for Ray to remove a placement group."""


class _Hosts:
    """The hosts of one run, as Ray has them."""

    def __init__(self, ray: Any, job: RayJob, *, events: int) -> None:
        self._ray, self._job, self._events = ray, job, events
        self._since = SYSTEM_CLOCK.monotonic()
        self._was_placed = False
        self._group = self._find_group()
        self.hosts = {f"host-{index + 1}": _Host(index) for index in range(job.num_hosts)}
        for name, host in self.hosts.items():
            host.number = job.numbers.get(name, 0)
            with suppress(ValueError):  # There is none of this name.
                host.actor = ray.get_actor(name)

    def _find_group(self) -> Any:
        """Find the placement group of the run, or make it."""
        from ray.util import get_placement_group, placement_group

        try:
            group = get_placement_group(self._job.job)
            self._was_placed = True
            return group
        except ValueError:
            bundle = {"CPU": self._job.cpus, "GPU": self._job.gpus}
            # A bundle has to ask for something.
            bundle = {kind: count for kind, count in bundle.items() if count} or {"memory": 1 << 20}
            return placement_group(
                [bundle] * self._job.num_hosts,
                strategy="STRICT_SPREAD",
                name=self._job.job,
                lifetime="detached",
            )

    def order(self, order: StartHost) -> None:
        host = self.hosts[order.host]
        host.number, host.ticket, host.sealed_for = order.number, order.ticket, b""

    def turn(self) -> None:
        """Look at all hosts once."""
        from ray.util import placement_group_table

        nodes = {node["NodeID"]: node for node in self._ray.nodes()}
        table = placement_group_table(self._group)
        placed = table.get("bundles_to_node_id", {})
        is_placed = table.get("state") == "CREATED"
        self._was_placed = self._was_placed or is_placed
        if not self._was_placed and SYSTEM_CLOCK.monotonic() - self._since > PLACE_S:
            self._refuse(nodes)
        for name, host in self.hosts.items():
            self._check(name, host, nodes, placed.get(host.index, "") if is_placed else "")

    def _refuse(self, nodes: dict[str, Any]) -> None:
        free = sum(node["Alive"] for node in nodes.values())
        each = f"{self._job.cpus} CPUs and {self._job.gpus} GPUs"
        why = (
            f"Ray has not placed {self._job.num_hosts} hosts of {each} on {free} nodes for {PLACE_S:g} s: others use "
            "them, `ray status` shows what"
        )
        for name, host in self.hosts.items():
            if host.ticket is not None:
                host.ticket = None
                write_line(self._events, Went(name, host.number, why))

    def _check(self, name: str, host: _Host, nodes: dict[str, Any], node: str) -> None:
        """Note a dead node, make an actor where there is none, take its answer, and ask the next question."""
        if host.actor is not None and host.node and not nodes.get(host.node, {}).get("Alive", False):
            self._node_died(name, host, nodes.get(host.node, {}))
        if host.actor is None:
            if nodes.get(node, {}).get("Alive", False) and (host.ticket or host.supervisor):
                self._make_actor(name, host, node)
            return
        host.node = host.node or node
        if host.answer is not None:
            if not self._ray.wait([host.answer], timeout=0)[0]:
                return
            answer, host.answer = host.answer, None
            try:
                value = self._ray.get(answer)
            except self._ray.exceptions.ActorUnavailableError:
                return  # Its node may be lost, or the link to it for a moment; `nodes` will tell.
            except self._ray.exceptions.RayActorError as error:
                self._actor_died(name, host, error)
                return
            except self._ray.exceptions.RayError as error:  # Of the method itself.
                self._went(name, host, _reason(error))
                return
            self._take(name, host, value, place=_name_of(nodes.get(host.node, {})))
        self._ask(host)

    def _make_actor(self, name: str, host: _Host, node: str) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=host.index)
        actor = self._ray.remote(HostActor).options(
            name=name,
            lifetime="detached",
            num_cpus=0,
            num_gpus=self._job.gpus,
            max_restarts=0,
            scheduling_strategy=strategy,
        )
        with suppress(
            ValueError
        ):  # Ray still holds the name for one that has died: the next turn tries again.
            host.actor = actor.remote(
                name=name, lease_s=self._job.lease_s, supervisor=host.supervisor, leave=leave_in_turn
            )
            host.node, host.asked, host.answer, host.sealed_for = node, "", None, b""
            host.has_answered = False

    def _ask(self, host: _Host) -> None:
        now = SYSTEM_CLOCK.monotonic()
        if host.ticket is not None and not host.sealed_for:
            host.asked, host.answer = "key", host.actor.key.remote()
        elif host.ticket is not None:
            sealed = seal(host.ticket, public=host.sealed_for)
            host.asked, host.started_number = "start", host.number
            host.answer = host.actor.start.remote(sealed, self._job.command)
        elif now >= host.look_at:
            host.look_at = now + LOOK_S
            host.asked, host.answer = "look", host.actor.look.remote()

    def _take(self, name: str, host: _Host, value: Any, *, place: str) -> None:
        host.has_answered = True
        match host.asked:
            case "key":
                host.sealed_for = value
            case "start":
                host.supervisor = value
                if host.number == host.started_number:  # No other was ordered meanwhile.
                    host.ticket = None
                    write_line(self._events, Came(name, host.number, place))
            case "look":
                supervisor, last_line = value
                had_one, host.supervisor = host.supervisor is not None, supervisor
                if supervisor is None and (had_one or last_line) and host.ticket is None:
                    write_line(self._events, Went(name, host.number, last_line))

    def _node_died(self, name: str, host: _Host, node: dict[str, Any]) -> None:
        why = node.get("DeathReasonMessage") or "it does not answer"
        had_one = host.supervisor is not None or not host.has_answered
        host.actor = host.answer = host.supervisor = None
        host.node, host.sealed_for = "", b""
        if had_one and host.ticket is None:
            write_line(self._events, Went(name, host.number, f"Ray node {_name_of(node)} is dead: {why}"))

    def _actor_died(self, name: str, host: _Host, error: Exception) -> None:
        """An actor that could not be made is told. One that was killed is made again, and finds the supervisor."""
        could_not_begin = not host.has_answered and host.supervisor is None
        host.actor, host.sealed_for = None, b""
        if could_not_begin:
            self._went(name, host, _reason(error))

    def _went(self, name: str, host: _Host, why: str) -> None:
        host.ticket = host.supervisor = None
        write_line(self._events, Went(name, host.number, why))

    def give_back(self, timeout_s: float) -> None:
        """End all supervisors and remove the placement group, which ends its actors."""
        from ray.util import placement_group_table, remove_placement_group

        grace_s = timeout_s / 4  # Two of them.
        ended = [host.actor.end.remote(grace_s) for host in self.hosts.values() if host.actor is not None]
        _wait_for_all(self._ray, ended, what="the end of the supervisors", timeout_s=timeout_s * 0.6)
        remove_placement_group(self._group)
        until = SYSTEM_CLOCK.monotonic() + GONE_S
        while SYSTEM_CLOCK.monotonic() < until:
            if placement_group_table(self._group).get("state") in (None, "REMOVED"):
                break
            wait_readable(whom="Ray", what="the end of the placement group", timeout_s=0.05)


class _Host:
    """One host: its actor, the question that is open, and the order that waits."""

    def __init__(self, index: int) -> None:
        self.index = index
        """Number of its bundle."""
        self.number = self.started_number = 0
        self.ticket: bytes | None = None
        self.actor: Any = None
        self.node = ""
        """Ray's name of the node of its actor."""
        self.asked = ""
        self.answer: Any = None
        self.sealed_for = b""
        """Public key of its actor."""
        self.supervisor: tuple[int, int] | None = None
        self.has_answered = False
        self.look_at = 0.0


def _wait_for_all(ray: Any, answers: list[Any], *, what: str, timeout_s: float) -> None:
    """Wait until all answers are there, or the time is over."""

    def attempt(remaining_s: float) -> bool | None:
        late = ray.wait(answers, num_returns=len(answers), timeout=remaining_s)[1] if answers else []
        return None if late else True

    with suppress(DeadlineExceeded):
        wait(attempt, whom="Ray", what=what, timeout_s=timeout_s)


def _name_of(node: dict[str, Any]) -> str:
    return f"{node.get('NodeManagerHostname', '?')}, {node.get('NodeManagerAddress', '?')}"


def _reason(error: Exception) -> str:
    """Return the last line of an error of Ray that says something: its own come with a traceback in the text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in reversed(lines):
        if "No module named" in line:
            return f"{line}: Kintsugi has to be installed in the environment of Ray's workers on each node"
        if line.startswith(("OSError", "FileNotFoundError", "kintsugi.")):
            return line.partition(": ")[2] or line
    return lines[0] if lines else type(error).__name__


def _living_nodes(ray: Any) -> tuple[RayNode, ...]:
    return tuple(
        RayNode(
            id=node["NodeID"],
            name=node["NodeManagerHostname"],
            address=node["NodeManagerAddress"],
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    )


def host_facts(address: str) -> str:
    """Ask the interpreter of this node for its facts, outside of the worker of Ray; return the last line."""
    from kintsugi.cluster.backends.command import EngineCommand

    environment = supervisor_environment(dict(os.environ))
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # A task without accelerators sees none.
    program = [sys.executable, "-P", "-m", "kintsugi", "host-facts", address]
    command = EngineCommand(program, environment=environment)
    command.close(timeout_s=FACTS_S, keep_output=True)
    answer = command.explain()
    command.release()
    return answer


def _ask_all(ray: Any, address: str, *, events: int) -> None:
    """Ask every living node for its facts at the same time."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(host_facts)
    asked = {
        ask.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        ).remote(address): node
        for node in _living_nodes(ray)
    }
    _wait_for_all(ray, list(asked), what="the facts of all nodes", timeout_s=ALL_FACTS_S)
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=0)
    for answer in done:
        try:
            text = ray.get(answer)
        except ray.exceptions.RayError as error:
            text = _reason(error)
        write_line(events, Facts(asked[answer], text))
    for answer in late:
        write_line(events, Facts(asked[answer], f"no answer for {ALL_FACTS_S:g} s"))


def _read_orders(orders: queue.SimpleQueue[Order]) -> None:
    """Body of a thread: at end of file this process ends, also while Ray blocks it."""
    decoder = msgspec.json.Decoder(Order)
    # Not `sys.stdin`, whose lock the end of the interpreter would wait for.
    with open(0, "rb", closefd=False) as lines:
        for line in lines:
            orders.put(decoder.decode(line))
    os._exit(0)


def _serve(ray: Any, job: RayJob, orders: queue.SimpleQueue[Order], *, events: int) -> None:
    hosts = _Hosts(ray, job, events=events)
    write_line(events, Connected())
    while True:
        while not orders.empty():
            order = orders.get_nowait()
            if isinstance(order, GiveBack):
                hosts.give_back(order.timeout_s)
                return
            hosts.order(order)
        hosts.turn()
        wait_readable(whom="Ray", what="events", timeout_s=TURN_S)


def _connect(job: RayJob) -> Any:
    import ray

    ray.init(
        address=job.address or "auto",
        namespace=job.job,
        log_to_driver=False,
        configure_logging=False,
    )
    return ray


def main(arguments: list[str]) -> int:
    """Body of the process. Ray writes to standard output too: events have a descriptor of their own."""
    job = msgspec.json.decode(arguments[0], type=RayJob)
    events = os.dup(1)
    os.dup2(2, 1)
    question, orders = arguments[1:], queue.SimpleQueue[Order]()
    if not question:
        # Before Ray is asked: the pipe holds some hundred orders, and the host manager must not wait for Ray.
        threading.Thread(target=_read_orders, args=(orders,), name="orders", daemon=True).start()
    try:
        ray = _connect(job)
        match question:
            case ["--nodes"]:
                write_line(events, Nodes(_living_nodes(ray)))
            case ["--facts", address]:
                _ask_all(ray, address, events=events)
            case _:
                _serve(ray, job, orders, events=events)
    except BrokenPipeError:
        return 1
    except Exception as error:  # noqa: BLE001 - Ray raises errors of any type; the back end tells the reason.
        with suppress(BrokenPipeError):
            write_line(events, _failed(error))
        return 1
    return 0


def _failed(error: Exception) -> Event:
    if isinstance(error, ModuleNotFoundError) and error.name == "ray":
        return Failed("expected Ray on this machine: pip install 'kintsugi[ray]'")
    return Failed(" ".join(str(error).split()) or type(error).__name__)


if __name__ == "__main__":
    # Without Ray's exit handlers, which can wait for a cluster that is gone.
    os._exit(main(sys.argv[1:]))
